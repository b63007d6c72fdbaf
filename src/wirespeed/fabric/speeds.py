"""What each host's transport and island cost, per protocol, as arrays beside the network's links.

Between hosts of different transports both ends speak the slower one's terms: the larger latency, the smaller limit per
flow. A fabric without transports has one protocol, of half the measured round trip; where that is unknown too, times
between hosts are not a number, which ``Timed.check_known`` turns into an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from wirespeed.fabric.network import Floats, Ints, Network
from wirespeed.fabric.parts import Protocol, Transport, way


@dataclass(frozen=True, eq=False)
class Speeds:
    """(K,) protocols; per host (H,) or (K, H); per link (K, L + 1).

    ``capacity_bit_per_s`` is what links carry of a protocol's payload.
    """

    protocols: tuple[str, ...]
    net_hop_s: Floats
    local_hop_s: Floats
    capacity_bit_per_s: Floats
    flow_bit_per_s: Floats
    switch_s: Floats
    launch_s: Floats
    link_share: Floats
    """Of each link's capacity, what collectives reach at best, (L + 1,)."""
    transport: tuple[Transport | None, ...]
    is_uniform: bool
    """All hosts speak one transport and hold one kind of island: a hop is the same from every one."""
    is_known: npt.NDArray[np.bool_]
    """Whether a host's rate is known, (H,)."""
    is_assumed: npt.NDArray[np.bool_]


@lru_cache(maxsize=8)
def speeds_of(network: Network) -> Speeds:
    """The speeds of a network's hosts; kept for the last few networks."""
    fabric = network.fabric
    transports = {t.name: t for t in fabric.transports}
    default = fabric.transports[0] if fabric.transports else None
    # Of ten thousand hosts a few kinds: everything is found once per kind and dealt out to the hosts.
    kinds, kind_of = _kinds([host.transport for host in fabric.hosts])
    held = [transports.get(name, default) for name in kinds]
    islands = {island.name: island for island in fabric.islands}
    insides, inside_of = _kinds([host.island for host in fabric.hosts])
    used_islands = [islands.get(name) for name in insides]
    every = [p.name for t in fabric.transports for p in t.ways] + [p.name for i in fabric.islands for p in i.ways]
    # "plain" parts state one protocol for all sizes: it goes with every other one.
    names = tuple(dict.fromkeys(name for name in every if name != "plain")) or ("plain",)
    half_trip = math.nan if fabric.rtt_s is None else fabric.rtt_s.value / 2
    plain = (Protocol(name="plain", hop_s=0.0),)
    net = [[None if t is None else way(t.ways, name) for t in held] for name in names]
    local = [[way(plain if i is None else i.ways, name) for i in used_islands] for name in names]
    capacity = np.repeat(network.capacity_bit_per_s[None, :], len(names), axis=0)
    net_links = network.is_between_switches
    inside = network.links_of("device out", "device in", "island cross", "bus")
    for k in range(len(names)):
        factor = np.array([1.0 if p is None else p.factor for p in net[k]])[kind_of]
        capacity[k, network.is_nic_out] *= factor[network.nic_host]
        capacity[k, network.is_nic_in] *= factor[network.nic_host]
        capacity[k, net_links] *= factor.max()
        island_factor = np.array([p.factor for p in local[k]])[inside_of]
        capacity[k, inside] *= island_factor[network.host_of_inside]
    share = np.array([1.0 if t is None else t.collective_share for t in held])[kind_of]
    link_share = np.ones(network.no_link + 1)
    link_share[network.is_nic_out] = link_share[network.is_nic_in] = share[network.nic_host]
    link_share[net_links] = share.max()
    return Speeds(
        protocols=names,
        net_hop_s=np.array([[half_trip if p is None else p.hop_s for p in row] for row in net])[:, kind_of],
        local_hop_s=np.array([[p.hop_s for p in row] for row in local])[:, inside_of],
        capacity_bit_per_s=capacity,
        flow_bit_per_s=np.array([math.inf if t is None else t.flow_limit_bit_per_s for t in held])[kind_of],
        switch_s=np.array([0.0 if t is None else t.switch_s for t in held])[kind_of],
        launch_s=np.array([0.0 if t is None else t.launch_s for t in held])[kind_of],
        link_share=link_share,
        transport=tuple(held[kind] for kind in kind_of.tolist()),
        is_uniform=len({id(t) for t in held}) == 1 and len({id(i) for i in used_islands}) == 1,
        is_known=np.array([host.rate_bit_per_s is not None for host in fabric.hosts]),
        is_assumed=np.array([h.rate_bit_per_s is None or h.rate_bit_per_s.origin == "assumed" for h in fabric.hosts]),
    )


def _kinds(names: list[str]) -> tuple[list[str], Ints]:
    """The names that occur, and of each host (H,) which of them it has."""
    place = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return list(place), np.array([place[name] for name in names], dtype=np.int64)
