"""Predicts published tables that wirespeed's authors did not measure, and says how far off it is.

  3.1  ResNet-50 over 10GbE, 100G TCP and InfiniBand: calibrated at 8 GPUs, predicted at 16 and 32 (HKBU, 2020)
  3.2  Megatron-LM on A100 and H100, and its sequence-parallel cases, with one efficiency per type of GPU
  3.3  the what-if simulator of NetAI'20, from its measured layer times and from those of the catalogue
  3.4  the bucket size of PyTorch DDP (VLDB'20): curves from one number of GPUs, chosen at the other
  3.5  NCCL's sweeps, each point from the others

Mechanisms are the library's own; nothing here is fitted but what each section calls calibrated. Figures and their
sources are in published/tables.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from _harness import Bar, arguments, finish
from wirespeed.cli import render
from wirespeed.errors import UsageError
from wirespeed.fabric.curves import curve_time_s, fit_curve
from wirespeed.fabric.placement import place
from wirespeed.fabric.timing import prepare
from wirespeed.fabric.topology import CollectiveCurve, Curve
from wirespeed.fabric.words import parse_words
from wirespeed.plan.axes import FabricAxes
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.compute import workload_of
from wirespeed.plan.devices import find_device
from wirespeed.plan.search import MARGIN
from wirespeed.plan.transformers import gpt
from wirespeed.sim.cadence import scaled
from wirespeed.sim.costs import StageCost, TransferCost
from wirespeed.sim.fusion import all_at_once, drain, fuse_by_cycle, merge_to_save, one_by_one
from wirespeed.sim.layout import Layout
from wirespeed.sim.parallelism import LayoutPrediction, predict_layout
from wirespeed.sim.training import Bucket, fill_buckets, simulate_step
from wirespeed.spec.model import Transformer
from wirespeed.spec.strategy import Strategy, Transfer
from wirespeed.spec.workload import GradientTensor, TrainingWorkload

TABLES: dict[str, Any] = json.loads((Path(__file__).parent / "published" / "tables.json").read_text())
Results = dict[str, Any]


def bisect(wanted: float, value: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising ``value`` meets ``wanted``, in the logarithm."""
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if value(middle) < wanted else (low, middle)
    return low


def schedules_on_slow_networks(results: Results) -> list[Bar]:
    table = TABLES["ddl_benchmarks"]
    networks = {"10GbE_tcp": ("10g", 0.03), "100G_ipoib_tcp": ("100g", 0.10), "100G_ib_rdma": ("100g-ib", 0.03)}
    workload = workload_of(
        find_model("resnet50"),
        find_device("2080ti"),
        batch=64,
        num_ranks=8,
        samples_per_s=table["single_gpu"]["resnet50_bs64"],
    )
    gradients, rest_s = workload.gradients, workload.compute_s - workload.backward_s

    def steps_s(cost_s: Callable[[int], float]) -> list[float]:
        """No overlap, every tensor alone, merged."""
        ways = (all_at_once(gradients), one_by_one(gradients), merge_to_save(gradients, cost_s))
        return [rest_s + max(workload.backward_s, drain(messages, cost_s)) for messages in ways]

    bars, rows, fused = [], [], []
    for network, (nic, target) in networks.items():
        published = table["throughput"][network]["resnet50"]
        real = {
            gpus: [gpus * 64 / published[way][place_] for way in ("bsp", "wfbp", "mgwfbp")]
            for place_, gpus in enumerate(published["gpus"])
        }
        # Calibrated at 8 GPUs: seconds per byte from the step without overlap, latency from the one tensor by tensor.
        num_bytes = 4 * workload.num_elements
        latency_s, per_byte_s = 1e-4, 1e-9
        for _ in range(8):
            per_byte_s = (real[8][0] - rest_s - workload.backward_s - latency_s) / num_bytes

            def alone_s(latency_s: float, per_byte_s: float = per_byte_s) -> float:
                return steps_s(lambda size: latency_s + per_byte_s * size)[1]

            latency_s = bisect(real[8][1], alone_s, 1e-6, 5e-3)
        sizes = tuple(2**power for power in range(10, 29, 2))
        curve = CollectiveCurve(
            collective="all_reduce",
            backend="nccl",
            num_ranks=8,
            ranks_per_host=4,
            curve=Curve(sizes_bytes=sizes, times_s=tuple(latency_s + per_byte_s * n for n in sizes), residual=0.02),
        )
        worst = 0.0
        for gpus in (8, 16, 32):
            fabric = msgspec.structs.replace(
                parse_words(f"star hosts={gpus // 4} nic={nic} devices=4 island=pcie3"), collectives=(curve,)
            )
            model = prepare(fabric, "all_reduce", place(fabric), backend="nccl")
            predicted = steps_s(lambda n, m=model: m.cost(n).seconds)
            errors = [p / r - 1 for p, r in zip(predicted, real[gpus], strict=True)]
            rows.append(
                {
                    "network": network,
                    "gpus": gpus,
                    "predicted_s": predicted,
                    "published_s": real[gpus],
                    "errors": errors,
                }
            )
            if gpus > 8:
                worst = max(worst, abs(errors[0]))
                fused.append(abs(errors[2]))
        bars.append(Bar(f"3.1 {network} no overlap, 16 and 32 GPUs, worst error", worst, target, at_least=False))
    bars.append(Bar("3.1 merged messages, mean error", float(np.mean(fused)), 0.10, at_least=False))
    results["3.1"] = rows
    return bars


