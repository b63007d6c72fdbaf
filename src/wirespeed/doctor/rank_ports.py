"""The ports that ranks of a job listen on here, and on which addresses: gloo's, NCCL's, torchrun's own.

Engines that ranks bring along (NCCL's bootstrap, gloo's pairs) take any free port, so that no number tells them; the
process does. A listener on the loopback address is no way for another host, and one on all addresses is reachable from
every network that the host has. Processes of other users can be seen by root only.

Standard library only: this module travels to hosts that have nothing else.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.inventory import HostView
from wirespeed.doctor.launch import running_ranks
from wirespeed.doctor.network import address_of

_LISTENING = re.compile(r"\s*\d+: ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) \S+ 0A \S+ \S+ \S+\s+\d+\s+\d+ (\d+)")
_MAX_SHOWN = 6


def _no_ranks(view: HostView) -> str | None:
    return None if running_ranks(view) else "no rank of a job runs here"


@check("route.rank-ports", "ports that the job's ranks listen on here, and their addresses", applies=_no_ranks)
def rank_ports(view: HostView) -> Iterator[Outcome]:
    """Every listener of a rank; those that no other host reaches, and those that every network does."""
    listeners: dict[int, tuple[str, int]] = {}
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (view.system.read_text(name) or "").splitlines()[1:]:
            match = _LISTENING.match(line)
            if match is not None:
                listeners[int(match[3])] = (address_of(match[1]), int(match[2], 16))
    for job, ranks in running_ranks(view).items():
        seen: dict[str, list[int]] = defaultdict(list)
        hidden = 0
        for pid in ranks:
            owned = view.system.process_sockets(pid)
            if owned is None:
                hidden += 1
                continue
            for inode in owned & listeners.keys():
                address, port = listeners[inode]
                seen[address].append(port)
        if hidden:
            yield Unknown(
                what=f"ports of {hidden} ranks of {job}", why="their files may not be listed", hint="run as root"
            )
        for address, ports in sorted(seen.items()):
            shown = ", ".join(map(str, sorted(ports)[:_MAX_SHOWN])) + (" ..." if len(ports) > _MAX_SHOWN else "")
            yield Fact(key=f"route.port.ranks.{address}", value=f"{len(ports)} ports of {job}: {shown}")
        yield from _only_loopback(job, seen, is_one_host=_is_one_host(ranks))


def _is_one_host(ranks: Mapping[int, Mapping[str, str]]) -> bool:
    environs = list(ranks.values())
    sizes = {int(e["WORLD_SIZE"]) for e in environs if e.get("WORLD_SIZE", "").isdigit()}
    local = {int(e["LOCAL_WORLD_SIZE"]) for e in environs if e.get("LOCAL_WORLD_SIZE", "").isdigit()}
    return not sizes or max(sizes) <= max(local, default=len(environs))


def _only_loopback(job: str, seen: dict[str, list[int]], *, is_one_host: bool) -> Iterator[Outcome]:
    loopback = {a: ports for a, ports in seen.items() if ipaddress.ip_address(a).is_loopback}
    if not loopback or len(loopback) < len(seen) or is_one_host:
        return
    address, ports = next(iter(loopback.items()))
    yield Finding(
        id="route.ranks-on-loopback",
        subject=job,
        severity="critical",
        title=f"The ranks of {job} listen on {address} only: no other host of the job can reach them.",
        evidence=(
            Evidence(
                where="/proc/net/tcp", seen=f"{address}:{ports[0]} LISTEN", expected="an address of the job's network"
            ),
        ),
        remedy=Remedy(
            text="the host's own name resolves to a loopback address, or an interface setting names lo",
            commands=(
                "getent hosts $(hostname)",
                "export GLOO_SOCKET_IFNAME=<interface> NCCL_SOCKET_IFNAME=<interface>",
            ),
        ),
        source="gloo: address of the hostname; horovod#584",
    )


CHECKS = (rank_ports,)
