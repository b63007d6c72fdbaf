"""The host's place in the network: routes, filters, open ports.

Routes to the job's other hosts are asked for where those are known (``--hosts``). A firewall's rules need root.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Setting, Unknown, check
from wirespeed.doctor.inventory import HostView

_ENGINES = {
    29500: "torchrun's rendezvous",
    29400: "torchrun's c10d rendezvous",
    6379: "Redis, or Ray's head",
    8265: "Ray's dashboard (runs any command it is sent)",
    10001: "Ray's client server (runs any code it is sent)",
    28028: "NCCL's RAS service",
    11211: "memcached",
    8000: "an inference server (HTTP)",
    8001: "an inference server (gRPC)",
    9000: "an object store",
}
_DANGEROUS = {6379, 8265, 10001, 11211}  # whoever reaches them owns data or the machine
# Interface, destination, gateway, (flags, references, use, metric,) mask; addresses are little-endian.
_ROUTE = re.compile(r"(\S+)\s+([0-9A-F]{8})\s+([0-9A-F]{8})\s+\S+\s+\S+\s+\S+\s+\S+\s+([0-9A-F]{8})\b")
_SOCKET = re.compile(r"\s*\d+: ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) \S+ 0A\b")  # 0A: listening
_MAX_RULE_LINES = 20_000


def on_link(view: HostView) -> dict[str, list[str]]:
    """Subnet -> interfaces that reach it without a gateway."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (view.system.read_text("/proc/net/route") or "").splitlines()[1:]:
        match = _ROUTE.match(line)
        if match is None or match[3] != "00000000" or match[4] in ("00000000", "FFFFFFFF"):
            continue
        address, mask = (int.from_bytes(bytes.fromhex(match[group]), "little") for group in (2, 4))
        net = f"{ipaddress.ip_address(address & mask)}/{bin(mask).count('1')}"
        if match[1] not in found[net]:
            found[net].append(match[1])
    return found


@check("route.subnets", "interfaces that share a subnet, and reverse path filters")
def subnets(view: HostView) -> Iterator[Outcome]:
    """Two interfaces in one subnet: the kernel sends by one of them whatever address a program is bound to."""
    if view.system.read_text("/proc/net/route") is None:
        yield view.file_unknown("/proc/net/route", "routes")
        return
    rdma = {netdev for port in view.rdma_ports if port.is_roce for netdev in port.netdevs}
    for net, names in on_link(view).items():
        if len(names) < 2 or set(names) <= rdma:  # RoCE rails: see rdma.rails
            continue
        yield Finding(
            id="route.one-subnet",
            subject=", ".join(names),
            severity="warning",
            title=f"{' and '.join(names)} are in one subnet ({net}): all traffic leaves by one of them.",
            evidence=(
                Evidence(
                    where="/proc/net/route", seen=f"{net} on {', '.join(names)}", expected="one interface per subnet"
                ),
            ),
            remedy=Remedy(
                text="bond them, give each its own subnet, or add a routing rule per source address (ip rule add from "
                "...)"
            ),
            source="RFC 1122 weak host model; kernel ip-sysctl.rst (rp_filter, arp_ignore)",
        )
        strict = max((view.sysctl_int(f"net.ipv4.conf.{name}.rp_filter") or 0 for name in ("all", *names)), default=0)
        if strict == 1:
            yield Finding(
                id="route.strict-filter",
                subject="net.ipv4.conf.all.rp_filter",
                severity="warning",
                title="Packets that arrive on the other interface than the route back are dropped (strict reverse "
                "path filter).",
                evidence=(
                    Evidence(where="/proc/sys/net/ipv4/conf/*/rp_filter", seen="1", expected="2 with several paths"),
                ),
                remedy=Remedy(
                    text="set net.ipv4.conf.all.rp_filter to 2 (loose)",
                    settings=(Setting(key="net.ipv4.conf.all.rp_filter", value="2"),),
                ),
                source="kernel Documentation/networking/ip-sysctl.rst (rp_filter); RFC 3704",
            )


def _no_peers(view: HostView) -> str | None:
    return None if view.peers else "no other hosts were named"


