"""Explain a prediction in words with numbers: where the time goes, what binds, what each change would give, how sure.

Every "would give" is a simulation of the same step with one thing changed, not a rule of thumb. Changes do not add up:
two that each save 10 % may save 10 % together when they shorten the same path.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from wirespeed.plan.search import MARGIN, Choice
from wirespeed.sim.costs import ScaledCosts, StepCosts
from wirespeed.sim.training import simulate_step
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.units import format_duration, format_percent, format_size

_BINDING_WORDS = {
    "compute": "compute binds: a faster device or less work shortens the step most",
    "codec": "the encoder binds: a faster codec, or cores of its own, shortens the step most",
    "bandwidth": "bandwidth binds: fewer bytes or a faster link shortens the step most",
    "latency": "latency binds: fewer, larger messages or a faster round trip shortens the step most",
}


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """One change and the step it gives. ``gain`` is the share of the present step that it saves."""

    change: str
    step_s: float
    gain: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One prediction, explained. ``best_speedup`` is the limit that no network and no codec can pass (Amdahl)."""

    strategy: Strategy
    parts_s: dict[str, float]
    what_ifs: tuple[WhatIf, ...]
    best_speedup: float
    lines: tuple[str, ...]


def explain(
    workload: TrainingWorkload,
    prediction: Prediction,
    costs: StepCosts,
    *,
    choice: Choice | None = None,
    first_bucket_bytes: int | None = None,
) -> Explanation:
    """Explain ``prediction``, made of ``workload`` and ``costs``; with ``choice`` also what to do."""
    parts_s = {
        "data": workload.data_s,
        "forward": workload.forward_s,
        "backward": workload.backward_s,
        "exposed communication": prediction.exposed_s,
        "optimizer": workload.optimizer_s,
        "other": workload.other_s,
    }
    what_ifs = _what_ifs(workload, prediction, costs, first_bucket_bytes)
    best_speedup = prediction.step_s / workload.compute_s if workload.compute_s > 0 else float("inf")
    lines = [*_time_lines(prediction, parts_s), *_binding_lines(workload, prediction)]
    lines += [f"{one.change}: {format_duration(one.step_s)} per step ({_gain_words(one.gain)})" for one in what_ifs]
    lines.append(_limit_line(prediction, best_speedup))
    if choice is not None:
        lines.append(_advice_line(choice))
    lines += _trust_lines(workload, prediction)
    return Explanation(
        strategy=prediction.strategy,
        parts_s=parts_s,
        what_ifs=what_ifs,
        best_speedup=best_speedup,
        lines=tuple(lines),
    )


def best_of_each_codec(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """Of ranked predictions, the first of each codec and ratio: what remains when only the bucket size differs."""
    best: dict[tuple[str, float | None], Prediction] = {}
    for prediction in predictions:
        best.setdefault((prediction.strategy.codec, prediction.strategy.ratio), prediction)
    return tuple(best.values())


def _what_ifs(
    workload: TrainingWorkload, prediction: Prediction, costs: StepCosts, first_bucket_bytes: int | None
) -> tuple[WhatIf, ...]:
    def step_s(changed: TrainingWorkload, **factors: float) -> float:
        return simulate_step(
            changed, prediction.strategy, ScaledCosts(costs=costs, **factors), first_bucket_bytes=first_bucket_bytes
        ).step_s

    steps_s = {
        "twice the bandwidth": step_s(workload, wire=0.5),
        "ten times the bandwidth": step_s(workload, wire=0.1),
        "half the latency": step_s(workload, latency=0.5),
    }
    if prediction.codec_s > 0:
        steps_s["a codec twice as fast"] = step_s(workload, codec=0.5)
    if workload.cpus_per_rank is not None:
        steps_s["communication on cores of its own"] = step_s(msgspec.structs.replace(workload, cpus_per_rank=None))
    steps_s["a network that costs nothing"] = step_s(workload, wire=0.0, latency=0.0)
    return tuple(
        WhatIf(
            change=change,
            step_s=changed_s,
            gain=1 - changed_s / prediction.step_s if prediction.step_s > 0 else 0.0,
        )
        for change, changed_s in steps_s.items()
    )


def _gain_words(gain: float) -> str:
    if abs(gain) < 0.001:
        return "no gain"
    return f"{format_percent(abs(gain))} {'less' if gain > 0 else 'more'}"


def _time_lines(prediction: Prediction, parts_s: dict[str, float]) -> list[str]:
    step_s = prediction.step_s
    shares = ", ".join(
        f"{name} {format_duration(part_s)} ({format_percent(part_s / step_s)})"
        for name, part_s in parts_s.items()
        if part_s > 0
    )
    hidden_s = max(0.0, prediction.codec_s + prediction.wire_s - prediction.exposed_s)
    sent = (
        f"it sends {format_size(prediction.wire_bytes)} per rank and step; the network would take "
        f"{format_duration(prediction.wire_s)} and the codec {format_duration(prediction.codec_s)} alone, "
        f"of which {format_duration(hidden_s)} hide behind compute or each other"
    )
    return [f"{prediction.strategy.name}: {format_duration(step_s)} per step: {shares}", sent]


def _binding_lines(workload: TrainingWorkload, prediction: Prediction) -> list[str]:
    lines = [_BINDING_WORDS[prediction.binding]]
    if workload.cpus_per_rank is not None and workload.cpus_per_rank < 2 and prediction.exposed_s > 0:
        lines.append(
            f"a rank has {workload.cpus_per_rank:.3g} cores: codec stages and collectives slow backward down while "
            "they overlap with it, so hiding them is not free"
        )
    return lines


def _limit_line(prediction: Prediction, best_speedup: float) -> str:
    return (
        f"limit: without any communication the step takes {format_duration(prediction.compute_s)}, so nothing done to "
        f"the network can give more than {best_speedup:.3g} x; no schedule of this strategy is below "
        f"{format_duration(prediction.lower_bound_s)}"
    )


def _advice_line(choice: Choice) -> str:
    if choice.changes_nothing:
        return f"change nothing: {choice.reason}"
    return f"use {choice.strategy.name}: {choice.reason}"


def _trust_lines(workload: TrainingWorkload, prediction: Prediction) -> list[str]:
    lines = []
    if workload.origin != "measured":
        lines.append(f"the workload's times are {workload.origin}, not measured: steps are no better than they are")
    if not prediction.is_in_range:
        lines.append("a cost was extrapolated or assumed: measure this size and rank count before trusting the figure")
    if prediction.uncertainty is not None and prediction.uncertainty > MARGIN:
        lines.append(
            f"the curves' own scatter moves the step by {format_percent(prediction.uncertainty)} either way: "
            "more than the margin of a choice"
        )
    return lines
