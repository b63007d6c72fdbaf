"""hierarchical: sum inside the host, send only between hosts, gather inside the host; around any codec but lowrank.

Each rank of a host owns one share of every bucket. The ranks of a host give each other their parts of it (fp32) and add
them; the codec then averages each share over the hosts, among the ranks that own the same share; and the ranks of a
host gather the shares. So a host sends a bucket once, however many ranks it has, where a flat all_to_all would send it
once per rank. Inside the host nothing is compressed: memory and NVLink are taken to be much faster than the NIC.

What error feedback holds back belongs to the owner of a share and is kept at its place in the bucket's residual. It is
added to the rank's own gradient before the ranks of the host exchange theirs, so it also finds its way when buckets are
divided anew and the place belongs to another rank. (A step that is not finite therefore loses it, unless a loss scaler
is known, which restores it.)

Shape suffixes as in ``base``; g: ranks of a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wirespeed.spec.payloads import Shapes, hierarchical_shard_elements
from wirespeed.train.codecs.base import Codec, Message


@dataclass
class HierarchicalBuffers:
    """One bucket, padded to g shares: what the ranks of a host exchange, the own share, and the codec's own buffers."""

    send_n: Tensor
    received_n: Tensor
    share_n: Tensor
    held_n: Tensor
    inner: Any


class HierarchicalCodec:
    """Another codec between hosts only. ``inner`` is that of the flat strategy."""

    def __init__(self, inner: Codec, *, ranks_per_host: int, local_rank: int, host: int, num_hosts: int) -> None:
        self.strategy = inner.strategy
        self.stages: tuple[str, ...] = ("split", *inner.stages, "join")
        self.has_residual = inner.has_residual
        self._inner = inner
        self._ranks_per_host = ranks_per_host
        self._local_rank = local_rank
        self._host = host
        self._num_hosts = num_hosts

    def state_sizes(self, shapes: Shapes) -> tuple[int, ...]:
        """See ``Codec.state_sizes``: that of the codec inside."""
        return self._inner.state_sizes(shapes)

    def make_buffers(
        self,
        num_elements: int,
        num_ranks: int,
        device: torch.device,
        *,
        shapes: Shapes | None = None,
        state_s: Tensor | None = None,
    ) -> HierarchicalBuffers:
        """Two buckets in fp32, two shares, and what the codec needs for one share among the hosts."""
        share = hierarchical_shard_elements(num_elements, self._ranks_per_host)
        padded = share * self._ranks_per_host
        return HierarchicalBuffers(
            send_n=torch.zeros(padded, device=device),
            received_n=torch.zeros(padded, device=device),
            share_n=torch.zeros(share, device=device),
            held_n=torch.zeros(share if self.has_residual else 0, device=device),
            inner=self._inner.make_buffers(share, self._num_hosts, device, state_s=state_s),
        )

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: HierarchicalBuffers, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """See ``Codec.exchange``."""
        b, size = buffers, grad_n.numel()
        if size == 0:
            return
        if residual_n is not None:
            grad_n.add_(residual_n)
            residual_n.zero_()
            b.held_n.zero_()
        b.send_n[:size].copy_(grad_n)
        yield Message("all_to_all", b.send_n, b.received_n)
        torch.sum(b.received_n.view(self._ranks_per_host, -1), 0, out=b.share_n)
        held_n = None if residual_n is None else b.held_n
        yield from self._inner.exchange(b.share_n, held_n, b.inner, rank=self._host, num_ranks=self._num_hosts)
        b.share_n.mul_(1 / self._ranks_per_host)
        if residual_n is not None:
            own_n = residual_n[self._local_rank * len(b.share_n) :][: len(b.share_n)]
            own_n.copy_(b.held_n[: len(own_n)])
        yield Message("all_gather", b.share_n, b.received_n)
        grad_n.copy_(b.received_n[:size])
