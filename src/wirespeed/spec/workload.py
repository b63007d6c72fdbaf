"""Workload: what has to cross the network, and when it is ready.

A training workload is one step of one rank: its gradients in the order in which backward makes them, each with the
time since the start of backward at which it is ready, and the durations of everything else in the step. Times hold on
the device and under the contention where they were taken; ``cpus_per_rank`` says what that was.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from wirespeed.errors import DataError

Origin = Literal["measured", "declared", "assumed"]


class GradientTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One gradient. ``ready_s`` counts from the start of backward, without any communication in the way.

    ``shape`` is empty where only the size is known.
    """

    name: str
    num_elements: int
    ready_s: float
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shape and math.prod(self.shape) != self.num_elements:
            raise DataError(
                f"gradient {self.name!r} has shape {self.shape} and {self.num_elements} elements",
                expected="a shape of as many elements",
            )


class TrainingWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of one rank, compute only (no communication). Gradients are fp32, in backward order.

    ``cpus_per_rank``: cores that one rank can count on; None on an accelerator, where codecs run beside compute.
    """

    gradients: tuple[GradientTensor, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float
    data_s: float = 0.0
    other_s: float = 0.0
    num_ranks: int
    ranks_per_host: int = 1
    cpus_per_rank: float | None = None
    origin: Origin = "measured"

    def __post_init__(self) -> None:
        times = [g.ready_s for g in self.gradients]
        durations = [self.forward_s, self.backward_s, self.optimizer_s, self.data_s, self.other_s, *times]
        if not all(0 <= duration < math.inf for duration in durations):
            raise DataError(
                "a workload holds a duration that is negative or not finite", expected="durations of 0 s or more"
            )
        if times != sorted(times):
            raise DataError("the gradients of a workload are not in backward order", expected="ready_s never falling")
        if self.num_ranks < 1 or self.ranks_per_host < 1 or any(g.num_elements < 1 for g in self.gradients):
            raise DataError("a workload holds an empty gradient or no rank", expected="at least one of each")

    @property
    def num_elements(self) -> int:
        """Gradient elements per step."""
        return sum(g.num_elements for g in self.gradients)

    @property
    def compute_s(self) -> float:
        """The step without any communication."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.data_s + self.other_s
