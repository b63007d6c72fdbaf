"""Build fabrics of the usual shapes from a host's description: star, tree, fat-tree, leaf-spine, rails, dragonfly.

Hosts are named h0, h1, ... and stand in racks r0, r1, ... in that order. An uplink carries what its hosts' NICs carry
together, over the oversubscription; parallel links of a switch matter only where flows are hashed to them. What does
not divide (a last rack that is not full) keeps the uplink of a full one, as it would be bought.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from wirespeed.errors import UsageError
from wirespeed.fabric.parts import Dragonfly, Figure, Island, Switch, Transport
from wirespeed.fabric.topology import Fabric, Host, Spread


class HostKind(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of equal hosts holds. ``rate`` is of one NIC; ``price`` of all network parts of one host."""

    rate: Figure
    num_nics: int = 1
    num_devices: int = 1
    island: Island | None = None
    transport: Transport | None = None
    price: float | None = None
    kind: str = "default"

    @property
    def bit_per_s(self) -> float:
        """Of all its NICs together."""
        return self.rate.value * self.num_nics

    def host(self, name: str, rack: str, *, switches: tuple[str, ...] = (), num_devices: int | None = None) -> Host:
        """One host of this kind."""
        return Host(
            name=name,
            rack=rack,
            kind=self.kind,
            rate_bit_per_s=self.rate,
            num_nics=self.num_nics,
            switches=switches,
            num_devices=self.num_devices if num_devices is None else num_devices,
            island="" if self.island is None else self.island.name,
            transport="" if self.transport is None else self.transport.name,
            price=self.price,
        )


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """How many hosts of which kinds, in order: the names h0, h1, ... go on through the kinds."""

    kinds: tuple[tuple[int, HostKind], ...]
    name: str = ""
    rtt_s: Figure | None = None
    spread: Spread = "packets"
    currency: str = ""

    def __post_init__(self) -> None:
        if not self.kinds or any(count < 1 for count, _ in self.kinds):
            raise UsageError(f"got hosts of {[count for count, _ in self.kinds]}", expected="at least one of each kind")

    @property
    def count(self) -> int:
        """All hosts."""
        return sum(count for count, _ in self.kinds)

    @property
    def fastest_bit_per_s(self) -> float:
        """Of the NICs of the fastest kind together: what uplinks are bought for."""
        return max(kind.bit_per_s for _, kind in self.kinds)

    def build(
        self,
        racks: Sequence[str],
        *,
        nic_switches: Sequence[tuple[str, ...]] = (),
        switches: tuple[Switch, ...] = (),
        dragonfly: Dragonfly | None = None,
    ) -> Fabric:
        """The fabric with host i in ``racks[i]`` and, where given, its NICs at ``nic_switches[i]``."""
        hosts: list[Host] = []
        for count, kind in self.kinds:
            for _ in range(count):
                i = len(hosts)
                hosts.append(kind.host(f"h{i}", racks[i], switches=nic_switches[i] if nic_switches else ()))
        parts = [kind for _, kind in self.kinds]
        return Fabric(
            name=self.name,
            hosts=tuple(hosts),
            switches=switches,
            dragonfly=dragonfly,
            transports=tuple({k.transport.name: k.transport for k in parts if k.transport is not None}.values()),
            islands=tuple({k.island.name: k.island for k in parts if k.island is not None}.values()),
            spread=self.spread,
            currency=self.currency,
            rtt_s=self.rtt_s,
        )


def star(hosts: Hosts) -> Fabric:
    """All hosts at one switch that never binds."""
    return hosts.build(["r0"] * hosts.count)