@check("route.peers", "routes to the job's other hosts", applies=_no_peers, deadline_s=8.0)
def peers(view: HostView) -> Iterator[Outcome]:
    """A gateway to a peer that is on link, and peers that are reached by different interfaces."""
    nets = {ipaddress.ip_network(net, strict=False): names for net, names in on_link(view).items()}
    by_interface: dict[str, list[str]] = defaultdict(list)
    for peer in view.peers:
        said = view.command("ip", "-j", "route", "get", peer)
        if isinstance(said, Unknown):
            yield Unknown(what=f"route to {peer}", why=said.why, hint=said.hint)
            continue
        route = _first(said.stdout)
        name, gateway = str(route.get("dev", "unknown")), route.get("gateway")
        if name == "lo":
            continue
        by_interface[name].append(peer)
        yield from _asymmetric(view, peer, route)
        home = next((net for net in nets if ipaddress.ip_address(peer) in net), None)
        if gateway is not None and home is not None:
            yield Finding(
                id="route.gateway-though-on-link",
                subject=peer,
                severity="warning",
                title=f"{peer} is in a subnet of this host but is reached through gateway {gateway}.",
                evidence=(
                    Evidence(
                        where=f"`ip route get {peer}`",
                        seen=f"via {gateway} dev {name}",
                        expected=f"dev {', '.join(nets[home])}",
                    ),
                ),
                remedy=Remedy(text="remove the more specific route", commands=(f"ip route show match {peer}",)),
                source="ip-route(8)",
            )
    if len(by_interface) > 1:
        usual = max(by_interface, key=lambda name: len(by_interface[name]))
        for name, some in by_interface.items():
            if name != usual:
                yield Finding(
                    id="route.peers-by-other-interface",
                    subject=name,
                    severity="warning",
                    title=f"{', '.join(some[:4])} {'is' if len(some) == 1 else 'are'} reached by {name}, the others "
                    f"by {usual}.",
                    evidence=(Evidence(where=f"`ip route get {some[0]}`", seen=name, expected=usual),),
                    remedy=Remedy(text="one network for the whole job: check names in DNS or /etc/hosts, and routes"),
                    source="ip-route(8)",
                )


def _asymmetric(view: HostView, peer: str, route: dict[str, Any]) -> Iterator[Outcome]:
    """Peers reach this host by ``view.address``; packets to them carry the route's own source address."""
    source = route.get("prefsrc")
    if view.address is None or not isinstance(source, str) or source == view.address:
        return
    if ipaddress.ip_address(view.address).is_loopback:
        return  # the caller is this host itself, and its name resolves to a loopback address
    yield Finding(
        id="route.asymmetric",
        subject=peer,
        severity="warning",
        title=f"{peer} reaches this host at {view.address}, but packets to it leave by "
        f"{route.get('dev', 'another way')} with source {source}: the ways there and back differ.",
        evidence=(
            Evidence(
                where=f"`ip route get {peer}`",
                seen=f"dev {route.get('dev', 'unknown')} src {source}",
                expected=f"src {view.address}",
            ),
        ),
        remedy=Remedy(
            text="one network for the job in both directions: names in DNS or /etc/hosts, routes, NCCL_SOCKET_IFNAME; "
            "strict reverse path filters drop such packets"
        ),
        source="RFC 3704; ip-route(8)",
    )


def _first(text: str) -> dict[str, Any]:
    try:
        held = json.loads(text)
    except ValueError:
        return {}
    return held[0] if isinstance(held, list) and held and isinstance(held[0], dict) else {}


