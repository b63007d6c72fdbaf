"""What no algorithm can beat: the bytes that must cross each cut of the fabric, at the cut's capacity.

A cut is a host with its NICs, or everything below one switch; inside one host, a device. For all_reduce there is also
what all hosts must send together, 2 (m - 1) times the size (Patarasuk, Yuan 2009, Bandwidth optimal all-reduce
algorithms for clusters of workstations). Reduction inside switches would beat that and is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wirespeed.fabric.network import Floats, Ints, Network
from wirespeed.fabric.patterns import Operation

MAX_CELLS = 1 << 22
"""Groups times cuts that are counted at once: 32 MiB of numbers."""


@dataclass(frozen=True)
class Bound:
    """Seconds per byte of the collective's size that the tightest cut takes, and the cut in words."""

    s_per_byte: float
    cut: str


def cut_bound(network: Network, operation: Operation, hosts: Sequence[Ints]) -> Bound:
    """The bound for groups that do it at the same time: hosts of their ranks, one (G, p) array per size, roots first.

    What several groups must send across a cut adds up: the last of them is no sooner done.
    """
    hosts = [host for host in hosts if host.shape[1] > 1]
    capacity = network.nic_bit_per_s * network.num_nics / 8
    crossed = np.zeros(capacity.size)
    cut = np.zeros(network.cut_bit_per_s.size)
    best = Bound(0.0, "nothing")
    for host in hosts:
        is_single = (host == host[:, :1]).all(axis=1)
        inside = _inside(network, operation, host[is_single], host.shape[1])
        best = max(best, inside, key=lambda bound: bound.s_per_byte)
        rows = max(1, MAX_CELLS // max(1, cut.size))
        wide = host[~is_single]
        for start in range(0, wide.shape[0], rows):
            part = wide[start : start + rows]
            size = part.shape[1]
            key = np.arange(part.shape[0], dtype=np.int64)[:, None] * capacity.size + part
            held, counts = _count(key, part.shape[0] * capacity.size)
            row, used = np.divmod(held, capacity.size)
            np.add.at(crossed, used, crossing(operation, counts, size, used == part[row, 0]))
            if operation == "all_reduce":
                members = np.bincount(row)
                together = float((2 * (members - 1) / np.bincount(row, weights=capacity[used])).max())
                best = max(best, Bound(together, "NICs of all hosts together"), key=lambda bound: bound.s_per_byte)
            below, has_root = network.ranks_below(part), network.ranks_below(part[:, :1]) > 0
            is_cut = (below > 0) & (below < size)
            cut += np.where(is_cut, crossing(operation, below, size, has_root), 0.0).sum(axis=0)
    for seconds, name in (
        (crossed / capacity, lambda at: f"NICs of host {network.fabric.hosts[at].name}"),
        (8 * cut / network.cut_bit_per_s, network.cut_name),
    ):
        worst = int(np.argmax(seconds)) if seconds.size else 0
        if seconds.size and float(seconds[worst]) > best.s_per_byte:
            best = Bound(float(seconds[worst]), name(worst))
    return best


def _count(key: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """The keys that occur, rising, and how often. Sorting is for keys that are few among those there may be."""
    if num_keys > 4 * key.size:
        held, counts = np.unique(key, return_counts=True)
        return held, counts.astype(np.int64)
    every = np.bincount(key.ravel(), minlength=num_keys)
    held = np.flatnonzero(every)
    return held, every[held]


def crossing(operation: Operation, inside: Ints, num_ranks: int, has_root: npt.NDArray[np.bool_]) -> Floats:
    """Bytes that must cross in the busier direction, as a share of the size, for cuts around ``inside`` ranks each."""
    s, p = inside.astype(np.float64), float(num_ranks)
    match operation:
        case "all_gather" | "reduce_scatter":
            return np.maximum(s, p - s) / p
        case "all_to_all":
            return s * (p - s) / p
        case "scatter" | "gather":
            return np.where(has_root, p - s, s) / p
        case _:
            return np.ones_like(s)


def _inside(network: Network, operation: Operation, host: Ints, num_ranks: int) -> Bound:
    """Of groups that each lie on one host, (G, p): what a device, or the bus, must carry for one of them."""
    islands = {island.name: island for island in network.fabric.islands}
    best = Bound(0.0, "nothing")
    one = float(crossing(operation, np.array([1]), num_ranks, np.array([True]))[0])
    if operation == "all_reduce":
        one = max(one, 2 * (num_ranks - 1) / num_ranks)
    kinds = {network.fabric.hosts[int(h)].island: int(h) for h in np.unique(host[:, 0])} if host.size else {}
    for name, at in kinds.items():
        island = islands.get(name)
        # Ranks that share a device exchange in its memory, at no stated cost.
        if island is None or int(network.num_devices[at]) < num_ranks:
            continue
        # A bus carries what every rank sends; of operations with a root, what the root does is bound enough.
        is_shared = island.kind == "bus" and operation in ("all_reduce", "all_to_all")
        seconds = one * (num_ranks if is_shared else 1) / (island.rate_bit_per_s.value / 8)
        if seconds > best.s_per_byte:
            best = Bound(seconds, f"{name} of host {network.fabric.hosts[at].name}")
    return best
