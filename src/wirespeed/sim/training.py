"""One training step: backward fills buckets, lanes exchange them, the step ends when the last one is written back.

An exact event simulation of a fluid model (docs/design/0002-step-recurrence.md): every activity has work left and a
rate, rates change only when something starts or ends. Ranks are taken to be alike, so one of them stands for all; the
network gives each collective the time that its curve says, and two collectives in flight share the wire equally. A
rank's threads share its cores fairly. It is wrong where ranks differ (stragglers), where collectives of several groups
collide unevenly, or where the curves were taken under another load than ``cpus_per_rank`` says.

Under ``delayed`` the exchange of one step runs beside all of the next: a chain of such steps is simulated, and what one
more of them takes is the step. Under ``local_sgd`` and ``diloco`` a step computes alone, and once per period all
buckets are exchanged with nothing beside; what the outer optimizer takes is left out (some passes over memory per
period).

Pure: plain data in, plain data out; what a transfer or a codec stage costs is asked of ``StepCosts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from wirespeed.errors import DataError
from wirespeed.sim.costs import ScaledCosts, StepCosts
from wirespeed.sim.flow import Exchange, Span, run_step
from wirespeed.spec.payloads import BYTES_PER_ELEMENT, CodecName, hierarchical_shard_elements
from wirespeed.spec.prediction import Prediction, Resource
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.workload import GradientTensor, TrainingWorkload
from wirespeed.units import MIB

FIRST_BUCKET_BYTES = MIB
"""torch's ``dist._DEFAULT_FIRST_BUCKET_BYTES``: DDP's first bucket where ``bucket_cap_mb`` is left at its default."""

STAGES: dict[CodecName, tuple[str, ...]] = {
    "dense": ("encode", "decode"),
    "half": ("encode", "decode"),
    "int8": ("encode", "reduce", "decode"),
    "int4": ("encode", "reduce", "decode"),
    "lowrank": ("encode", "decode"),
    "topk": ("encode", "decode"),
    "sign": ("encode", "reduce", "decode"),
}
"""The local stages of each codec's exchange: one more than it has transfers."""

CHAIN = 3
"""Delayed steps that are chained: the first fills the lanes, the second and third differ only by a whole step."""

DENSE_IN_FLIGHT = 2
"""Collectives of one gloo group that progress at a time: it has two worker threads (torch, ProcessGroupGloo.cpp)."""


class Bucket(NamedTuple):
    """Gradients that are exchanged together; ready when the last of them is. ``shapes`` None: not all are known."""

    num_elements: int
    ready_s: float
    shapes: tuple[tuple[int, ...], ...] | None = None


class StepTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """What happens in one step. Times count from the start of backward, but for ``step_s``.

    Where several steps share one exchange, ``codec_s``, ``wire_s`` and ``exposed_s`` are one step's share of it, and
    ``spans`` show the exchange with time counted from its start; so they do under ``delayed``, for the first step.
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


def fill_buckets(
    gradients: Sequence[GradientTensor], bucket_bytes: int, *, first_bucket_bytes: int | None = None
) -> tuple[Bucket, ...]:
    """Buckets as DDP fills them once it has seen the gradients' order (torch, reducer.cpp: rebuild_buckets).

    A bucket closes with the tensor that brings it to its limit, so it may exceed it; a tensor is never split.
    ``first_bucket_bytes`` None is what DDP does by default and ``train.rebucket`` does for every size: the first bucket
    is at most 1 MiB. A DDP made with an explicit ``bucket_cap_mb`` has no such exception: give that size.
    """
    limit = min(FIRST_BUCKET_BYTES, bucket_bytes) if first_bucket_bytes is None else first_bucket_bytes
    buckets = []
    held = 0
    shapes: list[tuple[int, ...]] = []
    for gradient in gradients:
        held += gradient.num_elements
        shapes.append(gradient.shape)
        if held * BYTES_PER_ELEMENT >= limit:
            buckets.append(Bucket(held, gradient.ready_s, tuple(shapes) if all(shapes) else None))
            held, limit, shapes = 0, bucket_bytes, []
    if held:
        buckets.append(Bucket(held, gradients[-1].ready_s, tuple(shapes) if all(shapes) else None))
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
    exchanges: list[Exchange] = []
    codec_s = wire_s = bound_s = 0.0
    is_in_range = True
    priced: dict[tuple[object, ...], tuple[Exchange, float, float, float, bool]] = {}
    for bucket in buckets:
        key = (bucket.num_elements, bucket.shapes)
        found = priced.get(key)
        if found is None:
            found = priced[key] = _price(strategy, bucket, workload, costs)
        exchanges.append(found[0])
        codec_s += found[1]
        wire_s += found[2]
        bound_s += found[3]
        is_in_range = is_in_range and found[4]
    backward_s = workload.backward_s
    rest_s = workload.compute_s - backward_s
    share = 1 / strategy.steps_per_exchange
    if workload.num_ranks < 2 or not buckets:
        flow = _Flow(backward_s, backward_s, 0.0, ())
        first_ready_s = 0.0
    else:
        ready_s = [min(bucket.ready_s, backward_s) for bucket in buckets]
        first_ready_s = ready_s[0]
        match strategy.schedule:
            case "every_step":
                flow = _beside_backward(workload, strategy, ready_s, exchanges)
            case "delayed" | "async":
                flow = _beside_next_step(workload, strategy, ready_s, exchanges, bound_s)
            case "local_sgd" | "diloco":
                flow = _after_a_period(workload, strategy, exchanges, share)
    if strategy.schedule == "every_step":
        lower_bound_s = rest_s + max(backward_s, first_ready_s + bound_s)
    elif strategy.schedule in ("delayed", "async"):
        lower_bound_s = max(workload.compute_s, bound_s)
    else:
        lower_bound_s = workload.compute_s + bound_s * share
    return StepTimeline(
        step_s=rest_s + flow.end_s,
        compute_s=workload.compute_s,
        codec_s=codec_s * share,
        wire_s=wire_s * share,
        exposed_s=max(0.0, flow.end_s - backward_s),
        backward_end_s=flow.backward_end_s,
        exchange_end_s=flow.exchange_end_s,
        lower_bound_s=lower_bound_s,
        is_in_range=is_in_range,
        buckets=buckets,
        spans=flow.spans,
    )


class _Flow(NamedTuple):
    """What the fluid gave. ``end_s``: when the step's share of the exchange, and backward, have ended."""

    end_s: float
    backward_end_s: float
    exchange_end_s: float
    spans: tuple[Span, ...]


