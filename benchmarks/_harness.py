"""What the benchmarks share: interleaved runs, bars, the result file, and the command line.

A benchmark runs its arms in turn, round after round, so that a disturbance hits all of them; states its bars; and ends
with ``sys.exit(finish(...))``. Exit status: 0 when every bar holds or ``--check`` was not given, else 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wirespeed.measure import stats
from wirespeed.measure.environment import capture
from wirespeed.measure.steal import StealMeter
from wirespeed.records import write_bytes

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
QUIET_SHARE = 0.05
"""Of all CPU time that a machine's neighbours may take during a measurement that is to count."""
ATTEMPTS = 3


@dataclass(frozen=True)
class Bar:
    """A promise: ``value`` is at least (or at most) ``target``."""

    name: str
    value: float
    target: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        """Whether it is kept. A value that is not a number is not."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def line(self) -> str:
        """``holds|short  NAME  value  target``."""
        sign = ">=" if self.at_least else "<="
        return f"{'holds' if self.holds else 'short'}  {self.name}  {self.value:.4g}  {sign}{self.target:.4g}"


@dataclass(frozen=True)
class Runs:
    """One arm's timed runs, in order. ``cpu_s``: what the calling thread used, without waiting for a core."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    def summary(self) -> dict[str, Any]:
        """Medians, spread (median absolute deviation / median) and every run."""
        return {
            "median_wall_s": stats.median(self.wall_s),
            "median_cpu_s": stats.median(self.cpu_s),
            "spread_wall": stats.spread(self.wall_s),
            "spread_cpu": stats.spread(self.cpu_s),
            "is_stable": stats.is_stable(self.cpu_s),
            **asdict(self),
        }


def run_interleaved(
    arms: dict[str, Callable[[], object]],
    rounds: int,
    *,
    before_round: Callable[[], object] = lambda: None,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, Runs]:
    """Run every arm once per round, in order, after one round that is not counted.

    ``before_round`` and ``after_round`` are not timed: set up inputs in one, check results in the other.
    """
    wall_s: dict[str, list[float]] = {name: [] for name in arms}
    cpu_s: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(-1, rounds):
        before_round()
        for name, arm in arms.items():
            wall, cpu = time.perf_counter(), time.thread_time()
            arm()
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            if round_ >= 0:
                wall_s[name].append(wall)
                cpu_s[name].append(cpu)
        after_round()
    return {name: Runs(tuple(wall_s[name]), tuple(cpu_s[name])) for name in arms}


def until_quiet(measure: Callable[[], T]) -> list[tuple[T, float]]:
    """Measure until the neighbours took little of the CPU meanwhile, at most ``ATTEMPTS`` times.

    Gives every attempt, in order, with the share that was taken; the least disturbed one counts. Whether to go on, and
    which counts, depends on the share alone, never on the value.
    """
    attempts: list[tuple[T, float]] = []
    while not attempts or (attempts[-1][1] > QUIET_SHARE and len(attempts) < ATTEMPTS):
        meter = StealMeter()
        value = measure()
        attempts.append((value, meter.share()))
    return attempts


def least_disturbed(attempts: Sequence[tuple[T, float]]) -> T:
    """The one of ``until_quiet``'s that counts."""
    return min(attempts, key=lambda attempt: attempt[1])[0]


def arguments(description: str) -> argparse.Namespace:
    """``check``, ``quick`` and ``out`` from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print one line per bar, and exit 1 if one is short")
    parser.add_argument("--quick", action="store_true", help="under a minute; results are not kept unless --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go (benchmarks/results/NAME.json)")
    return parser.parse_args()


def finish(
    name: str,
    bars: list[Bar],
    results: dict[str, Any],
    *,
    check: bool = False,
    is_quick: bool = False,
    out: Path | None = None,
) -> int:
    """Write the results, print the bars where ``check`` asks for them, and give the exit status.

    Results go to ``out``, else to benchmarks/results/NAME.json; those of a quick run only to ``out``.
    """
    target = out if out is not None else None if is_quick else RESULTS / f"{name}.json"
    if target is not None:
        document = {
            "schema": 1,
            "name": name,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": msgspec.to_builtins(capture()),
            "is_quick": is_quick,
            "bars": [{**asdict(bar), "holds": bar.holds} for bar in bars],
            "results": results,
        }
        write_bytes(target, json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")
    if not check:
        return 0
    for bar in bars:
        print(bar.line)
    return 0 if all(bar.holds for bar in bars) else 1
