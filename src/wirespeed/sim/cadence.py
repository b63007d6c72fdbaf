"""How often gradients are exchanged, and what waiting for the slowest rank costs: around the recurrence of one step.

``simulate_step`` answers for one step of equal ranks that exchange every step. Here several micro-steps share one
exchange (accumulation), the exchange hides behind the next step (delayed, async), or happens once per period (local
SGD, DiLoCo, whose fragments stream). Jitter is the relative standard deviation of a step's compute from rank to rank
and step to step, taken as independent: slow spells that last longer than a period are a ``slowdown`` instead.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from wirespeed.errors import UsageError
from wirespeed.sim.costs import StepCosts
from wirespeed.sim.training import StepTimeline, simulate_step
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.workload import TrainingWorkload

CadenceName = Literal["every_step", "delayed", "async", "local_sgd", "diloco"]


class Cadence(msgspec.Struct, frozen=True, kw_only=True):
    """When gradients (or parameters) are exchanged. ``accumulation`` counts micro-steps per optimizer step.

    ``period``: optimizer steps between exchanges of ``local_sgd`` and ``diloco``. ``fragments``: parts in which
    ``diloco`` streams its exchange beside compute; 1 waits for the whole of it.
    """

    name: CadenceName = "every_step"
    accumulation: int = 1
    period: int = 1
    fragments: int = 1

    def __post_init__(self) -> None:
        if self.accumulation < 1 or self.period < 1 or self.fragments < 1:
            raise UsageError(f"got {self!r}", expected="accumulation, period and fragments of 1 or more")
        if self.period > 1 and self.name not in ("local_sgd", "diloco"):
            raise UsageError(
                f"got a period of {self.period} for {self.name}", expected="a period only for local_sgd, diloco"
            )
        if self.fragments > 1 and self.name != "diloco":
            raise UsageError(f"got {self.fragments} fragments for {self.name}", expected="fragments only for diloco")


class CadencePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of one optimizer step, and what of it is waiting. ``micro_s`` is one micro-step's compute."""

    step_s: float
    compute_s: float
    exposed_s: float
    straggler_s: float
    lower_bound_s: float
    timeline: StepTimeline


def predict_cadence(
    workload: TrainingWorkload,
    strategy: Strategy,
    costs: StepCosts,
    cadence: Cadence,
    *,
    jitter: float = 0.0,
    slowdown: float = 1.0,
) -> CadencePrediction:
    """Predict the mean optimizer step under ``cadence``.

    ``slowdown``: the slowest rank's compute over that of the workload, 1 and above; every cadence but ``async`` waits
    for it at each exchange. The cadence stands for the strategy's own schedule. Raises UsageError for a jitter that is
    negative or a slowdown below 1.
    """
    if not 0 <= jitter < 1 or not 1 <= slowdown < math.inf:
        raise UsageError(f"got a jitter of {jitter:g} and a slowdown of {slowdown:g}", expected="0 to 1, and 1 or more")
    strategy = msgspec.structs.replace(strategy, schedule="every_step", period=None, warmup_steps=0, staleness=None)
    slow = scaled(workload, slowdown if cadence.name != "async" else 1.0)
    timeline = simulate_step(slow, strategy, costs)
    micro_s = slow.forward_s + slow.backward_s + slow.data_s
    more_s = (cadence.accumulation - 1) * micro_s
    compute_s = slow.compute_s + more_s
    whole_s = timeline.codec_s + timeline.wire_s
    if cadence.name in ("local_sgd", "diloco"):
        exposed_s = _periodic_s(cadence, compute_s, whole_s)
    elif cadence.name in ("delayed", "async"):
        # The exchange of step t runs beside all of step t + 1: only what is longer than a whole step shows.
        exposed_s = max(0.0, whole_s - compute_s)
    else:
        exposed_s = timeline.exposed_s
    # Between two meetings a rank's lateness is the sum of independent ones: it grows as the root of their number.
    meetings = cadence.period * cadence.accumulation
    waits = cadence.name != "async" and workload.num_ranks > 1
    straggler_s = expected_maximum(workload.num_ranks) * jitter * compute_s / math.sqrt(meetings) if waits else 0.0
    # What a hidden exchange leaves idle absorbs part of the lateness under delayed exchange, which is left out: safe.
    step_s = compute_s + exposed_s + straggler_s
    return CadencePrediction(
        step_s=step_s,
        compute_s=compute_s,
        exposed_s=exposed_s,
        straggler_s=straggler_s,
        lower_bound_s=max(compute_s, _bound_s(timeline, cadence)),
        timeline=timeline,
    )


def _periodic_s(cadence: Cadence, compute_s: float, whole_s: float) -> float:
    if cadence.fragments == 1:
        return whole_s / cadence.period
    # Each fragment has the steps until the next one is due to hide behind; the last bit of each cannot hide.
    window_s = compute_s * cadence.period / cadence.fragments
    return max(0.0, whole_s / cadence.fragments - window_s) * cadence.fragments / cadence.period


def _bound_s(timeline: StepTimeline, cadence: Cadence) -> float:
    """The wire's own bound, spread over the steps that share an exchange."""
    rest_s = timeline.compute_s - (timeline.step_s - timeline.exposed_s - timeline.compute_s)
    wire_s = max(0.0, timeline.lower_bound_s - rest_s)
    return wire_s / cadence.period


def scaled(workload: TrainingWorkload, factor: float) -> TrainingWorkload:
    """The workload on devices ``factor`` times slower."""
    if factor == 1:
        return workload
    return msgspec.structs.replace(
        workload,
        gradients=tuple(
            msgspec.structs.replace(gradient, ready_s=gradient.ready_s * factor) for gradient in workload.gradients
        ),
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
        optimizer_s=workload.optimizer_s * factor,
    )


def expected_maximum(num_ranks: int) -> float:
    """Expected largest of so many standard normal values: Blom's approximation, within 0.02 from 2 on."""
    if num_ranks < 2:
        return 0.0
    from statistics import NormalDist

    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
