"""Which queue training traffic ends up in: its mark, what the interface trusts, and what the switch offers.

A mark alone does nothing. Where an interface trusts the VLAN priority (the default of mlx5) and frames have none, all
RoCE traffic is in priority 0 whatever its DSCP. The switch's side is read from what it tells by LLDP, where a daemon
listens; else it is not known.

Standard library only: this module travels to hosts that have nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.inventory import HostView, RdmaPort
from wirespeed.doctor.launch import settings


def roce_ports(view: HostView) -> list[RdmaPort]:
    """Active RoCE ports."""
    return [port for port in view.rdma_ports if port.is_roce and port.is_active and not port.is_efa]


def no_roce(view: HostView) -> str | None:
    """Why checks of RoCE queues do not apply, or None."""
    return None if roce_ports(view) else "no active RoCE port"


def traffic_class(view: HostView, port: RdmaPort) -> tuple[int, str] | None:
    """The traffic class that NCCL's packets carry and where it is set; None where nothing says it."""
    given = settings(view).get("NCCL_IB_TC")
    if given is not None and given.value.isdigit():
        return int(given.value), given.where
    file = f"/sys/class/infiniband/{port.device}/tc/{port.port}/traffic_class"
    fixed = re.search(r"tclass=(\d+)", view.system.read_text(file) or "")
    return None if fixed is None else (int(fixed[1]), file)


def parse_trust(text: str) -> str | None:
    """``dscp`` or ``pcp`` of mlnx_qos; None where it does not say."""
    found = re.search(r"^Priority trust state:\s*(\w+)", text, re.MULTILINE)
    return None if found is None else found[1]


def parse_map(text: str) -> dict[int, int]:
    """DSCP to priority, of mlnx_qos or of ``dcb -j app show``; empty where neither is in the text."""
    found: dict[int, int] = {}
    for priority, listed in re.findall(r"prio:(\d)\s+dscp:([\d,]+)", text):
        found.update({int(dscp): int(priority) for dscp in listed.split(",") if dscp})
    listed = re.search(r'"dscp[-_]prio"\s*:\s*\[((?:\s*\[\s*\d+\s*,\s*\d\s*\]\s*,?)*)', text)
    for dscp, priority in re.findall(r"\[\s*(\d+)\s*,\s*(\d)\s*\]", "" if listed is None else listed[1]):
        found[int(dscp)] = int(priority)
    return found


def lossless(text: str) -> tuple[int, ...] | None:
    """Priorities with PFC, of ``dcb -j pfc show`` or ``mlnx_qos``; None where it is neither."""
    row = re.search(r"^\s*enabled\s+((?:[01]\s+){7}[01])", text, re.MULTILINE)
    if row is not None:
        return tuple(priority for priority, bit in enumerate(row[1].split()) if bit == "1")
    block = re.search(r'"prio-pfc"\s*:\s*(\{[^}]*\}|\[[^\]]*\])', text) or re.search(r"prio-pfc ((?:\d:\w+ ?)+)", text)
    if block is None:
        return None
    if block[1].startswith("["):
        return tuple(i for i, bit in enumerate(re.findall(r"true|false|on|off", block[1])) if bit in ("true", "on"))
    return tuple(int(p) for p in re.findall(r'"?(\d)"?\s*:\s*(?:true|"?on"?)', block[1]))


@check("rdma.queues", "priority that RoCE traffic really gets, here and at the switch", applies=no_roce, deadline_s=8.0)
def queues(view: HostView) -> Iterator[Outcome]:
    """Trust state, map of DSCP to priority, and the switch's lossless priorities."""
    for port in roce_ports(view):
        marked = traffic_class(view, port)
        for netdev in port.netdevs:
            yield from _trust(view, netdev, marked)
            yield from _switch(view, netdev)


