"""Fair shares on shared links: what each flow or each group gets when all of them send at once.

``max_min`` fills progressively: all rates rise together until a link is full, its users stop, the rest go on. Weights
make one variable of a whole group, for a ring runs at the pace of its slowest flow. The fluid picture leaves out
packets, queues and the time that TCP takes to find its share; two flows of different congestion control do not share
fairly at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric.network import Floats, Ints, Network, network_of
from wirespeed.fabric.placement import Placement, stack_groups
from wirespeed.fabric.topology import Fabric

Pattern = Literal["ring", "all_to_all", "pairs"]

FULL = 1e-9
"""Share of a link's capacity below which it counts as full: well above rounding of 10^5 sums, far below any figure."""


@dataclass(frozen=True, kw_only=True)
class GroupRate:
    """What the slowest flow of a group gets, and the link that limits it ("flow limit" where no link does)."""

    bytes_per_s: float
    binding: str


@dataclass(frozen=True)
class Shares:
    """Rates of max-min fairness. ``binding`` is the link at which each variable stopped, -1 for its own limit."""

    rate: Floats
    binding: Ints


def max_min(
    variable: Ints, link: Ints, weight: Floats, capacity: Floats, *, num_variables: int, limit: Floats | None = None
) -> Shares:
    """Max-min fair rates of variables that use ``weight * rate`` of a link each.

    ``variable``, ``link``, ``weight`` (E,): one entry per use; the same pair may occur often. ``capacity`` (L,),
    infinite for links that never bind. ``limit`` (V,): most that each variable takes. A variable that nothing limits
    gets an infinite rate.
    """
    num_links = capacity.size
    rate = np.zeros(num_variables)
    binding = np.full(num_variables, -1, dtype=np.int64)
    limits = np.full(num_variables, math.inf) if limit is None else limit
    active = np.ones(num_variables, dtype=bool)
    kept = np.isfinite(capacity[link]) & (weight > 0)
    variable, link, weight = variable[kept], link[kept], weight[kept]
    left = capacity.astype(np.float64).copy()
    load = np.bincount(link, weights=weight, minlength=num_links)
    level = 0.0
    while active.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(load > 0, left / load, math.inf)
        step = float(room.min()) if room.size else math.inf
        nearest = float(limits[active].min()) - level
        step = max(0.0, min(step, nearest))
        if not math.isfinite(step):
            rate[active] = math.inf
            break
        level += step
        left -= np.where(load > 0, load * step, 0.0)
        full = (load > 0) & (left <= FULL * capacity)
        reached = active & (limits <= level * (1 + FULL))
        rate[reached] = limits[reached]
        stopped = reached.copy()
        users = full[link]
        if users.any():
            at_full, full_link = variable[users], link[users]
            fresh = ~stopped[at_full]
            binding[at_full[fresh]] = full_link[fresh]
            rate[at_full[fresh]] = level
            stopped[at_full] = True
        if not stopped.any():
            # Rounding left the tightest link a hair short of full.
            tight = room <= step * (1 + FULL)
            users = tight[link]
            stopped[variable[users]] = True
            binding[variable[users]] = link[users]
            rate[variable[users]] = level
        active &= ~stopped
        gone = stopped[variable]
        load -= np.bincount(link[gone], weights=weight[gone], minlength=num_links)
        keep = ~gone
        variable, link, weight = variable[keep], link[keep], weight[keep]
        touched = np.bincount(link, minlength=num_links) > 0
        load[~touched] = 0.0
    return Shares(rate=rate, binding=binding)


def flow_rates(network: Network, sources: tuple[Ints, Ints], targets: tuple[Ints, Ints]) -> tuple[Floats, Ints]:
    """Max-min rates (bit/s) of single flows between (hosts, devices), and the link that binds each."""
    paths = network.paths(*sources, *targets)
    num_flows, num_hops = paths.shape
    shares = max_min(
        np.repeat(np.arange(num_flows, dtype=np.int64), num_hops),
        paths.ravel(),
        np.ones(paths.size),
        network.capacity_bit_per_s,
        num_variables=num_flows,
    )
    return shares.rate, shares.binding


def group_bandwidth(
    fabric: Fabric, placement: Placement, groups: Sequence[Ints] | Ints | None = None, pattern: Pattern = "ring"
) -> list[GroupRate]:
    """What the slowest flow of each group gets while all groups send at once, bytes per second.

    ``ring``: each rank to the next, in the group's order; all flows of a ring go at one pace. ``all_to_all``: each rank
    to every other, the sum of what one rank sends. ``pairs``: ranks 0 -> 1, 2 -> 3, ... of the group.
    """
    network = network_of(fabric)
    held = stack_groups(placement, groups)
    num_groups = sum(part.index.size for part in held)
    sources, targets, members, weights = [], [], [], []
    for part in held:
        source, target, weight = _flows(part.ranks.shape[1], pattern)
        sources.append(part.ranks[:, source].ravel())
        targets.append(part.ranks[:, target].ravel())
        weights.append(np.tile(weight, part.index.size))
        members.append(np.repeat(part.index, source.size))
    source, target = np.concatenate(sources), np.concatenate(targets)
    if not source.size:
        return [GroupRate(bytes_per_s=math.inf, binding="nothing") for _ in range(num_groups)]
    paths = network.paths(
        placement.host[source], placement.device[source], placement.host[target], placement.device[target]
    )
    hops = paths.shape[1]
    shares = max_min(
        np.repeat(np.concatenate(members), hops),
        paths.ravel(),
        np.repeat(np.concatenate(weights), hops),
        network.capacity_bit_per_s,
        num_variables=num_groups,
    )
    return [
        GroupRate(bytes_per_s=float(rate) / 8, binding="nothing" if link < 0 else network.link_name(int(link)))
        for rate, link in zip(shares.rate, shares.binding, strict=True)
    ]


def _flows(size: int, pattern: Pattern) -> tuple[Ints, Ints, Floats]:
    """Places in the group that send and receive, and the weight of each flow."""
    places = np.arange(size, dtype=np.int64)
    if size < 2:
        return places[:0], places[:0], np.zeros(0)
    match pattern:
        case "ring":
            return places, np.roll(places, -1), np.ones(size)
        case "pairs":
            if size % 2:
                raise UsageError(f"got a group of {size} ranks for pairs", expected="an even number")
            return places[0::2], places[1::2], np.ones(size // 2)
        case "all_to_all":
            source, target = np.repeat(places, size), np.tile(places, size)
            others = source != target
            return source[others], target[others], np.full(int(others.sum()), 1 / (size - 1))
