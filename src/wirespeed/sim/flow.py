"""The fluid of one rank's step: backward, lanes of codec stages, the wire and the cores they share.

Every activity has work left and a rate; rates change only when an activity starts or ends, so the simulation jumps from
one such event to the next and is exact. An event costs some microseconds; a step has a few per bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

_NOTHING_LEFT_S = 1e-12
"""Work below a picosecond is rounding of the subtraction, not work."""

Activity = Literal["stage", "transfer"]
_IDLE, _STAGE, _LATENCY, _WIRE = range(4)


class Span(NamedTuple):
    """One activity of one bucket, in seconds since the start of backward. Lane k runs stage k and transfer k."""

    bucket: int
    lane: int
    activity: Activity
    start_s: float
    end_s: float


class Exchange(NamedTuple):
    """One bucket's durations: stages K + 1, and per transfer K (latency, wire work, cpu, slowdown beside compute)."""

    stages_s: tuple[float, ...]
    transfers: tuple[tuple[float, float, float, float], ...]


def run_step(  # noqa: PLR0912, PLR0915 - one loop over one state; cut up it is slower and harder to follow
    backward_s: float,
    ready_s: Sequence[float],
    exchanges: Sequence[Exchange],
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
    slowdown = [1.0] * len(lanes)
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
                        left[worker], _, cpu[worker], slowdown[worker] = exchanges[bucket].transfers[lane]
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
        # Only ranks that run on these cores take up messages late while they compute.
        computes = cpus is not None and (backward_runs or _STAGE in phase)
        pace = [
            (wire_share if phase[worker] == _WIRE else 1.0) / (slowdown[worker] if computes else 1.0)
            for worker in workers
        ]
        if cpus is not None:
            alone = min(1.0, cpus)
            wants = [alone] if backward_runs else []
            for worker in workers:
                state = phase[worker]
                if state == _STAGE:
                    wants.append(alone)
                elif state != _IDLE:
                    wants.append(min(cpu[worker], cpus) * pace[worker])
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
                rate = pace[worker]
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
