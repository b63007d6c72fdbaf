"""What the simulator asks of a network under a layout: the time of one operation along one axis, as a protocol.

All groups of an axis do the operation at the same time (all tensor groups, all data-parallel groups), so that links
which they share are counted as shared. ``plan.axes`` makes one of a fabric; tests make one of two numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

import msgspec

from wirespeed.errors import UsageError
from wirespeed.sim.layout import Axis

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


class AxisCost(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. ``binding`` names the link or resource; ``uncertainty`` is relative, None where unknown."""

    seconds: float
    latency_s: float = 0.0
    lower_bound_s: float = 0.0
    binding: str = "latency"
    is_in_range: bool = False
    uncertainty: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lower_bound_s <= self.seconds * (1 + 1e-9):
            raise UsageError(f"got the cost {self!r}", expected="0 <= bound <= seconds")


FREE = AxisCost(seconds=0.0, binding="nothing to send", is_in_range=True, uncertainty=0.0)


class AxisCosts(Protocol):
    """Costs of one layout on one network."""

    def cost(self, axis: Axis, operation: Operation, size_bytes: float) -> AxisCost:
        """Cost of ``operation`` of ``size_bytes`` (the convention of ``records``) in every group of ``axis``."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledAxes:
    """Costs with their parts multiplied: "twice the bandwidth" is ``wire=0.5``, no network at all 0 for both."""

    costs: AxisCosts
    wire: float = 1.0
    latency: float = 1.0

    def cost(self, axis: Axis, operation: Operation, size_bytes: float) -> AxisCost:
        """The scaled cost; its bound scales with the wire."""
        held = self.costs.cost(axis, operation, size_bytes)
        latency_s = min(held.latency_s, held.seconds) * self.latency
        seconds = latency_s + (held.seconds - min(held.latency_s, held.seconds)) * self.wire
        return msgspec.structs.replace(
            held, seconds=seconds, latency_s=latency_s, lower_bound_s=min(held.lower_bound_s * self.wire, seconds)
        )