@check("route.firewall", "filters in the way of a job's connections", deadline_s=6.0)
def firewall(view: HostView) -> Iterator[Outcome]:
    """A default policy of drop. Ranks open arbitrary ports, so that a list of open ports is not enough."""
    said = view.command("nft", "list", "ruleset")
    if isinstance(said, Unknown):
        legacy = view.command("iptables", "-S")
        if isinstance(legacy, Unknown):
            why = said.why if "not installed" not in said.why else legacy.why
            yield Unknown(
                what="firewall rules", why=why, hint="run as root" if not view.is_root else "install nftables"
            )
            return
        text = legacy.stdout
        chain = re.search(r"^-P INPUT (?:DROP|REJECT)", text, re.MULTILINE)
    else:
        text = said.stdout[: _MAX_RULE_LINES * 100]
        chain = re.search(r"hook input priority[^;]*; policy drop", text)
        if chain is None:
            chain = re.search(r"chain \w*INPUT\w* \{[^}]*^\s*(?:counter )?(?:drop|reject)\b[^}]*\}", text, re.MULTILINE)
    yield Fact(key="route.firewall", value="none" if chain is None else "input is dropped by default")
    if chain is not None:
        yield Finding(
            id="route.firewall-drops",
            subject="input",
            severity="notice",
            title="A firewall drops what no rule allows; ranks open ports of their own choice and would time out.",
            evidence=(
                Evidence(
                    where="`nft list ruleset`" if not isinstance(said, Unknown) else "`iptables -S`",
                    seen=chain[0][:120],
                ),
            ),
            remedy=Remedy(
                text="allow everything from the cluster's subnet, or fix the ports (NCCL: ip_local_port_range; gloo: "
                "the same)"
            ),
            source="nccl#1105, #706, nccl-tests#162 (No route to host, time-outs)",
        )


@check("route.conntrack", "connection tracking table")
def conntrack(view: HostView) -> Iterator[Outcome]:
    """A full table drops new connections of every program."""
    count, most = (view.sysctl_int(f"net.netfilter.nf_conntrack_{name}") for name in ("count", "max"))
    if count is None or most is None or most <= 0:
        return
    if count > 0.8 * most:
        key = "net.netfilter.nf_conntrack_max"
        yield Finding(
            id="route.conntrack-full",
            subject=key,
            severity="warning",
            title=f"{count} of {most} connections are tracked: soon new ones are dropped.",
            evidence=(
                Evidence(
                    where="/proc/sys/net/netfilter/nf_conntrack_count",
                    seen=str(count),
                    expected=f"below {most * 8 // 10}",
                ),
            ),
            remedy=Remedy(text=f"set {key} to {2 * most}", settings=(Setting(key=key, value=str(2 * most)),)),
            source="kernel Documentation/networking/nf_conntrack-sysctl.rst; 80 %: own recommendation",
        )


@check("route.open-ports", "open ports of the engines and their addresses")
def open_ports(view: HostView) -> Iterator[Outcome]:
    """Ports that are known by number; a service on another port is not recognised."""
    seen: dict[int, set[str]] = defaultdict(set)
    is_known = False
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        text = view.system.read_text(name)
        is_known = is_known or text is not None
        for line in (text or "").splitlines()[1:]:
            match = _SOCKET.match(line)
            if match is not None:
                seen[int(match[2], 16)].add(address_of(match[1]))
    if not is_known:
        yield view.file_unknown("/proc/net/tcp", "open ports")
        return
    for number, addresses in sorted(seen.items()):
        if number not in _ENGINES:
            continue
        shown = ", ".join(sorted(addresses))
        yield Fact(key=f"route.port.{number}", value=f"{shown} ({_ENGINES[number]})")
        is_open = any(not ipaddress.ip_address(address).is_loopback for address in addresses)
        if is_open and number in _DANGEROUS:
            yield Finding(
                id="route.open-engine-port",
                subject=f"port {number}",
                severity="notice",
                title=f"Port {number} ({_ENGINES[number]}) is open on {shown}: "
                "whoever reaches it owns data or the host.",
                evidence=(
                    Evidence(
                        where="/proc/net/tcp",
                        seen=f"{shown}:{number} LISTEN",
                        expected="loopback, or a firewall and a password",
                    ),
                ),
                remedy=Remedy(text="bind it to an address of the cluster's own network, and set its password or token"),
                source="Ray and Redis security documentation",
            )


def address_of(digits: str) -> str:
    """An address as the kernel prints it in /proc/net: words of four bytes, each in the processor's order."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


CHECKS = (subnets, peers, firewall, conntrack, open_ports)
