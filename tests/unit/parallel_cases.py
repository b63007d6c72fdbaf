"""A network of two numbers for the tests of layouts: a rate and a latency per axis."""

from __future__ import annotations

from dataclasses import dataclass, field

from wirespeed.sim.axes import AxisCost, Operation
from wirespeed.sim.layout import Axis


@dataclass
class TwoNumbers:
    """Every operation takes ``latency_s`` and its bytes at ``bytes_per_s``, whatever the group; it counts what it is asked."""

    bytes_per_s: float = 25e9
    latency_s: float = 1e-5
    is_in_range: bool = True
    asked: list[tuple[Axis, Operation, float]] = field(default_factory=list)

    def cost(self, axis: Axis, operation: Operation, size_bytes: float) -> AxisCost:
        self.asked.append((axis, operation, size_bytes))
        wire_s = size_bytes / self.bytes_per_s
        return AxisCost(
            seconds=self.latency_s + wire_s,
            latency_s=self.latency_s,
            lower_bound_s=wire_s,
            binding=f"link of {axis}",
            is_in_range=self.is_in_range,
            uncertainty=0.1,
        )
