"""Predict first, then run, then compare: the planner against this machine's own labs.

Calibrated once, at the start, on runs of 2 and 4 hosts in one rack (`bench links`, `bench collectives`, `bench codecs`,
`fabric calibrate`). Then 24 scenarios are drawn from the seed, all predicted with what `wirespeed plan
collective` and the replay's predictor use, the predictions written down, and only then run. What binds a run is read
from byte counters (``_lab_meter``), not from a model. What ran while the machine's neighbours took more than 5 % of its
CPU runs again, at most twice; the least disturbed run counts and all are kept.

    python benchmarks/validate_lab.py --seed 1 --check

Results stay in a folder (--work), so that a run can be done in parts (--part 2/5) and go on where it was stopped; what
is measured there already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _harness import RESULTS, Bar, finish, least_disturbed, until_quiet
from _lab_calibration import LINES_BIT_PER_S, bench, calibrated, losses, say
from _lab_meter import HALF, Meter, Reading
from _lab_scenarios import Scenario, draw, quick
from validation_page import PAGE, page
from wirespeed.fabric.extension import extend
from wirespeed.fabric.placement import place_on
from wirespeed.fabric.topology import Fabric
from wirespeed.lab import Lab
from wirespeed.plan.axes import PlacedCosts
from wirespeed.plan.collective import predict_collective
from wirespeed.plan.models import load_model
from wirespeed.records import CollectivesRecord, LinksRecord, read, write_bytes
from wirespeed.sim.training import fill_buckets, predict_step
from wirespeed.spec.strategy import Strategy
from wirespeed.tune.places import LabPlace
from wirespeed.tune.replay import ReplayOptions, first_bucket_bytes, options_of, run_replay, scaled_strategy

MEAN_ERROR, WORST_ERROR = 0.08, 0.20


class Quiet:
    """Progress of a replay: nothing."""

    def phase(self, text: str, *, total: int | None = None) -> None:
        """See ``tune.loop.Progress``."""

    def advance(self, step: int) -> None:
        """See ``tune.loop.Progress``."""

    def note(self, text: str) -> None:
        """See ``tune.loop.Progress``."""
        say(text)


# Predictions.


def fabric_of(scenario: Scenario, bases: Sequence[Fabric]) -> Fabric:
    """What `wirespeed fabric extend` makes of the calibrated fabrics for the scenario's lab."""
    return extend(
        bases[0],
        num_hosts=scenario.hosts,
        rate_bit_per_s=scenario.rate_bit_per_s,
        measured_line_bit_per_s=LINES_BIT_PER_S[0],
        num_racks=scenario.racks,
        uplink_bit_per_s=scenario.uplink_bit_per_s,
        name=f"scenario {scenario.number}",
        others=bases[1:],
    )


def replay_options(scenario: Scenario) -> ReplayOptions:
    """What a training scenario runs."""
    return options_of(
        load_model(scenario.model), [Strategy.parse(scenario.strategy)], num_ranks=len(scenario.order),
        scale=scenario.scale, compute_s=scenario.compute_s, num_steps=6, rounds=1, predicts=False, links_s=0.0,
    )  # fmt: skip


def predict(scenario: Scenario, bases: Sequence[Fabric]) -> dict[str, Any]:
    """Seconds and what binds, from the calibrated fabrics alone."""
    fabric = fabric_of(scenario, bases)
    if scenario.what != "training":
        dtype = "float32" if scenario.operation in ("all_reduce", "reduce_scatter") else "uint8"
        held = predict_collective(
            fabric, scenario.operation, scenario.size_bytes, order=scenario.order, backend="gloo", dtype=dtype
        )
        return {"seconds": held.seconds, "binding": held.binding, "kind": held.binding_kind}
    options = replay_options(scenario)
    strategy = scaled_strategy(options.strategies[0], scenario.scale)
    costs = PlacedCosts(fabric, place_on(fabric, scenario.order), None, backend="gloo")
    first = min(first_bucket_bytes(scenario.scale), strategy.bucket_bytes)
    found = predict_step(options.workload, strategy, costs, first_bucket_bytes=first)
    buckets = fill_buckets(options.workload.gradients, strategy.bucket_bytes, first_bucket_bytes=first)
    sent = [t for b in buckets for t in strategy.transfers(b.num_elements, len(scenario.order), b.shapes)]
    each = [
        predict_collective(fabric, t.collective, t.size_bytes, order=scenario.order, backend="gloo", dtype=t.dtype)
        for t in sent
    ]
    largest = max(each, key=lambda one: one.size_bytes)
    is_busy = sum(one.busy_s for one in each) >= HALF * found.step_s
    return {
        "seconds": found.step_s,
        "binding": largest.binding,
        "kind": largest.binding_kind if is_busy else "nothing",
        "resource": found.binding,
        "exposed_s": found.exposed_s,
    }


