"""RDMA over Ethernet: payload MTU, addresses, lossless priorities, rails in one subnet.

The payload MTU is derived from the interface's MTU by the kernel's own arithmetic (rdma/ib_addr.h), since sysfs does
not show the active one. Whether a lossy fabric hurts, only counters under load tell.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Setting, Unknown, check
from wirespeed.doctor.inventory import HostView, RdmaPort
from wirespeed.doctor.network import on_link
from wirespeed.doctor.rdma import no_rdma
from wirespeed.doctor.traffic_class import lossless, parse_map, traffic_class

ROCE_HEADER_BYTES = 96  # GRH 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4
_MTUS = (256, 512, 1024, 2048, 4096)


def roce_mtu(netdev_mtu: int) -> int | None:
    """Payload bytes per RoCE packet on an interface of that MTU; None below the smallest."""
    return max((mtu for mtu in _MTUS if mtu <= netdev_mtu - ROCE_HEADER_BYTES), default=None)


@check("rdma.roce", "RoCE: MTU, addresses, priorities", applies=no_rdma)
def roce(view: HostView) -> Iterator[Outcome]:
    """MTU by the kernel's arithmetic; GIDs; whether a priority is lossless."""
    for port in view.rdma_ports:
        if port.is_roce and port.is_active and not port.is_efa:
            yield from _roce_mtu(view, port)
            yield from _gids(view, port)
            yield from _priorities(view, port)


def _roce_mtu(view: HostView, port: RdmaPort) -> Iterator[Outcome]:
    for netdev in port.netdevs:
        mtu = view.system.read_int(f"/sys/class/net/{netdev}/mtu")
        if mtu is None:
            yield view.file_unknown(f"/sys/class/net/{netdev}/mtu", f"MTU of {netdev}")
            continue
        active = roce_mtu(mtu)
        yield Fact(key=f"rdma.{port.name}.roce-mtu", value="none" if active is None else str(active))
        if active == 4096:
            continue
        almost = " (4096 on the interface is a common mistake: headers take 96 bytes)" if 4096 <= mtu < 4192 else ""
        yield Finding(
            id="rdma.roce-mtu",
            subject=netdev,
            severity="warning",
            title=f"RoCE on {port.name} sends packets of {active or 'no'} bytes instead of 4096: {netdev} has MTU "
            f"{mtu}{almost}.",
            evidence=(
                Evidence(
                    where=f"/sys/class/net/{netdev}/mtu",
                    seen=str(mtu),
                    expected="4200 or 9000 on every host and switch port",
                ),
                Evidence(
                    where=f"{mtu} - {ROCE_HEADER_BYTES} bytes of headers", seen=f"payload {active}", expected="4096"
                ),
            ),
            remedy=Remedy(
                text="raise the MTU on all hosts and switch ports, the same everywhere: unequal ones fail with NCCL "
                "2.20 and later",
                commands=(f"ip link set {netdev} mtu 4200",),
                undo=(f"ip link set {netdev} mtu {mtu}",),
                caution="resets the link; the switch must allow it first",
            ),
            source="kernel include/rdma/ib_addr.h (iboe_get_mtu); NVIDIA recommends 4200; nccl#1524",
            path="rdma",
        )


def _gids(view: HostView, port: RdmaPort) -> Iterator[Outcome]:
    base = f"/sys/class/infiniband/{port.device}/ports/{port.port}"
    routable: list[int] = []
    any_seen = is_hidden = False
    for index in sorted(int(name) for name in view.system.list_dir(f"{base}/gids") if name.isdigit())[:32]:
        # An empty index answers EINVAL: it is no address, and nothing is hidden.
        gid, kind = (view.system.read(f"{base}/{folder}/{index}") for folder in ("gids", "gid_attrs/types"))
        is_hidden = is_hidden or "denied" in (gid.problem, kind.problem)
        if gid.text is None or kind.text is None or set(gid.text) <= {"0", ":"}:
            continue
        try:
            address = ipaddress.ip_address(gid.text)
        except ValueError:
            continue
        any_seen = True
        if "v2" in kind.text and not address.is_link_local:
            routable.append(index)
    if routable:
        yield Fact(key=f"rdma.{port.name}.gid-index", value=str(routable[0]))
    elif any_seen and not is_hidden:
        yield Finding(
            id="rdma.no-routable-gid",
            subject=port.name,
            severity="critical",
            title=f"{port.name} has no RoCE v2 address that can be routed: connections end in time-outs.",
            evidence=(
                Evidence(
                    where=f"{base}/gids", seen="link-local or RoCE v1 only", expected="RoCE v2 with an IP address"
                ),
            ),
            remedy=Remedy(
                text=f"give {', '.join(port.netdevs) or 'its interface'} an IP address; leave NCCL_IB_GID_INDEX unset"
            ),
            source="nccl#426, #769",
            path="rdma",
        )
    else:
        yield Unknown(
            what=f"GIDs of {port.name}", why=f"{base}/gids shows none", hint="`show_gids`, or run on the host itself"
        )


