"""A fabric as a tree of labels for people: switches with their uplinks, racks with their hosts, equal ones once.

Runs of branches that look alike become one, with its first and last name and their number, so that ten thousand hosts
fit on a page and what differs stands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wirespeed.fabric.topology import SPINE, Fabric, Host
from wirespeed.units import format_duration, format_rate


@dataclass(frozen=True)
class Branch:
    """A switch or hosts: ``names`` of all that look alike, what they are, the rate upwards, and what is below one."""

    names: tuple[str, ...]
    kind: str
    detail: str
    rate_bit_per_s: float | None
    children: tuple[Branch, ...] = ()

    @property
    def title(self) -> str:
        """One name, or the first and last of several and their number."""
        if len(self.names) == 1:
            return self.names[0]
        return f"{self.names[0]} .. {self.names[-1]} ({len(self.names)} alike)"

    @property
    def look(self) -> tuple[object, ...]:
        """What makes two branches alike."""
        return (self.kind, self.detail, tuple((len(child.names), child.look) for child in self.children))


def draw(fabric: Fabric) -> Branch:
    """The tree of a fabric, from its spine down."""
    by_rack: dict[str, list[Host]] = {}
    for host in fabric.hosts:
        for at in dict.fromkeys(host.switches or (host.rack,)):
            by_rack.setdefault(at, []).append(host)
    if fabric.dragonfly is not None:
        return _dragonfly(fabric, by_rack)
    if not fabric.switches:
        limits = {uplink.rack: uplink.rate_bit_per_s.value for uplink in fabric.uplinks}
        racks = [
            Branch((rack,), "rack", _uplink(limits.get(rack), 1), limits.get(rack), _hosts(fabric, hosts))
            for rack, hosts in by_rack.items()
        ]
        return racks[0] if len(racks) == 1 and not limits else Branch((SPINE,), "switch", "", None, join(racks))
    below: dict[str | None, list[str]] = {}
    for switch in fabric.switches:
        below.setdefault(switch.parent, []).append(switch.name)
    held = {switch.name: switch for switch in fabric.switches}

    def branch(name: str) -> Branch:
        switch = held[name]
        rate = None if switch.rate_bit_per_s is None else switch.rate_bit_per_s.value
        children = [branch(child) for child in below.get(name, ())]
        hosts = _hosts(fabric, by_rack.get(name, ()))
        detail = "" if switch.parent is None else _uplink(rate, switch.num_links)
        return Branch((name,), "rack" if hosts else "switch", detail, rate, (*join(children), *hosts))

    return branch(below[None][0])


def join(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """Put neighbours that look alike together."""
    joined: list[Branch] = []
    for one in branches:
        if joined and joined[-1].look == one.look:
            last = joined[-1]
            joined[-1] = Branch((*last.names, *one.names), last.kind, last.detail, last.rate_bit_per_s, last.children)
        else:
            joined.append(one)
    return tuple(joined)


def _dragonfly(fabric: Fabric, by_rack: dict[str, list[Host]]) -> Branch:
    shape = fabric.dragonfly
    assert shape is not None
    groups = []
    for group in range(shape.num_groups):
        routers = []
        for router in range(shape.routers_per_group):
            name = f"g{group}r{router}"
            detail = f"{format_rate(shape.local_bit_per_s.value)} to each router of its group"
            hosts = _hosts(fabric, by_rack.get(name, ()))
            routers.append(Branch((name,), "router", detail, shape.local_bit_per_s.value, hosts))
        detail = f"{format_rate(shape.global_bit_per_s.value)} to each other group"
        groups.append(Branch((f"g{group}",), "group", detail, shape.global_bit_per_s.value, join(routers)))
    way = "detours over a third group" if shape.detour else "shortest ways"
    return Branch(("dragonfly",), "switch", way, None, join(groups))


def _uplink(rate: float | None, num_links: int) -> str:
    if rate is None:
        return "uplink never binds"
    return f"uplink {format_rate(rate)}" + (f" on {num_links} links" if num_links > 1 else "")


def _hosts(fabric: Fabric, hosts: Sequence[Host]) -> tuple[Branch, ...]:
    return join([Branch((host.name,), "host", describe_host(fabric, host), _rate(host)) for host in hosts])


def describe_host(fabric: Fabric, host: Host) -> str:
    """A host's network parts in words."""
    rate = "unknown rate" if host.rate_bit_per_s is None else format_rate(host.rate_bit_per_s.value)
    parts = [f"{host.num_nics} x {rate}" if host.num_nics > 1 else rate]
    name = host.transport or (fabric.transports[0].name if fabric.transports else "")
    if name:
        held = next(transport for transport in fabric.transports if transport.name == name)
        parts.append(f"{name} ({format_duration(held.latency_s.value)})" if name != "declared" else
                     f"latency {format_duration(held.latency_s.value)}")  # fmt: skip
    if host.num_devices > 1:
        parts.append(f"{host.num_devices} devices" + (f" on {host.island}" if host.island else ""))
    return ", ".join(parts)


def _rate(host: Host) -> float | None:
    return None if host.rate_bit_per_s is None else host.rate_bit_per_s.value * host.num_nics
