"""What would happen: deterministic simulation, without threads, clocks or I/O."""

from wirespeed.sim.training import (
    Bucket,
    ScaledCosts,
    Span,
    StageCost,
    StepCosts,
    StepTimeline,
    TransferCost,
    fill_buckets,
    predict_step,
    simulate_step,
)

__all__ = [
    "Bucket",
    "ScaledCosts",
    "Span",
    "StageCost",
    "StepCosts",
    "StepTimeline",
    "TransferCost",
    "fill_buckets",
    "predict_step",
    "simulate_step",
]
