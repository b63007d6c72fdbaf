"""Batch jobs that scatter items over workers, compute, and gather results: plain, in chunks that overlap, over a tree.

A recurrence over chunks: the root's NIC sends one after another, each worker receives, computes and returns in order,
and the root's other direction takes the results one after another. Exact for those resources; it leaves out the
switch's buffers (incast is a ``gather_share`` below 1) and workers that fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from wirespeed.errors import UsageError


class ScatterJob(msgspec.Struct, frozen=True, kw_only=True):
    """Items of ``in_bytes`` that become results of ``out_bytes`` after ``item_s`` on a worker of speed 1."""

    num_items: int
    in_bytes: float
    out_bytes: float
    item_s: float
    fixed_s: float = 0.0
    """Per chunk on the worker: a batch's own cost."""

    def __post_init__(self) -> None:
        values = (self.in_bytes, self.out_bytes, self.item_s, self.fixed_s)
        if self.num_items < 1 or not all(0 <= value < math.inf for value in values):
            raise UsageError(f"got {self!r}", expected="1 item or more, and sizes and times of 0 or more")


class ScatterPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """``parts_s`` of the root's clock: sending, waiting for compute, and receiving after all was sent."""

    total_s: float
    lower_bound_s: float
    binding: str
    parts_s: dict[str, float]
    chunk_items: int
    throughput_per_s: float


def predict_scatter(
    job: ScatterJob,
    *,
    root_bytes_per_s: float,
    worker_bytes_per_s: Sequence[float],
    worker_speed: Sequence[float] | None = None,
    chunk_items: int | None = None,
    latency_s: float = 0.0,
    gather_share: float = 1.0,
    is_overlapped: bool = True,
) -> ScatterPrediction:
    """Time from the first byte out to the last result in.

    Items go to workers in proportion to ``worker_speed``. ``chunk_items`` None takes the best of a few sizes.
    ``is_overlapped`` False sends everything, then computes, then gathers, which is what a scatter and a gather
    collective around the computation do. ``gather_share``: what is left of the root's rate under incast.
    """
    workers = len(worker_bytes_per_s)
    speed = [1.0] * workers if worker_speed is None else list(worker_speed)
    rates = [root_bytes_per_s, *worker_bytes_per_s, *speed]
    if workers < 1 or len(speed) != workers or not all(0 < rate < math.inf for rate in rates):
        raise UsageError(f"got {workers} workers with rates {rates}", expected="one or more, with rates above zero")
    if not 0 < gather_share <= 1 or latency_s < 0:
        raise UsageError(
            f"got a gather share of {gather_share:g}", expected="above 0, at most 1, and a latency of 0 s or more"
        )
    counts = _split(job.num_items, speed)
    if chunk_items is None:
        sizes = sorted({1, *(max(1, math.ceil(max(counts) / parts)) for parts in (1, 2, 4, 8, 16, 32, 64))})
        sizes = [size for size in sizes if job.num_items / size <= 20_000]
    elif chunk_items < 1:
        raise UsageError(f"got chunks of {chunk_items} items", expected="1 or more")
    else:
        sizes = [chunk_items]
    best: tuple[float, int, float, float] | None = None
    for size in sizes:
        run = _run(
            job, counts, size, root_bytes_per_s, list(worker_bytes_per_s), speed, latency_s, gather_share, is_overlapped
        )
        if best is None or run[0] < best[0]:
            best = (run[0], size, run[1], run[2])
    assert best is not None
    total_s, size, sent_s, computed_s = best
    send_s = job.num_items * job.in_bytes / root_bytes_per_s
    gather_s = job.num_items * job.out_bytes / (root_bytes_per_s * gather_share)
    work_s = job.num_items * job.item_s / sum(speed)
    bounds = {"root NIC, sending": send_s, "compute": work_s, "root NIC, receiving": gather_s}
    bounds["worker NIC"] = max(
        count * max(job.in_bytes, job.out_bytes) / rate for count, rate in zip(counts, worker_bytes_per_s, strict=True)
    )
    binding = max(bounds, key=lambda name: bounds[name])
    if latency_s > max(bounds.values()):
        binding = "latency"
    return ScatterPrediction(
        total_s=total_s,
        lower_bound_s=max(bounds.values()),
        binding=binding,
        parts_s={
            "sending": sent_s,
            "computing after the last send": max(0.0, computed_s - sent_s),
            "gathering after the last result": max(0.0, total_s - max(sent_s, computed_s)),
        },
        chunk_items=size,
        throughput_per_s=job.num_items / total_s,
    )


def _split(num_items: int, speed: Sequence[float]) -> list[int]:
    """Whole items in proportion to speed; the largest remainders get the rest."""
    exact = [num_items * one / sum(speed) for one in speed]
    counts = [int(share) for share in exact]
    order = sorted(range(len(speed)), key=lambda worker: (counts[worker] - exact[worker], worker))
    for worker in order[: num_items - sum(counts)]:
        counts[worker] += 1
    return counts


def _run(  # noqa: PLR0917 - private, called in one place
    job: ScatterJob,
    counts: Sequence[int],
    size: int,
    root_rate: float,
    worker_rates: Sequence[float],
    speed: Sequence[float],
    latency_s: float,
    gather_share: float,
    is_overlapped: bool,
) -> tuple[float, float, float]:
    """``(total, last send, last compute)``."""
    left = list(counts)
    sent_s = 0.0
    in_free = [0.0] * len(counts)
    busy = [0.0] * len(counts)
    results: list[tuple[float, float, float]] = []
    arrivals: list[list[tuple[float, int]]] = [[] for _ in counts]
    while any(left):
        for worker, rest in enumerate(left):
            if rest == 0:
                continue
            items = min(size, rest)
            left[worker] -= items
            num_bytes = items * job.in_bytes
            start_s = sent_s
            sent_s += num_bytes / root_rate
            # A slower worker NIC drains behind the root's; both carry the chunk at the same time.
            in_free[worker] = max(sent_s, max(in_free[worker], start_s) + num_bytes / worker_rates[worker])
            arrivals[worker].append((in_free[worker] + latency_s, items))
    last_arrival_s = max(in_free) + latency_s
    for worker, chunks in enumerate(arrivals):
        for arrived_s, items in chunks:
            ready_s = arrived_s if is_overlapped else last_arrival_s
            busy[worker] = max(busy[worker], ready_s) + job.fixed_s + items * job.item_s / speed[worker]
            num_bytes = items * job.out_bytes
            results.append((busy[worker], num_bytes / worker_rates[worker], num_bytes / (root_rate * gather_share)))
    computed_s = max(busy)
    done_s = 0.0
    for ready_s, worker_s, root_s in sorted(results):
        begin_s = ready_s if is_overlapped else computed_s
        done_s = max(max(begin_s, done_s) + root_s, begin_s + worker_s)
    return done_s + latency_s, sent_s, computed_s
