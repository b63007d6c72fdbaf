"""From traces to outcomes: medians, losses, the time to a loss, and which strategy to take. Pure arithmetic.

The target is the held-out loss that dense ends with. A strategy's time to it is interpolated between its evaluations.
Where no held-out loss was recorded, the training loss is used, as a running median over ``SMOOTHING`` steps; where
there is no loss at all nothing can vouch for a compressed strategy, and none is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from itertools import pairwise
from statistics import fmean, median

import msgspec

from wirespeed.spec.comparison import LossKind, LossPoint, StrategyOutcome
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import Fidelity, Strategy
from wirespeed.train.report import SKIPPED_STEPS, breakdown_of, mean_breakdown, period_means
from wirespeed.train.trace import RunTrace
from wirespeed.units import format_percent

MARGIN = 0.05
"""A strategy has to be better than dense by more than this to be worth a change: runs differ by about 3 %."""
SMOOTHING = 15
"""Steps in the running median of the training loss."""


def outcome_of(
    strategy: Strategy,
    traces: Sequence[RunTrace],
    prediction: Prediction | None,
    *,
    num_steps: int,
    name: str | None = None,
) -> StrategyOutcome:
    """Put the ranks' traces of one run together, on the time line of ``elapsed_steps``."""
    evaluated = {entry.step for entry in traces[0].losses if entry.is_held_out}
    per_step = elapsed_steps([[s.step_s for s in t.steps] for t in traces], evaluated)
    kept = period_means(_settled(per_step[:num_steps]), strategy.steps_per_cycle)
    measured_s = median(kept)
    breakdowns = [
        b for b in (breakdown_of(t.steps[:num_steps], period=strategy.steps_per_cycle) for t in traces) if b is not None
    ]
    breakdown = mean_breakdown(breakdowns)
    ends_s = _running_sum(per_step)
    held_out = [entry for entry in traces[0].losses if entry.is_held_out]
    training = traces[0].training_losses or tuple(e for e in traces[0].losses if not e.is_held_out)
    losses = tuple(
        LossPoint(step=e.step, train_s=ends_s[e.step - 1] if e.step > 0 else 0.0, loss=e.loss)
        for e in held_out
        if e.step <= len(ends_s)
    )
    training_losses = tuple(
        LossPoint(step=e.step, train_s=ends_s[e.step - 1], loss=e.loss) for e in training if 1 <= e.step <= len(ends_s)
    )
    predicted_s = None if prediction is None else prediction.step_s
    return StrategyOutcome(
        name=name or strategy.name,
        strategy=strategy,
        prediction=prediction,
        predicted_step_s=predicted_s,
        measured_step_s=measured_s,
        measured_spread=_spread(kept),
        prediction_error=None if predicted_s is None else predicted_s / measured_s - 1,
        breakdown=breakdown,
        exposed_s=breakdown.exposed_s,
        stated_bytes_per_step=round(fmean(_per_step(t, 0) for t in traces)),
        wire_bytes_per_step=_counted(traces),
        num_steps=len(per_step),
        step_times_s=tuple(per_step),
        losses=losses,
        training_losses=training_losses,
    )


def elapsed_steps(ranks: Sequence[Sequence[float]], meets_after: Set[int] = frozenset()) -> list[float]:
    """How far the slowest rank's end of each step lies behind its end of the step before; sums to the elapsed time.

    ``ranks``: every rank's step durations. Ranks wait for each other inside a step, so who was late in one step is
    early in the next: the slowest of each step taken alone would count that wait twice. After the steps
    ``meets_after`` (counted from 1) all ranks meet, as an evaluation makes them, and start level.
    """
    ends = [0.0] * len(ranks)
    last, steps = 0.0, []
    for number, parts in enumerate(zip(*ranks, strict=False), start=1):
        ends = [end + part for end, part in zip(ends, parts, strict=True)]
        steps.append(max(ends) - last)
        last = max(ends)
        if number in meets_after:
            ends = [last] * len(ends)
    return steps


def with_losses(outcome: StrategyOutcome, kind: LossKind, target: float | None, num_steps: int) -> StrategyOutcome:
    """Fill in the final loss (after ``num_steps`` steps) and the time to the target."""
    curve = _curve(outcome, kind)
    at_end = [point for point in curve if point.step <= num_steps]
    return msgspec.structs.replace(
        outcome,
        final_loss=at_end[-1].loss if at_end else None,
        time_to_loss_s=None if target is None else time_to_loss(curve, target),
    )


def final_loss(outcome: StrategyOutcome, kind: LossKind, num_steps: int) -> float | None:
    """The loss that this run ends with after ``num_steps`` steps."""
    at_end = [point for point in _curve(outcome, kind) if point.step <= num_steps]
    return at_end[-1].loss if at_end else None


def loss_kind_of(outcome: StrategyOutcome) -> LossKind:
    """Which loss a comparison can rest on: held-out where the script records it at least twice."""
    if len(outcome.losses) >= 2:
        return "held_out"
    return "training" if len(outcome.training_losses) >= 2 * SMOOTHING else "none"