def _trust(view: HostView, netdev: str, marked: tuple[int, str] | None) -> Iterator[Outcome]:
    said = view.command("mlnx_qos", "-i", netdev)
    if isinstance(said, Unknown):
        said = view.command("dcb", "-j", "app", "show", "dev", netdev)
    if isinstance(said, Unknown):
        yield Unknown(
            what=f"what {netdev} takes the priority of packets from", why=said.why,
            hint=said.hint or "install mlnx_qos, or iproute2's dcb",
        )  # fmt: skip
        return
    trust, mapped = parse_trust(said.stdout), parse_map(said.stdout)
    if trust is None:
        trust = "dscp" if mapped else "pcp"
    yield Fact(key=f"rdma.{netdev}.trust", value=trust)
    if marked is None or marked[0] == 0:
        return
    value, where = marked
    dscp = value >> 2
    if trust == "pcp":
        yield Finding(
            id="rdma.mark-not-trusted",
            subject=netdev,
            severity="warning",
            title=f"RoCE packets of {netdev} are marked DSCP {dscp}, but the interface does not look at the mark: they "
            "go into priority 0.",
            evidence=(
                Evidence(where=where, seen=f"traffic class {value} = DSCP {dscp}"),
                Evidence(where=f"`mlnx_qos -i {netdev}`", seen=f"trust state {trust}", expected="dscp"),
            ),
            remedy=Remedy(
                text="let the interface trust DSCP, as the switch does",
                commands=(f"mlnx_qos -i {netdev} --trust dscp",),
                undo=(f"mlnx_qos -i {netdev} --trust pcp",),
            ),
            source="kernel mlx5: trust state; mlnx_qos",
            path="rdma",
        )
        return
    priority = mapped.get(dscp)
    if priority is not None and priority != dscp >> 3:
        yield Fact(key=f"rdma.{netdev}.mapped-priority", value=str(priority))


def _switch(view: HostView, netdev: str) -> Iterator[Outcome]:
    """Lossless priorities as the switch tells them by LLDP (DCBX), against this interface's own."""
    said = view.command("lldptool", "-t", "-n", "-i", netdev, "-V", "PFC")
    if isinstance(said, Unknown):
        yield Unknown(
            what=f"priorities of the switch behind {netdev}", why=said.why,
            hint=said.hint or "install lldpad; else ask the switch's owner",
        )  # fmt: skip
        return
    found = re.search(r"PFC enabled:\s*([\d ,]+|none)", said.stdout)
    if found is None:
        yield Unknown(
            what=f"priorities of the switch behind {netdev}", why="the switch does not tell them by LLDP",
            hint="enable DCBX on the switch port, or ask its owner",
        )  # fmt: skip
        return
    there = {int(part) for part in re.findall(r"\d", found[1])}
    here = _own_lossless(view, netdev)
    yield Fact(key=f"rdma.{netdev}.switch-pfc", value=",".join(map(str, sorted(there))) or "none")
    if here is not None and here != there:
        yield Finding(
            id="rdma.pfc-differs-from-switch",
            subject=netdev,
            severity="warning",
            title=f"{netdev} and its switch port do not agree on lossless priorities: one end pauses what the other "
            "drops.",
            evidence=(
                Evidence(where=f"PFC of {netdev}", seen=_listed(here), expected=_listed(there)),
                Evidence(where=f"`lldptool -t -n -i {netdev} -V PFC`", seen=_listed(there)),
            ),
            remedy=Remedy(
                text="the same priorities on both ends",
                commands=(f"mlnx_qos -i {netdev} --pfc {','.join('1' if p in there else '0' for p in range(8))}",),
                undo=(f"mlnx_qos -i {netdev} --pfc {','.join('1' if p in here else '0' for p in range(8))}",),
                caution="both ends must agree",
            ),
            source="IEEE 802.1Qbb, DCBX",
            path="rdma",
        )


def _listed(priorities: set[int]) -> str:
    return ", ".join(f"priority {one}" for one in sorted(priorities)) or "none"


def _own_lossless(view: HostView, netdev: str) -> set[int] | None:
    for command in (("dcb", "-j", "pfc", "show", "dev", netdev), ("mlnx_qos", "-i", netdev)):
        said = view.command(*command)
        if not isinstance(said, Unknown):
            enabled = lossless(said.stdout)
            if enabled is not None:
                return set(enabled)
    return None


CHECKS = (queues,)
