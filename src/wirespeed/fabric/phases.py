"""The time of an algorithm's phases: bytes at the tightest link, steps at their hops, and what TCP adds.

Flows of a phase carry bytes in fixed proportion and the phase ends with its slowest, so its time per byte is the
largest of load over capacity: the level at which max-min sharing fills the first link. Steps are not overlapped with
bytes, but for streams, whose chunks are chosen as well as can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wirespeed.fabric.network import Floats, Ints, Network, network_of
from wirespeed.fabric.parts import Transport
from wirespeed.fabric.patterns import Operation, Phase
from wirespeed.fabric.placement import Placement
from wirespeed.fabric.speeds import Speeds, speeds_of
from wirespeed.fabric.tcp import incast_delay_s, slow_start_s
from wirespeed.fabric.topology import Fabric
from wirespeed.spec.workload import Origin


@dataclass(frozen=True, eq=False)
class Timed:
    """Phases (P,) under protocols (K,): ``alpha_s`` and ``s_per_byte`` are (P, K), ``steps`` and ``depth`` (P, 1).

    ``host_bytes``: largest share of the size that one host sends. ``binding``: the link that takes the longest.
    ``unknown``: a host that takes part and whose rate or latency the fabric does not tell. ``messages`` and
    ``net_weight``: what all ranks together send to other hosts, and the share of the size that it carries.
    ``busy_s_per_byte``: of the link that binds
    alone. ``single_s_per_byte``: of large messages, without the uplinks that several flows share.
    """

    alpha_s: Floats
    s_per_byte: Floats
    steps: Floats
    depth: Floats
    launch_s: float
    binding: str
    host_bytes: float
    effective_bit_per_s: float
    weight: float
    origin: Origin
    unknown: str
    tcp: tuple[TcpTerms, ...]
    messages: float
    net_weight: float
    single_s_per_byte: float
    busy_s_per_byte: float

    def seconds(self, sizes_bytes: Floats) -> Floats:
        """Times for sizes (S,), without the bound; never falling with size."""
        transfer = sizes_bytes[:, None, None] * self.s_per_byte
        hop_s = self.alpha_s / np.maximum(self.steps, 1)
        # A stream in k chunks takes (depth + k) hops of a latency and a chunk each; the best k is at least one.
        behind = self.depth * transfer
        is_whole = behind <= hop_s
        filling = np.where(is_whole, hop_s + behind, 2 * np.sqrt(behind * hop_s))
        phase_s = np.where(self.depth > 0, self.depth * hop_s + transfer + filling, self.alpha_s + transfer)
        total: Floats = phase_s.sum(axis=1).min(axis=1) + self.launch_s
        for terms in self.tcp:
            total = total + terms.seconds(sizes_bytes)
        return total

    @property
    def latency_s(self) -> float:
        """What the smallest message takes."""
        return float(self.alpha_s.sum(axis=0).min()) + self.launch_s

    @property
    def last_s_per_byte(self) -> float:
        """Seconds per byte of the protocol for large messages."""
        return float(self.s_per_byte[:, -1].sum())


@dataclass(frozen=True, kw_only=True)
class TcpTerms:
    """What TCP adds to a phase whose flows carry ``weight`` of the size in ``steps`` messages."""

    weight: float
    steps: float
    fan_in: int
    bit_per_s: float
    transport: Transport
    is_cold: bool

    def seconds(self, sizes_bytes: Floats) -> Floats:
        """Times for sizes (S,), never falling with size."""
        message = sizes_bytes * self.weight / max(self.steps, 1.0)
        total = incast_delay_s(self.transport, message, self.fan_in)
        if self.is_cold:
            total = total + slow_start_s(self.transport, sizes_bytes * self.weight, self.bit_per_s)
        return total


def time_phases(
    fabric: Fabric, operation: Operation, placement: Placement, found: Sequence[Phase], *, share: float, is_cold: bool
) -> Timed:
    """Lay the phases on the fabric's links."""
    network = network_of(fabric)
    speeds = speeds_of(network)
    capacity = speeds.capacity_bit_per_s * share
    if operation != "send":
        capacity = capacity * speeds.link_share
    # Halving and doubling, and the two inner phases of a hierarchy, are the same phase twice.
    timed = {id(phase): _time_phase(network, speeds, placement, phase, capacity) for phase in dict.fromkeys(found)}
    parts = [timed[id(phase)] for phase in found]
    longest = max(range(len(parts)), key=lambda i: parts[i].s_per_byte[-1])
    sent = np.zeros(len(fabric.hosts))
    for part in parts:
        np.add.at(sent, network.nic_host, part.load[network.is_nic_out])
    tcp = []
    for phase, part in zip(found, parts, strict=True):
        if part.transport is not None and (is_cold or part.transport.buffer_bytes is not None):
            steps = 1.0 if part.fan_in > 1 else max(1.0, phase.net_steps)
            rate = 8 * part.weight / part.s_per_byte[-1] if part.s_per_byte[-1] > 0 else math.inf
            tcp.append(
                TcpTerms(
                    weight=part.weight, steps=steps, fan_in=part.fan_in, bit_per_s=rate, transport=part.transport,
                    is_cold=is_cold,
                )
            )  # fmt: skip
    takes_part = np.zeros(len(fabric.hosts), dtype=bool)
    for phase in found:
        takes_part[placement.host[phase.source]] = True
        takes_part[placement.host[phase.target]] = True
    hosts = np.flatnonzero(takes_part)
    slow = parts[longest]
    by_link: dict[int, float] = {}
    for part in parts:
        by_link[part.binding] = by_link.get(part.binding, 0.0) + float(part.s_per_byte[-1])
    binding = max(by_link, key=lambda link: by_link[link])
    rate = float(8 * slow.weight / slow.s_per_byte[-1]) if slow.s_per_byte[-1] > 0 else math.inf
    crosses = any(part.crosses for part in parts)
    return Timed(
        alpha_s=np.array([part.alpha_s for part in parts]),
        s_per_byte=np.array([part.s_per_byte for part in parts]),
        steps=np.array([[phase.net_steps + phase.local_steps] for phase in found]),
        depth=np.array([[phase.depth] for phase in found]),
        launch_s=float(speeds.launch_s[hosts].max()) if operation != "send" else 0.0,
        binding=_words(network, binding, by_link[binding]),
        host_bytes=float(sent.max()),
        effective_bit_per_s=rate,
        weight=sum(part.weight for part in parts),
        origin="assumed" if speeds.is_assumed[hosts].any() else "declared",
        unknown=_unknown(fabric, speeds, hosts) if crosses else "",
        tcp=tuple(tcp),
        messages=sum(phase.messages for phase in found),
        net_weight=sum(part.net_weight for part in parts),
        single_s_per_byte=sum(part.single_s_per_byte for part in parts),
        busy_s_per_byte=by_link[binding],
    )