def tree(hosts: Hosts, *, per_rack: int, oversubscription: float = 1.0, num_links: int | None = None) -> Fabric:
    """Racks under one spine, each with an uplink of its hosts' rate over the oversubscription."""
    _check(per_rack=per_rack, oversubscription=oversubscription)
    num_racks = -(-hosts.count // per_rack)
    rate = _declared(per_rack * hosts.fastest_bit_per_s / oversubscription)
    links = max(1, round(per_rack / oversubscription)) if num_links is None else num_links
    switches = (
        Switch(name="spine"),
        *(Switch(name=f"r{i}", parent="spine", rate_bit_per_s=rate, num_links=links) for i in range(num_racks)),
    )
    return hosts.build([f"r{i // per_rack}" for i in range(hosts.count)], switches=switches)


def leaf_spine(hosts: Hosts, *, per_rack: int, num_spines: int, oversubscription: float = 1.0) -> Fabric:
    """Leaves that are each joined to every spine: a tree whose uplink is one link per spine."""
    _check(num_spines=num_spines)
    return tree(hosts, per_rack=per_rack, oversubscription=oversubscription, num_links=num_spines)


def fat_tree(
    hosts: Hosts, *, ports: int | None = None, oversubscription: float = 1.0, core_oversubscription: float = 1.0
) -> Fabric:
    """A k-ary fat-tree (Al-Fares, Loukissas, Vahdat 2008): k / 2 hosts per edge switch, k / 2 of those per pod, k pods.

    ``ports`` is k; None takes the smallest that holds the hosts. ``oversubscription`` thins the edge's uplinks,
    ``core_oversubscription`` the pods' as well.
    """
    k = smallest_fat_tree(hosts.count) if ports is None else ports
    _check(oversubscription=oversubscription, core_oversubscription=core_oversubscription)
    if k < 2 or k % 2:
        raise UsageError(f"got a fat-tree of {k} ports per switch", expected="an even number of 2 or more")
    if k**3 // 4 < hosts.count:
        raise UsageError(
            f"got {hosts.count} hosts for a fat-tree of {k} ports per switch",
            expected=f"at most k^3 / 4 = {k**3 // 4}",
            hint=f"k={smallest_fat_tree(hosts.count)} holds them",
        )
    half = k // 2
    edge_rate = half * hosts.fastest_bit_per_s / oversubscription
    pod_rate = half * edge_rate / core_oversubscription
    num_edges = -(-hosts.count // half)
    num_pods = -(-num_edges // half)
    edge_links = max(1, round(half / oversubscription))
    core_links = max(1, round(half * edge_links / core_oversubscription))
    switches = (
        Switch(name="core"),
        *(
            Switch(name=f"pod{i}", parent="core", rate_bit_per_s=_declared(pod_rate), num_links=core_links)
            for i in range(num_pods)
        ),
        *(
            Switch(name=f"r{i}", parent=f"pod{i // half}", rate_bit_per_s=_declared(edge_rate), num_links=edge_links)
            for i in range(num_edges)
        ),
    )
    return hosts.build([f"r{i // half}" for i in range(hosts.count)], switches=switches)


def smallest_fat_tree(num_hosts: int) -> int:
    """The smallest even k with k^3 / 4 hosts or more."""
    k = 2
    while k**3 // 4 < num_hosts:
        k += 2
    return k


def rail(hosts: Hosts, *, per_group: int, oversubscription: float = 1.0) -> Fabric:
    """NIC r of every host of a group at rail switch r of that group; the rails meet at the spine.

    Raises UsageError where hosts differ in their number of NICs, or have one only.
    """
    _check(per_group=per_group, oversubscription=oversubscription)
    counts = {kind.num_nics for _, kind in hosts.kinds}
    if len(counts) != 1 or counts == {1}:
        raise UsageError(
            f"got rails for hosts of {sorted(counts)} NICs", expected="the same number of NICs, 2 or more",
            hint="name it, such as nics=8",
        )  # fmt: skip
    rails = counts.pop()
    num_groups = -(-hosts.count // per_group)
    rate = _declared(per_group * hosts.fastest_bit_per_s / rails / oversubscription)
    links = max(1, round(per_group / oversubscription))
    switches = (
        Switch(name="spine"),
        *(
            Switch(name=f"r{group}n{r}", parent="spine", rate_bit_per_s=rate, num_links=links)
            for group in range(num_groups)
            for r in range(rails)
        ),
    )
    by_group = [tuple(f"r{group}n{r}" for r in range(rails)) for group in range(num_groups)]
    return hosts.build(
        [f"r{i // per_group}" for i in range(hosts.count)],
        nic_switches=[by_group[i // per_group] for i in range(hosts.count)],
        switches=switches,
    )


def dragonfly(
    hosts: Hosts, *, per_router: int, routers_per_group: int, global_per_router: int | None = None, detour: bool = False
) -> Fabric:
    """Routers of ``per_router`` hosts; a group joins its routers all to all, and the groups all to all.

    Every link is as fast as a host's NICs. The recommended balance is routers = 2 x hosts = 2 x global links per router
    (Kim et al. 2008); the global links that a group has are dealt evenly to the other groups.
    """
    links = per_router if global_per_router is None else global_per_router
    _check(per_router=per_router, routers_per_group=routers_per_group, global_per_router=links)
    num_groups = -(-hosts.count // (per_router * routers_per_group))
    per_pair = routers_per_group * links / max(1, num_groups - 1)
    if num_groups > 1 and per_pair < 1:
        raise UsageError(
            f"got a dragonfly of {num_groups} groups with {routers_per_group * links} links out of each",
            expected=f"at least {num_groups - 1}, one to each other group",
            hint="more hosts per router, more routers per group, or more global links",
        )
    racks = []
    for i in range(hosts.count):
        group, router = divmod(i // per_router, routers_per_group)
        racks.append(f"g{group}r{router}")
    shape = Dragonfly(
        num_groups=num_groups,
        routers_per_group=routers_per_group,
        local_bit_per_s=_declared(hosts.fastest_bit_per_s),
        global_bit_per_s=_declared(per_pair * hosts.fastest_bit_per_s),
        detour=detour,
    )
    return hosts.build(racks, dragonfly=shape)


def _declared(bit_per_s: float) -> Figure:
    return Figure(value=bit_per_s, origin="declared")


def _check(**values: float) -> None:
    for name, value in values.items():
        least = 1
        if not least <= value < float("inf"):
            raise UsageError(f"got {name} {value:g}", expected=f"{least} or more")
