"""What a comparison says, as figures and sentences: the one source of the table, the page and ``--json``.

Baseline is dense, measured. Times to the loss target come from the record, which measured them; where a strategy has
none (no losses, or it never got there) no speed-up is stated, and a ratio of step times is called by that name. A value
that is missing or not finite is None here and a dash to the reader, never a zero.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from wirespeed.spec.comparison import LossKind, LossPoint, StrategyOutcome, TuneRecord
from wirespeed.spec.payloads import CodecName
from wirespeed.spec.strategy import FIDELITIES, Fidelity
from wirespeed.units import format_duration

PREDICTION_BAND = 0.15
"""Relative error within which a prediction counts as good (the project's own bar)."""

MAX_PREDICTED = 4
"""Strategies that were predicted but not run, in tables and figures."""

State = Literal["measured", "predicted"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy of the comparison. Of a strategy that did not run, the parts of the step are predicted ones.

    ``compute_s`` is the step without exposed communication, as a mean over ranks. Bytes are what one rank sends.
    ``speed_up`` is dense's time to the loss target over this strategy's; ``step_ratio`` this strategy's step over
    dense's, both measured.
    """

    name: str
    codec: CodecName
    fidelity: Fidelity
    state: State
    chosen: bool
    predicted_step_s: float | None
    measured_step_s: float | None
    measured_spread: float | None
    prediction_error: float | None
    compute_s: float | None
    exposed_s: float | None
    exposed_share: float | None
    stated_bytes: float | None
    wire_bytes: float | None
    final_loss: float | None
    diverged_at_step: int | None
    time_to_loss_s: float | None
    speed_up: float | None
    step_ratio: float | None
    verdict: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison in short. ``headline`` is one sentence with numbers, ``points`` are the further ones."""

    headline: str
    points: tuple[str, ...]
    reason: str
    chosen: str
    is_complete: bool
    loss_kind: str
    loss_target: float | None
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]


def finite(value: float | None) -> float | None:
    """The value, or None where it is absent, nan or infinite."""
    return value if value is not None and math.isfinite(value) else None


def share_text(fraction: float) -> str:
    """A share as people say it: whole percents, a decimal only below ten."""
    return f"{fraction * 100:.0f} %" if fraction >= 0.0995 else f"{fraction * 100:.2g} %"


def outcome_losses(outcome: StrategyOutcome, kind: LossKind) -> tuple[LossPoint, ...]:
    """The losses to show: those that the comparison rests on, or whichever there are."""
    if kind == "training":
        return outcome.training_losses or outcome.losses
    return outcome.losses or outcome.training_losses


def baseline_of(record: TuneRecord) -> StrategyOutcome | None:
    """Dense as measured, or None."""
    measured = [o for o in record.strategies if o.strategy.codec == "dense" and finite(o.measured_step_s) is not None]
    return min(measured, key=lambda outcome: outcome.name != "dense", default=None)


def make_rows(record: TuneRecord) -> tuple[Row, ...]:
    """One row per strategy, in the record's order."""
    baseline = baseline_of(record)
    return tuple(_row(outcome, record, baseline) for outcome in record.strategies)


def split_rows(rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """``(rows to show, the rest)``: all that ran or was chosen, and the ``MAX_PREDICTED`` fastest that were predicted.

    A comparison predicts every bucket size of every codec, far more than a reader can use.
    """
    predicted = [row for row in rows if row.state == "predicted" and not row.chosen]
    fastest = sorted(predicted, key=lambda row: row.predicted_step_s or math.inf)[:MAX_PREDICTED]
    shown = tuple(row for row in rows if row not in predicted or row in fastest)
    return shown, tuple(row for row in rows if row not in shown)


def summarize(record: TuneRecord) -> Summary:
    """The whole comparison in short."""
    rows = make_rows(record)
    headline, points = _sentences(record, rows)
    return Summary(
        headline=headline,
        points=points,
        reason=record.reason,
        chosen=record.chosen,
        is_complete=record.is_complete,
        loss_kind=record.loss_kind,
        loss_target=finite(record.loss_target),
        rows=rows,
        warnings=record.warnings,
    )


def _row(outcome: StrategyOutcome, record: TuneRecord, baseline: StrategyOutcome | None) -> Row:
    measured_s = finite(outcome.measured_step_s)
    predicted_s = finite(outcome.predicted_step_s)
    prediction = outcome.prediction
    if predicted_s is None and prediction is not None:
        predicted_s = finite(prediction.step_s)
    exposed_s, compute_s, share = _parts(outcome, measured_s, predicted_s)
    wire_bytes: float | None = finite(outcome.wire_bytes_per_step)
    stated_bytes: float | None = outcome.stated_bytes_per_step
    if stated_bytes is None and measured_s is None and prediction is not None:
        stated_bytes = prediction.wire_bytes
    error = finite(outcome.prediction_error)
    if error is None and predicted_s is not None and measured_s:
        error = predicted_s / measured_s - 1
    time_s, baseline_time_s = finite(outcome.time_to_loss_s), _time_to_loss(baseline)
    baseline_step_s = finite(baseline.measured_step_s) if baseline is not None else None
    return Row(
        name=outcome.name,
        codec=outcome.strategy.codec,
        fidelity=outcome.strategy.fidelity,
        state="measured" if measured_s is not None else "predicted",
        chosen=outcome.chosen or (bool(record.chosen) and outcome.name == record.chosen),
        predicted_step_s=predicted_s,
        measured_step_s=measured_s,
        measured_spread=finite(outcome.measured_spread),
        prediction_error=error if measured_s is not None else None,
        compute_s=compute_s,
        exposed_s=exposed_s,
        exposed_share=share,
        stated_bytes=stated_bytes,
        wire_bytes=wire_bytes,
        final_loss=finite(outcome.final_loss),
        diverged_at_step=next(
            (point.step for point in outcome_losses(outcome, record.loss_kind) if point.loss is None), None
        ),
        time_to_loss_s=time_s,
        speed_up=baseline_time_s / time_s if baseline_time_s is not None and time_s else None,
        step_ratio=measured_s / baseline_step_s if measured_s is not None and baseline_step_s else None,
        verdict=outcome.verdict,
    )


def _parts(
    outcome: StrategyOutcome, measured_s: float | None, predicted_s: float | None
) -> tuple[float | None, float | None, float | None]:
    """``(exposed_s, compute_s, exposed share)``, measured where the strategy ran.

    The measured step is that of the slowest rank, its parts are means over ranks: the share is taken among the parts.
    """
    step_s, exposed_s = measured_s, finite(outcome.exposed_s)
    if measured_s is None:
        step_s, exposed_s = predicted_s, None if outcome.prediction is None else finite(outcome.prediction.exposed_s)
    elif outcome.breakdown is not None:
        step_s, exposed_s = finite(outcome.breakdown.step_s), finite(outcome.breakdown.exposed_s)
    if step_s is None or step_s <= 0 or exposed_s is None:
        return exposed_s, None, None
    return exposed_s, max(0.0, step_s - exposed_s), exposed_s / step_s


def _time_to_loss(outcome: StrategyOutcome | None) -> float | None:
    return None if outcome is None else finite(outcome.time_to_loss_s)


def _sentences(record: TuneRecord, rows: tuple[Row, ...]) -> tuple[str, tuple[str, ...]]:
    chosen = next((row for row in rows if row.chosen), None)
    baseline = baseline_of(record)
    dense = next((row for row in rows if baseline is not None and row.name == baseline.name), None)
    points: list[str] = []
    if not record.is_complete:
        points.append("The comparison was stopped before its end: what did not run is missing below.")
    if chosen is None:
        ran = sum(row.state == "measured" for row in rows)
        if ran == 0:
            return "No strategy was measured, so none was chosen.", tuple(points)
        return f"No strategy was chosen: {ran} of {len(rows)} strategies were measured.", tuple(points)
    if chosen.state == "predicted":
        step = "unknown" if chosen.predicted_step_s is None else format_duration(chosen.predicted_step_s)
        headline = f"{chosen.name} is predicted to be best, with a step of {step}; it was not measured."
    elif dense is not None and chosen.name == dense.name:
        headline = _keep_dense(record, dense, rows)
    else:
        headline = _gain(chosen, dense)
    points += _points(record, rows, chosen, dense)
    return headline, tuple(points)


def _keep_dense(record: TuneRecord, dense: Row, rows: tuple[Row, ...]) -> str:
    share = "" if dense.exposed_share is None else share_text(dense.exposed_share)
    tail = f"; communication was {share} of its step." if share else "."
    if any(row.state == "measured" and row.name != dense.name for row in rows):
        return f"Change nothing: of what fidelity {record.fidelity!r} allows, nothing measured beats dense{tail}"
    return f"Only dense was measured: its step takes {format_duration(dense.measured_step_s or 0.0)}{tail}"


def _gain(chosen: Row, dense: Row | None) -> str:
    if dense is None:
        step = format_duration(chosen.measured_step_s or 0.0)
        return f"{chosen.name} is chosen, with a step of {step}; dense was not measured beside it."
    share = "" if dense.exposed_share is None else share_text(dense.exposed_share)
    tail = f"; communication was {share} of dense's step." if share else "."
    if chosen.speed_up is not None and chosen.time_to_loss_s is not None and dense.time_to_loss_s is not None:
        return f"{chosen.name} reaches dense's loss in {share_text(1 / chosen.speed_up)} of the time{tail}"
    assert chosen.step_ratio is not None, "both are measured"
    return f"{chosen.name} makes a step in {share_text(chosen.step_ratio)} of dense's time{tail}"


def _points(record: TuneRecord, rows: tuple[Row, ...], chosen: Row, dense: Row | None) -> list[str]:
    points: list[str] = []
    if dense is not None and chosen.name != dense.name and chosen.speed_up is None and chosen.state == "measured":
        points.append(
            "No losses were compared, so this says nothing about how well the model learns."
            if record.loss_kind == "none" or not any(outcome_losses(o, record.loss_kind) for o in record.strategies)
            else f"{chosen.name} did not reach dense's loss within the steps that were run."
        )
    better = _better_below(record, rows, chosen)
    if better is not None and better.speed_up is not None:
        points.append(
            f"{better.name} would reach dense's loss in {share_text(1 / better.speed_up)} of dense's time, "
            f"but needs fidelity {better.fidelity!r}; {record.fidelity!r} was allowed."
        )
    faster = _faster_not_run(rows, chosen)
    if faster is not None and faster.predicted_step_s is not None:
        points.append(
            f"{faster.name} was not run; its predicted step is {format_duration(faster.predicted_step_s)} "
            f"(fidelity {faster.fidelity!r})."
        )
    measured = [row for row in rows if row.prediction_error is not None]
    if measured:
        errors = [abs(row.prediction_error or 0.0) for row in measured]
        within = sum(error <= PREDICTION_BAND for error in errors)
        points.append(
            f"{within} of {len(errors)} predicted steps lie within {share_text(PREDICTION_BAND)} of the measured ones; "
            f"the largest error is {share_text(max(errors))}."
        )
    diverged = [f"{row.name} (step {row.diverged_at_step})" for row in rows if row.diverged_at_step is not None]
    if diverged:
        points.append(f"The loss stopped being finite: {', '.join(diverged)}.")
    return points


def _faster_not_run(rows: tuple[Row, ...], chosen: Row) -> Row | None:
    """The strategy that was only predicted, to be faster than what was chosen by more than predictions err.

    Predictions are held against each other: they err together where the machine is busier than when it was measured.
    """
    if chosen.measured_step_s is None:
        return None
    step_s = chosen.measured_step_s if chosen.predicted_step_s is None else chosen.predicted_step_s
    limit_s = step_s * (1 - PREDICTION_BAND)
    faster = [row for row in rows if row.state == "predicted" and (row.predicted_step_s or math.inf) < limit_s]
    return min(faster, key=lambda row: row.predicted_step_s or math.inf, default=None)


def _better_below(record: TuneRecord, rows: tuple[Row, ...], chosen: Row) -> Row | None:
    """The fastest strategy that the allowed fidelity forbids and that reaches the loss sooner than the chosen one."""
    allowed = FIDELITIES.index(record.fidelity) if record.fidelity in FIDELITIES else len(FIDELITIES)
    forbidden = [row for row in rows if FIDELITIES.index(row.fidelity) > allowed and row.speed_up is not None]
    best = max(forbidden, key=lambda row: row.speed_up or 0.0, default=None)
    return best if best is not None and (best.speed_up or 0.0) > (chosen.speed_up or 1.0) else None
