"""From outcomes to a choice."""

import pytest

from wirespeed.measure.steps import StepParts
from wirespeed.spec.comparison import LossPoint, StrategyOutcome
from wirespeed.spec.strategy import Strategy
from wirespeed.train.trace import RunTrace
from wirespeed.tune.compare import (
    choose,
    elapsed_steps,
    final_loss,
    loss_kind_of,
    outcome_of,
    time_to_loss,
    with_losses,
)


def curve(*points):
    return tuple(LossPoint(step=step, train_s=at, loss=loss) for step, at, loss in points)


def outcome(name, *, step_s, losses=(), training=()):
    return StrategyOutcome(
        name=name,
        strategy=Strategy.parse(name),
        prediction=None,
        predicted_step_s=None,
        measured_step_s=step_s,
        losses=losses,
        training_losses=training,
    )


def judged(outcomes, fidelity):
    kind = loss_kind_of(outcomes[0])
    num_steps = 20
    target = final_loss(outcomes[0], kind, num_steps)
    return choose([with_losses(o, kind, target, num_steps) for o in outcomes], kind, fidelity)


DENSE = outcome("dense", step_s=1.0, losses=curve((10, 10.0, 3.0), (20, 20.0, 2.0)))


def test_time_to_a_loss_is_interpolated_between_evaluations():
    # 3.0 -> 2.0 between 10 s and 20 s: 2.5 is half-way.
    assert time_to_loss(DENSE.losses, 2.5) == 15.0


def test_a_loss_never_reached_has_no_time():
    assert time_to_loss(DENSE.losses, 1.9) is None


def test_a_loss_that_is_not_finite_reaches_nothing():
    assert time_to_loss(curve((10, 1.0, None), (20, 2.0, float("nan"))), 100.0) is None


def test_a_rank_that_is_late_once_counts_once():
    # The first rank needs 3 s, then waits less: both have taken 5 s after two steps, and 7 s after three.
    assert elapsed_steps([[3.0, 2.0, 2.0], [2.0, 3.0, 2.0]]) == [3.0, 2.0, 2.0]


def test_ranks_start_level_after_an_evaluation():
    # After step 1 the second rank waited for the first outside the training time: step 2 then ends at 3 + 3.
    assert elapsed_steps([[3.0, 2.0], [2.0, 3.0]], {1}) == [3.0, 3.0]


def test_steps_that_a_rank_did_not_report_are_left_out():
    assert elapsed_steps([[1.0, 1.0, 1.0], [1.0, 1.0]]) == [1.0, 1.0]


def test_the_fastest_to_denses_loss_is_chosen():
    half = outcome("half", step_s=0.6, losses=curve((10, 6.0, 3.0), (20, 12.0, 2.0)))
    int8 = outcome("int8", step_s=0.4, losses=curve((10, 4.0, 3.0), (20, 8.0, 2.0)))
    marked, chosen, reason = judged([DENSE, half, int8], "compressed")
    assert chosen == "int8"
    assert [o.chosen for o in marked] == [False, False, True]
    assert "40 %" in reason


def test_what_the_fidelity_forbids_is_shown_but_not_chosen():
    half = outcome("half", step_s=0.6, losses=curve((10, 6.0, 3.0), (20, 12.0, 2.0)))
    int8 = outcome("int8", step_s=0.4, losses=curve((10, 4.0, 3.0), (20, 8.0, 2.0)))
    marked, chosen, _ = judged([DENSE, half, int8], "half")
    assert chosen == "half"
    assert "needs --fidelity compressed" in marked[2].verdict


def test_a_gain_within_the_margin_changes_nothing():
    half = outcome("half", step_s=0.97, losses=curve((10, 9.7, 3.0), (20, 19.4, 2.0)))
    marked, chosen, reason = judged([DENSE, half], "half")
    assert chosen == "dense"
    assert reason.startswith("change nothing")
    assert "within 5 %" in marked[1].verdict


def test_a_faster_step_that_never_reaches_the_loss_is_not_chosen():
    topk = outcome("topk@1%", step_s=0.1, losses=curve((10, 1.0, 3.2), (20, 2.0, 2.4)))
    _, chosen, _ = judged([DENSE, topk], "lossy")
    assert chosen == "dense"


def test_extra_steps_count_for_the_time_to_the_loss_but_not_for_the_final_loss():
    topk = outcome("topk@1%", step_s=0.1, losses=curve((10, 1.0, 3.2), (20, 2.0, 2.4), (30, 3.0, 2.0)))
    marked, chosen, _ = judged([DENSE, topk], "lossy")
    assert chosen == "topk@1%"
    assert marked[1].final_loss == 2.4
    assert marked[1].time_to_loss_s == pytest.approx(3.0)


def test_without_any_loss_nothing_compressed_is_chosen():
    dense = outcome("dense", step_s=1.0)
    marked, chosen, _ = judged([dense, outcome("half", step_s=0.6), outcome("int8", step_s=0.3)], "lossy")
    assert chosen == "half"
    assert "no loss recorded" in marked[2].verdict


def test_the_training_loss_serves_when_nothing_was_held_out():
    steps = range(1, 61)
    dense = outcome("dense", step_s=1.0, training=curve(*((s, s * 1.0, 5 - s * 0.05) for s in steps)))
    assert loss_kind_of(dense) == "training"


def test_a_step_of_low_rank_is_the_mean_of_one_with_each_factor():
    none = dict.fromkeys(("data_s", "forward_s", "backward_s", "exposed_s", "optimizer_s", "other_s"), 0.0)
    steps = tuple(StepParts(step_s=(0.1, 0.3)[number % 2], bucket_ready_s=(), **none) for number in range(21))
    trace = RunTrace(strategy=Strategy.parse("lowrank@4"), status="complete", steps=steps, wire=((0, 0),) * 21)
    assert outcome_of(trace.strategy, [trace], None, num_steps=21).measured_step_s == pytest.approx(0.2)
