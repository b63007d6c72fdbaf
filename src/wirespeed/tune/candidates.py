"""Which of the predicted strategies are worth a run."""

from __future__ import annotations

from collections.abc import Sequence

from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import Strategy
from wirespeed.tune import compare


def candidates(predictions: Sequence[Prediction], wanted: tuple[Strategy, ...] | None) -> list[Prediction]:
    """Which strategies to run, the best predicted first.

    Those that the user named; else the best of each codec (and top-k ratio, and matrix rank) that promises more than
    the margin. What is predicted no faster than dense is not worth its run.
    """
    baseline, others = predictions[0], predictions[1:]
    if wanted is not None:
        return [p for p in others if p.strategy in wanted]
    best: dict[tuple[str, float | None, int | None], Prediction] = {}
    for prediction in others:
        key = (prediction.strategy.codec, prediction.strategy.ratio, prediction.strategy.matrix_rank)
        if key not in best or prediction.step_s < best[key].step_s:
            best[key] = prediction
    promising = [p for p in best.values() if p.step_s < baseline.step_s * (1 - compare.MARGIN)]
    return sorted(promising, key=lambda p: p.step_s)
