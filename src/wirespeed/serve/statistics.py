"""Counters of one model: what the protocol's statistics and /metrics are made of.

Times are nanoseconds, sums of requests.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from wirespeed.serve.status import Reason, RequestFailed

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ModelStatistics:
    """Plain counters; only the server's event loop writes them."""

    def __init__(self) -> None:
        self.num_success = 0
        self.success_ns = 0
        self.num_failed = 0
        self.failed_ns = 0
        self.queue_ns = 0
        self.compute_ns = 0
        self.output_ns = 0
        self.num_rows = 0
        self.num_executions = 0
        self.num_restarts = 0
        self.last_unix_ms = 0
        self.failures: dict[Reason, int] = {}
        self.batches: dict[int, tuple[int, int]] = {}
        """Rows of a batch -> how many, and their compute time."""
        self.latency_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)

    def ended(self, done: asyncio.Future[Any], *, rows: int, begin_ns: int) -> None:
        """A request that ran elsewhere has ended, in whichever way: only the whole of its time is known."""
        took_ns = time.perf_counter_ns() - begin_ns
        fault = None if done.cancelled() else done.exception()
        if done.cancelled():
            self.failed(Reason.CANCELLED, took_ns)
        elif fault is None:
            self.succeeded(rows=rows, total_ns=took_ns, queue_ns=0, compute_ns=0, output_ns=0)
        else:
            self.failed(fault.reason if isinstance(fault, RequestFailed) else Reason.FAILED, took_ns)

    def succeeded(self, *, rows: int, total_ns: int, queue_ns: int, compute_ns: int, output_ns: int) -> None:
        """A request was answered."""
        self.num_success += 1
        self.num_rows += rows
        self.success_ns += total_ns
        self.queue_ns += queue_ns
        self.compute_ns += compute_ns
        self.output_ns += output_ns
        seconds = total_ns / 1e9
        place = 0
        for bound_s in LATENCY_BOUNDS_S:
            if seconds <= bound_s:
                break
            place += 1
        self.latency_counts[place] += 1

    def failed(self, reason: Reason, total_ns: int) -> None:
        """A request was not."""
        self.num_failed += 1
        self.failed_ns += total_ns
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def executed(self, rows: int, compute_ns: int) -> None:
        """A batch ran."""
        self.num_executions += 1
        count, total_ns = self.batches.get(rows, (0, 0))
        self.batches[rows] = (count + 1, total_ns + compute_ns)
        self.last_unix_ms = time.time_ns() // 1_000_000
