"""The fault matrix: a rank killed or paused at every phase of a step, under every kind of strategy, on four real ranks.

Of every cell: all other ranks end with a clear error within the deadline, none hangs, none trains on by itself, and no
two ranks ever hold different parameters after the same step at which the strategy makes them equal. A rank that was
paused and goes on when the others have given it up ends likewise. A pause shorter than the deadline changes nothing.

Covered here: {attach, forward, backward with buckets under way, exchange (of gradients, of a period, of a round of
async), optimizer, between steps, evaluation} x {killed, paused} x {every_step dense, with a codec, hierarchical; delayed;
local_sgd; diloco; async dense and with a codec}. The quick test takes a cell of every row and column; the slow one takes
all of them, every other codec in its exchange, rank 0 (which holds the store) as the victim, and short pauses.
Partitions need a network to cut: tests/lab/test_fault_partitions_lab.py. Recovery: test_recovery.py.
"""

import pytest
from fault_cases import CODECS, KINDS, NUM_RANKS, PHASES, Case, batches, command, problems, write

from wirespeed.tune.places import LoopbackPlace


def live_through(cases: list[Case], folder) -> None:
    made = batches(cases)
    write(made, folder)
    end = LoopbackPlace(NUM_RANKS, why="a test").run(
        command(folder), env={}, folder=folder, watch=None, timeout_s=60 + 90 * len(made)
    )
    assert end.returncode == 0, end
    found = problems(made, folder)
    assert not found, f"{len(found)} of {len(cases)} cells:\n" + "\n".join(found)


def test_a_fault_at_any_phase_ends_every_rank_in_time(tmp_path):
    # The diagonal: every phase, every kind and both faults; rank 0, which holds the store that async looks into, once.
    cases = [Case(kind, PHASES[i % len(PHASES)], ("kill", "pause")[i % 2]) for i, kind in enumerate(KINDS)]
    cases += [Case("dense/64KiB/async", "forward", "pause", victim=0), Case("int8/64KiB", "exchange", "kill", victim=0)]
    cases += [Case("dense/64KiB", "exchange", "pause"), Case("int8/64KiB/diloco@2", "exchange", "kill")]
    live_through(cases, tmp_path / "cases")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_every_cell_of_the_matrix(fault, tmp_path):
    cases = [Case(kind, phase, fault) for kind in KINDS for phase in PHASES]
    cases += [Case(codec, "exchange", fault) for codec in CODECS]
    cases += [Case(kind, phase, fault, victim=0) for kind in KINDS[-2:] for phase in ("forward", "exchange", "between")]
    live_through(cases, tmp_path / "cases")


@pytest.mark.slow
def test_a_pause_shorter_than_the_deadline_changes_nothing(tmp_path):
    cases = [Case(kind, phase, "hiccup") for kind in KINDS for phase in ("backward", "exchange")]
    live_through(cases, tmp_path / "cases")
