"""Wirespeed's strategies beside every peer: time to the same held-out loss, and step time by replay.

Training: char GPT and Fashion-MNIST, 4 hosts, at 100 Mbit/s, 1 Gbit/s and "cpu" (10 Gbit/s, where two cores are the
limit). Per seed dense runs first, and the held-out loss that it ends with is the target; every other arm then runs from
the same seed until it is there, at most three times the steps. Replay: ResNet-50 and BERT-Large, compute a sleep, bytes
and rates divided by one factor; all arms in turn in one process group, the order turned by one place per round.

Peers are PyTorch's own, fp16, PowerSGD (best of three ranks), quantization (best of two) and post-localSGD, and two
that average parameters: hivemind (fp32 and fp16) and torchft's LocalSGD. Arms that send once in so many steps count by
the mean over whole periods. ``auto`` is held against the best strategy of its fidelity that was tried here, and against
dense. All run under one interpreter: ``pip install hivemind torchft`` beside wirespeed first.

The whole takes hours. Every run is kept in ``--join FILE`` as soon as it ends, and what is in there is not run again;
``--seconds N`` begins nothing new after N seconds. With ``--check`` a bar whose runs are missing is short.

    python benchmarks/train_vs_peers.py --join runs.json --seconds 1200 --only "replay resnet50"
    python benchmarks/train_vs_peers.py --join runs.json --seconds 0 --check
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from _arms import Arena, Arm, seconds_to
from _averaging_peers import missing_packages
from _harness import Bar, finish
from _peers import period_of
from wirespeed import units
from wirespeed.lab import Lab, LabSpec
from wirespeed.records import write_bytes

RANK = str(Path(__file__).with_name("_peer_replay_rank.py"))
NUM_HOSTS = 4
RATES = {"100mbit": "100mbit", "1gbit": "1gbit", "cpu": "10gbit"}
FAMILIES = {
    "fp16": ("torch-fp16",),
    "PowerSGD": ("torch-powersgd@2", "torch-powersgd@4", "torch-powersgd@8"),
    "quantization": ("torch-quantize", "torch-quantize-channels"),
    "post-localSGD": ("torch-post-local-sgd@8",),
    "hivemind": ("hivemind@8", "hivemind-fp16@8"),
    "torchft's LocalSGD": ("torchft-local-sgd@8",),
}
"""A family counts by its best."""
PEERS = tuple(peer for family in FAMILIES.values() for peer in family)
OURS = ("half", "int8", "lowrank@4", "lowrank@8", "topk@2%/2MiB", "dense/local_sgd@8", "int8/local_sgd@8")
TASKS = {
    "char GPT": ("examples/char_gpt.py", {"100mbit": 50, "1gbit": 100, "cpu": 60}),
    "Fashion-MNIST": ("examples/fashion_mnist.py", {"100mbit": 60, "1gbit": 120, "cpu": 120}),
}
"""Script, and dense's steps by rate."""
EXTRA = 3.0
REPLAYS = {
    ("resnet50", "100mbit"): (2.0, 8.0, 3),
    ("resnet50", "1gbit"): (0.6, 8.0, 6),
    ("resnet50", "cpu"): (0.3, 8.0, 6),
    ("bert-large", "1gbit"): (1.2, 20.0, 3),
    ("bert-large", "cpu"): (0.6, 20.0, 4),
    ("bert-large", "100mbit"): (4.0, 20.0, 1),
}
"""Seconds of compute, what bytes and rates are divided by, timed steps."""
REPLAY_ARMS = ("torch-dense", "dense", *OURS, "lowrank@32", "auto", "auto-compressed", *PEERS)
BY_FIDELITY = {"auto": ("dense", "half"), "auto-compressed": ("dense", "half", "int8", "lowrank@32")}
WITHIN, NOISE = 1.10, 1.03
NEVER = 1e6


@dataclass(frozen=True)
class Cell:
    """What is run at a time, and kept: a seed of an arm, or a round of a replay."""

    what: str
    rate: str
    arm: str
    number: int

    @property
    def key(self) -> str:
        """Of its place in the file."""
        return f"{self.what} at {self.rate}, {self.arm}, {self.number}"


