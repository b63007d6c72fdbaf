"""Lanes: the ordered communication workers of one rank.

Lane k is one thread with one process group. It takes buckets in the order in which backward made them, runs the k-th
local stage of each bucket's codec, performs the collective that the stage asks for, and hands the bucket to lane k + 1.
So every rank issues the collectives of one group in the same order (gloo and NCCL require it), a bucket is encoded
while the one before it is on the wire, and nothing ever waits inside a future's callback (which deadlocks on gloo,
pytorch#48478).

An error in any lane ends its bucket and all that come after it, and is kept as ``failure``: the session raises it out
of the user's ``backward``. (An exception set on the bucket's future would reach the user as a failed cast, because the
reducer reads the future's value.)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from wirespeed.errors import PeerFailure, WirespeedError
from wirespeed.measure.exchange import all_gather_single, all_to_all, reduce_scatter_single
from wirespeed.train import ranges
from wirespeed.train.codecs.base import Message


@dataclass(kw_only=True)
class Exchange:
    """One bucket on its way through the lanes.

    ``spans_s`` holds begin and end of stage 0, collective 0, stage 1, ..., on the clock of ``queued_s``.
    """

    bucket: int
    steps: Iterator[Message]
    result: Tensor
    future: torch.futures.Future[Tensor]
    queued_s: float = field(default_factory=time.perf_counter)
    spans_s: list[tuple[float, float]] = field(default_factory=list)


class Lanes:
    """The workers of one rank: one per local stage, all but the last with a process group of its own."""

    def __init__(self, groups: list[dist.ProcessGroup], *, on_done: Callable[[Exchange], None]) -> None:
        self._groups = groups
        self._on_done = on_done
        self._queues: list[SimpleQueue[Exchange | None]] = [SimpleQueue() for _ in range(len(groups) + 1)]
        self.failure: Exception | None = None
        self._ranges = ranges.open_backend() if ranges.are_wanted() else None
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"wirespeed-lane-{lane}", daemon=True)
            for lane in range(len(groups) + 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, exchange: Exchange) -> None:
        """Put a bucket at the end of the first lane's queue."""
        self._queues[0].put(exchange)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """End the threads after what is queued. A thread stuck in a collective is left to the group's own time-out."""
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self, lane: int) -> None:
        while True:
            exchange = self._queues[lane].get()
            if exchange is None:
                if lane < len(self._groups):
                    self._queues[lane + 1].put(None)
                return
            if self.failure is not None:
                exchange.future.set_result(exchange.result)
                continue
            try:
                is_finished = self._advance(exchange, lane)
            except Exception as fault:
                self.failure = as_peer_failure(fault)
                exchange.future.set_result(exchange.result)
                continue
            if is_finished:
                self._on_done(exchange)
                exchange.future.set_result(exchange.result)
            else:
                self._queues[lane + 1].put(exchange)

    def _advance(self, exchange: Exchange, lane: int) -> bool:
        """Run one stage and its collective. True when the exchange has ended."""
        began_s = time.perf_counter()
        with ranges.span(self._ranges, f"stage {lane} of bucket {exchange.bucket}"):
            message = next(exchange.steps, None)
        ended_s = time.perf_counter()
        exchange.spans_s.append((began_s, ended_s))
        if message is None:
            return True
        with ranges.span(self._ranges, f"{message.collective} of bucket {exchange.bucket}"):
            perform(message, self._groups[lane])
        exchange.spans_s.append((ended_s, time.perf_counter()))
        return False


def perform(message: Message, group: dist.ProcessGroup) -> None:
    """Carry out one collective and wait for its end. Raises what the backend raises."""
    match message.collective:
        case "all_reduce":
            dist.all_reduce(message.receive, group=group)
        case "all_to_all":
            all_to_all(message.receive, message.send, group)
        case "all_gather":
            all_gather_single(message.receive, message.send, group=group)
        case "reduce_scatter":
            reduce_scatter_single(message.receive, message.send, group=group)
        case "broadcast":
            dist.broadcast(message.receive, src=dist.get_global_rank(group, 0), group=group)


_TRANSPORT_WORDS = ("gloo", "nccl", "timed out", "timeout", "closed by peer", "reset by peer", "broken pipe")
"""What backends' errors say, which are plain RuntimeErrors where they are gloo's."""


def as_peer_failure(fault: Exception) -> Exception:
    """What a user is told: errors of the backend (connection reset, time-out) as a PeerFailure, others as they are."""
    if isinstance(fault, WirespeedError):
        return fault
    text = str(fault).lower()
    if isinstance(fault, dist.DistError) or any(word in text for word in _TRANSPORT_WORDS):
        return PeerFailure(
            f"exchanging gradients failed: {str(fault).splitlines()[0] if str(fault) else type(fault).__name__}",
            hint="a rank died or its link went down; see the output of the other ranks for the first error",
        )
    return fault


@contextlib.contextmanager
def peer_failures() -> Iterator[None]:
    """For collectives outside of the lanes: what the backend raises inside is told as ``as_peer_failure`` tells it."""
    try:
        yield
    except RuntimeError as fault:
        told = as_peer_failure(fault)
        if told is fault:
            raise
        raise told from fault
