"""Request queues with dynamic batching: open or closed arrivals, several replicas, throughput and latency percentiles.

A deterministic event recurrence over seeded arrivals. A free replica takes what waits, at most ``max_batch``; where
fewer wait it holds on until the oldest has waited ``max_wait_s``. Service is ``fixed_s + per_item_s x batch``, plus
jitter. Assumes one queue that all replicas share, requests of one size, and clients that do not give up.
"""

from __future__ import annotations

import heapq
import math

import msgspec

from wirespeed.errors import UsageError


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica does with a batch of b requests: ``fixed_s + per_item_s * b``; and how batches form."""

    fixed_s: float
    per_item_s: float
    max_batch: int = 1
    max_wait_s: float = 0.0
    replicas: int = 1
    jitter: float = 0.0
    network_s: float = 0.0
    """Added to every request's latency outside of the replica: both ways on the wire and through the front door."""

    def __post_init__(self) -> None:
        values = (self.fixed_s, self.per_item_s, self.max_wait_s, self.jitter, self.network_s)
        if not all(0 <= value < math.inf for value in values) or self.fixed_s + self.per_item_s <= 0:
            raise UsageError(f"got {self!r}", expected="times of 0 s or more, and a service above 0 s")
        if self.max_batch < 1 or self.replicas < 1:
            raise UsageError(
                f"got a batch of {self.max_batch} on {self.replicas} replicas", expected="1 or more of both"
            )

    def batch_s(self, size: float) -> float:
        """Seconds of one batch."""
        return self.fixed_s + self.per_item_s * size

    @property
    def capacity_per_s(self) -> float:
        """Requests per second with full batches: no arrival rate above it is served."""
        return self.replicas * self.max_batch / self.batch_s(self.max_batch)


class QueuePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Steady state, the first tenth of the requests left out. Latencies are None where the queue grows without end."""

    throughput_per_s: float
    capacity_per_s: float
    utilization: float
    mean_batch: float
    p50_s: float | None
    p99_s: float | None
    mean_s: float | None
    lower_bound_s: float
    is_stable: bool


def predict_queue(
    service: Service,
    *,
    arrivals_per_s: float | None = None,
    clients: int | None = None,
    think_s: float = 0.0,
    num_requests: int = 20_000,
    seed: int = 0,
) -> QueuePrediction:
    """Predict an open queue (``arrivals_per_s``, Poisson) or a closed one (``clients`` that wait for each answer).

    Above 98 % of the capacity an open queue's latency depends on how long it has been open: it is called unstable and
    has none. Raises UsageError unless exactly one of the two kinds of load is given.
    """
    if (arrivals_per_s is None) == (clients is None):
        raise UsageError("got both or neither of arrivals_per_s and clients", expected="one of them")
    if num_requests < 100:
        raise UsageError(f"got {num_requests} requests", expected="100 or more, to take percentiles of")
    if arrivals_per_s is not None:
        if not 0 < arrivals_per_s < math.inf:
            raise UsageError(f"got {arrivals_per_s} arrivals per second", expected="above zero")
        if arrivals_per_s >= 0.98 * service.capacity_per_s:
            return QueuePrediction(
                throughput_per_s=service.capacity_per_s,
                capacity_per_s=service.capacity_per_s,
                utilization=1.0,
                mean_batch=float(service.max_batch),
                p50_s=None,
                p99_s=None,
                mean_s=None,
                lower_bound_s=service.batch_s(1) + service.network_s,
                is_stable=False,
            )
    assert arrivals_per_s is not None or clients is not None
    if clients is not None and (clients < 1 or think_s < 0):
        raise UsageError(f"got {clients} clients that think for {think_s:g} s", expected="1 or more, and 0 s or more")
    return _run(service, arrivals_per_s, clients, think_s, num_requests, seed)


def _run(  # noqa: PLR0917 - private, called in one place
    service: Service, arrivals_per_s: float | None, clients: int | None, think_s: float, num_requests: int, seed: int
) -> QueuePrediction:
    import numpy as np

    random = np.random.default_rng(seed)
    noise = random.standard_normal(num_requests) if service.jitter else None
    if arrivals_per_s is not None:
        pending = np.cumsum(random.exponential(1 / arrivals_per_s, num_requests)).tolist()
    else:
        assert clients is not None
        # Clients start spread over one batch, so that they do not all knock at once.
        pending = (random.random(clients) * (service.batch_s(1) + think_s)).tolist()
    heapq.heapify(pending)
    free = [0.0] * service.replicas
    latencies: list[float] = []
    ends: list[float] = []
    busy_s = 0.0
    num_batches = 0
    while pending and len(latencies) < num_requests:
        replica_s = heapq.heappop(free)
        first = pending[0]
        start_s = max(replica_s, first)
        batch: list[float] = []
        deadline_s = max(start_s, first + service.max_wait_s)
        while pending and len(batch) < service.max_batch and pending[0] <= deadline_s:
            batch.append(heapq.heappop(pending))
        # A full batch leaves when its last member is there; a short one when the oldest has waited its time.
        is_full = len(batch) == service.max_batch
        start_s = max(replica_s, batch[-1]) if is_full else max(start_s, deadline_s)
        took_s = service.batch_s(len(batch))
        if noise is not None:
            took_s *= max(0.1, 1 + service.jitter * float(noise[num_batches % num_requests]))
        end_s = start_s + took_s
        busy_s += took_s
        num_batches += 1
        heapq.heappush(free, end_s)
        for arrived in batch:
            latencies.append(end_s - arrived + service.network_s)
            ends.append(end_s)
            if clients is not None:
                heapq.heappush(pending, end_s + service.network_s + think_s)
    skip = len(latencies) // 10
    held = np.array(latencies[skip:])
    spent_s = max(ends) - ends[skip]
    return QueuePrediction(
        throughput_per_s=(len(ends) - skip) / spent_s if spent_s > 0 else service.capacity_per_s,
        capacity_per_s=service.capacity_per_s,
        utilization=min(1.0, busy_s / (service.replicas * max(ends))),
        mean_batch=len(latencies) / num_batches,
        p50_s=float(np.quantile(held, 0.5)),
        p99_s=float(np.quantile(held, 0.99)),
        mean_s=float(held.mean()),
        lower_bound_s=service.batch_s(1) + service.network_s,
        is_stable=True,
    )