def cells(*, seeds: int, rounds: int, only: str) -> Iterator[Cell]:
    """All of them, those of one seed together and dense first, whose loss is the others' target."""
    found = [Cell(f"replay {model}", rate, "all", number) for model, rate in REPLAYS for number in range(rounds)]
    for task, (_, by_rate) in TASKS.items():
        for rate in by_rate:
            for seed in range(seeds):
                others = [*OURS, *PEERS]
                turned = others[seed % len(others) :] + others[: seed % len(others)]
                found += [Cell(task, rate, arm, seed) for arm in ("dense", *turned)]
    return (cell for cell in found if only in cell.key)


class Book:
    """The runs so far, in a file that is whole after every one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.runs: dict[str, Any] = {}
        if path is not None and path.exists():
            self.runs = json.loads(path.read_text())

    def add(self, cell: Cell, told: Any) -> None:
        """Keep a run."""
        self.runs[cell.key] = told
        if self._path is not None:
            write_bytes(self._path, json.dumps(self.runs, indent=1).encode() + b"\n")


def run_task(cell: Cell, book: Book, num_steps: int) -> dict[str, Any]:
    """One arm from one seed to dense's loss."""
    script = TASKS[cell.what][0]
    target = None
    if cell.arm != "dense":
        target = book.runs[Cell(cell.what, cell.rate, "dense", cell.number).key]["final_loss"]
    with Arena(f"{NUM_HOSTS}x{RATES[cell.rate]}", script) as arena:
        outcome = arena.run(
            Arm(cell.arm), num_steps=num_steps, seed=cell.number, target_loss=target,
            max_steps=None if target is None else round(EXTRA * num_steps),
        )  # fmt: skip
    final = outcome.losses[-1].loss
    assert final is not None
    return {
        "step_s": outcome.measured_step_s,
        "num_steps": outcome.num_steps,
        "final_loss": final,
        "time_to_loss_s": seconds_to(outcome, final if target is None else target),
    }


def run_replay(cell: Cell, *, is_quick: bool) -> dict[str, Any]:
    """One round of all arms."""
    model = cell.what.removeprefix("replay ")
    compute_s, scale, num_steps = REPLAYS[model, cell.rate]
    arms = REPLAY_ARMS if not is_quick else ("torch-dense", "dense", "int8", "torch-fp16", "torch-powersgd@4")
    rate_bit_per_s = units.parse_rate(RATES[cell.rate]) / scale
    job = [cell.number, *arms]
    with (
        tempfile.TemporaryDirectory(prefix="wirespeed-bench-") as folder,
        Lab(LabSpec(hosts=NUM_HOSTS, rate_bit_per_s=rate_bit_per_s)) as lab,
    ):
        arguments = (folder, model, compute_s, scale, 2 if is_quick else num_steps, *job)
        end = lab.run([sys.executable, RANK, *map(str, arguments)], timeout_s=3600)
        if end.returncode != 0:
            raise RuntimeError(f"{cell.key} ended with {end.returncode}: {end.tails[end.failed_rank or 0]}")
        ranks = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(NUM_HOSTS)]
    return {
        arm: {
            "steps_s": [max(times) for times in zip(*(rank[arm]["steps_s"] for rank in ranks), strict=True)],
            "chosen": ranks[0][arm]["chosen"],
        }
        for arm in arms
    }


def times(book: Book, what: str, rate: str, *, seeds: int, rounds: int) -> dict[str, float]:
    """Seconds by arm: to the loss (median over seeds), or per step (of all rounds); NaN where runs are missing."""
    if what.startswith("replay "):
        held = [book.runs.get(Cell(what, rate, "all", number).key, {}) for number in range(rounds)]
        steps = {arm: [round_.get(arm, {}).get("steps_s", []) for round_ in held] for arm in REPLAY_ARMS}
        return {arm: _step_s(arm, found) if all(found) else math.nan for arm, found in steps.items()}
    by_arm = {}
    for arm in ("dense", *OURS, *PEERS):
        runs = [book.runs.get(Cell(what, rate, arm, seed).key) for seed in range(seeds)]
        reached = [math.inf if run["time_to_loss_s"] is None else run["time_to_loss_s"] for run in runs if run]
        by_arm[arm] = median(reached) if len(reached) == seeds else math.nan
    return by_arm


