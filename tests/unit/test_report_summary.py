"""The figures and sentences of a comparison."""

from __future__ import annotations

import math

import msgspec
import pytest
from report_records import make_losses, make_outcome, make_record

from wirespeed.report.summary import make_rows, summarize
from wirespeed.spec.comparison import LossPoint, StrategyOutcome, TuneRecord

replace = msgspec.structs.replace


def row_of(record: TuneRecord, name: str):
    return next(row for row in make_rows(record) if row.name == name)


def outcome_of(record: TuneRecord, name: str) -> StrategyOutcome:
    return next(outcome for outcome in record.strategies if outcome.name == name)


def test_headline_gives_time_to_the_loss_and_communication_share_of_dense():
    # int8 takes 23.0 s to dense's loss, dense 56.2 s: 0.409. Exposed 337 of 468 ms: 0.720.
    expected = "int8 reaches dense's loss in 41 % of the time; communication was 72 % of dense's step."
    assert summarize(make_record()).headline == expected


def test_speed_up_is_the_ratio_of_times_to_the_loss_and_not_of_step_times():
    row = row_of(make_record(), "half")
    assert row.speed_up == pytest.approx(56.2 / 34.6)
    assert row.step_ratio == pytest.approx(0.288 / 0.468)


def test_strategy_that_never_reaches_the_loss_has_no_speed_up():
    row = row_of(make_record(), "topk@1%")
    assert row.time_to_loss_s is None
    assert row.speed_up is None


def test_compute_and_exposed_communication_sum_to_the_measured_step():
    row = row_of(make_record(), "dense")
    assert row.compute_s == pytest.approx(0.468 - 0.337)
    assert row.exposed_share == pytest.approx(0.337 / 0.468)


def test_strategy_that_did_not_run_shows_its_prediction_and_no_measurement():
    row = row_of(make_record(), "dense/4MiB")
    assert row.state == "predicted"
    assert row.predicted_step_s == 0.46
    assert row.measured_step_s is None
    assert row.prediction_error is None
    assert row.wire_bytes is None
    assert row.stated_bytes == 43_200_000  # dense moves 2 x 3/4 x 28.8 MB


def test_error_of_the_prediction_is_made_up_for_where_the_record_lacks_it():
    record = make_record()
    bare = replace(outcome_of(record, "half"), prediction_error=None)
    row = make_rows(replace(record, strategies=(bare,)))[0]
    assert row.prediction_error == pytest.approx(0.271 / 0.288 - 1)


def test_without_losses_the_headline_compares_steps_and_says_that_learning_is_unknown():
    record = make_record()
    strategies = tuple(
        replace(outcome, losses=(), final_loss=None, time_to_loss_s=None) for outcome in record.strategies
    )
    summary = summarize(replace(record, strategies=strategies, loss_kind="none", loss_target=None))
    # 192 ms over 468 ms: 0.410
    assert summary.headline == "int8 makes a step in 41 % of dense's time; communication was 72 % of dense's step."
    assert "No losses were compared, so this says nothing about how well the model learns." in summary.points


def test_dense_chosen_among_others_says_change_nothing_and_what_a_lower_fidelity_would_give():
    record = make_record()
    strategies = tuple(
        replace(outcome, chosen=outcome.name == "dense") for outcome in record.strategies if outcome.name != "half"
    )
    summary = summarize(replace(record, strategies=strategies, chosen="dense", fidelity="half"))
    assert summary.headline == (
        "Change nothing: of what fidelity 'half' allows, nothing measured beats dense; "
        "communication was 72 % of its step."
    )
    assert summary.points[0] == (
        "int8 would reach dense's loss in 41 % of dense's time, but needs fidelity 'compressed'; 'half' was allowed."
    )


def test_dense_alone_makes_no_claim_about_others():
    record = make_record()
    dense = replace(outcome_of(record, "dense"), chosen=True)
    summary = summarize(replace(record, strategies=(dense,), chosen="dense"))
    assert summary.headline == "Only dense was measured: its step takes 468 ms; communication was 72 % of its step."


def test_faster_strategy_that_was_not_run_is_pointed_out():
    record = make_record()
    dense = replace(outcome_of(record, "dense"), chosen=True)
    half = make_outcome("half", predicted_s=0.271, measured_s=None, exposed_s=0.1)
    summary = summarize(replace(record, strategies=(dense, half), chosen="dense", fidelity="lossy"))
    assert "half was not run; its predicted step is 271 ms (fidelity 'half')." in summary.points


def test_prediction_alone_is_never_told_as_a_result():
    record = make_record()
    predicted = make_outcome("int8", predicted_s=0.2, measured_s=None, exposed_s=0.05, chosen=True)
    summary = summarize(replace(record, strategies=(predicted,)))
    assert summary.headline == "int8 is predicted to be best, with a step of 200 ms; it was not measured."


def test_stopped_comparison_says_so_and_claims_no_choice():
    record = make_record()
    summary = summarize(replace(record, strategies=(), chosen="", is_complete=False))
    assert summary.headline == "No strategy was measured, so none was chosen."
    assert summary.points == ("The comparison was stopped before its end: what did not run is missing below.",)


def test_loss_that_stops_being_finite_is_named_with_its_step():
    record = make_record()
    points = tuple(replace(point, loss=math.nan if point.step >= 50 else point.loss) for point in make_losses(0.162))
    bad = replace(outcome_of(record, "topk@1%"), losses=points, final_loss=math.nan)
    summary = summarize(replace(record, strategies=(outcome_of(record, "dense"), bad), chosen="dense"))
    row = next(row for row in summary.rows if row.name == "topk@1%")
    assert row.diverged_at_step == 50
    assert row.final_loss is None
    assert "The loss stopped being finite: topk@1% (step 50)." in summary.points


def test_training_losses_are_shown_where_the_comparison_rests_on_them():
    record = make_record()
    held_out = (LossPoint(step=120, train_s=1.0, loss=math.inf),)
    outcome = replace(outcome_of(record, "int8"), losses=held_out, training_losses=make_losses(0.192))
    rows = make_rows(replace(record, strategies=(outcome,), loss_kind="training"))
    assert rows[0].diverged_at_step is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_absent(value: float):
    record = make_record()
    broken = replace(
        outcome_of(record, "int8"),
        predicted_step_s=value,
        prediction=None,
        measured_spread=value,
        prediction_error=value,
        exposed_s=value,
        breakdown=None,
        time_to_loss_s=value,
        wire_bytes_per_step=value,
    )
    row = make_rows(replace(record, strategies=(outcome_of(record, "dense"), broken)))[1]
    assert (row.predicted_step_s, row.prediction_error, row.exposed_s, row.compute_s) == (None, None, None, None)
    assert (row.time_to_loss_s, row.speed_up, row.wire_bytes, row.measured_spread) == (None, None, None, None)
