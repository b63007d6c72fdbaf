"""Which ranks of a group share a host: asked of the ranks themselves, so that any rank order will do.

A host is what ``WIRESPEED_HOST`` or the kernel calls it. Ranks exchange a digest of that name, not the name: its length
is fixed and nothing has to be unpickled.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from wirespeed.errors import UsageError
from wirespeed.measure.environment import host_name


@dataclass(frozen=True)
class HostLayout:
    """The ranks of a group (numbers within it) by host, in the order of each host's first rank."""

    hosts: tuple[tuple[int, ...], ...]

    @property
    def ranks_per_host(self) -> int:
        """The same on every host."""
        return len(self.hosts[0])

    def place(self, rank: int) -> tuple[int, int]:
        """``(host, number within it)`` of a rank."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self.hosts) if rank in ranks)


def host_layout(group: dist.ProcessGroup, device: torch.device) -> HostLayout:
    """Ask all ranks of the group; a collective. Raises UsageError where hosts have unlike numbers of ranks."""
    digest = hashlib.sha256(host_name().encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    by_host: dict[tuple[int, ...], list[int]] = {}
    for rank, name in enumerate(every):
        by_host.setdefault(tuple(name.tolist()), []).append(rank)
    sizes = sorted({len(ranks) for ranks in by_host.values()})
    if len(sizes) > 1:
        raise UsageError(
            f"hosts have from {sizes[0]} to {sizes[-1]} ranks",
            expected="as many ranks on every host for topology hierarchical",
            hint="use the flat strategy, or start as many ranks everywhere",
        )
    return HostLayout(tuple(tuple(ranks) for ranks in by_host.values()))
