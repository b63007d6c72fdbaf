"""Comparison: strategies run on the same script with the same seed, prediction beside measurement, loss beside loss."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from wirespeed.records import Record
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.workload import TrainingWorkload

LossKind = Literal["held_out", "training", "none"]


class StepBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where one step's time goes, medians over steps, mean over ranks. The parts sum to about ``step_s``."""

    step_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float
    data_s: float
    other_s: float

    @property
    def exposed_share(self) -> float:
        """Exposed communication over the whole step."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A loss after ``step`` optimizer steps, at ``train_s`` seconds of training time (evaluation not counted).

    ``loss`` is None where it was not finite: JSON has no nan, and a record with one could not be read back.
    """

    step: int
    train_s: float
    loss: float | None

    def __post_init__(self) -> None:
        if self.loss is not None and not math.isfinite(self.loss):
            msgspec.structs.force_setattr(self, "loss", None)


class StrategyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one strategy was predicted to do, and did. Measured fields are None where it was predicted but not run."""

    name: str
    strategy: Strategy
    prediction: Prediction | None
    predicted_step_s: float | None
    measured_step_s: float | None = None
    measured_spread: float | None = None
    prediction_error: float | None = None
    breakdown: StepBreakdown | None = None
    exposed_s: float | None = None
    stated_bytes_per_step: int | None = None
    wire_bytes_per_step: float | None = None
    num_steps: int = 0
    step_times_s: tuple[float, ...] = ()
    losses: tuple[LossPoint, ...] = ()
    training_losses: tuple[LossPoint, ...] = ()
    final_loss: float | None = None
    time_to_loss_s: float | None = None
    chosen: bool = False
    verdict: str = ""


class MeasuredFabric(msgspec.Struct, frozen=True, kw_only=True):
    """The network under the comparison. ``link_bit_per_s`` is the median goodput between pairs, as measured."""

    description: str
    hosts: tuple[str, ...]
    num_ranks: int
    link_bit_per_s: float | None
    declared_bit_per_s: float | None
    rtt_s: float | None
    links: dict[str, dict[str, float]] = {}
    """Goodput in bits per second, by source and target."""


class TuneRecord(Record, frozen=True, kw_only=True, tag="tune"):
    """The outcome of `wirespeed tune`."""

    script: str
    arguments: tuple[str, ...]
    fabric: MeasuredFabric
    workload: TrainingWorkload | None
    fidelity: str
    loss_kind: LossKind
    loss_target: float | None
    strategies: tuple[StrategyOutcome, ...]
    chosen: str
    reason: str
    warnings: tuple[str, ...] = ()
    is_complete: bool = True
    steal_share: float = 0.0
    """Of this machine's CPU time, the most that its hypervisor gave to others during one of the phases."""
