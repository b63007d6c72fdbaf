"""Do all ranks hold the same parameters? By a hash of every byte, for whoever wants it checked at every step.

Costs a copy to the host, some 0.5 s per GB of parameters for the hash, and one small all_gather. WIRESPEED_CHECK=1 asks
for it after every step at which the strategy makes parameters equal.
"""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist

from wirespeed.errors import DataError
from wirespeed.train.lanes import peer_failures

VARIABLE = "WIRESPEED_CHECK"


def is_wanted() -> bool:
    """Whether the environment asks for the check."""
    return os.environ.get(VARIABLE) == "1"


def check_agreement(module: torch.nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise DataError, on all ranks, unless all ranks of the group hold the same bytes. A collective."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        content = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(content.numpy().data)
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with peer_failures():
        dist.all_gather(every, mine, group=group)
    names = [tuple(held.tolist()) for held in every]
    others = [rank for rank, name in enumerate(names) if name != names[0]]
    if others:
        raise DataError(
            f"parameters differ between ranks: {', '.join(map(str, others))} from rank 0",
            expected="the same bytes on all ranks",
            hint="a parameter changed outside of the optimizer, optimizers started from unlike state, or unlike "
            "processors rounded differently",
        )
