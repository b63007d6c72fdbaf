"""Search: predict every strategy, rank them, and choose one with a reason; often the choice is to change nothing.

A choice is only as good as the predictions. It prefers the more faithful of two strategies that are within the margin
of each other, because a prediction cannot tell them apart and a gradient that is sent exactly costs no quality.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.topology import Fabric
from wirespeed.plan.costs import FabricCosts
from wirespeed.plan.space import legal_strategies
from wirespeed.sim.costs import StepCosts
from wirespeed.sim.training import predict_step
from wirespeed.spec.payloads import CODECS
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import DEFAULT_BUCKET_BYTES, FIDELITIES, Fidelity, Strategy
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.units import format_duration, format_percent

MARGIN = 0.05
"""Gains below this are not worth a change: predictions and single measurements do not resolve less."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions ranked from the fastest, and what could not be predicted with the reason, by strategy name."""

    predictions: tuple[Prediction, ...]
    skipped: dict[str, str]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen strategy beside the baseline (what runs if nothing is changed), and why."""

    prediction: Prediction
    baseline: Prediction
    reason: str

    @property
    def strategy(self) -> Strategy:
        """The chosen strategy."""
        return self.prediction.strategy

    @property
    def changes_nothing(self) -> bool:
        """Whether the baseline is the best choice."""
        return self.prediction.strategy == self.baseline.strategy

    @property
    def speedup(self) -> float:
        """Baseline step over chosen step."""
        return self.baseline.step_s / self.prediction.step_s if self.prediction.step_s > 0 else 1.0


def costs_of(workload: TrainingWorkload, fabric: Fabric, *, backend: str = "gloo") -> FabricCosts:
    """The costs of the workload's ranks on the fabric."""
    return FabricCosts(fabric, workload.num_ranks, ranks_per_host=workload.ranks_per_host, backend=backend)


def predict(
    workload: TrainingWorkload,
    strategy: Strategy,
    fabric: Fabric,
    *,
    backend: str = "gloo",
    first_bucket_bytes: int | None = None,
) -> Prediction:
    """Predict one strategy. Raises DataError where the fabric lacks what that needs."""
    return predict_step(
        workload, strategy, costs_of(workload, fabric, backend=backend), first_bucket_bytes=first_bucket_bytes
    )


def search(
    workload: TrainingWorkload,
    fabric: Fabric,
    fidelity: Fidelity = "half",
    *,
    strategies: Sequence[Strategy] | None = None,
    backend: str = "gloo",
    first_bucket_bytes: int | None = None,
    costs: StepCosts | None = None,
) -> Search:
    """Predict ``strategies`` (None: all legal ones down to ``fidelity``) and rank them.

    ``costs`` None takes the fabric's measured curves.

    What the fabric holds no curve for is skipped and named. Raises DataError where nothing can be predicted.
    """
    if strategies is None:
        strategies = legal_strategies(workload, fidelity)
    if costs is None:
        costs = costs_of(workload, fabric, backend=backend)
    predictions: list[Prediction] = []
    skipped: dict[str, str] = {}
    for strategy in strategies:
        try:
            predictions.append(predict_step(workload, strategy, costs, first_bucket_bytes=first_bucket_bytes))
        except DataError as fault:
            skipped[strategy.name] = str(fault)
    if not predictions:
        raise DataError(
            f"none of {len(skipped)} strategies can be predicted: {next(iter(skipped.values()), 'none was given')}"
        )
    return Search(predictions=rank(predictions), skipped=skipped)


def rank(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """Fastest first; steps that agree to four digits rank by fidelity, then by simplicity."""
    return tuple(sorted(predictions, key=_rank_key))


def _rank_key(prediction: Prediction) -> tuple[float, int, int, bool, int]:
    strategy = prediction.strategy
    return (
        float(f"{prediction.step_s:.4g}"),
        FIDELITIES.index(strategy.fidelity),
        CODECS.index(strategy.codec),
        strategy.bucket_bytes != DEFAULT_BUCKET_BYTES,
        -strategy.bucket_bytes,
    )


def choose(predictions: Iterable[Prediction], fidelity: Fidelity = "half", margin: float = MARGIN) -> Choice:
    """The strategy to run: the most faithful one whose step is within ``margin`` of the fastest that is allowed.

    The baseline is the default dense strategy (else the best dense one); it is kept where nothing allowed is faster by
    more than ``margin``. Raises UsageError without a dense prediction to compare with.
    """
    if not 0 <= margin < 1:
        raise UsageError(f"got a margin of {margin:g}", expected="a fraction from 0 up to 1")
    ranked = rank(predictions)
    dense = [p for p in ranked if p.strategy.fidelity == "exact"]
    if not dense:
        raise UsageError("got no prediction of dense", expected="dense among the candidates, to compare with")
    baseline = next((p for p in dense if p.strategy == Strategy()), dense[0])
    allowed = [p for p in ranked if p.strategy.allows(fidelity)]
    fastest = allowed[0]
    contenders = [p for p in allowed if fastest.step_s >= p.step_s * (1 - margin)]
    if baseline in contenders:
        best = baseline
        reason = f"nothing allowed is faster than {baseline.strategy.name} by more than {format_percent(margin)}"
    else:
        best = min(contenders, key=lambda p: FIDELITIES.index(p.strategy.fidelity))
        reason = (
            f"{best.strategy.name} takes {format_duration(best.step_s)} per step, "
            f"{format_percent(1 - best.step_s / baseline.step_s)} less than {baseline.strategy.name} "
            f"({format_duration(baseline.step_s)})"
        )
        if best is not fastest:
            reason += f"; {fastest.strategy.name} is less faithful and not faster by more than {format_percent(margin)}"
    return Choice(prediction=best, baseline=baseline, reason=reason)