# Measurements.


def run(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Run the scenario on a lab of its own: seconds, and what its links carried meanwhile.

    Again, at most twice, where the machine's neighbours took more than ``QUIET_SHARE`` of its CPU; the last run counts.
    """

    def once() -> dict[str, Any]:
        with Lab(scenario.spec) as lab, Meter(lab) as meter:
            found = _RUNNERS[scenario.what](scenario, lab, folder)
        return {**found, "reading": asdict(meter.reading)}

    attempts = until_quiet(once)
    told = [{"seconds": found["seconds"], "steal_share": share} for found, share in attempts]
    return {**least_disturbed(attempts), "attempts": told}


def run_collective(scenario: Scenario, lab: Lab, folder: Path) -> dict[str, Any]:
    out = folder / f"collective-{scenario.number}.json"
    bench(
        lab,
        ["collectives", "--only", scenario.operation, "--sizes", f"{scenario.size_bytes}B", "--dtypes", "float32",
         "--repeats", str(scenario.repeats), "--warmup", "1", "--out", str(out)],
        order=scenario.order,
    )  # fmt: skip
    (sample,) = read(out, CollectivesRecord).samples
    if not sample.is_correct:
        raise RuntimeError(f"{scenario.name} gave wrong results")
    return {"seconds": statistics.median(sample.times_s), "runs_s": sample.times_s}


def run_send(scenario: Scenario, lab: Lab, folder: Path) -> dict[str, Any]:
    out = folder / f"links-{scenario.number}.json"
    bench(lab, ["links", "--streams", "1", "--duration", "2 s", "--out", str(out)], order=scenario.order)
    source, target = scenario.order
    sample = next(s for s in read(out, LinksRecord).samples if (s.source, s.target) == (source, target))
    rates = sample.bit_per_s
    return {
        "seconds": 8 * scenario.size_bytes / statistics.median(rates),
        "runs_s": [8 * scenario.size_bytes / rate for rate in rates],
    }


def run_training(scenario: Scenario, lab: Lab, folder: Path) -> dict[str, Any]:
    place = LabPlace(lab, order=scenario.order)
    with tempfile.TemporaryDirectory(prefix="wirespeed-lab-") as held:
        record = run_replay(replay_options(scenario), place, Path(held), Quiet())
    (arm,) = record.arms
    return {"seconds": arm.step_s, "runs_s": arm.step_times_s, "compute_s": record.measured_compute_s}


_RUNNERS = {"collective": run_collective, "send": run_send, "training": run_training}


# The whole.


def compare(scenario: Scenario, predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """One row: the scenario, both times, the error, and whether what binds was named."""
    kinds = {"host NIC": "host NIC", "uplink": "rack uplink"}
    reading = Reading(**measured["reading"])
    verdict = reading.verdict_of_steps if scenario.what == "training" else reading.verdict
    measured = {**measured, "verdict": verdict}
    named = kinds.get(predicted["kind"], "none")
    return {
        "scenario": scenario.as_dict(),
        "predicted": predicted,
        "measured": measured,
        "error": predicted["seconds"] / measured["seconds"] - 1,
        "named": named,
        "is_named_right": named == measured["verdict"],
    }


def show(row: dict[str, Any]) -> None:
    held, predicted, measured = row["scenario"], row["predicted"], row["measured"]
    reading = measured["reading"]
    uplink = held["uplink_bit_per_s"]
    network = f"{len(held['order'])} of {held['hosts']} x {held['rate_bit_per_s'] / 1e6:.0f}"
    network += "" if uplink is None else f", 2 x {uplink / 1e6:.0f}"
    print(
        f"{held['number']:2d} {held['name']:20s} {network:20s} "
        f"{predicted['seconds'] * 1e3:8.1f} {measured['seconds'] * 1e3:8.1f} ms {row['error']:+7.1%}  "
        f"{row['named']:11s} {'=' if row['is_named_right'] else '!'} {measured['verdict']:11s} "
        f"nic {reading['nic']:.2f} up {reading['uplink']:.2f} cores {reading['cores']:.2f}  {predicted['binding']}"
    )


def bars_of(seed: int, rows: Sequence[dict[str, Any]]) -> list[Bar]:
    errors = [abs(row["error"]) for row in rows]
    wrong = sum(not row["is_named_right"] for row in rows)
    return [
        Bar(f"lab, seed {seed}: scenarios", len(rows), 20),
        Bar(f"lab, seed {seed}: mean error", statistics.fmean(errors), MEAN_ERROR, at_least=False),
        Bar(f"lab, seed {seed}: worst error", max(errors), WORST_ERROR, at_least=False),
        Bar(f"lab, seed {seed}: scenarios whose binding link is named wrong", wrong, 0, at_least=False),
    ]


def part_of(scenarios: Sequence[Scenario], text: str) -> list[Scenario]:
    """The scenarios of part i/n: every n-th."""
    which, _, parts = text.partition("/")
    if not (which.isdecimal() and parts.isdecimal() and 1 <= int(which) <= int(parts)):
        raise SystemExit(f"got --part {text!r}; expected I/N with 1 <= I <= N")
    return list(scenarios[int(which) - 1 :: int(parts)])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="what the scenarios are drawn from")
    parser.add_argument("--check", action="store_true", help="print one line per bar, and exit 1 if one is short")
    parser.add_argument("--quick", action="store_true", help="three scenarios; results are not kept unless --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go (benchmarks/results/NAME.json)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where records stay; default a temporary folder")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="run only every N-th scenario, from the I-th")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="S", help="begin nothing after so long")
    parser.add_argument("--only-calibrate", action="store_true", help="measure and fit the fabric, and stop")
    parser.add_argument("--again", action="store_true", help="predict again from what is measured in --work")
    return parser.parse_args()


def main() -> int:
    args = options()
    scenarios = quick(args.seed) if args.quick else draw(args.seed)
    with tempfile.TemporaryDirectory(prefix="wirespeed-lab-") as temporary:
        work = Path(temporary) if args.work is None else args.work
        work.mkdir(parents=True, exist_ok=True)
        return validate(args, scenarios, work)


def validate(args: argparse.Namespace, scenarios: Sequence[Scenario], work: Path) -> int:
    strategies = list(dict.fromkeys(s.strategy for s in scenarios if s.strategy))
    began = time.monotonic()
    bases = calibrated(work, strategies, LINES_BIT_PER_S[:1] if args.quick else LINES_BIT_PER_S)
    if args.only_calibrate:
        return 0
    told = work / f"predictions-{args.seed}.json"
    if not told.is_file() or args.again:
        found = {str(s.number): predict(s, bases) for s in scenarios}
        document = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "predictions": found}
        write_bytes(told, json.dumps(document, indent=1).encode())
    document = json.loads(told.read_bytes())
    predictions, written = document["predictions"], document["written"]
    for scenario in part_of(scenarios, args.part):
        if time.monotonic() - began > args.stop_after:
            break
        target = work / f"measured-{args.seed}-{scenario.number}.json"
        if not target.is_file():
            write_bytes(target, json.dumps(run(scenario, work), indent=1).encode())
            show(compare(scenario, predictions[str(scenario.number)], json.loads(target.read_bytes())))
    rows = []
    for scenario in scenarios:
        target = work / f"measured-{args.seed}-{scenario.number}.json"
        if target.is_file():
            rows.append(compare(scenario, predictions[str(scenario.number)], json.loads(target.read_bytes())))
    if len(rows) < len(scenarios):
        say(f"{len(rows)} of {len(scenarios)} scenarios are measured in {work}")
        return 0
    print(f"   {'scenario':20s} {'hosts x Mbit/s':20s} predicted measured      error  named, measured")
    for row in rows:
        show(row)
    held = RESULTS / "validate_lab.json" if args.out is None else args.out
    runs = [] if args.quick or not held.is_file() else json.loads(held.read_bytes())["results"]["runs"]
    made = {"seed": args.seed, "predicted_at": written, "took_s": time.monotonic() - began, "rows": rows}
    made["calibration_steal_shares"] = losses(work)
    runs = sorted([run for run in runs if run["seed"] != args.seed] + [made], key=lambda run: run["seed"])
    bars = [bar for run in runs for bar in bars_of(run["seed"], run["rows"])]
    status = finish("validate_lab", bars, {"runs": runs}, check=args.check, is_quick=args.quick, out=args.out)
    if not args.quick and args.out is None:
        write_bytes(PAGE, page().encode())
    return status


if __name__ == "__main__":
    sys.exit(main())
