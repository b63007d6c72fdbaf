"""every_step: gradients are averaged in the backward that makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wirespeed.train.exchanger import Exchanger
from wirespeed.train.schedules.base import GradientBucket


class EveryStep:
    """See ``Schedule``. Holds nothing of its own."""

    sends_gradients = True
    num_steps_apart = 0
    has_trained_apart = False

    def __init__(self, exchanger: Exchanger) -> None:
        self._exchanger = exchanger

    def exchange(self, bucket: GradientBucket) -> torch.futures.Future[Tensor]:
        """The average over the ranks."""
        return self._exchanger.average(bucket.values, bucket=bucket.index, names=bucket.names, shapes=bucket.shapes)

    def is_due(self) -> bool:
        """Never: nothing is left to send."""
        return False

    def step_taken(self) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Nothing to do: parameters are equal after every step."""

    def close(self) -> None:
        """Nothing to undo."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""
