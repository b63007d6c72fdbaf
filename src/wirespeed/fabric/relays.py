"""Broadcast as gloo does it: every rank that holds the data sends it whole to all of its children at once.

Place v of the group has the children v + 2^i for every 2^i above v, as in a binomial tree, but they do not wait for
each other: their flows share the sender's NIC, so that the first one is as late as the last (gloo, broadcast.cc). How
long that takes depends on who shares which link with whom, so the flows are played through: at every moment they have
their max-min fair rates, and a rank that has all of it starts to send. Each stretch between two such events becomes a
phase. Exact for fluid flows of equal size; TCP shares less evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wirespeed.fabric import patterns
from wirespeed.fabric.network import Floats, Ints, Network
from wirespeed.fabric.patterns import Layout, Phase
from wirespeed.fabric.placement import Placement
from wirespeed.fabric.routing import max_min
from wirespeed.fabric.schedules import merge

MAX_FLOWS = 2048
"""Flows that are played through; of more, generations are taken to wait for each other, which is cheaper to say."""
_DONE = 1e-9


def relay(network: Network, placement: Placement, layouts: Sequence[Layout]) -> list[Phase]:
    """The phases of a broadcast from place 0 of every group of the layouts, all at the same time."""
    parent: list[Ints] = []
    source: list[Ints] = []
    target: list[Ints] = []
    group: list[Ints] = []
    offset = depth = 0
    for layout in layouts:
        of = _parents(layout.size)
        depth = max(depth, (layout.size - 1).bit_length())
        child = np.flatnonzero(of >= 0)
        for row in layout.ranks:
            source.append(row[of[child]])
            target.append(row[child])
            # The flow that brings the data to the sender: flow c - 1 of the group brings them to place c.
            parent.append(np.where(of[child] > 0, offset + of[child] - 1, -1))
            group.append(np.full(child.size, len(group), dtype=np.int64))
            offset += child.size
    found: list[Phase] = []
    if 0 < offset <= MAX_FLOWS:
        flows = (np.concatenate(source), np.concatenate(target), np.concatenate(group))
        found = _play(network, placement, flows, np.concatenate(parent), depth)
    return found or merge([patterns.binomial(layout, halves=False) for layout in layouts])


def _parents(size: int) -> Ints:
    """Of each place, whom it receives from: itself without its highest bit; -1 at the root."""
    places = range(size)
    return np.array([place - (1 << (place.bit_length() - 1)) if place else -1 for place in places], dtype=np.int64)


def _play(
    network: Network, placement: Placement, flows: tuple[Ints, Ints, Ints], parent: Ints, depth: int
) -> list[Phase]:
    source, target, group = flows
    paths = network.paths(
        placement.host[source], placement.device[source], placement.host[target], placement.device[target]
    )
    num_far = int((placement.host[source] != placement.host[target]).sum())
    left = np.ones(source.size)
    runs = parent < 0
    found: list[Phase] = []
    while runs.any():
        at = np.flatnonzero(runs)
        rate = _rates(network, paths[at])
        is_local = ~np.isfinite(rate)
        if is_local.any():
            left[at[is_local]] = 0.0
        else:
            step_s = float((left[at] / rate).min())
            moved = rate * step_s
            left[at] -= moved
            found.append(
                Phase(
                    source=source[at], target=target[at], group=group[at], weight=moved,
                    net_steps=0.0 if found else float(depth), local_steps=0.0,
                    num_messages=0.0 if found else float(num_far),
                )
            )  # fmt: skip
        left[left < _DONE] = 0.0
        has_all = left == 0.0
        runs = ~has_all & ((parent < 0) | has_all[parent])
    return found


def _rates(network: Network, paths: Ints) -> Floats:
    num_flows, num_hops = paths.shape
    shares = max_min(
        np.repeat(np.arange(num_flows, dtype=np.int64), num_hops),
        paths.ravel(),
        np.ones(paths.size),
        network.capacity_bit_per_s / 8,
        num_variables=num_flows,
    )
    return np.where(shares.rate > 0, shares.rate, math.inf)
