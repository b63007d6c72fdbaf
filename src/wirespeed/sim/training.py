"""One training step: backward fills buckets, lanes exchange them, the step ends when the last one is written back.

An exact event simulation of a fluid model (docs/design/0002-step-recurrence.md): every activity has work left and a
rate, rates change only when something starts or ends. Ranks are taken to be alike, so one of them stands for all; the
network gives each collective the time that its curve says, and two collectives in flight share the wire equally. A
rank's threads share its cores fairly. It is wrong where ranks differ (stragglers), where collectives of several groups
collide unevenly, or where the curves were taken under another load than ``cpus_per_rank`` says.

Pure: plain data in, plain data out; what a transfer or a codec stage costs is asked of ``StepCosts``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from wirespeed.errors import UsageError
from wirespeed.records import Collective
from wirespeed.spec.prediction import Prediction, Resource
from wirespeed.spec.strategy import BYTES_PER_ELEMENT, DEFAULT_BUCKET_BYTES, CodecName, Strategy
from wirespeed.spec.workload import GradientTensor, TrainingWorkload
from wirespeed.units import MIB

FIRST_BUCKET_BYTES = MIB
"""torch's ``dist._DEFAULT_FIRST_BUCKET_BYTES``: DDP's first bucket where ``bucket_cap_mb`` is left at its default."""

STAGES: dict[CodecName, tuple[str, ...]] = {
    "dense": ("encode", "decode"),
    "half": ("encode", "decode"),
    "int8": ("encode", "reduce", "decode"),
    "topk": ("encode", "decode"),
}
"""The local stages of each codec's exchange: one more than it has transfers."""

DENSE_IN_FLIGHT = 2
"""Collectives of one gloo group that progress at a time: it has two worker threads (torch, ProcessGroupGloo.cpp)."""

_NOTHING_LEFT_S = 1e-12
"""Work below a picosecond is rounding of the subtraction, not work."""

Activity = Literal["stage", "transfer"]
_IDLE, _STAGE, _LATENCY, _WIRE = range(4)


