"""What the simulator asks of the network and the encoder, as a protocol: it holds no fabric and no curve itself."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import msgspec

from wirespeed.errors import UsageError
from wirespeed.spec.strategy import Strategy, Transfer


class TransferCost(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, alone on the network.

    ``latency_s`` of its ``seconds`` use no wire (hops, scheduling), the rest does. No such transfer can be faster than
    ``lower_bound_s``. ``cpu``: cores that it keeps busy in each rank. ``slowdown``: how many times as long it takes
    while its ranks compute. ``residual``: relative error of ``seconds``.
    """

    seconds: float
    latency_s: float = 0.0
    lower_bound_s: float = 0.0
    cpu: float = 0.0
    slowdown: float = 1.0
    is_in_range: bool = True
    residual: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s <= self.seconds or not 0 <= self.lower_bound_s <= self.seconds or self.cpu < 0:
            raise UsageError(f"got the transfer cost {self!r}", expected="0 <= latency, bound <= seconds and cpu >= 0")
        if self.slowdown < 1:
            raise UsageError(f"got a slowdown of {self.slowdown:g}", expected="1 or more")


class StageCost(msgspec.Struct, frozen=True, kw_only=True):
    """One local stage of a codec on one thread, as slow as it is with the rank's share of the cores."""

    seconds: float
    is_in_range: bool = True
    residual: float = 0.0

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise UsageError(f"got a codec stage of {self.seconds:g} s", expected="0 s or more")


class StepCosts(Protocol):
    """What the network and the encoder take; ``plan.costs`` makes one of a calibrated fabric."""

    def transfer(self, transfer: Transfer) -> TransferCost:
        """Cost of one collective among the workload's ranks."""
        ...

    def stage(self, strategy: Strategy, stage: str, size_bytes: int) -> StageCost:
        """Cost of one local stage for a bucket of ``size_bytes`` of fp32 gradient."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledCosts:
    """Costs with each part multiplied: "twice the bandwidth" is ``wire=0.5``, a free encoder ``codec=0``.

    ``spread`` moves every cost by that many of its own residuals: +1 is the slow end of the uncertainty, -1 the fast.
    """

    costs: StepCosts
    wire: float = 1.0
    latency: float = 1.0
    codec: float = 1.0
    spread: float = 0.0

    def transfer(self, transfer: Transfer) -> TransferCost:
        """The transfer's cost, scaled; its bound scales with the wire."""
        cost = self.costs.transfer(transfer)
        off = max(0.0, 1 + self.spread * cost.residual)
        latency_s = cost.latency_s * self.latency * off
        wire_s = (cost.seconds - cost.latency_s) * self.wire * off
        return msgspec.structs.replace(
            cost,
            seconds=latency_s + wire_s,
            latency_s=latency_s,
            lower_bound_s=min(cost.lower_bound_s * self.wire, wire_s),
        )

    def stage(self, strategy: Strategy, stage: str, size_bytes: int) -> StageCost:
        """The stage's cost, scaled."""
        cost = self.costs.stage(strategy, stage, size_bytes)
        return msgspec.structs.replace(
            cost, seconds=cost.seconds * self.codec * max(0.0, 1 + self.spread * cost.residual)
        )