def _step_s(arm: str, rounds: list[list[float]]) -> float:
    """Seconds per step: the median of all, or, where one in a period sends, the median round's mean over whole ones."""
    period = period_of(arm)
    if period == 1:
        return median(itertools.chain(*rounds))
    return median(mean(steps[: len(steps) // period * period]) for steps in rounds)


def bars_of(what: str, rate: str, by_arm: dict[str, float]) -> list[Bar]:
    """Our best over every family of peers; ``auto`` over the best of its fidelity, and over dense."""
    best = _least(by_arm[arm] for arm in OURS)
    where = f"{what} at {rate}"
    found = [
        Bar(f"{where}: times as fast as {family}", _ratio(_least(by_arm[arm] for arm in arms), best), 1.0)
        for family, arms in FAMILIES.items()
    ]
    for name, others in BY_FIDELITY.items() if what.startswith("replay ") else ():
        best = _least(by_arm[arm] for arm in others)
        found += [
            Bar(f"{where}: {name} over the best of its fidelity", by_arm[name] / best, WITHIN, at_least=False),
            Bar(f"{where}: {name} over dense", by_arm[name] / by_arm["dense"], NOISE, at_least=False),
        ]
    return found


def _ratio(theirs: float, ours: float) -> float:
    """How many times as fast. One that never got to the loss is as good as NEVER times slower."""
    if math.isinf(ours):
        return 0.0
    return min(theirs / ours, NEVER)


def _least(values: Iterator[float]) -> float:
    """The least; NaN where any is: a best of some is not the best."""
    found = list(values)
    return math.nan if any(math.isnan(value) for value in found) else min(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="hold the figures against their bars")
    parser.add_argument("--quick", action="store_true", help="one round of some arms of one replay: shows that it runs")
    parser.add_argument("--join", type=Path, metavar="FILE", help="keep runs there, and run nothing that is there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so long")
    parser.add_argument("--only", default="", help="what a run's name has to hold: 'char GPT at 1gbit', ', int8,'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    missing_here = missing_packages()
    if missing_here and not args.quick and args.seconds > 0:
        parser.error(
            f"not installed: {', '.join(missing_here)}; hint: {sys.executable} -m pip install hivemind torchft"
        )
    began_s, rounds = time.monotonic(), 1 if args.quick else args.rounds
    book = Book(args.join)
    only = "replay resnet50 at 1gbit, all, 0" if args.quick else args.only
    for cell in cells(seeds=args.seeds, rounds=rounds, only=only):
        if cell.key in book.runs:
            continue
        if time.monotonic() - began_s >= args.seconds:
            break
        print(f"  {cell.key}", file=sys.stderr, flush=True)
        if cell.what.startswith("replay "):
            book.add(cell, run_replay(cell, is_quick=args.quick))
        else:
            book.add(cell, run_task(cell, book, TASKS[cell.what][1][cell.rate]))
    bars: list[Bar] = []
    places = [(f"replay {model}", rate) for model, rate in REPLAYS]
    places += [(task, rate) for task, (_, by_rate) in TASKS.items() for rate in by_rate]
    for what, rate in places:
        by_arm = times(book, what, rate, seeds=args.seeds, rounds=rounds)
        for arm, seconds in sorted(by_arm.items(), key=lambda item: item[1]):
            if not math.isnan(seconds):
                print(f"{what} at {rate}: {arm:24s} {seconds:8.3f} s")
        bars += bars_of(what, rate, by_arm)
    known = [bar for bar in bars if not math.isnan(bar.value)]
    missing = [bar for bar in bars if math.isnan(bar.value)]
    if args.check:
        for bar in missing:
            print(f"short  {bar.name}  not run  {'>=' if bar.at_least else '<='}{bar.target:g}")
    code = finish("train_vs_peers", known, {"runs": book.runs}, check=args.check, is_quick=args.quick)
    return 1 if args.check and missing else code


if __name__ == "__main__":
    sys.exit(main())