def layout_on(shape: Transformer, device: str, words: str, layout: Layout) -> LayoutPrediction:
    hosts = max(1, layout.num_ranks // 8)
    fabric = parse_words(f"fat-tree hosts={hosts} {words}")
    costs = FabricAxes(fabric, place(fabric), layout, backend="nccl")
    return predict_layout(shape, find_device(device), layout, costs)


SELENE = "nic=200g-ib nics=8 island=nvlink3"
EOS = "nic=400g-ib nics=8 island=nvlink4"


def megatron(results: Results) -> list[Bar]:
    # 2021: fp16 gradients, exchanged after backward; attention not fused; activations recomputed in full.
    table = TABLES["megatron_2021_a100"]
    a100 = []
    for row in table["rows"]:
        one = dict(zip(table["cols"], row, strict=True))
        shape = gpt(
            "megatron",
            hidden=one["hidden"],
            num_layers=one["layers"],
            num_heads=one["heads"],
            sequence=2048,
            vocab=51200,
        ).transformer
        layout = Layout(
            tensor=one["tp"],
            pipeline=one["pp"],
            data=one["gpus"] // one["tp"] // one["pp"],
            micro_batch=one["micro_batch"],
            interleave=one["interleave"],
            global_batch=one["batch"],
            recompute="full",
            sequence_parallel=False,
            is_fused_attention=False,
            overlap=False,
            dtype="fp16",
            gradient_bytes=2,
        )
        found = layout_on(shape, "a100", SELENE, layout)
        a100.append(_row(f"{one['params_B']} B", found.flop_per_s / 1e12, one["tflops_per_gpu"], found))
    cases = TABLES["korthikanti_2022_tab5_iteration_s"]
    sequence = []
    for name, (model, tensor, pipeline, interleave, micro_batch, batch) in cases["configurations"]["rows"].items():
        for place_, (recompute, is_split) in enumerate((("full", False), ("selective", True))):
            layout = Layout(
                tensor=tensor,
                pipeline=pipeline,
                interleave=interleave,
                micro_batch=micro_batch,
                global_batch=batch,
                recompute=recompute,
                sequence_parallel=is_split,
                is_fused_attention=False,
                dtype="fp16",
            )
            found = layout_on(find_model(model).transformer, "a100", SELENE, layout)
            sequence.append(_row(f"{name} {recompute}", found.step_s, cases[name][place_], found))
    # Megatron Core: flash attention, distributed optimizer, overlapped exchanges (half of the tensor group's hide).
    # The table has neither micro-batch nor chunks: the fastest that fits is what its authors chose too.
    table = TABLES["mcore_h100"]
    h100 = []
    for row in table["rows"]:
        one = dict(zip(table["cols"], row, strict=True))
        shape = gpt(
            "mcore", hidden=one["hidden"], num_layers=one["layers"], num_heads=one["heads"], sequence=4096, vocab=131072
        ).transformer
        shape = msgspec.structs.replace(shape, is_tied=False)
        found = _fastest(shape, one)
        h100.append(_row(f"{one['params_B']} B", found.flop_per_s / 1e12, one["tflops_per_gpu"], found))
    results["3.2"] = {"a100_2021_tflops": a100, "sequence_parallel_s": sequence, "h100_tflops": h100}
    bars = []
    for name, rows in (("A100 rows", a100), ("sequence-parallel cases", sequence), ("H100 rows", h100)):
        errors = [abs(row["error"]) for row in rows]
        bars.append(Bar(f"3.2 {name}, mean error", float(np.mean(errors)), 0.06, at_least=False))
        bars.append(Bar(f"3.2 {name}, worst error", max(errors), 0.12, at_least=False))
    return bars


def _fastest(shape: Transformer, one: dict[str, Any]) -> LayoutPrediction:
    best: LayoutPrediction | None = None
    for micro_batch in (1, 2, 4):
        for interleave in range(1, one["layers"] // one["pp"] + 1):
            try:
                layout = Layout(
                    tensor=one["tp"],
                    pipeline=one["pp"],
                    data=one["dp"],
                    micro_batch=micro_batch,
                    interleave=interleave,
                    global_batch=one["batch"],
                    zero=1,
                    tensor_overlap=0.5,
                )
                found = layout_on(shape, "h100", EOS, layout)
            except UsageError:
                continue
            if best is None or found.step_s < best.step_s:
                best = found
    assert best is not None
    return best


def _row(name: str, predicted: float, published: float, found: LayoutPrediction) -> Results:
    return {
        "case": name,
        "predicted": predicted,
        "published": published,
        "error": predicted / published - 1,
        "layout": found.layout.name,
        "parts": {part: round(seconds / found.step_s, 4) for part, seconds in found.parts_s.items()},
    }


def what_if_simulator(results: Results) -> list[Bar]:
    table = TABLES["netai_2020_what_if_simulator"]
    names = {"resnet50": "resnet50", "resnet101": "resnet101", "vgg16": "vgg16_bn"}
    add = table["vector_add"]
    ranks = 64
    worst = {"measured": 0.0, "generated": 0.0}
    rows = []
    for name, key in names.items():
        facts = table["models"][key]
        backward_s = facts["backward_ms"] / 1e3
        workload = workload_of(find_model(key.replace("_", "-")), find_device("v100"), batch=32, num_ranks=ranks)
        traces = {
            "measured": tuple(
                GradientTensor(name=str(place_), num_elements=size // 4, ready_s=ready_us * 1e-6)
                for place_, (ready_us, size) in enumerate(facts["ready_us_and_bytes"])
            ),
            "generated": scaled(workload, backward_s / workload.backward_s).gradients,
        }
        plain = zip(table["bw_gbps"], [1.0] * 5, table["scaling_percent_N64"][name], strict=True)
        squeezed = table["compression_at_10G_scaling_percent"].get(name, {})
        points = [*plain, *((10, float(ratio[:-1]), value) for ratio, value in squeezed.items())]
        for gbit_per_s, ratio, published in points:

            def cost_s(num_bytes: int, rate: float = gbit_per_s * 1e9, ratio: float = ratio) -> float:
                add_s = max(add["floor_s"], num_bytes / ranks / add["bytes_per_s"])
                return 2 * 8 * num_bytes * (ranks - 1) / ranks / rate / ratio + (ranks - 1) * add_s

            row: Results = {"model": name, "gbit_per_s": gbit_per_s, "compression": ratio, "published": published}
            for kind, gradients in traces.items():
                late_s = max(0.0, drain(fuse_by_cycle(gradients), cost_s) - gradients[-1].ready_s)
                row[kind] = 100 * facts["batch_s"] / (facts["batch_s"] + late_s)
                worst[kind] = max(worst[kind], abs(row[kind] - published))
            rows.append(row)
    results["3.3"] = rows
    return [
        Bar(
            "3.3 what-if simulator on its measured layer times, worst difference in points",
            worst["measured"],
            0.5,
            at_least=False,
        ),
        # No promise of the issue: layers' shares of backward are a roofline's here.
        Bar("3.3 the same on layer times of the catalogue, points", worst["generated"], 1.0, at_least=False),
    ]


KNOTS = np.array([1e3, 3e5, 2e6, 5e6, 1.2e7, 2.8e7, 6e7, 1.2e8, 2.5e8])
"""Sizes at which a curve of unknown shape is described."""
MB = 10**6
SCALE = 1000


class BucketCase:
    """One model and backend of the DDP paper: its buckets at every size, and the step for a cost curve."""

    def __init__(self, model: str, backend: str) -> None:
        table = TABLES["pytorch_ddp_vldb2020"]
        key = f"{'bert' if model == 'bert-base' else model}_{backend}"
        self.rows = {16: table["fig7_16gpu_median_s"][key], 32: table["fig8_32gpu_median_s"][key]}
        forward, backward, _, optimizer, overlapped = table["fig6_normalised"][key]
        unit_s = self.rows[32][3] / overlapped  # figure 6 is of 32 GPUs and 25 MB
        self.rest_s, self.backward_s = (forward + optimizer) * unit_s, backward * unit_s
        workload = workload_of(find_model(model), find_device("v100"), batch=32, num_ranks=32)
        gradients = scaled(workload, self.backward_s / workload.backward_s).gradients
        self.sizes = table["bucket_MB"][: len(self.rows[32])]
        # That DDP's first bucket was 1 MB whatever the others are; 0 MB sends every tensor alone.
        self.buckets: list[tuple[Bucket, ...]] = [
            fill_buckets(gradients, size * MB, first_bucket_bytes=MB) if size else one_by_one(gradients)
            for size in self.sizes
        ]
        self.backend = backend

    def steps_s(self, cost_s: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The step at every bucket size; ``cost_s`` takes bytes (n,) and gives seconds (n,)."""
        found = []
        for buckets in self.buckets:
            times = cost_s(np.array([4.0 * bucket.num_elements for bucket in buckets]))
            if self.backend == "nccl":
                done_s = 0.0
                for bucket, own_s in zip(buckets, times, strict=True):
                    done_s = max(done_s, bucket.ready_s) + own_s
            else:
                done_s = self._gloo_s(buckets, times, float(cost_s(np.array([KNOTS[0]]))[0]))
            found.append(self.rest_s + max(self.backward_s, done_s))
        return np.array(found)

    def _gloo_s(self, buckets: tuple[Bucket, ...], times: np.ndarray, latency_s: float) -> float:
        """End of the last bucket: two collectives progress at a time and share the wire, not the latency."""
        # Sizes are scaled up so that the smallest tensor, of two elements, is a bucket of its own.
        known = {4 * SCALE * bucket.num_elements: float(own_s) for bucket, own_s in zip(buckets, times, strict=True)}
        workload = TrainingWorkload(
            gradients=tuple(
                GradientTensor(
                    name=str(place_), num_elements=SCALE * b.num_elements, ready_s=min(b.ready_s, self.backward_s)
                )
                for place_, b in enumerate(buckets)
            ),
            forward_s=0.0,
            backward_s=self.backward_s,
            optimizer_s=0.0,
            num_ranks=2,
        )
        costs = KnownCosts(known, latency_s)
        return simulate_step(workload, Strategy(bucket_bytes=1024), costs, first_bucket_bytes=1).step_s


class KnownCosts:
    """``sim.StepCosts`` of messages whose times are known."""

    def __init__(self, seconds: dict[int, float], latency_s: float) -> None:
        self.seconds = seconds
        self.latency_s = latency_s

    def transfer(self, transfer: Transfer) -> TransferCost:
        """The time of its size."""
        own_s = self.seconds[transfer.size_bytes]
        return TransferCost(seconds=own_s, latency_s=min(self.latency_s, own_s))

    def stage(self, strategy: Strategy, stage: str, size_bytes: int) -> StageCost:
        """Dense has none."""
        return StageCost(seconds=0.0)


def infer_curve(cases: Sequence[BucketCase], gpus: int) -> np.ndarray:
    """Log seconds at KNOTS that explain all ``cases`` at ``gpus``: monotone, with throughput that changes slowly."""
    from scipy.optimize import least_squares

    def curve(unknown: np.ndarray) -> np.ndarray:
        return np.logaddexp.accumulate(unknown)  # positive increments: monotone

    def misfit(unknown: np.ndarray) -> np.ndarray:
        logs = curve(unknown)
        parts = []
        for case in cases:
            predicted = case.steps_s(lambda sizes: np.exp(np.interp(np.log(sizes), np.log(KNOTS), logs)))
            parts.append(np.log(predicted / np.array(case.rows[gpus])) / 0.02)
        rate = np.log(KNOTS) - logs
        bends = np.diff(rate, 2)
        return np.concatenate([*parts, 0.5 * bends, 2.0 * np.diff(rate)[-3:]])

    first = 4e-4 + KNOTS / 1e9
    start = np.log(np.concatenate([first[:1], np.diff(first)]))
    return curve(least_squares(misfit, start, diff_step=1e-2, max_nfev=40).x)


def bucket_sizes(results: Results) -> list[Bar]:
    worst, rows = 0.0, []
    for backend in ("nccl", "gloo"):
        cases = {model: BucketCase(model, backend) for model in ("resnet50", "bert-base")}
        for source, target in ((16, 32), (32, 16)):
            logs = infer_curve(list(cases.values()), source)
            curve = CollectiveCurve(
                collective="all_reduce",
                backend=backend,
                num_ranks=source,
                ranks_per_host=8,
                curve=Curve(
                    sizes_bytes=tuple(int(size) for size in KNOTS), times_s=tuple(np.exp(logs).tolist()), residual=0.02
                ),
            )
            words = f"star hosts={max(source, target) // 8} nic=100g devices=8 island=nvlink2"
            fabric = msgspec.structs.replace(parse_words(words), collectives=(curve,))
            carried = prepare(fabric, "all_reduce", place(fabric, target, 8), backend=backend)
            for model, case in cases.items():
                predicted = case.steps_s(carried.seconds)
                default = case.sizes.index(25)
                best = int(np.argmin(predicted))
                chosen = best if predicted[best] < predicted[default] * (1 - MARGIN) else default
                published = case.rows[target]
                regret = published[chosen] / min(published) - 1
                worst = max(worst, regret)
                rows.append(
                    {
                        "model": model,
                        "backend": backend,
                        "curve_from_gpus": source,
                        "gpus": target,
                        "bucket_MB": case.sizes,
                        "predicted_s": predicted.round(4).tolist(),
                        "published_s": published,
                        "chosen_MB": case.sizes[chosen],
                        "regret": regret,
                    }
                )
    results["3.4"] = rows
    return [Bar("3.4 bucket chosen, published step over the best, worst", worst, 0.03, at_least=False)]


def leave_one_out(results: Results) -> list[Bar]:
    bars: list[Bar] = []
    results["3.5"] = {}
    for name in ("nccl_allreduce_a100_1x8_nvlink", "nccl_allreduce_h100_2x8_tcpxo"):
        points = {int(size): us * 1e-6 for size, us in TABLES[name]["rows"]}
        errors = {}
        for size, time_s in points.items():
            others = fit_curve({other: value for other, value in points.items() if other != size})
            errors[size] = curve_time_s(others, size) / time_s - 1
        results["3.5"][name] = {str(size): error for size, error in errors.items()}
        bars.append(Bar(f"3.5 {name}, mean error", float(np.mean(np.abs(list(errors.values())))), 0.10, at_least=False))
    return bars


def main() -> int:
    options = arguments(__doc__ or "")
    results: Results = {}
    bars: list[Bar] = []
    for section in (schedules_on_slow_networks, megatron, what_if_simulator, bucket_sizes, leave_one_out):
        bars += section(results)
    if not options.check:
        rows = [[bar.name, f"{bar.value:.4g}", f"{bar.target:.4g}", "holds" if bar.holds else "short"] for bar in bars]
        render.show(render.make_table(["published table<", "value", "at most", ""], rows))
    return finish("validate_published", bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
