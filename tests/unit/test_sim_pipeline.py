"""Pipeline schedules: the recurrence against closed forms and against itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.sim import pipeline
from wirespeed.sim.pipeline import run_pipeline, uniform_pipeline_s


@pytest.mark.parametrize(
    ("stages", "micro", "interleave"),
    [(4, 8, 1), (4, 8, 2), (8, 64, 1), (8, 64, 3), (3, 7, 1), (4, 4, 2), (64, 512, 2)],
)
def test_equal_stages_take_the_closed_form(stages, micro, interleave):
    run = run_pipeline((1.0,) * stages, (2.0,) * stages, num_microbatches=micro, interleave=interleave)
    # (m + (p - 1) / v) (f + b)
    assert run.total_s == pytest.approx((micro + (stages - 1) / interleave) * 3)
    assert run.total_s == pytest.approx(
        uniform_pipeline_s(3.0, stages=stages, num_microbatches=micro, interleave=interleave)
    )
    assert run.bubble_s == pytest.approx((stages - 1) / interleave * 3)


def test_two_stages_and_two_micro_batches_by_hand():
    # Stage 0: F0 0-1, F1 1-2; stage 1: F0 1-3, B0 3-7, F1 7-9, B1 9-13; stage 0: B0 7-9, B1 13-15.
    run = run_pipeline((1.0, 2.0), (2.0, 4.0), num_microbatches=2)
    assert run.total_s == pytest.approx(15)


def test_a_transfer_delays_every_hop_of_the_way_in_and_out():
    plain = run_pipeline((1.0,) * 4, (1.0,) * 4, num_microbatches=1).total_s
    slow = run_pipeline((1.0,) * 4, (1.0,) * 4, num_microbatches=1, transfer_s=0.5).total_s
    assert slow - plain == pytest.approx(2 * 3 * 0.5)


def test_one_stage_has_no_bubble():
    assert run_pipeline((1.0,), (2.0,), num_microbatches=5, transfer_s=9.0).total_s == 15


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 3)), min_size=2, max_size=5),
    st.integers(4, 9),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.05]),
)
def test_periods_added_are_those_of_the_whole_schedule(times, rounds, interleave, transfer_s):
    forward, backward = tuple(f for f, _ in times), tuple(b for _, b in times)
    micro = rounds * len(times)
    run = run_pipeline(forward, backward, num_microbatches=micro, transfer_s=transfer_s, interleave=interleave)
    whole_s = pipeline._simulate(forward, backward, micro, transfer_s, interleave)
    # Chunks of unequal stages, and transfers of several per cent of a stage, can have a longer period than is simulated.
    is_exact = transfer_s == 0 and interleave == 1
    assert run.total_s == pytest.approx(max(whole_s, run.ideal_s), rel=1e-9 if is_exact else 0.03)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 3)), min_size=1, max_size=5),
    st.integers(1, 12),
    st.floats(0, 1),
)
def test_no_schedule_beats_its_slowest_stage_or_its_longest_path(times, micro, transfer_s):
    forward, backward = tuple(f for f, _ in times), tuple(b for _, b in times)
    run = run_pipeline(forward, backward, num_microbatches=micro, transfer_s=transfer_s)
    assert run.total_s >= run.ideal_s * (1 - 1e-12)
    if len(times) > 1 and micro <= pipeline.SIMULATED_ROUNDS * len(times):
        path_s = sum(forward) + sum(backward) + 2 * transfer_s * (len(times) - 1)
        assert run.total_s >= path_s * (1 - 1e-12)


def test_what_no_schedule_can_run_is_refused():
    with pytest.raises(UsageError, match="interleaved stages"):
        run_pipeline((1.0,) * 4, (1.0,) * 4, num_microbatches=6, interleave=2)
    with pytest.raises(UsageError, match="1 forward and 2 backward"):
        run_pipeline((1.0,), (1.0, 1.0), num_microbatches=1)
