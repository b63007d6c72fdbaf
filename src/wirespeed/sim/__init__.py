"""What would happen: deterministic simulation, without threads, clocks or I/O."""

from wirespeed.sim.costs import ScaledCosts, StageCost, StepCosts, TransferCost
from wirespeed.sim.flow import Span
from wirespeed.sim.training import Bucket, StepTimeline, fill_buckets, predict_step, simulate_step

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
