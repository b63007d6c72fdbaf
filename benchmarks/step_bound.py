"""How near a real step comes to its bound: replay on 4 hosts at 100 Mbit/s and 1 Gbit/s, for dense, half and int8.

The bound is the recurrence over the same buckets: each at the goodput measured in this very run (what the slowest
host's link gave a TCP stream to its best peer, just before), encoded and decoded at the speed that the codecs have when
they are measured alone in this run, nothing waiting for a core. A step is held within 10 % of it.

Two bounds are shown. "alone": one codec at a time on an idle machine. "shared": as they are measured with all ranks at
once; on a lab's machine, where four hosts share two cores, no step can do better than that.

    python benchmarks/step_bound.py --check
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from _harness import Bar, arguments, finish
from wirespeed.fabric.calibrate import calibrate, host_rates_bit_per_s
from wirespeed.fabric.collectives import codec_stage_s
from wirespeed.lab import Lab, LabSpec
from wirespeed.plan.bounds import StageSeconds, bound_step_s
from wirespeed.plan.models import load_model
from wirespeed.records import CodecsRecord, CollectivesRecord, LinksRecord, read
from wirespeed.spec.strategy import Strategy
from wirespeed.train.speed import measure_codecs
from wirespeed.tune.places import LabPlace
from wirespeed.tune.replay import first_bucket_bytes, options_of, run_replay, scaled_strategy
from wirespeed.units import KIB, MIB

STRATEGIES = ("dense", "half", "int8")
SETTINGS = {
    "100mbit": ("100mbit", "resnet50", 2.0, 8.0),
    "1gbit": ("1gbit", "resnet50", 0.6, 1.0),
    "1gbit, bytes and rate divided by 5": ("200mbit", "resnet50", 0.6, 5.0),
}
"""The lab's rate, model, seconds of compute and scale: compute is of the order of the wire's time, so that both ends of
the recurrence count. At 1 Gbit/s and full size four hosts want more than two cores for the codecs and gloo's sums; with
one common factor taken out of bytes and rate they do not."""
HOSTS = 4


class Quiet:
    """Progress on stderr, a line per phase."""

    def phase(self, text: str, *, total: int | None = None) -> None:
        """See ``tune.loop.Progress``."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        """Nothing to show."""

    def note(self, text: str) -> None:
        """See ``tune.loop.Progress``."""
        print(f"  {text}", file=sys.stderr, flush=True)


def stage_seconds(collectives: CollectivesRecord, codecs: CodecsRecord) -> StageSeconds:
    """Seconds of a stage from curves through the measured medians; dense divides its bucket in place, once."""
    fabric = calibrate(None, [collectives], [codecs], name="bound")

    def seconds(strategy: Strategy, stage: str, size_bytes: int) -> float:
        codec = strategy.name.partition("/")[0]
        if codec == "dense":
            return codec_stage_s(fabric, "memcpy", "copy", size_bytes, HOSTS) if stage == "encode" else 0.0
        return codec_stage_s(fabric, codec, stage, size_bytes, HOSTS)

    return seconds


def run_rate(rate: str, *, steps: int, rounds: int) -> dict[str, Any]:
    """The replay at one rate, and both bounds of every strategy."""
    lab_rate, name, compute_s, scale = SETTINGS[rate]
    strategies = [Strategy.parse(text) for text in STRATEGIES]
    options = options_of(
        load_model(name), strategies, num_ranks=HOSTS, scale=scale, compute_s=compute_s, num_steps=steps, rounds=rounds,
        links_s=1.0,
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="wirespeed-bench-") as folder,
        Lab(LabSpec.parse(f"{HOSTS}x{lab_rate}")) as lab,
    ):
        record = run_replay(options, LabPlace(lab), Path(folder), Quiet())
        goodput_bit_per_s = min(host_rates_bit_per_s(read(Path(folder) / "links.json", LinksRecord)).values())
        collectives = read(Path(folder) / "collectives.json", CollectivesRecord)
        shared = read(Path(folder) / "codecs.json", CodecsRecord)
    alone = measure_codecs(strategies, (256 * KIB, MIB, 4 * MIB, 25 * MIB), num_ranks=HOSTS, deadline_s=10.0)
    rows = []
    for arm in record.arms:
        strategy = scaled_strategy(arm.strategy, scale)
        bounds = {
            kind: bound_step_s(
                options.workload,
                strategy,
                goodput_bit_per_s,
                stage_s=stage_seconds(collectives, codecs),
                first_bucket_bytes=first_bucket_bytes(scale),
            )
            for kind, codecs in (("alone", alone), ("shared", shared))
        }
        rows.append({"arm": arm.name, "step_s": arm.step_s, "spread": arm.spread, **bounds})
    return {"record": msgspec.to_builtins(record), "goodput_bit_per_s": goodput_bit_per_s, "rows": rows}


def main() -> int:
    args = arguments(__doc__ or "")
    steps, rounds = (4, 1) if args.quick else (6, 2)
    bars: list[Bar] = []
    results: dict[str, Any] = {}
    for rate in SETTINGS:
        results[rate] = run_rate(rate, steps=steps, rounds=rounds)
        for row in results[rate]["rows"]:
            print(
                f"{rate:8s} {row['arm']:6s} step {row['step_s'] * 1e3:7.1f} ms (spread {row['spread']:.1%}), bound "
                f"{row['alone'] * 1e3:7.1f} ms alone ({row['step_s'] / row['alone']:.3f}x), "
                f"{row['shared'] * 1e3:7.1f} ms shared ({row['step_s'] / row['shared']:.3f}x)"
            )
            bars.append(Bar(f"{rate}: {row['arm']} step over its bound", row["step_s"] / row["alone"], 1.10, False))
    return finish("step_bound", bars, results, check=args.check, is_quick=args.quick, out=args.out)


if __name__ == "__main__":
    sys.exit(main())
