"""Averages flat buckets over the ranks of one group with one codec: gradients of a backward, or a model's parameters.

Dense goes straight to the process group as DDP itself would; every other codec goes through ``Lanes``, with residuals
and what the codec learns kept by parameter name. Values in fp16 and bf16 are encoded from an fp32 copy and come back in
their own type; fp64 (and any codec's integers) are averaged as they are, with one warning. All ranks must ask for the
same buckets in the same order.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wirespeed.errors import UsageError
from wirespeed.spec.payloads import Shapes
from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs import make_codec, warm_up
from wirespeed.train.codecs.base import Codec, Message
from wirespeed.train.codecs.hierarchical import HierarchicalCodec
from wirespeed.train.groups import group_of, new_group, timeout_of
from wirespeed.train.hosts import HostLayout, host_layout
from wirespeed.train.lanes import Exchange, Lanes, as_peer_failure, peer_failures
from wirespeed.train.report import BucketTimes
from wirespeed.train.residuals import Residuals
from wirespeed.train.undo import Undo

KEPT_BUCKET_TIMES = 4096
_CONVERTED = (torch.float16, torch.bfloat16)
_DENSE = Strategy()


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
        """Takes back the residuals of a backward that the loss scaler skips; does nothing until it is switched on."""
        self.stated_bytes = 0
        """What this rank has sent, by what strategies say."""
        self.stated_nic_bytes = 0
        """What its whole host has sent to other hosts, since ranks were asked which of them share one."""
        self._asked_at_bytes = 0
        self.bucket_times: deque[BucketTimes] = deque(maxlen=KEPT_BUCKET_TIMES)
        self.own_group: dist.ProcessGroup | None = None
        """For what is exchanged beside collectives of the training thread: made by the first ``async`` strategy."""
        self._codec: Codec | None = None
        self._lanes: Lanes | None = None
        self._hop_groups: list[dist.ProcessGroup] = []
        self._layout: HostLayout | None = None
        self._host_groups: list[dist.ProcessGroup] = []
        """For the topology hierarchical: of this host, for its first and last hop."""
        self._between_groups: list[dist.ProcessGroup] = []
        """Of the ranks of equal number on all hosts, for the hops between."""
        self._buffers: dict[tuple[str, ...], Any] = {}
        self._scratch: dict[tuple[str, ...], Tensor] = {}
        self._warned: set[str] = set()
        self._failure: Exception | None = None
        self._dense_sizes: dict[int, tuple[int, int]] = {}
        """Bytes stated for dense buckets by their size: looked up, because dense is held to cost nothing."""
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

    @property
    def timeout_s(self) -> float:
        """Of the process group: for how long a rank waits for the others. Infinite where the backend does not tell."""
        timeout = timeout_of(self.group)
        return math.inf if timeout is None else timeout.total_seconds()

    @property
    def nic_share(self) -> float | None:
        """Bytes that the host sends to others over those that this rank sends; None where hosts were not asked for."""
        sent = self.stated_bytes - self._asked_at_bytes
        return None if self._layout is None or sent == 0 else self.stated_nic_bytes / sent

    def use(self, strategy: Strategy) -> None:
        """Exchange with ``strategy`` from the next bucket on."""
        self.stop()
        self.strategy = strategy
        layout = self._hosts() if strategy.topology == "hierarchical" and self.num_ranks > 1 else None
        is_flat = layout is None or layout.ranks_per_host == 1
        codec = None if self.num_ranks == 1 or (strategy.codec == "dense" and is_flat) else make_codec(strategy)
        if codec is None or not codec.has_residual:
            self.residuals.clear()
        self._codec = codec
        self.forget()
        if strategy.schedule == "async" and self.num_ranks > 1 and self.own_group is None:
            self.own_group = new_group(self.group)
        if codec is None:
            return
        warm_up(device=self.device)
        num_hops = len(codec.stages) - 1
        if layout is not None and not is_flat:
            host, local_rank = layout.place(self.rank)
            groups = self._hierarchical_groups(layout, num_hops)
            self._codec = HierarchicalCodec(
                codec,
                ranks_per_host=layout.ranks_per_host,
                local_rank=local_rank,
                host=host,
                num_hosts=len(layout.hosts),
            )
        else:
            while len(self._hop_groups) < num_hops:
                self._hop_groups.append(new_group(self.group))
            groups = self._hop_groups[:num_hops]
        self._lanes = Lanes(groups, on_done=self._bucket_done)

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
        for groups in (self._hop_groups, self._host_groups, self._between_groups):
            groups.clear()
        released: Any = self
        released.group = released.own_group = None

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
        self._count(self.strategy, num_elements, shapes)
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
        """Average as DDP does: divide, then one all_reduce in the values' own type. Failures as in ``average``."""
        size_bytes = values.numel() * values.element_size()
        self._count(_DENSE, size_bytes // 4, None)
        values.div_(self.num_ranks)
        group = self.own_group if self.strategy.schedule == "async" else self.group
        watched = self.undo if self.undo.is_on else None

        def done(arrived: torch.futures.Future[list[Tensor]]) -> Tensor:
            try:
                result = arrived.value()[0]
            except Exception as fault:  # raised from here, it would come out of DDP's reducer as something else
                self.fail(fault)
                return values
            if watched is not None:
                watched.look_at(result)
            return result

        try:
            work = dist.all_reduce(values, group=group, async_op=True)
        except RuntimeError as fault:
            self.fail(fault)
            return finished(values)
        future: torch.futures.Future[Tensor] = work.get_future().then(done)
        return future

    def count_dense(self, num_bytes: int) -> None:
        """Gradients of so many bytes were averaged by DDP itself."""
        self._count(_DENSE, num_bytes // 4, None)

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

    def _count(self, strategy: Strategy, num_elements: int, shapes: Shapes | None) -> None:
        is_dense = strategy.codec == "dense" and strategy.topology == "flat"
        sent = self._dense_sizes.get(num_elements) if is_dense else None
        if sent is None:
            per_host = 1 if self._layout is None else self._layout.ranks_per_host
            sent = (
                strategy.wire_bytes(num_elements, self.num_ranks, shapes, ranks_per_host=per_host),
                strategy.nic_bytes(num_elements, self.num_ranks, shapes, ranks_per_host=per_host),
            )
            if is_dense:
                self._dense_sizes[num_elements] = sent
        with self._lock:
            self.stated_bytes += sent[0]
            self.stated_nic_bytes += sent[1]

    def _hosts(self) -> HostLayout:
        """Which ranks share a host; asked once."""
        if self._layout is None:
            with peer_failures():
                self._layout = host_layout(self.group, self.device)
            self._dense_sizes.clear()
            self._asked_at_bytes, self.stated_nic_bytes = self.stated_bytes, 0
        if len(self._layout.hosts) == 1:
            raise UsageError(
                f"all {self.num_ranks} ranks are on one host",
                expected="two hosts or more for topology hierarchical: its codec works between hosts",
                hint="use the flat strategy",
            )
        return self._layout

    def _hierarchical_groups(self, layout: HostLayout, num_hops: int) -> list[dist.ProcessGroup]:
        """One group per hop: this host's, then ``num_hops`` between hosts, then this host's again."""
        ranks = dist.get_process_group_ranks(self.group)
        host, local_rank = layout.place(self.rank)
        mates = [ranks[rank] for rank in layout.hosts[host]]
        peers = [ranks[others[local_rank]] for others in layout.hosts]
        while len(self._host_groups) < 2:
            self._host_groups.append(group_of(mates, like=self.group))
        while len(self._between_groups) < num_hops:
            self._between_groups.append(group_of(peers, like=self.group))
        return [self._host_groups[0], *self._between_groups[:num_hops], self._host_groups[1]]

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