@dataclass(frozen=True, eq=False)
class _Part:
    alpha_s: Floats
    s_per_byte: Floats
    load: Floats
    weight: float
    binding: int
    fan_in: int
    transport: Transport | None
    crosses: bool
    net_weight: float
    single_s_per_byte: float


def _time_phase(network: Network, speeds: Speeds, placement: Placement, phase: Phase, capacity: Floats) -> _Part:
    source, target = placement.host[phase.source], placement.host[phase.target]
    paths = network.paths(source, placement.device[phase.source], target, placement.device[phase.target])
    num_links = network.no_link + 1
    load = np.bincount(paths.ravel(), weights=np.repeat(phase.weight, paths.shape[1]), minlength=num_links).astype(
        np.float64
    )
    load[network.no_link] = 0.0
    used = np.flatnonzero(load)
    with np.errstate(invalid="ignore"):
        took = 8 * load[used] / capacity[:, used]
    # Where flows of several senders share an uplink, one uses what another leaves while it waits.
    is_shared = (np.bincount(paths.ravel(), minlength=num_links)[used] > 1) & network.is_between_switches[used]
    took[:, ~is_shared] *= phase.stall
    s_per_byte = took.max(axis=1) if used.size else np.zeros(capacity.shape[0])
    binding = int(used[np.argmax(took[-1])]) if used.size and s_per_byte[-1] > 0 else -1
    crosses = source != target
    has_net = bool(crosses.any())
    alone = 0.0
    transport, hop_s = None, np.zeros(len(speeds.protocols))
    if has_net:
        limit = np.minimum(speeds.flow_bit_per_s[source], speeds.flow_bit_per_s[target])
        alone = float(np.where(crosses, 8 * phase.weight / phase.stands_for / limit, 0.0).max())
        far = np.flatnonzero(crosses)
        groups = phase.group[far] if phase.is_round else None
        hop_s, transport = _hops(network, speeds, paths[far], source[far], target[far], groups=groups)
    if alone > s_per_byte[-1]:
        binding = -1
    local_s = speeds.local_hop_s[:, 0] if speeds.is_uniform else speeds.local_hop_s[:, source].max(axis=1)
    fan_in = 1
    if transport is not None and transport.buffer_bytes is not None and not phase.is_round:
        fan_in = max(1, int(np.bincount(paths.ravel(), minlength=num_links)[network.is_nic_in].max()))
    return _Part(
        alpha_s=phase.net_steps * hop_s + phase.local_steps * local_s,
        s_per_byte=np.maximum(s_per_byte, alone),
        load=load,
        weight=float(phase.weight.max()),
        binding=binding,
        fan_in=fan_in,
        transport=transport,
        crosses=has_net,
        net_weight=float(phase.weight[crosses].sum()),
        single_s_per_byte=float(took[-1, ~is_shared].max(initial=alone)),
    )


