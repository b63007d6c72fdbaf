"""Placement: which rank runs on which device of which host. The order of ranks decides what crosses which link.

A group is an array of ranks in the order in which a collective visits them; several groups that communicate at the same
time (the data-parallel groups of a model split by tensor, say) are a list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from wirespeed.errors import UsageError
from wirespeed.fabric.topology import Fabric

Ints = npt.NDArray[np.int64]
Order = Literal["racks", "listed", "round_robin", "shuffled"]


@dataclass(frozen=True, eq=False)
class Placement:
    """Rank r runs on ``fabric.hosts[host[r]]``, as its device ``device[r]``. Both (N,), never written to."""

    host: Ints
    device: Ints

    def __post_init__(self) -> None:
        if self.host.shape != self.device.shape or self.host.ndim != 1 or not self.host.size:
            raise UsageError("got a placement without ranks", expected="a host and a device for each rank")
        self.host.setflags(write=False)
        self.device.setflags(write=False)

    @property
    def num_ranks(self) -> int:
        """Ranks placed."""
        return int(self.host.size)


def place(
    fabric: Fabric,
    num_ranks: int | None = None,
    ranks_per_host: int | None = None,
    *,
    order: Order = "racks",
    seed: int | None = None,
) -> Placement:
    """Ranks on the hosts of a fabric: neighbours on one host, host after host.

    ``num_ranks`` None takes all hosts; ``ranks_per_host`` None takes each host's devices. ``order``: hosts rack by
    rack, as listed, dealt to the racks in turn (the worst that a scheduler does), or shuffled with ``seed``. Of a
    larger fabric the first hosts in that order are taken. Raises UsageError where the ranks do not fit, or fill no
    whole hosts.
    """
    hosts = host_order(fabric, order, seed=seed)
    width = np.array(
        [fabric.hosts[h].num_devices for h in hosts] if ranks_per_host is None else [ranks_per_host] * len(hosts)
    )
    if ranks_per_host is not None and ranks_per_host < 1:
        raise UsageError(f"got {ranks_per_host} ranks per host", expected="at least 1")
    ends = np.cumsum(width)
    total = int(ends[-1])
    wanted = total if num_ranks is None else num_ranks
    if not 1 <= wanted <= total:
        raise UsageError(
            f"got {wanted} ranks for {len(hosts)} hosts of {_span(width)} ranks each",
            expected=f"1 to {total} ranks",
            hint="name more hosts, or more ranks per host",
        )
    used = int(np.searchsorted(ends, wanted)) + 1
    if used > 1 and int(ends[used - 1]) != wanted:
        raise UsageError(
            f"got {wanted} ranks, which leave host {fabric.hosts[hosts[used - 1]].name!r} partly filled",
            expected=f"ranks that fill hosts of {_span(width)}, such as {int(ends[used - 2])} or {int(ends[used - 1])}",
        )
    host = np.repeat(np.asarray(hosts[:used], dtype=np.int64), width[:used])[:wanted]
    starts = np.repeat(ends[:used] - width[:used], width[:used])[:wanted]
    return Placement(host=host, device=np.arange(wanted, dtype=np.int64) - starts)


def place_on(fabric: Fabric, hosts: Sequence[str], *, ranks_per_host: int = 1) -> Placement:
    """Ranks on the hosts of these names, in this order: all hosts or some, each at most once.

    Raises UsageError naming a host that the fabric does not have or that stands twice.
    """
    index = {host.name: i for i, host in enumerate(fabric.hosts)}
    wrong = next((name for i, name in enumerate(hosts) if name not in index or name in hosts[:i]), None)
    if wrong is not None or not hosts:
        known = ", ".join(list(index)[:8]) + (", ..." if len(index) > 8 else "")
        raise UsageError(
            "got no hosts" if wrong is None else f"got host {wrong!r} {'twice' if wrong in index else 'in the order'}",
            expected=f"hosts of the fabric, each once: {known}",
        )
    if ranks_per_host < 1:
        raise UsageError(f"got {ranks_per_host} ranks per host", expected="at least 1")
    held = np.array([index[name] for name in hosts], dtype=np.int64)
    return Placement(
        host=np.repeat(held, ranks_per_host), device=np.tile(np.arange(ranks_per_host, dtype=np.int64), held.size)
    )


def host_order(fabric: Fabric, order: Order = "racks", *, seed: int | None = None) -> list[int]:
    """Indexes of the fabric's hosts in an order of ``place``."""
    listed = list(range(len(fabric.hosts)))
    if seed is not None or order == "shuffled":
        return [int(i) for i in np.random.default_rng(0 if seed is None else seed).permutation(len(listed))]
    if order == "listed":
        return listed
    racks: dict[str, list[int]] = {}
    for index, host in enumerate(fabric.hosts):
        racks.setdefault(host.rack, []).append(index)
    if order == "racks":
        return [host for held in sorted_racks(fabric, racks) for host in racks[held]]
    turns = sorted(
        (place_in_rack, rack, host)
        for rack, held in enumerate(racks.values())
        for place_in_rack, host in enumerate(held)
    )
    return [host for _, _, host in turns]


