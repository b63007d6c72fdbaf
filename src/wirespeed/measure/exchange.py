"""The collectives as wirespeed issues them: the same calls are timed by ``bench`` and used in training.

Two of them are not simply torch's. ``all_gather`` goes by the name that this torch knows. ``all_to_all`` on gloo posts
all its sends and receives at once: gloo's own waits for one peer after the other and reached 0.64 of a 100 Mbit/s link
between 4 ranks, where this reaches 0.82 (1 Gbit/s: 0.5 against 0.63).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_to_all(receive: Tensor, send: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Rank r's part p of ``send`` becomes rank p's part r of ``receive``. Both are flat, contiguous and of equal size.

    Blocks until this rank has sent and received all. The group must not have other point-to-point traffic under way.
    """
    if dist.get_backend(group) != "gloo":
        dist.all_to_all_single(receive, send, group=group)
        return
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    coming, going = receive.chunk(num_ranks), send.chunk(num_ranks)
    coming[rank].copy_(going[rank])
    others = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]
    works = [dist.irecv(coming[peer], group=group, group_src=peer) for peer in reversed(others)]
    works += [dist.isend(going[peer], group=group, group_dst=peer) for peer in others]
    for work in works:
        if work is not None:
            work.wait()