def _hops(
    network: Network, speeds: Speeds, paths: Ints, source: Ints, target: Ints, *, groups: Ints | None
) -> tuple[Floats, Transport | None]:
    """Seconds per hop (K,) of flows between hosts, and the slowest one's transport.

    The slowest hop counts; with ``groups`` of each flow, the mean of the group that has the slowest mean.
    """
    extra = network.is_between_switches[paths].sum(axis=1)
    if speeds.is_uniform:
        switches = extra.max() if groups is None else _slowest_mean(extra, groups)
        return speeds.net_hop_s[:, source[0]] + speeds.switch_s[source[0]] * switches, speeds.transport[int(source[0])]
    extra_s = np.maximum(speeds.switch_s[source], speeds.switch_s[target]) * extra
    hops = np.maximum(speeds.net_hop_s[:, source], speeds.net_hop_s[:, target]) + extra_s
    slowest = int(np.argmax(hops[-1]))
    ends = (int(source[slowest]), int(target[slowest]))
    at = max(ends, key=lambda host: float(speeds.net_hop_s[-1, host]))
    slow = hops.max(axis=1) if groups is None else np.array([_slowest_mean(row, groups) for row in hops])
    return slow, speeds.transport[at]


def _slowest_mean(values: Floats | Ints, groups: Ints) -> float:
    counts = np.bincount(groups)
    sums = np.bincount(groups, weights=values)
    return float((sums[counts > 0] / counts[counts > 0]).max())


def _words(network: Network, link: int, s_per_byte: float) -> str:
    if link >= 0:
        return network.link_name(link)
    return "what one connection reaches" if s_per_byte > 0 else "nothing"


def _unknown(fabric: Fabric, speeds: Speeds, hosts: Ints) -> str:
    dark = hosts[~speeds.is_known[hosts]]
    if dark.size:
        return f"the rate of host {fabric.hosts[int(dark[0])].name!r}"
    return "a round trip or a transport" if np.isnan(speeds.net_hop_s[:, hosts]).any() else ""
