"""Make a lab's hosts and links in the kernel, and change them while it is up.

    host hN: eth0 (tbf) ---- port N (tbf) : rack bridge : up (tbf) ---- down (tbf) : spine bridge

Every host has a network, a UTS and a mount namespace; the bridges are in the keeper's own. Where netem is
missing and the lab has delay or loss, a pair of veths and a process in user space stand between eth0 and the
port (see delay.py). All of it is called from the keeper's only thread and lives as long as the keeper.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from wirespeed.errors import MissingCapability
from wirespeed.lab import classes, layout, namespaces, shaping
from wirespeed.system import free_port

_UP = {"state": "up"}


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One host's namespaces (descriptors) and devices (indices)."""

    host: layout.LabHost
    net: int
    mnt: int
    uts: int
    device: int
    """eth0, in the host's namespace."""
    plug: int
    """The other end of eth0, in the keeper's namespace: its state is the cable's."""
    port: int
    """The bridge port, which shapes what goes to the host. The same as ``plug`` without a delay line."""
    line: str | None
    """The device that the delay line reads frames of the bridge from, or None."""


class Wiring:
    """The kernel side of one lab."""

    def __init__(self, spec: layout.LabSpec) -> None:
        self.spec = spec
        self.links: dict[str, Link] = {}
        self.uses_netem = False
        self.uses_line = False
        self.notes: list[str] = []
        self._shapes: dict[int, shaping.Shape] = {}
        self._uplinks: dict[str, list[int]] = {}
        self._net = namespaces.open_own("net")
        self._mnt = namespaces.open_own("mnt")
        self._uts = namespaces.open_own("uts")

    def build(self, scratch: Path) -> None:
        """Make everything. The caller is in the lab's own network, mount and UTS namespaces."""
        from pyroute2.netlink.exceptions import NetlinkError

        namespaces.write_sysctl("/proc/sys/net/ipv4/ip_forward", "0")
        namespaces.write_sysctl("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
        namespaces.write_sysctl("/proc/sys/net/bridge/bridge-nf-call-iptables", "0")
        try:
            with _netlink() as netlink:
                bridges = self._make_bridges(netlink)
                for index, host in enumerate(layout.lay_out(self.spec)):
                    self._make_host(netlink, index, host, bridges[host.rack], scratch)
                shaping.check_rates(netlink, self._shapes)
        except NetlinkError as error:
            raise MissingCapability(
                f"the kernel refused a bridge or a veth pair: {error}",
                hint="load them with: modprobe bridge veth (CONFIG_BRIDGE, CONFIG_VETH)",
            ) from None

    def _make_bridges(self, netlink: Any) -> list[int]:
        racks = [_add_bridge(netlink, f"rack{rack}", rack) for rack in range(self.spec.racks)]
        if self.spec.racks == 1:
            return racks
        spine = _add_bridge(netlink, "spine", 255)
        for rack, bridge in enumerate(racks):
            netlink.link("add", ifname=f"up{rack}", kind="veth", peer={"ifname": f"down{rack}"})
            for name, master in ((f"up{rack}", bridge), (f"down{rack}", spine)):
                device = _index(netlink, name)
                netlink.link("set", index=device, master=master, **_UP)
                self._uplinks.setdefault(f"rack{rack}", []).append(device)
                if self.spec.uplink_bit_per_s is not None:
                    self._shape(netlink, device, self.spec.uplink_bit_per_s)
        return racks

    def _shape(self, netlink: Any, device: int, rate_bit_per_s: float) -> None:
        """Shape a device of the lab's own namespace; ``build`` reads all of them back at once."""
        self._shapes[device] = shaping.shape_of(rate_bit_per_s)
        shaping.set_rate(netlink, device, self._shapes[device], first_dscp=self.spec.first_dscp)

    def _make_host(self, netlink: Any, index: int, host: layout.LabHost, bridge: int, scratch: Path) -> None:
        net, mnt, uts = self._make_namespaces(host, scratch)
        netlink.link("add", ifname=f"plug{index}", kind="veth", peer={"ifname": host.interface, "net_ns_fd": net})
        plug = port = _index(netlink, f"plug{index}")
        wants_impairment = self.spec.delay_s > 0 or self.spec.loss > 0
        line = None
        with namespaces.inside(net, self._net), _netlink() as inner:
            device = _index(inner, host.interface)
            inner.link("set", index=1, **_UP)
            inner.addr("add", index=device, address=host.address, prefixlen=layout.PREFIX_LENGTH)
            inner.link("set", index=device, **_UP)
            shape = shaping.shape_of(self.spec.rate_bit_per_s)
            shaping.set_rate(inner, device, shape, first_dscp=self.spec.first_dscp)
            shaping.check_rates(inner, {device: shape})
            if wants_impairment and self.spec.first_dscp is not None:
                self.uses_line = True  # netem would have to stand once under each class
            elif wants_impairment and not self.uses_line:
                self.uses_netem = shaping.add_netem(
                    inner, device, delay_s=self.spec.delay_s, loss=self.spec.loss,
                    rate_bit_per_s=self.spec.rate_bit_per_s,
                )  # fmt: skip
                self.uses_line = not self.uses_netem
        if self.uses_line:
            line = f"line{index}"
            netlink.link("add", ifname=f"port{index}", kind="veth", peer={"ifname": line})
            port = _index(netlink, f"port{index}")
            netlink.link("set", index=_index(netlink, line), **_UP)
        netlink.link("set", index=plug, **_UP)
        netlink.link("set", index=port, master=bridge, **_UP)
        self._shape(netlink, port, self.spec.rate_bit_per_s)
        self.links[host.name] = Link(
            host=host, net=net, mnt=mnt, uts=uts, device=device, plug=plug, port=port, line=line
        )

    def _make_namespaces(self, host: layout.LabHost, scratch: Path) -> tuple[int, int, int]:
        """New namespaces for a host, held by descriptors; this process is in the lab's own again afterwards."""
        namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWNS | namespaces.CLONE_NEWUTS)
        try:
            namespaces.sethostname(host.name)
            namespaces.write_sysctl("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
            if not namespaces.show_own_devices(scratch) and not self.notes:
                self.notes.append("/sys/class/net shows the machine's devices, not the host's (the kernel forbids it)")
            return namespaces.open_own("net"), namespaces.open_own("mnt"), namespaces.open_own("uts")
        finally:
            for home in (self._uts, self._mnt, self._net):
                namespaces.setns(home)

    def network_inodes(self) -> frozenset[int]:
        """The inode numbers of the hosts' network namespaces: what tells a lab's processes from others."""
        return frozenset(os.fstat(link.net).st_ino for link in self.links.values())

    def line_pairs(self) -> list[tuple[str, str]]:
        """For the delay line: per host, the device towards the host and the one towards the bridge."""
        return [(f"plug{index}", link.line) for index, link in enumerate(self.links.values()) if link.line is not None]

    def free_port(self, host: str) -> int:
        """A TCP port that is free in a host at this moment."""
        link = self.links[host]
        with namespaces.inside(link.net, self._net):
            return free_port(link.host.address)

    def set_link(self, host: str, *, up: bool) -> None:
        """Plug in or pull the host's cable. The host sees it as carrier, and its address stays."""
        with _netlink() as netlink:
            netlink.link("set", index=self.links[host].plug, state="up" if up else "down")

    def set_rate(self, host: str, rate_bit_per_s: float) -> None:
        """Change a host's link in both directions, and read it back."""
        link = self.links[host]
        shape = shaping.shape_of(rate_bit_per_s)
        with _netlink() as netlink:
            shaping.set_rate(netlink, link.port, shape, change=True, first_dscp=self.spec.first_dscp)
            shaping.check_rates(netlink, {link.port: shape})
        with namespaces.inside(link.net, self._net), _netlink() as inner:
            shaping.set_rate(inner, link.device, shape, change=True, first_dscp=self.spec.first_dscp)
            shaping.check_rates(inner, {link.device: shape})

    def has_uplink(self, rack: str) -> bool:
        """Whether ``rack`` (``rack0`` ...) has an uplink that is shaped, so that its rate can be changed."""
        return rack in self._uplinks and self.spec.uplink_bit_per_s is not None

    def set_uplink_rate(self, rack: str, rate_bit_per_s: float) -> None:
        """Change a rack's uplink in both directions, and read it back."""
        shape = shaping.shape_of(rate_bit_per_s)
        with _netlink() as netlink:
            for device in self._uplinks[rack]:
                shaping.set_rate(netlink, device, shape, change=True, first_dscp=self.spec.first_dscp)
            shaping.check_rates(netlink, dict.fromkeys(self._uplinks[rack], shape))

    def read_rates(self) -> dict[str, tuple[float | None, float | None]]:
        """What the kernel says, by host: bit/s from the host and to the host."""
        with _netlink() as netlink:
            received = shaping.read_rates(netlink)
        rates = {}
        for name, link in self.links.items():
            with namespaces.inside(link.net, self._net), _netlink() as inner:
                rates[name] = (shaping.read_rates(inner).get(link.device), received.get(link.port))
        return rates

    def read_classes(self) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        """By host: bytes sent and bytes received, each in the first class and in the rest. Empty without classes."""
        if self.spec.first_dscp is None:
            return {}
        found = {}
        with _netlink() as netlink:
            for name, link in self.links.items():
                received = classes.read_sent_bytes(netlink, link.port)
                with namespaces.inside(link.net, self._net), _netlink() as inner:
                    found[name] = (classes.read_sent_bytes(inner, link.device), received)
        return found

    def set_partition(self, host: str, other: str, *, cut: bool) -> None:
        """Drop, silently, every frame between two hosts, or let them pass again.

        Each gets a fixed neighbour entry for the other that names the rack bridge's own address: such frames
        cross the shaped link as usual, then end at the bridge, which has no IP and does not forward.
        """
        for near, far in ((host, other), (other, host)):
            link, target = self.links[near], self.links[far].host
            with namespaces.inside(link.net, self._net), _netlink() as inner:
                if cut:
                    sink = _bridge_address(link.host.rack)
                    inner.neigh("replace", dst=target.address, lladdr=sink, ifindex=link.device, state=_PERMANENT)
                else:
                    inner.neigh("del", dst=target.address, ifindex=link.device)


_PERMANENT = 0x80


@contextlib.contextmanager
def _netlink() -> Iterator[Any]:
    """A netlink socket of the namespace this process is in."""
    from pyroute2 import IPRoute

    netlink = IPRoute()
    try:
        yield netlink
    finally:
        netlink.close()


def _index(netlink: Any, name: str) -> int:
    return int(netlink.link_lookup(ifname=name)[0])


def _bridge_address(rack: int) -> str:
    return f"02:77:00:00:{rack:02x}:01"


def _add_bridge(netlink: Any, name: str, number: int) -> int:
    # A fixed address: a bridge else takes the lowest of its ports', which changes as ports join.
    netlink.link("add", ifname=name, kind="bridge", address=_bridge_address(number))
    device = _index(netlink, name)
    netlink.link("set", index=device, **_UP)
    return device
