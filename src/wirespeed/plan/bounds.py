"""What a step cannot be faster than: its buckets at the link's goodput and its codecs at their own speed, pipelined.

``GoodputCosts`` is the network without latency and without contention for cores: every collective takes the bytes that
a rank must send, at the goodput of its link. The recurrence of ``sim`` over these costs is the bound that a real step
is held against, and the rate at which dense would be exposed by a wanted share is found from it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from wirespeed.errors import UsageError
from wirespeed.sim.costs import StageCost, TransferCost
from wirespeed.sim.training import simulate_step
from wirespeed.spec.payloads import bus_factor
from wirespeed.spec.strategy import Strategy, Transfer
from wirespeed.spec.workload import TrainingWorkload

StageSeconds = Callable[[Strategy, str, int], float]
"""``(strategy, stage, bytes of fp32 gradient) -> seconds``."""


class GoodputCosts:
    """``sim.StepCosts`` of a network that is nothing but a rate, and codecs whose speed is told."""

    def __init__(self, goodput_bit_per_s: float, num_ranks: int, *, stage_s: StageSeconds | None = None) -> None:
        if not goodput_bit_per_s > 0:
            raise UsageError(f"got a goodput of {goodput_bit_per_s:g} bit/s", expected="above zero")
        self._goodput_bit_per_s = goodput_bit_per_s
        self._num_ranks = num_ranks
        self._stage_s = stage_s

    def transfer(self, transfer: Transfer) -> TransferCost:
        """The bytes that a rank sends, at the goodput."""
        sent_bytes = transfer.size_bytes * bus_factor(transfer.collective, self._num_ranks)
        seconds = 8 * sent_bytes / self._goodput_bit_per_s
        return TransferCost(seconds=seconds, lower_bound_s=seconds)

    def stage(self, strategy: Strategy, stage: str, size_bytes: int) -> StageCost:
        """The stage's own time; free where no speed was told."""
        return StageCost(seconds=0.0 if self._stage_s is None else self._stage_s(strategy, stage, size_bytes))


def bound_step_s(
    workload: TrainingWorkload,
    strategy: Strategy,
    goodput_bit_per_s: float,
    *,
    stage_s: StageSeconds | None = None,
    first_bucket_bytes: int | None = None,
) -> float:
    """The step of the recurrence: buckets in order, each encoded, sent at the goodput and decoded, beside backward.

    Compute does not slow down for it (``cpus_per_rank`` is left out).
    """
    free = msgspec.structs.replace(workload, cpus_per_rank=None)
    costs = GoodputCosts(goodput_bit_per_s, workload.num_ranks, stage_s=stage_s)
    return simulate_step(free, strategy, costs, first_bucket_bytes=first_bucket_bytes).step_s


def rate_for_exposed(
    workload: TrainingWorkload,
    share: float,
    *,
    strategy: Strategy | None = None,
    first_bucket_bytes: int | None = None,
) -> float:
    """The goodput in bit/s at which ``strategy`` (dense) would be exposed for ``share`` of its step, by bisection.

    Raises UsageError where no rate gives that: a share of 0 or less, or of 1 or more.
    """
    if not 0 < share < 1:
        raise UsageError(f"got an exposed share of {share:g}", expected="above 0 and below 1")
    if workload.num_ranks < 2 or workload.compute_s <= 0:
        raise UsageError("got a step without compute or without peers", expected="two ranks or more that compute")
    strategy = Strategy() if strategy is None else strategy

    def exposed(rate_bit_per_s: float) -> float:
        step_s = bound_step_s(workload, strategy, rate_bit_per_s, first_bucket_bytes=first_bucket_bytes)
        return 1 - workload.compute_s / step_s

    low, high = 1.0, 1e15
    for _ in range(200):  # bisection on the logarithm: 200 halvings of 50 octaves are exact in doubles
        middle = (low * high) ** 0.5
        low, high = (middle, high) if exposed(middle) > share else (low, middle)
    return high