def sorted_racks(fabric: Fabric, racks: Sequence[str] | dict[str, list[int]]) -> list[str]:
    """Racks so that those below one switch stand together, else in the order in which they are listed."""
    parents = {switch.name: switch.parent for switch in fabric.switches}
    if fabric.dragonfly is not None:
        router = fabric.dragonfly.router
        return sorted(racks, key=router)
    seen: dict[str, int] = {}

    def path(rack: str) -> tuple[int, ...]:
        names: list[str] = []
        at: str | None = rack
        while at is not None:
            names.append(at)
            at = parents.get(at)
        return tuple(seen.setdefault(name, len(seen)) for name in reversed(names))

    return sorted(racks, key=path)


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of one size: ``ranks`` (G, p), and ``index`` (G,), where each stood in what was asked for."""

    ranks: Ints
    index: Ints


def stack_groups(placement: Placement, groups: Sequence[Ints] | Ints | None) -> list[Groups]:
    """Groups by their size, the largest first. A list of arrays, or one array (G, p); None is one group of all ranks.

    Raises UsageError for an empty group, unknown ranks or a rank that stands twice in a group.
    """
    if groups is None:
        groups = np.arange(placement.num_ranks, dtype=np.int64)[None, :]
    if isinstance(groups, np.ndarray) and groups.ndim == 2:
        stacked = [Groups(groups.astype(np.int64, copy=False), np.arange(groups.shape[0], dtype=np.int64))]
    else:
        by_size: dict[int, list[int]] = {}
        held = [np.asarray(group, dtype=np.int64).ravel() for group in groups]
        for index, group in enumerate(held):
            by_size.setdefault(int(group.size), []).append(index)
        stacked = [
            Groups(np.stack([held[i] for i in by_size[size]]), np.array(by_size[size], dtype=np.int64))
            for size in sorted(by_size, reverse=True)
        ]
    if not stacked or not stacked[0].index.size:
        raise UsageError("got no group of ranks", expected="at least one")
    for part in stacked:
        if not part.ranks.shape[1]:
            raise UsageError(f"group {int(part.index[0])} has no ranks", expected="at least one rank")
        wrong = (part.ranks < 0) | (part.ranks >= placement.num_ranks)
        if wrong.any():
            row, column = (int(x) for x in np.argwhere(wrong)[0])
            raise UsageError(
                f"group {int(part.index[row])} holds rank {int(part.ranks[row, column])}",
                expected=f"ranks 0 to {placement.num_ranks - 1}",
            )
        ordered = np.sort(part.ranks, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if twice.any():
            raise UsageError(
                f"group {int(part.index[int(np.argmax(twice))])} holds a rank twice", expected="each rank once"
            )
    return stacked


def _span(width: Ints) -> str:
    low, high = int(width.min()), int(width.max())
    return str(low) if low == high else f"{low} to {high}"