def _width(strategy: Strategy) -> int:
    return DENSE_IN_FLIGHT if strategy.codec == "dense" and strategy.topology == "flat" else 1


def _beside_backward(
    workload: TrainingWorkload, strategy: Strategy, ready_s: list[float], exchanges: list[Exchange]
) -> _Flow:
    backward_end_s, exchange_end_s, spans = run_step(
        workload.backward_s, ready_s, exchanges, cpus=workload.cpus_per_rank, first_lane_width=_width(strategy)
    )
    return _Flow(max(backward_end_s, exchange_end_s), backward_end_s, exchange_end_s, spans)


def _beside_next_step(
    workload: TrainingWorkload, strategy: Strategy, ready_s: list[float], exchanges: list[Exchange], bound_s: float
) -> _Flow:
    """Compute runs on without a break; what one more step adds to the end of a chain is the step.

    Compute that would have to wait is let run, so that on scarce cores a chain bound by its exchange comes out a little
    slower than it is. ``bound_s``: what one step's bytes need; a chain so short may end a little sooner per step.
    """
    compute_s = workload.compute_s
    before_s = compute_s - workload.backward_s

    def chain_s(num_steps: int) -> tuple[float, float, tuple[Span, ...]]:
        return run_step(
            compute_s * num_steps,
            [step * compute_s + before_s + ready for step in range(num_steps) for ready in ready_s],
            exchanges * num_steps,
            cpus=workload.cpus_per_rank,
            first_lane_width=_width(strategy),
        )

    shorter, longer = chain_s(CHAIN - 1), chain_s(CHAIN)
    # Beyond the last step nothing computes: there the exchange may run faster than in the middle of a chain.
    step_s = max(longer[0] - shorter[0], longer[1] - shorter[1], compute_s, bound_s)
    return _Flow(
        end_s=step_s - before_s,
        backward_end_s=workload.backward_s,
        exchange_end_s=longer[1] - (CHAIN - 1) * step_s - before_s,
        spans=tuple(span for span in longer[2] if span.bucket < len(ready_s)),
    )


def _after_a_period(workload: TrainingWorkload, strategy: Strategy, exchanges: list[Exchange], share: float) -> _Flow:
    _, exchange_end_s, spans = run_step(
        0.0, [0.0] * len(exchanges), exchanges, cpus=workload.cpus_per_rank, first_lane_width=_width(strategy)
    )
    return _Flow(workload.backward_s + exchange_end_s * share, workload.backward_s, exchange_end_s, spans)


def _price(
    strategy: Strategy, bucket: Bucket, workload: TrainingWorkload, costs: StepCosts
) -> tuple[Exchange, float, float, float, bool]:
    """The exchange of one bucket, and its codec seconds, wire seconds, lower bound and whether curves cover it."""
    per_host = workload.ranks_per_host
    if strategy.topology == "hierarchical" and (workload.num_ranks <= per_host or workload.num_ranks % per_host):
        raise DataError(
            f"{strategy.name} among {workload.num_ranks} ranks, {per_host} per host",
            expected="two hosts or more, with as many ranks on each",
        )
    needed = strategy.transfers(bucket.num_elements, workload.num_ranks, bucket.shapes, ranks_per_host=per_host)
    transfers = [costs.transfer(t) for t in needed]
    if not transfers:
        return Exchange((0.0,), ()), 0.0, 0.0, 0.0, True
    size_bytes = bucket.num_elements * BYTES_PER_ELEMENT
    if any(t.scope != "all" for t in needed):
        # Split and join each copy the bucket, as dense's encode is taken to do; the codec sees one share of it.
        copy = costs.stage(Strategy(), "encode", size_bytes)
        share_bytes = BYTES_PER_ELEMENT * hierarchical_shard_elements(bucket.num_elements, per_host)
        stages = [copy, *(costs.stage(strategy, stage, share_bytes) for stage in STAGES[strategy.codec]), copy]
    else:
        stages = [costs.stage(strategy, stage, size_bytes) for stage in STAGES[strategy.codec]]
    return (
        Exchange(
            tuple(stage.seconds for stage in stages),
            tuple((t.latency_s, t.seconds - t.latency_s, t.cpu, t.slowdown) for t in transfers),
        ),
        sum(stage.seconds for stage in stages),
        sum(t.seconds for t in transfers),
        # The bound holds for the wire alone: what a curve counts as latency may overlap between two collectives.
        sum(min(t.lower_bound_s, t.seconds - t.latency_s) for t in transfers),
        all(t.is_in_range for t in transfers) and all(stage.is_in_range for stage in stages),
    )


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
        wire_bytes=round(
            sum(
                strategy.wire_bytes(
                    b.num_elements, workload.num_ranks, b.shapes, ranks_per_host=workload.ranks_per_host
                )
                for b in timeline.buckets
            )
            / strategy.steps_per_exchange
        ),
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
