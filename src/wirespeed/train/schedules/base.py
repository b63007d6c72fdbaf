"""What a schedule is: it decides what becomes of each gradient bucket, and what happens once the optimizer has stepped.

The session calls ``exchange`` for every bucket of a synchronising backward, in bucket order, then ``step_taken`` when
the optimizer has stepped, and ``step_begins`` before the next training forward. Every rank gets the same calls in the
same order; a schedule may therefore start collectives in any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientBucket:
    """One bucket of a backward: parameter names and shapes in the order in which their gradients lie in ``values``."""

    index: int
    is_last: bool
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    values: Tensor


class Schedule(Protocol):
    """One schedule at work on one model of one rank."""

    @property
    def sends_gradients(self) -> bool:
        """Whether the next backward's gradients are what is exchanged (residuals are then theirs)."""
        ...

    @property
    def num_steps_apart(self) -> int:
        """Steps since all ranks last held equal parameters; 0 where they always do."""
        ...

    @property
    def has_trained_apart(self) -> bool:
        """Whether ranks have taken steps of their own, so that optimizers hold what differs from rank to rank."""
        ...

    def exchange(self, bucket: GradientBucket) -> torch.futures.Future[Tensor]:
        """What the optimizer is given of this bucket, in ``bucket.values``, when the future completes."""
        ...

    def is_due(self) -> bool:
        """Whether ``step_taken`` has something to send."""
        ...

    def step_taken(self) -> None:
        """The optimizer has stepped."""
        ...

    def synchronize(self) -> None:
        """Make parameters equal on all ranks now, and leave nothing under way. All ranks call it together."""
        ...

    def close(self) -> None:
        """Undo what was changed of the model. Sends nothing."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved beside the residuals: tensors, numbers and dictionaries of them."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state of the same schedule."""
        ...
