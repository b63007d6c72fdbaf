"""Process groups of our own, like the user's: same backend, same time-out, and made within that time-out.

torch reads the other ranks' addresses from the process group's store, and waits without end where the store's host does
not answer. So a group is made in a thread that can be given up; it then hangs until the process ends.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from wirespeed.errors import PeerFailure
from wirespeed.train.lanes import peer_failures

T = TypeVar("T")


def new_group(like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks, for collectives of our own."""
    return group_of(dist.get_process_group_ranks(like), like=like)


def group_of(ranks: list[int], *, like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of these ranks, numbered in the world. Raises PeerFailure where a rank or the store does not answer."""
    is_world = len(ranks) == dist.get_world_size()
    timeout = timeout_of(like)
    device = torch.cuda.current_device() if dist.get_backend(like) == "nccl" else None

    def make() -> dist.ProcessGroup:
        if device is not None:  # every thread has a current device of its own
            torch.cuda.set_device(device)
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=dist.get_backend(like), use_local_synchronization=not is_world
        )
        return group

    with peer_failures():
        return _within((timeout or distributed_c10d.default_pg_timeout).total_seconds(), make)


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """What the work gives or raises. Raises PeerFailure where it takes longer than ``limit_s``."""
    ended: list[tuple[T, None] | tuple[None, BaseException]] = []

    def run() -> None:
        try:
            ended.append((work(), None))
        except BaseException as fault:  # raised again where it is waited for
            ended.append((None, fault))

    thread = threading.Thread(target=run, name="wirespeed-new-group", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not ended:
        raise PeerFailure(
            f"a process group was not made within its time-out of {limit_s:g} s",
            hint="its store is rank 0's, or the launcher's on the first host: a rank died, hangs, or its "
            "link went down",
        )
    value, fault = ended[0]
    if fault is not None:
        raise fault
    return value  # type: ignore[return-value]


def timeout_of(group: Any) -> datetime.timedelta | None:
    """What the user gave the group; torch gives a new group its own default (30 minutes) otherwise."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    found: datetime.timedelta | None = None
    with contextlib.suppress(RuntimeError):  # a backend that does not tell
        found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return found