class TransferCost(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, alone on the network.

    ``latency_s`` of its ``seconds`` use no wire (hops, scheduling), the rest does. No such transfer can be faster than
    ``lower_bound_s``. ``cpu``: cores that it keeps busy in each rank. ``residual``: relative error of ``seconds``.
    """

    seconds: float
    latency_s: float = 0.0
    lower_bound_s: float = 0.0
    cpu: float = 0.0
    is_in_range: bool = True
    residual: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s <= self.seconds or not 0 <= self.lower_bound_s <= self.seconds or self.cpu < 0:
            raise UsageError(f"got the transfer cost {self!r}", expected="0 <= latency, bound <= seconds and cpu >= 0")


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

    def transfer(self, collective: Collective, size_bytes: int) -> TransferCost:
        """Cost of one collective among the workload's ranks; ``size_bytes`` as in ``records``."""
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

    def transfer(self, collective: Collective, size_bytes: int) -> TransferCost:
        """The transfer's cost, scaled; its bound scales with the wire."""
        cost = self.costs.transfer(collective, size_bytes)
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


class Bucket(NamedTuple):
    """Gradients that are exchanged together; ready when the last of them is."""

    num_elements: int
    ready_s: float


class Span(NamedTuple):
    """One activity of one bucket, in seconds since the start of backward. Lane k runs stage k and transfer k."""

    bucket: int
    lane: int
    activity: Activity
    start_s: float
    end_s: float


class StepTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """What happens in one step. Times count from the start of backward, but for ``step_s``.

    ``codec_s`` and ``wire_s`` are the sums over buckets of stages and transfers as if each ran alone;
    ``exposed_s`` is all by which the exchange lengthens the step: its tail, and the backward it slows down.
    """

    step_s: float
    compute_s: float
    codec_s: float
    wire_s: float
    exposed_s: float
    backward_end_s: float
    exchange_end_s: float
    lower_bound_s: float
    is_in_range: bool
    buckets: tuple[Bucket, ...]
    spans: tuple[Span, ...]


class _Exchange(NamedTuple):
    """One bucket's durations: stages K + 1, and per transfer K (latency, wire work, cpu)."""

    stages_s: tuple[float, ...]
    transfers: tuple[tuple[float, float, float], ...]


def fill_buckets(
    gradients: Sequence[GradientTensor], bucket_bytes: int, *, first_bucket_bytes: int | None = None
) -> tuple[Bucket, ...]:
    """Buckets as DDP fills them once it has seen the gradients' order (torch, reducer.cpp: rebuild_buckets).

    A bucket closes with the tensor that brings it to its limit, so it may exceed it; a tensor is never split.
    ``first_bucket_bytes`` None is torch's rule: 1 MiB where the limit is its default of 25 MiB, else no exception.
    """
    limit = bucket_bytes
    if first_bucket_bytes is not None:
        limit = first_bucket_bytes
    elif bucket_bytes == DEFAULT_BUCKET_BYTES:
        limit = FIRST_BUCKET_BYTES
    buckets = []
    held = 0
    for gradient in gradients:
        held += gradient.num_elements
        if held * BYTES_PER_ELEMENT >= limit:
            buckets.append(Bucket(held, gradient.ready_s))
            held, limit = 0, bucket_bytes
    if held:
        buckets.append(Bucket(held, gradients[-1].ready_s))
    return tuple(buckets)


def simulate_step(
    workload: TrainingWorkload,
    strategy: Strategy,
    costs: StepCosts,
    *,
    first_bucket_bytes: int | None = None,
) -> StepTimeline:
    """Simulate one step of ``workload`` under ``strategy``.

    Compute and codec stages count as measured on one thread with the rank's ``cpus_per_rank`` cores. When the rank's
    backward, codec stages and collectives want more than those cores together, each gets a fair share of them and slows
    down; with ``cpus_per_rank`` None (an accelerator) nothing contends but the wire.
    """
    buckets = fill_buckets(workload.gradients, strategy.bucket_bytes, first_bucket_bytes=first_bucket_bytes)
    exchanges: list[_Exchange] = []
    codec_s = wire_s = bound_s = 0.0
    is_in_range = True
    priced: dict[int, tuple[_Exchange, float, float, float, bool]] = {}
    for bucket in buckets:
        found = priced.get(bucket.num_elements)
        if found is None:
            found = priced[bucket.num_elements] = _price(strategy, bucket.num_elements, workload.num_ranks, costs)
        exchanges.append(found[0])
        codec_s += found[1]
        wire_s += found[2]
        bound_s += found[3]
        is_in_range = is_in_range and found[4]
    backward_s = workload.backward_s
    rest_s = workload.compute_s - backward_s
    spans: tuple[Span, ...] = ()
    if workload.num_ranks < 2 or not buckets:
        backward_end_s, exchange_end_s, first_ready_s = backward_s, 0.0, 0.0
    else:
        ready_s = [min(bucket.ready_s, backward_s) for bucket in buckets]
        first_ready_s = ready_s[0]
        width = DENSE_IN_FLIGHT if strategy.codec == "dense" else 1
        backward_end_s, exchange_end_s, spans = _flow(
            backward_s, ready_s, exchanges, cpus=workload.cpus_per_rank, first_lane_width=width
        )
    end_s = max(backward_end_s, exchange_end_s)
    return StepTimeline(
        step_s=rest_s + end_s,
        compute_s=workload.compute_s,
        codec_s=codec_s,
        wire_s=wire_s,
        exposed_s=max(0.0, end_s - backward_s),
        backward_end_s=backward_end_s,
        exchange_end_s=exchange_end_s,
        lower_bound_s=rest_s + max(backward_s, first_ready_s + bound_s),
        is_in_range=is_in_range,
        buckets=buckets,
        spans=spans,
    )


def _price(
    strategy: Strategy, num_elements: int, num_ranks: int, costs: StepCosts
) -> tuple[_Exchange, float, float, float, bool]:
    """The exchange of one bucket, and its codec seconds, wire seconds, lower bound and whether curves cover it."""
    transfers = [costs.transfer(t.collective, t.size_bytes) for t in strategy.transfers(num_elements, num_ranks)]
    if not transfers:
        return _Exchange((0.0,), ()), 0.0, 0.0, 0.0, True
    size_bytes = num_elements * BYTES_PER_ELEMENT
    stages = [costs.stage(strategy, stage, size_bytes) for stage in STAGES[strategy.codec]]
    return (
        _Exchange(
            tuple(stage.seconds for stage in stages),
            tuple((t.latency_s, t.seconds - t.latency_s, t.cpu) for t in transfers),
        ),
        sum(stage.seconds for stage in stages),
        sum(t.seconds for t in transfers),
        # The bound holds for the wire alone: what a curve counts as latency may overlap between two collectives.
        sum(min(t.lower_bound_s, t.seconds - t.latency_s) for t in transfers),
        all(t.is_in_range for t in transfers) and all(stage.is_in_range for stage in stages),
    )


def _flow(  # noqa: PLR0912, PLR0915 - one loop over one state; cut up it is slower and harder to follow
    backward_s: float,
    ready_s: Sequence[float],
    exchanges: Sequence[_Exchange],
    *,
    cpus: float | None,
    first_lane_width: int,
) -> tuple[float, float, tuple[Span, ...]]:
    """Run the fluid model; gives the end of backward, the end of the last exchange, and what was done when.

    Lane k is one worker that runs stage k of a bucket, then its transfer k, buckets in order; ``first_lane_width`` is
    how many workers the first lane has.
    """
    num_buckets = len(ready_s)
    num_lanes = len(exchanges[0].stages_s)
    lanes = [0] * first_lane_width + list(range(1, num_lanes))
    workers = range(len(lanes))
    queues: list[deque[int]] = [deque() for _ in range(num_lanes)]
    phase = [_IDLE] * len(lanes)
    left = [0.0] * len(lanes)
    cpu = [0.0] * len(lanes)
    held = [0] * len(lanes)
    since = [0.0] * len(lanes)
    spans: list[Span] = []
    now = progress = backward_end = exchange_end = 0.0
    num_ready = num_done = 0
    backward_runs = backward_s > 0

    while True:
        while num_ready < num_buckets and ready_s[num_ready] <= progress:
            queues[0].append(num_ready)
            num_ready += 1
        for worker in workers:  # a bucket only moves to later workers, so one pass settles all
            lane = lanes[worker]
            while True:
                if phase[worker] == _IDLE:
                    if not queues[lane]:
                        break
                    held[worker] = queues[lane].popleft()
                    phase[worker], left[worker], since[worker] = _STAGE, exchanges[held[worker]].stages_s[lane], now
                if left[worker] > 0:
                    break
                bucket = held[worker]
                if phase[worker] == _STAGE:
                    if now > since[worker]:
                        spans.append(Span(bucket, lane, "stage", since[worker], now))
                    if lane == num_lanes - 1:
                        num_done += 1
                        exchange_end = now
                        phase[worker] = _IDLE
                    else:
                        phase[worker], since[worker] = _LATENCY, now
                        left[worker], _, cpu[worker] = exchanges[bucket].transfers[lane]
                elif phase[worker] == _LATENCY:
                    phase[worker], left[worker] = _WIRE, exchanges[bucket].transfers[lane][1]
                else:
                    if now > since[worker]:
                        spans.append(Span(bucket, lane, "transfer", since[worker], now))
                    phase[worker] = _IDLE
                    queues[lane + 1].append(bucket)
        if num_done == num_buckets and not backward_runs:
            return backward_end, exchange_end, tuple(spans)

        num_wire = phase.count(_WIRE)
        wire_share = 1 / num_wire if num_wire > 1 else 1.0
        compute_rate = 1.0
        level = float("inf")
        if cpus is not None:
            alone = min(1.0, cpus)
            wants = [alone] if backward_runs else []
            for worker in workers:
                state = phase[worker]
                if state == _STAGE:
                    wants.append(alone)
                elif state != _IDLE:
                    wants.append(min(cpu[worker], cpus) * (wire_share if state == _WIRE else 1.0))
            level = fair_level(wants, cpus)
            compute_rate = min(alone, level) / alone

        rates = [0.0] * len(lanes)
        step_s = float("inf")
        if backward_runs:
            target = ready_s[num_ready] if num_ready < num_buckets else backward_s
            step_s = (target - progress) / compute_rate
        for worker in workers:
            state = phase[worker]
            if state == _IDLE:
                continue
            if state == _STAGE:
                rate = compute_rate
            else:
                rate = wire_share if state == _WIRE else 1.0
                if cpus is not None:
                    want = min(cpu[worker], cpus) * rate
                    if want > level:
                        rate *= level / want
            rates[worker] = rate
            step_s = min(step_s, left[worker] / rate)

        now += step_s
        if backward_runs:
            progress += step_s * compute_rate
            if target - progress <= _NOTHING_LEFT_S:
                progress = target
                if progress >= backward_s:
                    backward_runs, backward_end = False, now
        for worker in workers:
            if rates[worker]:
                rest = left[worker] - step_s * rates[worker]
                left[worker] = rest if rest > _NOTHING_LEFT_S else 0.0


def fair_level(wants: Sequence[float], capacity: float) -> float:
    """The share above which nobody gets more, such that shares sum to ``capacity``; infinite where all fit.

    Max-min fairness, which is what a fair scheduler gives to threads of equal weight.
    """
    if sum(wants) <= capacity:
        return float("inf")
    rest = capacity
    for index, want in enumerate(sorted(wants)):
        share = rest / (len(wants) - index)
        if want > share:
            return share
        rest -= want
    return float("inf")  # only where rounding made the sum exceed the capacity


_FREE: dict[Resource, dict[str, float]] = {
    "bandwidth": {"wire": 0.0},
    "latency": {"latency": 0.0},
    "codec": {"codec": 0.0},
}


def predict_step(
    workload: TrainingWorkload,
    strategy: Strategy,
    costs: StepCosts,
    *,
    first_bucket_bytes: int | None = None,
) -> Prediction:
    """Predict one step, with the resource that binds it and its uncertainty.

    ``binding`` is found by simulating again with each resource free; ``uncertainty`` is half the relative distance
    between the steps with all costs at the slow and at the fast end of their residuals.
    """

    def step_s(**factors: float) -> float:
        scaled = ScaledCosts(costs=costs, **factors)
        return simulate_step(workload, strategy, scaled, first_bucket_bytes=first_bucket_bytes).step_s

    timeline = simulate_step(workload, strategy, costs, first_bucket_bytes=first_bucket_bytes)
    binding: Resource = "compute"
    if timeline.exposed_s > 0:
        free_s = {resource: step_s(**factors) for resource, factors in _FREE.items()}
        free_s["compute"] = simulate_step(
            without_compute(workload), strategy, costs, first_bucket_bytes=first_bucket_bytes
        ).step_s
        binding = min(free_s, key=lambda resource: free_s[resource])
        slow_s, fast_s = step_s(spread=1.0), step_s(spread=-1.0)
    else:
        slow_s, fast_s = step_s(spread=1.0), timeline.step_s
    return Prediction(
        strategy=strategy,
        step_s=timeline.step_s,
        compute_s=timeline.compute_s,
        codec_s=timeline.codec_s,
        wire_s=timeline.wire_s,
        exposed_s=timeline.exposed_s,
        wire_bytes=sum(strategy.wire_bytes(bucket.num_elements, workload.num_ranks) for bucket in timeline.buckets),
        lower_bound_s=timeline.lower_bound_s,
        binding=binding,
        is_in_range=timeline.is_in_range,
        uncertainty=(slow_s - fast_s) / 2 / timeline.step_s if timeline.step_s > 0 else 0.0,
    )


def without_compute(workload: TrainingWorkload) -> TrainingWorkload:
    """The workload on a device that computes in no time."""
    return msgspec.structs.replace(
        workload,
        gradients=tuple(msgspec.structs.replace(gradient, ready_s=0.0) for gradient in workload.gradients),
        forward_s=0.0,
        backward_s=0.0,
        optimizer_s=0.0,
        data_s=0.0,
        other_s=0.0,
    )
