"""Request load on any callable: closed loop (so many callers, each waiting for its answer) or open loop (a rate).

In an open loop a request's latency counts from when it was due, not from when it could be sent: a target that stalls
is then charged for everybody who would have come meanwhile. Requests of the warm-up are sent and not counted. Every
request has a deadline, so a target that never answers ends the run in time with errors.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import msgspec

from wirespeed.errors import UsageError
from wirespeed.measure.stats import percentile

Target = Callable[[], Awaitable[None]]
"""One request, checked: returns when the answer is right, raises where it is not."""
MAX_OPEN = 10_000
"""Requests of an open loop under way at once; more are counted as failed without being sent."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run gave. Latencies are of answered requests; ``failures`` counts the others by what was said."""

    mode: str
    concurrency: int | None
    offered_per_s: float | None
    duration_s: float
    num_ok: int
    num_failed: int
    failures: dict[str, int]
    requests_per_s: float
    latency_p50_s: float | None
    latency_p90_s: float | None
    latency_p99_s: float | None
    latency_max_s: float | None


class _Tally:
    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.failures: dict[str, int] = {}

    def failed(self, fault: BaseException) -> None:
        text = str(fault).splitlines()[0][:200] if str(fault) else type(fault).__name__
        if text not in self.failures and len(self.failures) >= 20:
            text = "other"
        self.failures[text] = self.failures.get(text, 0) + 1

    def report(
        self, *, mode: str, concurrency: int | None, offered_per_s: float | None, duration_s: float
    ) -> LoadReport:
        held = self.latencies_s
        return LoadReport(
            mode=mode,
            concurrency=concurrency,
            offered_per_s=offered_per_s,
            duration_s=duration_s,
            num_ok=len(held),
            num_failed=sum(self.failures.values()),
            failures=self.failures,
            requests_per_s=len(held) / duration_s,
            latency_p50_s=percentile(held, 0.5) if held else None,
            latency_p90_s=percentile(held, 0.9) if held else None,
            latency_p99_s=percentile(held, 0.99) if held else None,
            latency_max_s=max(held) if held else None,
        )


async def closed_loop(
    target: Target, *, concurrency: int, duration_s: float, warmup_s: float = 0.5, timeout_s: float = 30.0
) -> LoadReport:
    """``concurrency`` callers for ``duration_s``, after ``warmup_s`` that is not counted."""
    if concurrency < 1 or not duration_s > 0:
        raise UsageError(f"got concurrency {concurrency}, duration {duration_s} s", expected="both above zero")
    clock = time.perf_counter  # an event loop's own clock may count whole milliseconds (uvloop's does)
    tally = _Tally()
    start_s = clock() + warmup_s
    end_s = start_s + duration_s

    async def caller() -> None:
        while (begin_s := clock()) < end_s:
            try:
                async with asyncio.timeout(timeout_s):
                    await target()
            except Exception as fault:
                if clock() >= start_s:
                    tally.failed(fault)
                await asyncio.sleep(0.001)  # a target that refuses at once must not spin this loop
                continue
            done_s = clock()
            if start_s <= done_s <= end_s:
                tally.latencies_s.append(done_s - begin_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(caller())
    return tally.report(mode="closed", concurrency=concurrency, offered_per_s=None, duration_s=duration_s)


async def open_loop(
    target: Target,
    *,
    rate_per_s: float,
    duration_s: float,
    warmup_s: float = 0.5,
    timeout_s: float = 30.0,
    seed: int = 0,
) -> LoadReport:
    """Poisson arrivals at ``rate_per_s`` for ``duration_s``.

    A target that cannot keep up shows as latency and failures.
    """
    if not rate_per_s > 0 or not duration_s > 0:
        raise UsageError(f"got rate {rate_per_s}/s, duration {duration_s} s", expected="both above zero")
    clock = time.perf_counter  # an event loop's own clock may count whole milliseconds (uvloop's does)
    tally = _Tally()
    arrivals = random.Random(seed)  # noqa: S311 - a workload, not a secret
    start_s = clock() + warmup_s
    due_s, end_s = clock(), start_s + duration_s
    running: set[asyncio.Task[None]] = set()

    async def one(due_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await target()
        except Exception as fault:
            if due_s >= start_s:
                tally.failed(fault)
            return
        if due_s >= start_s:
            tally.latencies_s.append(clock() - due_s)

    while due_s < end_s:
        await asyncio.sleep(max(0.0, due_s - clock()))
        if len(running) >= MAX_OPEN:
            tally.failed(RuntimeError(f"{MAX_OPEN} requests are under way already"))
        else:
            task = asyncio.ensure_future(one(due_s))
            running.add(task)
            task.add_done_callback(running.discard)
        due_s += arrivals.expovariate(rate_per_s)
    if running:
        await asyncio.wait(running)
    return tally.report(mode="open", concurrency=None, offered_per_s=rate_per_s, duration_s=duration_s)