def time_to_loss(curve: Sequence[LossPoint], target: float) -> float | None:
    """Training time at which the curve first comes down to the target, linear between its points; None when never."""
    finite = [(point.train_s, point.loss) for point in curve if point.loss is not None]
    if finite and finite[0][1] <= target:
        return finite[0][0]
    for (before_s, before), (after_s, after) in pairwise(finite):
        if after <= target < before:
            return before_s + (before - target) / (before - after) * (after_s - before_s)
    return None


def smoothed(points: Sequence[LossPoint]) -> list[LossPoint]:
    """The training loss as a running median over the last ``SMOOTHING`` steps; not finite counts as infinite."""
    losses = [math.inf if point.loss is None else point.loss for point in points]
    return [
        LossPoint(
            step=point.step,
            train_s=point.train_s,
            loss=median(losses[max(0, index + 1 - SMOOTHING) : index + 1]),
        )
        for index, point in enumerate(points)
    ]


def choose(
    outcomes: Sequence[StrategyOutcome], kind: LossKind, fidelity: Fidelity
) -> tuple[tuple[StrategyOutcome, ...], str, str]:
    """Mark the best strategy within ``fidelity``. Gives the outcomes with verdicts, the chosen name, and why.

    The first outcome is the baseline. With a loss, the score is the time to the baseline's final loss; without one it
    is the step time, and nothing below ``half`` is considered.
    """
    baseline = outcomes[0]
    base = _score(baseline, kind)
    best = baseline
    best_score = base
    verdicts: dict[str, str] = {baseline.name: "baseline"}
    for outcome in outcomes[1:]:
        score = _score(outcome, kind)
        if outcome.measured_step_s is None:
            verdicts[outcome.name] = outcome.verdict or "predicted only"
            continue
        if score is None or base is None or best_score is None:
            verdicts[outcome.name] = "does not reach dense's loss in these steps"
            continue
        gain = f"{base / score:.2f}x as fast" if score < base else f"{format_percent(score / base - 1)} slower"
        if not outcome.strategy.allows(fidelity):
            verdicts[outcome.name] = f"{gain}; needs --fidelity {outcome.strategy.fidelity}"
        elif kind == "none" and not outcome.strategy.allows("half"):
            verdicts[outcome.name] = f"{gain} per step; no loss recorded, so not chosen"
        else:
            verdicts[outcome.name] = gain
            if score < best_score:
                best, best_score = outcome, score
    if base is not None and best_score is not None and best is not baseline and best_score > base * (1 - MARGIN):
        verdicts[best.name] += f"; within {format_percent(MARGIN)} of dense"
        best, best_score = baseline, base
    reason = _reason(baseline, best, base, best_score, kind)
    marked = tuple(
        msgspec.structs.replace(
            o, chosen=o is best, verdict="chosen: " + verdicts[o.name] if o is best else verdicts[o.name]
        )
        for o in outcomes
    )
    return marked, best.name, reason


def _reason(
    baseline: StrategyOutcome, best: StrategyOutcome, base: float | None, score: float | None, kind: LossKind
) -> str:
    share = "" if baseline.breakdown is None else format_percent(baseline.breakdown.exposed_share)
    exposed = f"communication was {share} of dense's step" if share else "dense was measured"
    if best is baseline or base is None or score is None:
        return f"change nothing: {exposed}, and no strategy within the fidelity was better by more than 5 %"
    what = {
        "held_out": "the held-out loss that dense ends with",
        "training": "the training loss that dense ends with",
        "none": "each step",
    }[kind]
    if kind == "none":
        return f"{best.name} takes {format_percent(score / base)} of dense's time for {what}; {exposed}"
    return f"{best.name} reaches {what} in {format_percent(score / base)} of dense's time; {exposed}"


def _score(outcome: StrategyOutcome, kind: LossKind) -> float | None:
    return outcome.measured_step_s if kind == "none" else outcome.time_to_loss_s


def _curve(outcome: StrategyOutcome, kind: LossKind) -> Sequence[LossPoint]:
    match kind:
        case "held_out":
            return outcome.losses
        case "training":
            return smoothed(outcome.training_losses)
        case "none":
            return ()


def _settled(times: Sequence[float]) -> Sequence[float]:
    return times[SKIPPED_STEPS:] if len(times) > 2 * SKIPPED_STEPS else times


def _spread(times: Sequence[float]) -> float:
    """Median absolute deviation over the median."""
    middle = median(times)
    return median(abs(t - middle) for t in times) / middle if middle > 0 else 0.0


def _running_sum(times: Sequence[float]) -> list[float]:
    total, sums = 0.0, []
    for value in times:
        total += value
        sums.append(total)
    return sums


def _per_step(trace: RunTrace, column: int) -> float:
    if len(trace.wire) < 2:
        return 0.0
    return (trace.wire[-1][column] - trace.wire[0][column]) / (len(trace.wire) - 1)


def _counted(traces: Sequence[RunTrace]) -> float | None:
    if any(len(t.wire) < 2 or t.wire[0][1] < 0 for t in traces):
        return None
    return fmean(_per_step(t, 1) for t in traces)
