"""The fault matrix's third fault: a host is cut off from the others, silently, at every phase of a step.

No connection closes: frames just stop. Every rank, on either side of the cut, has to end with a clear error within the
deadline; the cells and the conditions are those of tests/real/test_fault_matrix.py.

Covered here: {forward, backward, exchange, optimizer, between steps, evaluation} x partitioned x every kind of
strategy: the quick test takes the exchange of four kinds, the slow one every cell, and another the host of rank 0, which
holds the process group's store. Before attach a strategy with a codec makes process groups, for which it reads the store.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))
from fault_cases import KINDS, NUM_RANKS, PHASES, Case, batches, command, problems, write

from wirespeed.lab import Lab, LabSpec

pytestmark = [pytest.mark.lab, pytest.mark.torch]


class Scissors(threading.Thread):
    """Cuts the victims' host off when all victims of a batch are where they fail, and joins it again afterwards."""

    def __init__(self, lab: Lab, made: list[list[Case]], folder: Path) -> None:
        super().__init__(daemon=True)
        self._lab, self._made, self._folder = lab, made, folder
        self.is_over = threading.Event()
        self.fault: Exception | None = None

    def run(self) -> None:
        try:
            for number, batch in enumerate(self._made):
                self._cut(self._folder / str(number), batch)
        except Exception as fault:
            self.fault = fault

    def _cut(self, folder: Path, batch: list[Case]) -> None:
        host, others = f"h{batch[0].victim}", [f"h{rank}" for rank in range(NUM_RANKS) if rank != batch[0].victim]
        failing = [(folder / case.name / "at", folder / case.name / f"rank-{case.victim}.json") for case in batch]
        self._wait(lambda: all(at.exists() or end.exists() for at, end in failing))
        for other in others:
            self._lab.fault(host, "partition", other=other)
        (folder / "is-cut").touch()
        ends = [folder / case.name / f"rank-{rank}.json" for case in batch for rank in range(NUM_RANKS)]
        self._wait(lambda: all(end.exists() for end in ends))
        self._lab.fault(host, "heal")
        (folder / "is-healed").touch()

    def _wait(self, test) -> None:
        while not test() and not self.is_over.is_set():
            time.sleep(0.02)


def live_through(cases: list[Case], folder: Path, num_at_once: int = 4) -> None:
    made = batches(cases, num_at_once)
    write(made, folder)
    with Lab(LabSpec(hosts=NUM_RANKS, rate_bit_per_s=1e9)) as lab:
        scissors = Scissors(lab, made, folder)
        scissors.start()
        end = lab.run(command(folder), timeout_s=60 + 90 * len(made))
        scissors.is_over.set()
        scissors.join(10)
    assert scissors.fault is None
    assert end.returncode == 0, end
    found = problems(made, folder)
    assert not found, f"{len(found)} of {len(cases)} cells:\n" + "\n".join(found)


def test_a_host_that_is_cut_off_in_an_exchange_ends_every_rank_in_time(tmp_path: Path) -> None:
    kinds = ("dense/64KiB", "int8/64KiB", "int8/64KiB/diloco@2", "dense/64KiB/async")
    live_through([Case(kind, "exchange", "partition") for kind in kinds], tmp_path / "cases")


@pytest.mark.slow
def test_a_host_that_is_cut_off_at_any_phase_ends_every_rank_in_time(tmp_path: Path) -> None:
    phases = [phase for phase in PHASES if phase != "attach"]
    live_through([Case(kind, phase, "partition") for kind in KINDS for phase in phases], tmp_path / "cases")


@pytest.mark.slow
def test_a_host_that_is_cut_off_before_it_attaches_ends_every_rank_in_time(tmp_path: Path) -> None:
    live_through([Case(kind, "attach", "partition") for kind in ("dense/64KiB", "int8/64KiB")], tmp_path / "cases")


@pytest.mark.slow
def test_the_host_of_the_store_is_cut_off(tmp_path: Path) -> None:
    kinds = ("int8/64KiB", "int8/64KiB/diloco@2", "dense/64KiB/async", "int8/64KiB/async")
    cases = [Case(kind, phase, "partition", victim=0) for phase in ("forward", "exchange") for kind in kinds]
    live_through(cases, tmp_path / "cases")