def _priorities(view: HostView, port: RdmaPort) -> Iterator[Outcome]:
    for netdev in port.netdevs:
        said = view.command("dcb", "-j", "pfc", "show", "dev", netdev)
        if isinstance(said, Unknown):
            said = view.command("mlnx_qos", "-i", netdev)
        if isinstance(said, Unknown):
            hint = "install iproute2's dcb, or mlnx_qos"
            yield Unknown(what=f"lossless priorities (PFC) of {netdev}", why=said.why, hint=said.hint or hint)
            continue
        enabled = lossless(said.stdout)
        if enabled is None:
            yield Unknown(what=f"lossless priorities (PFC) of {netdev}", why="the answer has another form")
            continue
        yield Fact(key=f"rdma.{port.name}.pfc", value=",".join(map(str, enabled)) or "none")
        yield from _priority_of_traffic(view, port, netdev, enabled)
        marks = {p: view.system.read_text(f"/sys/class/net/{netdev}/ecn/roce_np/enable/{p}") for p in range(8)}
        has_ecn = any(mark == "1" for mark in marks.values())
        if not enabled and not has_ecn:
            yield Finding(
                id="rdma.roce-lossy",
                subject=netdev,
                severity="warning",
                title=f"RoCE on {netdev} has no lossless priority and no congestion marking: a full switch buffer "
                "means lost packets.",
                evidence=(
                    Evidence(
                        where=f"PFC of {netdev}",
                        seen="off for all priorities",
                        expected="on for the priority of training",
                    ),
                    Evidence(
                        where=f"/sys/class/net/{netdev}/ecn/roce_np/enable",
                        seen="not enabled" if any(marks.values()) else "unknown",
                    ),
                ),
                remedy=Remedy(
                    text="choose one priority with the switch's owner; set PFC and ECN there and here, and NCCL_IB_TC "
                    "to its DSCP x 4",
                    commands=(f"mlnx_qos -i {netdev} --pfc 0,0,0,1,0,0,0,0 --trust dscp",),
                    undo=(f"mlnx_qos -i {netdev} --pfc 0,0,0,0,0,0,0,0",),
                    caution="both ends must agree",
                ),
                source="nccl#378, #306 (not always confirmed as the cause): confirm with `--during 10s` under load",
                path="rdma",
            )


def _priority_of_traffic(view: HostView, port: RdmaPort, netdev: str, enabled: tuple[int, ...]) -> Iterator[Outcome]:
    """Whether RoCE traffic is sent in a lossless priority: by the interface's own map, else its DSCP over 8."""
    if not enabled:
        return
    marked = traffic_class(view, port)
    if marked is None:
        file = f"/sys/class/infiniband/{port.device}/tc/{port.port}/traffic_class"
        why = f"NCCL_IB_TC is not set and {file} does not say"
        yield Unknown(what=f"priority of RoCE traffic on {netdev}", why=why, hint="set NCCL_IB_TC to DSCP x 4")
        return
    value, where = marked
    said = view.command("mlnx_qos", "-i", netdev)
    mapped = {} if isinstance(said, Unknown) else parse_map(said.stdout)
    priority = mapped.get(value >> 2, value >> 5)  # traffic class = DSCP x 4; priority = DSCP / 8 by default
    yield Fact(key=f"rdma.{port.name}.priority", value=str(priority))
    if priority not in enabled:
        yield Finding(
            id="rdma.lossy-priority",
            subject=netdev,
            severity="warning",
            title=f"RoCE traffic of {netdev} is sent in priority {priority}, which is not lossless.",
            evidence=(
                Evidence(where=where, seen=f"traffic class {value} = DSCP {value >> 2}, priority {priority}"),
                Evidence(where=f"PFC of {netdev}", seen=f"priority {', '.join(map(str, enabled))}"),
            ),
            remedy=Remedy(
                text=f"NCCL_IB_TC={enabled[0] * 32} puts it into priority {enabled[0]}; agree with the switch's owner"
            ),
            source="NCCL user guide (NCCL_IB_TC = DSCP x 4); nccl#378; default map of mlnx_qos --trust dscp",
            path="rdma",
        )


@check("rdma.rails", "several NICs in one subnet", applies=no_rdma)
def rails(view: HostView) -> Iterator[Outcome]:
    """RoCE rails that share a subnet need arp_ignore=1 and arp_announce=2, or answers name the wrong NIC."""
    rdma = {netdev for port in view.rdma_ports if port.is_roce and port.is_active for netdev in port.netdevs}
    nets = {net: [name for name in names if name in rdma] for net, names in on_link(view).items()}
    for net, netdevs in nets.items():
        if len(netdevs) < 2:
            continue
        for key, wanted in (("arp_ignore", 1), ("arp_announce", 2)):
            full = f"net.ipv4.conf.all.{key}"
            value = view.sysctl_int(full)
            if value is not None and value < wanted:
                yield Finding(
                    id="rdma.rails-arp",
                    subject=full,
                    severity="warning",
                    title=f"{', '.join(netdevs)} are in one subnet ({net}), and any of them answers for the others' "
                    "addresses.",
                    evidence=(
                        Evidence(where=f"/proc/sys/net/ipv4/conf/all/{key}", seen=str(value), expected=str(wanted)),
                    ),
                    remedy=Remedy(text=f"set {full} to {wanted}", settings=(Setting(key=full, value=str(wanted)),)),
                    source="kernel Documentation/networking/ip-sysctl.rst (arp_ignore, arp_announce)",
                    path="rdma",
                )


CHECKS = (roce, rails)
