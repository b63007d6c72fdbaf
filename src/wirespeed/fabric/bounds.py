"""What no algorithm can beat: the bytes that must cross each cut of the fabric, at the cut's capacity.

A cut is a host with its NICs, or everything below one switch; inside one host, a device. For all_reduce there is also
what all hosts must send together, 2 (m - 1) times the size (Patarasuk, Yuan 2009, Bandwidth optimal all-reduce
algorithms for clusters of workstations). Reduction inside switches would beat that and is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wirespeed.fabric.network import Floats, Ints, Network
from wirespeed.fabric.patterns import Operation


@dataclass(frozen=True)
class Bound:
    """Seconds per byte of the collective's size that the tightest cut takes, and the cut in words."""

    s_per_byte: float
    cut: str


def cut_bound(network: Network, operation: Operation, host: Ints) -> Bound:
    """The bound for one group: the host of each of its ranks, (p,), the root first."""
    p = int(host.size)
    if p < 2:
        return Bound(0.0, "nothing")
    used, counts = np.unique(host, return_counts=True)
    hosts = network.fabric.hosts
    if used.size == 1:
        return _inside(network, operation, int(used[0]), p)
    capacity = network.nic_bit_per_s[used] * network.num_nics[used] / 8
    seconds = crossing(operation, counts, p, used == host[0]) / capacity
    worst = int(np.argmax(seconds))
    best = Bound(float(seconds[worst]), f"NICs of host {hosts[int(used[worst])].name}")
    if operation == "all_reduce":
        together = 2 * (used.size - 1) / float(capacity.sum())
        if together > best.s_per_byte:
            best = Bound(together, "NICs of all hosts together")
    below = network.ranks_below(host)
    has_root = network.ranks_below(host[:1]) > 0
    with np.errstate(invalid="ignore"):
        seconds = np.where((below > 0) & (below < p), crossing(operation, below, p, has_root), 0.0)
        seconds = seconds / (network.cut_bit_per_s / 8)
    if seconds.size and float(seconds.max()) > best.s_per_byte:
        worst = int(np.argmax(seconds))
        best = Bound(float(seconds[worst]), network.cut_name(worst))
    return best


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


def _inside(network: Network, operation: Operation, host: int, num_ranks: int) -> Bound:
    island = next((i for i in network.fabric.islands if i.name == network.fabric.hosts[host].island), None)
    if island is None:
        return Bound(0.0, "nothing")
    rate = island.rate_bit_per_s.value / 8
    one = float(crossing(operation, np.array([1]), num_ranks, np.array([True]))[0])
    if operation == "all_reduce":
        one = max(one, 2 * (num_ranks - 1) / num_ranks)
    if island.kind == "bus" and operation not in ("all_reduce", "all_to_all"):
        return Bound(one / rate, f"{island.name} of host {network.fabric.hosts[host].name}")
    return Bound(
        one * (num_ranks if island.kind == "bus" else 1) / rate,
        f"{island.name} of host {network.fabric.hosts[host].name}",
    )
