"""Averages flat buckets over the ranks of one group with one codec: gradients of a backward, or a model's parameters.

Dense goes straight to the process group as DDP itself would; every other codec goes through ``Lanes``, with residuals
and what the codec learns kept by parameter name. Values in fp16 and bf16 are encoded from an fp32 copy and come back in
their own type; fp64 (and any codec's integers) are averaged as they are, with one warning. All ranks must ask for the
same buckets in the same order.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs import make_codec, warm_up
from wirespeed.train.codecs.base import Codec, Message
from wirespeed.train.lanes import Exchange, Lanes, as_peer_failure
from wirespeed.train.report import BucketTimes
from wirespeed.train.residuals import Residuals
from wirespeed.train.undo import Undo

KEPT_BUCKET_TIMES = 4096
_CONVERTED = (torch.float16, torch.bfloat16)


class Exchanger:
    """One rank's end of every exchange of a session. ``use`` says how; all ranks call it between the same two steps."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.strategy = Strategy()
        self.residuals = Residuals()
        self.learned = Residuals("codec state")
        self.undo = Undo()
        """What takes back the residuals of a backward that the loss scaler skips; does nothing until it is switched on."""
        self.stated_bytes = 0
        self.bucket_times: deque[BucketTimes] = deque(maxlen=KEPT_BUCKET_TIMES)
        self._codec: Codec | None = None
        self._lanes: Lanes | None = None
        self._hop_groups: list[dist.ProcessGroup] = []
        self._buffers: dict[tuple[str, ...], Any] = {}
        self._scratch: dict[tuple[str, ...], Tensor] = {}
        self._warned: set[str] = set()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        """For the count of bytes: the delayed schedule also begins exchanges from a lane."""

    @property
    def is_plain(self) -> bool:
        """Whether buckets go to the process group as DDP would send them."""
        return self._codec is None

    @property
    def failure(self) -> Exception | None:
        """What ended the exchange, if anything did. It stays: nothing can be exchanged afterwards."""
        return self._failure if self._lanes is None or self._failure is not None else self._lanes.failure

    def use(self, strategy: Strategy) -> None:
        """Exchange with ``strategy`` from the next bucket on."""
        self.stop()
        self.strategy = strategy
        codec = None if strategy.codec == "dense" or self.num_ranks == 1 else make_codec(strategy)
        if codec is None or not codec.has_residual:
            self.residuals.clear()
        self._codec = codec
        self.forget()
        if codec is not None:
            warm_up(device=self.device)
            num_hops = len(codec.stages) - 1
            while len(self._hop_groups) < num_hops:
                self._hop_groups.append(new_group(self.group))
            self._lanes = Lanes(self._hop_groups[:num_hops], on_done=self._bucket_done)

    def forget(self) -> None:
        """Drop buffers and what the codec has learned. Residuals stay."""
        self.learned.clear()
        self.drop_buffers()

    def drop_buffers(self) -> None:
        """Drop what is made anew from residuals and codec state when a bucket next appears."""
        self._buffers.clear()
        self._scratch.clear()
        self.undo.clear()

    def stop(self) -> None:
        """End the lanes after what is queued."""
        if self._lanes is not None:
            self._failure = self._failure or self._lanes.failure
            self._lanes.close()
            self._lanes = None

    def release(self) -> None:
        """Let go of the process groups: nothing can be exchanged afterwards."""
        self.stop()
        self._codec = None
        self._hop_groups.clear()
        released: Any = self
        released.group = None

    def average(
        self, values: Tensor, *, bucket: int, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
    ) -> torch.futures.Future[Tensor]:
        """Average a flat bucket in place; the future gives ``values`` when that is done.

        After a failure the future is completed all the same, with whatever stands in ``values``: ask ``failure``.
        """
        codec, lanes = self._codec, self._lanes
        if codec is None or lanes is None:
            return self.all_reduce(values)
        steps_on = values
        if values.dtype in _CONVERTED:
            held = self._scratch.get(names)
            if held is None:
                held = self._scratch[names] = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
            steps_on = held
        elif values.dtype != torch.float32:
            self.warn_once(
                "dtype",
                f"values of {values.dtype} are averaged as they are: {self.strategy.name!r} takes fp32, fp16 and bf16",
            )
            return self.all_reduce(values)
        num_elements = values.numel()
        self._count(self.strategy.wire_bytes(num_elements, self.num_ranks, shapes))
        residual = None
        if codec.has_residual:
            residual = self.residuals.for_bucket(names, tuple(_num_elements(shapes)), self.device)
            self.undo.remember(names, residual)
        buffers = self._buffers.get(names)
        if buffers is None:
            learned = self.learned.for_bucket(names, codec.state_sizes(shapes), self.device)
            buffers = self._buffers[names] = codec.make_buffers(
                num_elements, self.num_ranks, values.device, shapes=shapes, state_s=learned
            )
        steps = codec.exchange(steps_on, residual, buffers, rank=self.rank, num_ranks=self.num_ranks)
        future = new_future(values)
        lanes.submit(
            Exchange(
                bucket=bucket,
                steps=steps if steps_on is values else _converted(values, steps_on, steps),
                result=values,
                future=future,
            )
        )
        return future

    def all_reduce(self, values: Tensor) -> torch.futures.Future[Tensor]:
        """Average as DDP does: divide, then one all_reduce in the values' own type."""
        size_bytes = values.numel() * values.element_size()
        self._count(Strategy().wire_bytes(size_bytes // 4, self.num_ranks))
        values.div_(self.num_ranks)
        work = dist.all_reduce(values, group=self.group, async_op=True)
        watched = self.undo if self.undo.is_on else None

        def done(finished: torch.futures.Future[list[Tensor]]) -> Tensor:
            result = finished.value()[0]
            if watched is not None:
                watched.look_at(result)
            return result

        future: torch.futures.Future[Tensor] = work.get_future().then(done)
        return future

    def fail(self, fault: Exception) -> None:
        """Keep the first error of an exchange that did not go through the lanes."""
        self._failure = self._failure or as_peer_failure(fault)

    def raise_failure(self) -> None:
        """Raise what ended the exchange, if anything did."""
        if self.failure is not None:
            raise self.failure

    def warn_once(self, key: str, text: str) -> None:
        """One warning per session and ``key``."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"wirespeed: {text}", stacklevel=4)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.stated_bytes += num_bytes

    def _bucket_done(self, exchange: Exchange) -> None:
        assert self._codec is not None
        if self.undo.is_on:
            self.undo.look_at(exchange.result)
        self.bucket_times.append(
            BucketTimes(
                bucket=exchange.bucket,
                num_bytes=exchange.result.numel() * 4,
                stages=self._codec.stages,
                queued_s=exchange.queued_s,
                spans_s=tuple(exchange.spans_s),
            )
        )


def new_group(like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks, backend and time-out, for collectives of our own."""
    ranks = dist.get_process_group_ranks(like)
    is_world = len(ranks) == dist.get_world_size()
    group: dist.ProcessGroup = dist.new_group(
        ranks, backend=dist.get_backend(like), use_local_synchronization=not is_world
    )
    return group


def finished(values: Tensor) -> torch.futures.Future[Tensor]:
    """A future that holds ``values`` already."""
    future = new_future(values)
    future.set_result(values)
    return future


def new_future(values: Tensor) -> torch.futures.Future[Tensor]:
    """A future for a tensor on the device of ``values``."""
    return torch.futures.Future(devices=[values.device] if values.is_cuda else None)


def _converted(values: Tensor, copy_n: Tensor, steps: Iterator[Message]) -> Iterator[Message]:
    """The exchange of an fp32 copy, whose result is written back."""
    copy_n.copy_(values)
    yield from steps
    values.copy_(copy_n)


def _num_elements(shapes: tuple[tuple[int, ...], ...]) -> Iterator[int]:
    for shape in shapes:
        num_elements = 1
        for side in shape:
            num_elements *= side
        yield num_elements


