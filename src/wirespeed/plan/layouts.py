"""Layouts of a transformer on a fabric: every legal one enumerated, predicted, ranked; and the reason for the choice.

Tensor groups stay inside a host, because their exchanges cannot hide. What does not divide or does not fit is left out
and counted by reason. Thousands are ranked by the closed form of equal stages; the best ones are predicted again with
the schedule's recurrence. The simplest layout within the margin of the fastest is chosen: fewer stages, less tensor
parallel, no recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric.placement import Placement, place
from wirespeed.fabric.timing import CollectiveModel
from wirespeed.fabric.topology import Fabric
from wirespeed.plan.axes import FabricAxes
from wirespeed.plan.search import MARGIN
from wirespeed.sim.layout import Layout, Recompute, divisors
from wirespeed.sim.memory import memory_use
from wirespeed.sim.parallelism import LayoutPrediction, least_step_s, predict_layout
from wirespeed.spec.device import Device
from wirespeed.spec.model import Transformer
from wirespeed.units import format_duration, format_percent

FINALISTS = 4
"""Layouts that are predicted again with the exact schedule."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
INTERLEAVES = (1, 2, 3, 4, 6, 8)


class LayoutSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions from the fastest, how many layouts were looked at, and why the others were left out."""

    predictions: tuple[LayoutPrediction, ...]
    chosen: LayoutPrediction
    reason: str
    num_tried: int
    refused: dict[str, int]
    baseline: LayoutPrediction | None = None

    @property
    def changes_nothing(self) -> bool:
        """Whether the layout in use is the best choice."""
        return self.baseline is not None and self.baseline.layout == self.chosen.layout


def enumerate_layouts(
    shape: Transformer,
    num_ranks: int,
    devices_per_host: int,
    global_batch: int,
    *,
    base: Layout | None = None,
) -> Iterator[Layout]:
    """Layouts whose sizes divide. ``base`` gives what is not searched: dtype, kernels, overlap."""
    held = Layout(global_batch=global_batch) if base is None else base
    experts = divisors(shape.experts)
    for tensor in divisors(devices_per_host):
        if shape.num_heads % tensor or shape.ffn % tensor or num_ranks % tensor:
            continue
        for pipeline in divisors(num_ranks // tensor):
            if pipeline > 1 and shape.num_layers % pipeline:
                continue
            data = num_ranks // tensor // pipeline
            if global_batch % data:
                continue
            for expert in experts:
                if data % expert:
                    continue
                yield from _variants(shape, held, (tensor, pipeline, data, expert), global_batch)


def _variants(
    shape: Transformer, held: Layout, sizes: tuple[int, int, int, int], global_batch: int
) -> Iterator[Layout]:
    tensor, pipeline, data, expert = sizes
    recomputes: tuple[Recompute, ...] = ("none", "full") if held.is_fused_attention else ("none", "selective", "full")
    zeros = (0,) if data == 1 else (0, 1) if pipeline > 1 else (0, 1, 3)
    for micro_batch in MICRO_BATCHES:
        if global_batch % (data * micro_batch):
            continue
        micro = global_batch // (data * micro_batch)
        for interleave in INTERLEAVES if pipeline > 1 and micro % pipeline == 0 else (1,):
            if shape.num_layers % (pipeline * interleave):
                continue
            for zero in zeros:
                for recompute in recomputes:
                    yield msgspec.structs.replace(
                        held,
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        expert=expert,
                        micro_batch=micro_batch,
                        global_batch=global_batch,
                        interleave=interleave,
                        zero=zero,
                        recompute=recompute,
                        sequence_parallel=tensor > 1 and shape.sequence % tensor == 0,
                    )


def search_layouts(
    shape: Transformer,
    device: Device,
    fabric: Fabric,
    *,
    global_batch: int,
    placement: Placement | None = None,
    base: Layout | None = None,
    current: Layout | None = None,
    backend: str = "any",
    slowdown: float = 1.0,
) -> LayoutSearch:
    """Predict every legal layout on all ranks of ``placement`` (None: every device, rack by rack) and choose one.

    ``current``: the layout in use; it is kept where nothing is faster by more than the margin. Raises UsageError with
    the commonest reason where no layout is legal.
    """
    placed = place(fabric) if placement is None else placement
    per_host = int(np.bincount(placed.host).max())
    models: dict[tuple[object, ...], CollectiveModel | None] = {}

    def axes(layout: Layout) -> FabricAxes:
        return FabricAxes(fabric, placed, layout, backend=backend, shared=models)

    refused: Counter[str] = Counter()
    bounded: list[tuple[float, int, Layout]] = []
    num_tried = 0
    for layout in enumerate_layouts(shape, placed.num_ranks, per_host, global_batch, base=base):
        num_tried += 1
        if memory_use(shape, layout).fits(device):
            bounded.append((least_step_s(shape, device, layout, axes(layout)), num_tried, layout))
        else:
            refused["memory"] += 1
    if not bounded:
        raise UsageError(_nothing_legal(shape, device, placed.num_ranks, global_batch, num_tried, refused))
    rough: list[LayoutPrediction] = []
    for bound_s, _, layout in sorted(bounded):
        if len(rough) >= FINALISTS and bound_s > rough[FINALISTS - 1].step_s:
            break  # all that follow are slower even on a network that costs nothing
        costs = axes(layout)
        found = predict_layout(
            shape, device, layout, costs, slowdown=slowdown, exact_schedule=False, check_memory=False
        )
        rough = rank_layouts([*rough, found])
    exact = [
        predict_layout(shape, device, one.layout, axes(one.layout), slowdown=slowdown) for one in rough[:FINALISTS]
    ]
    ranked = rank_layouts(exact)
    baseline = None
    if current is not None:
        costs = axes(current)
        baseline = predict_layout(shape, device, current, costs, slowdown=slowdown)
    chosen, reason = _choose(ranked, baseline)
    return LayoutSearch(
        predictions=tuple(ranked),
        chosen=chosen,
        reason=reason,
        num_tried=num_tried,
        refused=dict(refused.most_common()),
        baseline=baseline,
    )


def rank_layouts(predictions: Iterable[LayoutPrediction]) -> list[LayoutPrediction]:
    """Fastest first; steps that agree to four digits rank by simplicity."""
    return sorted(predictions, key=lambda one: (float(f"{one.step_s:.4g}"), complexity(one.layout)))


def complexity(layout: Layout) -> tuple[int, int, int, int, int]:
    """What a layout asks of whoever runs it: stages, tensor parallel, chunks, sharding, recomputation."""
    return (
        layout.pipeline,
        layout.tensor,
        layout.interleave,
        layout.zero,
        ("none", "selective", "full").index(layout.recompute),
    )


def _choose(ranked: Sequence[LayoutPrediction], baseline: LayoutPrediction | None) -> tuple[LayoutPrediction, str]:
    fastest = ranked[0]
    if baseline is not None and fastest.step_s >= baseline.step_s * (1 - MARGIN):
        gain = max(0.0, 1 - fastest.step_s / baseline.step_s)
        return baseline, (
            f"{baseline.layout.name} takes {format_duration(baseline.step_s)} per step and the best found, "
            f"{fastest.layout.name}, {format_percent(gain)} less: not worth a change below {format_percent(MARGIN)}"
        )
    within = [one for one in ranked if one.step_s <= fastest.step_s * (1 + MARGIN / 2)]
    best = min(within, key=lambda one: complexity(one.layout))
    reason = f"{best.layout.name} takes {format_duration(best.step_s)} per step"
    if baseline is not None:
        reason += f", {format_percent(1 - best.step_s / baseline.step_s)} less than {baseline.layout.name}"
    elif best is not fastest:
        reason += (
            f"; {fastest.layout.name} is {format_percent(1 - fastest.step_s / best.step_s)} faster, "
            "which is less than the prediction can tell, and it is less simple"
        )
    return best, reason


def _nothing_legal(  # noqa: PLR0917 - private, called in one place
    shape: Transformer,
    device: Device,
    num_ranks: int,
    global_batch: int,
    num_tried: int,
    refused: Counter[str],
) -> str:
    if num_tried == 0:
        return (
            f"no layout of {num_ranks} devices divides {shape.num_layers} layers, {shape.num_heads} heads and a global "
            f"batch of {global_batch}; hint: choose a batch that {num_ranks} or a large divisor of it divides"
        )
    reason, count = refused.most_common(1)[0]
    if reason != "memory":
        return f"none of {num_tried} layouts is legal; most often: {reason}"
    need = shape.num_layers * shape.layer_parameters * 18 / device.memory_bytes
    return (
        f"none of {num_tried} layouts fits: {count} need more than the memory of {device.name}; hint: weights, "
        f"gradients and optimizer state alone fill {need:.3g} of them, before activations; take more or larger devices"
    )


def parse_layout(text: str, *, global_batch: int, base: Layout | None = None) -> Layout:
    """Read ``tp8 pp8x3 dp4 mb1 zero1 full-recompute``, as ``Layout.name`` writes it; order does not matter."""
    held = (
        Layout(global_batch=global_batch) if base is None else msgspec.structs.replace(base, global_batch=global_batch)
    )
    fields = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "mb": "micro_batch"}
    changes: dict[str, object] = {"sequence_parallel": False}
    for word in text.lower().replace(",", " ").split():
        name = word.rstrip("0123456789x+sp") if not word.endswith("-recompute") else word
        if word.endswith("-recompute") and word.split("-")[0] in ("none", "selective", "full"):
            changes["recompute"] = word.split("-")[0]
            continue
        name = word[:2]
        digits = word[2:]
        if word.startswith("zero") and word[4:].isdigit():
            changes["zero"] = int(word[4:])
            continue
        if name == "tp" and digits.endswith("+sp"):
            changes["sequence_parallel"] = True
            digits = digits[:-3]
        number, times, chunks = digits.partition("x")
        if name not in fields or not number.isdigit() or (times and (name != "pp" or not chunks.isdigit())):
            raise UsageError(
                f"got {word!r} in the layout {text!r}",
                expected="words such as tp8, tp8+sp, pp8, pp8x3, dp4, cp2, ep8, mb1, zero1, full-recompute",
            )
        changes[fields[name]] = int(number)
        if times:
            changes["interleave"] = int(chunks)
    try:
        return msgspec.structs.replace(held, **changes)
    except UsageError as fault:
        raise UsageError(f"got the layout {text!r}: {fault.problem}", expected=fault.expected) from fault
