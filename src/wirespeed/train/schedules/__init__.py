"""Schedules: when gradients or parameters are exchanged. ``make_schedule`` gives the one of a strategy."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from wirespeed.train.exchanger import Exchanger
from wirespeed.train.schedules.asynchronous import Asynchronous
from wirespeed.train.schedules.base import GradientBucket, Schedule
from wirespeed.train.schedules.delayed import DelayedGradients
from wirespeed.train.schedules.every_step import EveryStep
from wirespeed.train.schedules.periodic import Periodic

__all__ = ["GradientBucket", "Schedule", "make_schedule"]


def make_schedule(ddp: DistributedDataParallel, exchanger: Exchanger) -> Schedule:
    """The schedule of the exchanger's strategy for this model."""
    match exchanger.strategy.schedule:
        case "every_step":
            return EveryStep(exchanger)
        case "delayed":
            return DelayedGradients(exchanger)
        case "async":
            return Asynchronous(ddp, exchanger)
        case "local_sgd" | "diloco":
            return Periodic(ddp, exchanger)
