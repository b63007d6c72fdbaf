"""A fabric as arrays: every directed link with its capacity, and the links on the way between any two devices.

Made once per fabric; all paths of a pattern are found at once, in numpy. Links of no stated rate have infinite
capacity. Assumes shortest ways: up to the nearest common switch and down, or a dragonfly's minimal or detoured way.
A host whose NICs sit at different switches (rails) sends on the receiver's rail where its island is a switch, by way of
the local device on that rail, as NCCL does; otherwise by its own NIC and the spine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wirespeed.errors import InternalError
from wirespeed.fabric.topology import SPINE, Fabric

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MAX_CACHED = 8
_cache: OrderedDict[int, tuple[Fabric, Network]] = OrderedDict()


def network_of(fabric: Fabric) -> Network:
    """The fabric's network. The last few are kept, so that asking again costs nothing."""
    held = _cache.get(id(fabric))
    # The fabric itself is kept beside its network: its id cannot come to mean another one.
    if held is None or held[0] is not fabric:
        held = _cache[id(fabric)] = (fabric, Network(fabric))
        while len(_cache) > _MAX_CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(id(fabric))
    return held[1]


@dataclass(frozen=True)
class _Block:
    """A run of links of one kind: ``start`` of the first, ``count`` of them."""

    kind: str
    start: int
    count: int


