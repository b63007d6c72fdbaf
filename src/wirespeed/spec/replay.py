"""Replay: a model's gradients over a real network, its compute replaced by sleep; what each strategy then took.

Bytes and rates of a replay are divided by one common ``scale``, so that times stay what they are at full size while the
machine has less to copy. Fields say which side of the scale they are on.
"""

from __future__ import annotations

import msgspec

from wirespeed.records import Record
from wirespeed.spec.comparison import StepBreakdown
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import Strategy


class ReplayArm(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy's steps. ``step_times_s``: of the slowest rank, step by step, blocks in order of time.

    ``exposed_s`` is the step less the compute that was measured without any communication. Bytes are scaled back to
    full size; ``wire_bytes_per_step`` is what the interface counted, None where it could not be read.
    """

    name: str
    strategy: Strategy
    step_times_s: tuple[float, ...]
    step_s: float
    spread: float
    exposed_s: float
    exposed_share: float
    stated_bytes_per_step: float
    wire_bytes_per_step: float | None = None
    breakdown: StepBreakdown | None = None
    prediction: Prediction | None = None
    predicted_step_s: float | None = None
    prediction_error: float | None = None


class ReplayRecord(Record, frozen=True, kw_only=True, tag="replay"):
    """The outcome of `wirespeed bench replay`. Rates and ``num_parameters`` are at full size."""

    model: str
    source: str
    num_parameters: int
    num_ranks: int
    network: str
    scale: float
    declared_bit_per_s: float | None
    goodput_bit_per_s: float | None
    """Median of what a TCP stream between two hosts gave before the run, times the scale."""
    compute_s: float
    """Declared: what the sleeping layers were told to take."""
    measured_compute_s: float
    """The same step without any communication, measured in this run."""
    arms: tuple[ReplayArm, ...]
    warnings: tuple[str, ...] = ()
