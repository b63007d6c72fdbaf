"""The cases of the fault matrix, how they are run, and what has to be true of each."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = str(Path(__file__).with_name("fault_rank.py"))
NUM_RANKS = 4
TIMEOUT_S = 6.0
"""Of the process group, and so what the user asks for as a deadline."""
PATIENT_S = 60.0
"""The same where nothing is to run into it: sixteen ranks share the cores, beside whatever else a machine does."""
DEADLINE_S = 2 * TIMEOUT_S + 2
"""From the fault to the last rank's end. One collective runs into its time-out; async takes a few steps more until it
waits for the others; and a busy machine is given as much again."""
FAULT_STEP = 5
PHASES = ("attach", "forward", "backward", "exchange", "optimizer", "between", "evaluation")
KINDS = (
    "dense/64KiB",
    "int8/64KiB",
    "int8/64KiB/hierarchical",
    "int8/64KiB/delayed",
    "dense/64KiB/local_sgd@2",
    "int8/64KiB/diloco@2",
    "dense/64KiB/async",
    "int8/64KiB/async",
)
"""One of every way in which ranks come to wait for each other; codecs differ only in what they send."""
CODECS = ("half/64KiB", "int4/64KiB", "topk@5%/64KiB", "lowrank@2/64KiB", "sign/64KiB", "dense/64KiB/delayed", "auto")
"""The rest, and what measures before it chooses."""
STEPS_AHEAD = {"every_step": 1, "delayed": 2, "local_sgd": 2, "diloco": 2}
"""How many steps beyond the fault's a rank may take that does not know of it. Under async a quick rank may be any number
of steps ahead of the one that fails, so only the time counts."""


@dataclass(frozen=True)
class Case:
    """A cell: one rank fails so, at that phase, under that strategy."""

    strategy: str
    phase: str
    fault: str
    victim: int = 1

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.strategy.replace('/', '+')}-{self.phase}-{self.fault}-{self.victim}"


def batches(cases: list[Case], size: int = 4) -> list[list[Case]]:
    """Cases that run at the same time: of one fault, and in a partition of one phase, so that one cut is for all."""
    made: list[list[Case]] = []

    def alike(case: Case) -> tuple[str, str]:
        return case.fault, case.phase if case.fault == "partition" else ""

    for _, group in itertools.groupby(sorted(cases, key=alike), key=alike):
        held = list(group)
        made += [held[begin : begin + size] for begin in range(0, len(held), size)]
    return made


def write(made: list[list[Case]], folder: Path) -> None:
    """Leave the batches where the ranks look for them."""
    folder.mkdir(parents=True, exist_ok=True)
    told = [
        [
            {**vars(case), "name": case.name, "timeout_s": PATIENT_S if case.fault == "hiccup" else TIMEOUT_S}
            for case in batch
        ]
        for batch in made
    ]
    (folder / "cases.json").write_text(json.dumps(told))


def command(folder: Path) -> list[str]:
    """What every rank runs."""
    return [sys.executable, SCRIPT, str(folder)]


def problems(made: list[list[Case]], folder: Path) -> list[str]:
    """What is wrong, in words, of all cases that were run; every cell is looked at before any is complained of."""
    return [
        f"{case.name}: {problem}"
        for number, batch in enumerate(made)
        for case in batch
        for problem in _problems_of(case, folder / str(number) / case.name)
    ]


def _problems_of(case: Case, place: Path) -> Iterator[str]:
    at = place / "at"
    if not at.is_file():
        words = [left.read_text() for left in sorted(place.glob("rank-*.json"))]
        yield f"the victim never came to the phase; {words}"
        return
    failed_s = float(at.read_text())
    held: list[dict[str, Any]] = []
    for rank in range(NUM_RANKS):
        left = place / f"rank-{rank}.json"
        if case.fault == "kill" and rank == case.victim:
            if left.is_file():
                yield "the victim was killed and yet ended by itself"
            continue
        if not left.is_file():
            yield f"rank {rank} left no word: it crashed"
            continue
        told = json.loads(left.read_text())
        held.append(told)
        yield from _problems_of_rank(case, rank, told, failed_s)
    for step in sorted({step for told in held for step in told["hashes"]}):
        if len({told["hashes"][step] for told in held if step in told["hashes"]}) > 1:
            yield f"parameters differ after step {step}"


def _problems_of_rank(case: Case, rank: int, told: dict[str, Any], failed_s: float) -> Iterator[str]:
    who = f"rank {rank} ({'victim' if rank == case.victim else 'survivor'})"
    if case.fault == "hiccup":
        if told["end"] != "done":
            yield f"{who} ended with {told['end']}: {told['message']}"
        return
    if told["end"] == "hung":
        yield f"{who} hangs after {told['num_steps']} steps: {told['message']}"
        return
    if not _is_clear(case, told):
        yield f"{who} ended after {told['num_steps']} steps with {told['end']}: {told['message']}"
    took_s = told["ended_s"] - failed_s
    # A paused victim goes on when the others have ended, and has as long as they had.
    allowed_s = DEADLINE_S * (2 if case.fault == "pause" and rank == case.victim else 1)
    if took_s > allowed_s:
        yield f"{who} ended {took_s:.1f} s after the fault; expected at most {allowed_s:g} s"
    if case.strategy.endswith("/async"):
        return
    schedule = next((name for name in STEPS_AHEAD if f"/{name}" in case.strategy), "every_step")
    fault_step = 0 if case.phase == "attach" else FAULT_STEP
    if told["num_steps"] > fault_step + STEPS_AHEAD[schedule] + 1:
        yield f"{who} took {told['num_steps']} steps: it trained on without the others"


def _is_clear(case: Case, told: dict[str, Any]) -> bool:
    if told["end"] == "PeerFailure":
        return "a rank died" in told["message"]
    # Collectives that are not ours end with torch's own error: the script's, and DDP's in its second forward, where it
    # tells all ranks its new buckets (a rank that never attached is missed there first where a period is two steps).
    # Under dense, with which auto begins, gradients are DDP's own business: `native.explain_failures` says what its
    # error means.
    words = ("closed by peer", "timed out", "timeout", "reset by peer", "broken pipe")
    is_torchs = case.phase in ("evaluation", "attach") or case.strategy in ("dense/64KiB", "auto")
    return is_torchs and any(word in told["message"].lower() for word in words)