class Network:
    """Directed links and ways of a fabric. ``capacity_bit_per_s`` (L + 1,); the last link is "no link", infinite."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        hosts = fabric.hosts
        self.num_nics: Ints = np.array([host.num_nics for host in hosts], dtype=np.int64)
        self.num_devices: Ints = np.array([host.num_devices for host in hosts], dtype=np.int64)
        self._nic_base = np.concatenate([[0], np.cumsum(self.num_nics)])
        self._device_base = np.concatenate([[0], np.cumsum(self.num_devices)])
        self.cut_bit_per_s: Floats = np.zeros(0)
        self._capacity: list[Floats] = []
        self._blocks: list[_Block] = []
        rate = np.array([math.inf if h.rate_bit_per_s is None else h.rate_bit_per_s.value for h in hosts])
        self.nic_bit_per_s: Floats = rate
        self._nic_out = self._add("nic out", np.repeat(rate, self.num_nics))
        self._nic_in = self._add("nic in", np.repeat(rate, self.num_nics))
        self._make_islands()
        if fabric.dragonfly is None:
            self._make_tree()
        else:
            self._make_dragonfly()
        self.no_link = sum(block.count for block in self._blocks)
        self.capacity_bit_per_s: Floats = np.concatenate([*self._capacity, [math.inf]])
        self.is_between_switches = self.links_of("up", "down", "local", "global")
        self.is_nic_out, self.is_nic_in = self.links_of("nic out"), self.links_of("nic in")
        every = np.arange(len(hosts), dtype=np.int64)
        self.nic_host: Ints = np.repeat(every, self.num_nics)
        owner = np.repeat(every, self.num_devices)
        self.host_of_inside: Ints = np.concatenate([owner, owner, every, every])
        """Host of each link inside hosts: device out, device in, bus, island cross, in the order of the links."""

    @property
    def num_links(self) -> int:
        """Directed links, "no link" not counted."""
        return self.no_link

    def _add(self, kind: str, capacity: Floats) -> int:
        start = sum(block.count for block in self._blocks)
        self._blocks.append(_Block(kind, start, int(capacity.size)))
        self._capacity.append(capacity)
        return start

    def _make_islands(self) -> None:
        hosts, islands = self.fabric.hosts, {island.name: island for island in self.fabric.islands}
        held = [islands.get(host.island) for host in hosts]
        self._has_islands = any(island is not None for island in held)
        self.is_bus = np.array([i is not None and i.kind == "bus" for i in held])
        self.is_switch = np.array([i is not None and i.kind == "switch" for i in held])
        self._island_size = np.array([10**9 if i is None else i.num_devices for i in held], dtype=np.int64)
        rate = np.array([math.inf if i is None else i.rate_bit_per_s.value for i in held])
        own = np.where(self.is_switch, rate, math.inf)
        self._device_out = self._add("device out", np.repeat(own, self.num_devices))
        self._device_in = self._add("device in", np.repeat(own, self.num_devices))
        self._bus = self._add("bus", np.where(self.is_bus, rate, math.inf))
        cross = np.array(
            [math.inf if i is None or i.cross_bit_per_s is None else i.cross_bit_per_s.value for i in held]
        )
        self._cross = self._add("island cross", cross)

    def _make_tree(self) -> None:
        fabric = self.fabric
        if fabric.switches:
            names = [switch.name for switch in fabric.switches]
            parents: list[str | None] = [switch.parent for switch in fabric.switches]
            rates = [math.inf if s.rate_bit_per_s is None else s.rate_bit_per_s.value for s in fabric.switches]
            parallel = [switch.num_links for switch in fabric.switches]
        else:
            names = [*dict.fromkeys(host.rack for host in fabric.hosts)]
            top = SPINE
            while top in names:
                top += "'"
            limits: dict[str, float] = {}
            for uplink in fabric.uplinks:
                limits[uplink.rack] = min(limits.get(uplink.rack, math.inf), uplink.rate_bit_per_s.value)
            rates = [*(limits.get(name, math.inf) for name in names), math.inf]
            parents = [*(top for _ in names), None]
            parallel = [1] * (len(names) + 1)
            names = [*names, top]
        index = {name: i for i, name in enumerate(names)}
        self.switch_names = names
        self._parent: Ints = np.array([-1 if p is None else index[p] for p in parents], dtype=np.int64)
        depth = np.zeros(len(names), dtype=np.int64)
        at = self._parent.copy()
        while (at >= 0).any():
            depth[at >= 0] += 1
            at = np.where(at >= 0, self._parent[at], -1)
        self._depth = depth
        at_switch: list[int] = []
        for host in fabric.hosts:
            at_switch += [index[name] for name in host.switches or (host.rack,) * host.num_nics]
        self.nic_switch: Ints = np.array(at_switch, dtype=np.int64)
        first = self.nic_switch[self._nic_base[:-1]]
        self._is_railed = np.array([len(set(host.switches)) > 1 for host in fabric.hosts], dtype=bool)
        self.host_switch = first
        # With hashed flows every parallel link is a link of its own; else a switch's links are one.
        self._lanes = np.array(parallel, dtype=np.int64)
        if fabric.spread == "packets":
            self._lanes = np.ones_like(self._lanes)
        self._is_hashed = bool((self._lanes > 1).any())
        self._lane_base = np.concatenate([[0], np.cumsum(self._lanes)])
        share = np.repeat(np.array(rates) / self._lanes, self._lanes)
        self._up = self._add("up", share)
        self._down = self._add("down", share)
        self._uplink_bit_per_s = np.array(rates)
        self._is_leaf = np.bincount(self.nic_switch, minlength=len(names)) > 0
        self._make_cuts()

    def _make_dragonfly(self) -> None:
        shape = self.fabric.dragonfly
        assert shape is not None
        groups, routers = shape.num_groups, shape.routers_per_group
        places = [shape.router(host.rack) for host in self.fabric.hosts]
        at = np.array([group * routers + router for group, router in places], dtype=np.int64)
        self.nic_switch = np.repeat(at, self.num_nics)
        self.host_switch = at
        self._is_railed = np.zeros(len(places), dtype=bool)
        self.switch_names = [f"g{g}r{r}" for g in range(groups) for r in range(routers)]
        self._local = self._add("local", np.full(groups * routers * routers, shape.local_bit_per_s.value))
        self._global = self._add("global", np.full(groups * groups, shape.global_bit_per_s.value))
        self.cut_bit_per_s = np.full(groups, (groups - 1) * shape.global_bit_per_s.value if groups > 1 else math.inf)

    # Ways.

    def paths(self, source_host: Ints, source_device: Ints, target_host: Ints, target_device: Ints) -> Ints:
        """Links on the way of each flow: (flows, hops), padded with "no link". Host and device numbers, (flows,) each.

        A flow from a device to itself uses no link.
        """
        # More ranks than devices share the devices.
        source_device = source_device % self.num_devices[source_host]
        target_device = target_device % self.num_devices[target_host]
        own_nic = self._nic(source_host, source_device)
        far_nic = self._nic(target_host, target_device)
        is_local = source_host == target_host
        # Rails: NIC of the receiver's number, reached over the sender's island.
        is_relayed = ~is_local & self._is_railed[source_host] & self.is_switch[source_host] & (own_nic != far_nic)
        is_relayed &= far_nic < self.num_nics[source_host]
        out_nic = np.where(is_relayed, far_nic, own_nic)
        none = self.no_link
        out_id = self._nic_base[source_host] + out_nic
        in_id = self._nic_base[target_host] + far_nic
        source_id = self._device_base[source_host] + source_device
        target_id = self._device_base[target_host] + target_device
        moves = is_local & (source_device != target_device)
        columns: list[Ints] = []
        if self._has_islands:
            size = self._island_size[source_host]
            crosses = moves & (source_device // size != target_device // size)
            columns = [
                np.where(moves | is_relayed, self._device_out + source_id, none),
                np.where(moves, self._device_in + target_id, none),
                np.where((moves | ~is_local) & self.is_bus[source_host], self._bus + source_host, none),
                np.where(~is_local & self.is_bus[target_host], self._bus + target_host, none),
                np.where(crosses, self._cross + source_host, none),
            ]
        columns += [
            np.where(is_local, none, self._nic_out + out_id),
            np.where(is_local, none, self._nic_in + in_id),
        ]
        for column in self._between(self.nic_switch[out_id], self.nic_switch[in_id], out_id, in_id):
            column[is_local] = none
            columns.append(column)
        kept = [column for column in columns if (column != none).any()]
        return np.stack(kept or columns[:1], axis=1)

    def _nic(self, host: Ints, device: Ints) -> Ints:
        return device * self.num_nics[host] // self.num_devices[host]

    def _between(self, source: Ints, target: Ints, source_nic: Ints, target_nic: Ints) -> list[Ints]:
        if self.fabric.dragonfly is not None:
            return self._across_dragonfly(source, target, source_nic, target_nic)
        columns: list[Ints] = []
        left, right = source.copy(), target.copy()
        lane: Ints | int = 0
        if self._is_hashed:
            salt = (source_nic * 0x9E3779B1 + target_nic * 0x85EBCA77) & 0x7FFFFFFF
            lane = (salt ^ (salt >> 15)) * 0x2C1B3C6D & 0x7FFFFFFF
            lane ^= lane >> 12
        while (apart := left != right).any():
            deeper = apart & (self._depth[left] >= self._depth[right])
            shallower = apart & (self._depth[right] >= self._depth[left])
            for moves, at, base in ((deeper, left, self._up), (shallower, right, self._down)):
                link = base + self._lane_base[at]
                if self._is_hashed:
                    link = link + lane % self._lanes[at]
                columns.append(np.where(moves, link, self.no_link))
            left = np.where(deeper, self._parent[left], left)
            right = np.where(shallower, self._parent[right], right)
        return columns

    def _across_dragonfly(self, source: Ints, target: Ints, source_nic: Ints, target_nic: Ints) -> list[Ints]:
        shape = self.fabric.dragonfly
        assert shape is not None
        groups, routers = shape.num_groups, shape.routers_per_group
        columns: list[Ints] = []
        at, goal = source, target // routers
        stops = [goal]
        if shape.detour and groups > 2:
            spread = (source_nic * 0x9E3779B1 + target_nic * 0x85EBCA77 >> 7) % groups
            here = source // routers
            middle = np.where((spread == here) | (spread == goal) | (here == goal), goal, spread)
            stops = [middle, goal]
        for stop in stops:
            here = at // routers
            moves = here != stop
            gate = here * routers + self._gate(here, stop)
            columns.append(self._local_link(at, np.where(moves, gate, at)))
            columns.append(np.where(moves, self._global + here * groups + stop, self.no_link))
            at = np.where(moves, stop * routers + self._gate(stop, here), at)
        columns.append(self._local_link(at, target))
        return columns

    def _gate(self, group: Ints, other: Ints) -> Ints:
        """The router of a group that holds the link to another group: links are dealt to the routers in turn."""
        assert self.fabric.dragonfly is not None
        return (other - group) % self.fabric.dragonfly.num_groups % self.fabric.dragonfly.routers_per_group

    def _local_link(self, at: Ints, to: Ints) -> Ints:
        assert self.fabric.dragonfly is not None
        routers = self.fabric.dragonfly.routers_per_group
        return np.where(at == to, self.no_link, self._local + at * routers + to % routers)

    # Cuts: what lies below each switch (tree), or in each group (dragonfly).

    def ranks_below(self, host: Ints) -> Ints:
        """How many of the ranks on these hosts, (G, p), lie inside each cut: (G, cuts)."""
        num_groups, width = host.shape
        if self.fabric.dragonfly is not None:
            place, num_cuts = self.host_switch[host] // self.fabric.dragonfly.routers_per_group, self.cut_bit_per_s.size
        else:
            place, num_cuts = self._anchor[host], int(self._parent.size)
        row = np.repeat(np.arange(num_groups, dtype=np.int64), width)
        counts = np.bincount(row * num_cuts + place.ravel(), minlength=num_groups * num_cuts)
        counts = counts.reshape(num_groups, num_cuts).astype(np.int64)
        return counts if self.fabric.dragonfly is not None else self._accumulate(counts.T).T

    def cut_name(self, cut: int) -> str:
        """A cut in words."""
        if self.fabric.dragonfly is not None:
            return f"links of group {cut}"
        return f"uplink of {self._switch_word(cut)} {self.switch_names[cut]}"

    def _make_cuts(self) -> None:
        """Where whole hosts lie. A switch that holds only some NICs of a host cuts nothing off."""
        anchor = self.host_switch.copy()
        for nic in range(1, int(self.num_nics.max())):
            has = self.num_nics > nic
            left, right = anchor[has], self.nic_switch[self._nic_base[:-1][has] + nic]
            while (left != right).any():
                down, up = self._depth[left] >= self._depth[right], self._depth[right] >= self._depth[left]
                left, right = (
                    np.where((left != right) & down, self._parent[left], left),
                    np.where((left != right) & up, self._parent[right], right),
                )
            anchor[has] = left
        self._anchor = anchor
        whole = self._accumulate(
            np.bincount(anchor, weights=self.num_nics, minlength=self._parent.size).astype(np.int64)
        )
        under = self._accumulate(np.bincount(self.nic_switch, minlength=self._parent.size).astype(np.int64))
        self.cut_bit_per_s = np.where((whole == under) & (self._parent >= 0), self._uplink_bit_per_s, math.inf)

    def _accumulate(self, counts: Ints) -> Ints:
        """Add what lies below each switch to it, from the deepest up."""
        total = counts.copy()
        for depth in range(int(self._depth.max()), 0, -1):
            at = np.flatnonzero(self._depth == depth)
            np.add.at(total, self._parent[at], total[at])
        return total

    def _switch_word(self, switch: int) -> str:
        return "rack" if self._is_leaf[switch] else "switch"

    # Names.

    def link_name(self, link: int) -> str:
        """What a link is, in words."""
        if link == self.no_link:
            return "nothing"
        block = next((b for b in self._blocks if b.start <= link < b.start + b.count), None)
        if block is None:
            raise InternalError(f"the network has no link {link}")
        return self._name_in(block, link - block.start)

    def _name_in(self, block: _Block, place: int) -> str:
        hosts = self.fabric.hosts
        if block.kind in ("nic out", "nic in"):
            host = int(np.searchsorted(self._nic_base, place, side="right")) - 1
            number = "" if self.num_nics[host] == 1 else f" {place - int(self._nic_base[host])}"
            return f"NIC{number} of host {hosts[host].name} ({block.kind.removeprefix('nic ')})"
        if block.kind in ("device out", "device in"):
            host = int(np.searchsorted(self._device_base, place, side="right")) - 1
            return f"{hosts[host].island} of device {place - int(self._device_base[host])} of host {hosts[host].name}"
        if block.kind in ("bus", "island cross"):
            joins = "between the islands " if block.kind == "island cross" else ""
            return f"{hosts[place].island} {joins}of host {hosts[place].name}"
        if block.kind in ("up", "down"):
            switch = int(np.searchsorted(self._lane_base, place, side="right")) - 1
            number = "" if self._lanes[switch] == 1 else f" {place - int(self._lane_base[switch])}"
            return f"uplink{number} of {self._switch_word(switch)} {self.switch_names[switch]} ({block.kind})"
        assert self.fabric.dragonfly is not None
        if block.kind == "local":
            routers = self.fabric.dragonfly.routers_per_group
            group, rest = divmod(place, routers * routers)
            return f"link of g{group}r{rest // routers} to g{group}r{rest % routers}"
        one, other = divmod(place, self.fabric.dragonfly.num_groups)
        return f"links of group {one} to group {other}"

    def links_of(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Which links are of these kinds, (L + 1,)."""
        found = np.zeros(self.no_link + 1, dtype=bool)
        for block in self._blocks:
            if block.kind in kinds:
                found[block.start : block.start + block.count] = True
        return found
