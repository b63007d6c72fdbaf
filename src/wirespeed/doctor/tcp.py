"""Kernel parameters of TCP against the link and the traffic. Obsolete settings are in advice.py.

Buffers follow rate x round trip. The rate is the fastest physical interface's; the round trip is given, else the median
of live connections', else assumed, and then a finding is a notice at most. Where RDMA is active a job's gradients do
not pass through here, so that every finding is a notice: TCP then carries set-up, storage and data loading.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Setting, Severity, Unknown, check
from wirespeed.doctor.inventory import HostView
from wirespeed.doctor.sockets import connections, limited_by_window
from wirespeed.units import format_duration, format_rate, format_size

ASSUMED_RTT_S = 200e-6  # hosts of one cluster; only used where nothing was measured
_IP_SYSCTL = "kernel Documentation/networking/ip-sysctl.rst"
_RENDEZVOUS_PORT = 29500  # torchrun's default
_INITIAL_WINDOW_BYTES = 10 * 1460  # RFC 6928


def link_rate_bit_per_s(view: HostView) -> float | None:
    """As given, else the fastest physical interface that is up; None where none says its speed."""
    if view.rate_bit_per_s is not None:
        return view.rate_bit_per_s
    speeds = [nic.speed_bit_per_s for nic in view.physical_nics if nic.is_up and nic.speed_bit_per_s is not None]
    return max(speeds, default=None)


def round_trip(view: HostView) -> tuple[float, str, bool]:
    """Seconds, where they come from, and whether anybody measured them."""
    if view.rtt_s is not None:
        return view.rtt_s, "given with --rtt", True
    seen = [c.min_rtt_s if c.min_rtt_s is not None else c.rtt_s for c in connections(view) or ()]
    near = [rtt for rtt in seen if rtt < 0.01]  # a job's hosts are near; beyond 10 ms is the rest of the world
    if near:
        return statistics.median(near), f"median of {len(near)} live connections", True
    return ASSUMED_RTT_S, "assumed, nothing measured it", False


def _severity(view: HostView, worst: Severity) -> Severity:
    return "notice" if view.has_active_rdma else worst


def _rate_unknown() -> Unknown:
    return Unknown(
        what="the link's rate",
        why="no physical interface says its speed (usual in virtual machines)",
        hint="say it with --rate; measure it with `wirespeed bench links`",
    )


@check("tcp.buffers", "largest TCP buffers against rate x round trip")
def buffers(view: HostView) -> Iterator[Outcome]:
    """Rule: a buffer holds 2 x rate x round trip, since half of it is window (tcp_adv_win_scale and overhead)."""
    rate = link_rate_bit_per_s(view)
    rtt_s, origin, is_measured = round_trip(view)
    for key in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
        text = view.sysctl(key)
        if text is None:
            yield view.sysctl_unknown(key)
            continue
        yield Fact(key=key, value=text)
        numbers = [int(part) for part in text.split() if part.isdigit()]
        if rate is None or len(numbers) != 3:
            continue
        wanted = math.ceil(2 * rate / 8 * rtt_s)
        if numbers[2] >= wanted:
            continue
        value = f"{numbers[0]} {numbers[1]} {1 << (wanted - 1).bit_length()}"
        is_felt = bool(limited_by_window(view))
        yield Finding(
            id="tcp.buffer-below-bdp",
            subject=key,
            severity=_severity(view, "warning" if is_measured and is_felt else "notice"),
            title=f"One TCP connection cannot fill the link: {key} ends at {format_size(numbers[2])}.",
            evidence=(
                Evidence(
                    where=f"/proc/sys/{key.replace('.', '/')}", seen=text, expected=f"a maximum of {wanted} or more"
                ),
                Evidence(where="link", seen=f"{format_rate(rate)}, round trip {format_duration(rtt_s)} ({origin})"),
                Evidence(
                    where="live connections",
                    seen="some wait for a window"
                    if is_felt
                    else "none waits for a window now, so the gain is not shown",
                ),
            ),
            remedy=Remedy(text=f"set {key} to {value}", settings=(Setting(key=key, value=value),)),
            source=f"{_IP_SYSCTL}; 2 x rate x round trip to the next power of two: own recommendation",
            path="tcp",
            limit_bit_per_s=numbers[2] * 8 / 2 / rtt_s,
            full_bit_per_s=rate,
        )
    if rate is None:
        yield _rate_unknown()


@check("tcp.after-idle", "slow start after a pause between steps")
def slow_start_after_idle(view: HostView) -> Iterator[Outcome]:
    """Price of one restart: the round trips in which a window of 10 segments doubles up to rate x round trip."""
    key = "net.ipv4.tcp_slow_start_after_idle"
    value = view.sysctl(key)
    if value is None:
        yield view.sysctl_unknown(key)
        return
    yield Fact(key=key, value=value)
    rate = link_rate_bit_per_s(view)
    if value == "0":
        return
    if rate is None:
        yield _rate_unknown()
        return
    rtt_s, origin, is_measured = round_trip(view)
    cost_s = max(0.0, math.ceil(math.log2(max(1.0, rate / 8 * rtt_s / _INITIAL_WINDOW_BYTES)))) * rtt_s
    yield Finding(
        id="tcp.slow-start-after-idle",
        subject=key,
        severity=_severity(view, "warning" if is_measured and cost_s >= 1e-3 else "notice"),
        title=f"After each pause TCP starts slowly again; at this link that costs about {format_duration(cost_s)}.",
        evidence=(
            Evidence(where=f"/proc/sys/{key.replace('.', '/')}", seen=value, expected="0 for traffic in bursts"),
            Evidence(where="link", seen=f"{format_rate(rate)}, round trip {format_duration(rtt_s)} ({origin})"),
        ),
        remedy=Remedy(text=f"set {key} to 0", settings=(Setting(key=key, value="0"),)),
        source=f"{_IP_SYSCTL}; RFC 2861; cost = log2(rate x round trip / 10 segments) x round trip",
        path="tcp",
    )


@check("tcp.queues", "listen queues, unsent data and port ranges")
def queues(view: HostView) -> Iterator[Outcome]:
    """Settings that a job of many ranks runs into when it connects."""
    yield from _listen_queue(view)
    yield from _unsent(view)
    yield from _ports(view)
    for key in (
        "net.ipv4.tcp_fastopen",
        "net.ipv4.tcp_congestion_control",
        "net.core.default_qdisc",
        "net.ipv4.tcp_ecn",
    ):
        value = view.sysctl(key)
        if value is not None:
            yield Fact(key=key, value=value)


def _listen_queue(view: HostView) -> Iterator[Outcome]:
    key = "net.core.somaxconn"
    value = view.sysctl_int(key)
    if value is None:
        yield view.sysctl_unknown(key)
        return
    yield Fact(key=key, value=str(value))
    if value < 1024:
        yield Finding(
            id="tcp.listen-queue",
            subject=key,
            severity="warning",
            title=f"Only {value} connections may wait to be accepted: ranks that all connect at once are turned away.",
            evidence=(
                Evidence(where="/proc/sys/net/core/somaxconn", seen=str(value), expected="4096, the default since 5.4"),
            ),
            remedy=Remedy(text=f"set {key} to 4096", settings=(Setting(key=key, value="4096"),)),
            source=f"{_IP_SYSCTL} (somaxconn)",
            path="any",  # NCCL's bootstrap is TCP, whatever carries the data
        )


def _unsent(view: HostView) -> Iterator[Outcome]:
    key = "net.ipv4.tcp_notsent_lowat"
    value = view.sysctl_int(key)
    if value is None:
        yield view.sysctl_unknown(key)
        return
    yield Fact(key=key, value=str(value))
    if 0 <= value < 65536:
        yield Finding(
            id="tcp.notsent-lowat",
            subject=key,
            severity=_severity(view, "warning"),
            title=f"Senders are woken for every {format_size(value)}: bulk transfers pay a wake-up each time.",
            evidence=(
                Evidence(where="/proc/sys/net/ipv4/tcp_notsent_lowat", seen=str(value), expected="131072 or more"),
            ),
            remedy=Remedy(text=f"set {key} to 131072", settings=(Setting(key=key, value="131072"),)),
            source=f"{_IP_SYSCTL}; below 64 KiB: own recommendation",
            path="tcp",
        )


def _ports(view: HostView) -> Iterator[Outcome]:
    key = "net.ipv4.ip_local_port_range"
    text = view.sysctl(key)
    if text is None:
        yield view.sysctl_unknown(key)
        return
    yield Fact(key=key, value=text)
    ends = [int(part) for part in text.split() if part.isdigit()]
    if len(ends) != 2:
        return
    low, high = ends
    if high - low < 16384:
        yield Finding(
            id="tcp.port-range",
            subject=key,
            severity="warning",
            title=f"Only {high - low + 1} ports for outgoing connections: a large job uses them up.",
            evidence=(
                Evidence(where="/proc/sys/net/ipv4/ip_local_port_range", seen=text, expected="32768 60999 or wider"),
            ),
            remedy=Remedy(text=f"set {key} to 32768 60999", settings=(Setting(key=key, value="32768 60999"),)),
            source=f"{_IP_SYSCTL} (ip_local_port_range)",
        )
    reserved = view.sysctl("net.ipv4.ip_local_reserved_ports") or ""
    if low <= _RENDEZVOUS_PORT <= high and not _is_reserved(_RENDEZVOUS_PORT, reserved):
        wider = ",".join(filter(None, [reserved, str(_RENDEZVOUS_PORT)]))
        yield Finding(
            id="tcp.rendezvous-port",
            subject=key,
            severity="warning",
            title=f"Port {_RENDEZVOUS_PORT} of torchrun may be taken by any outgoing connection: now and then a job "
            "cannot start.",
            evidence=(
                Evidence(
                    where="/proc/sys/net/ipv4/ip_local_port_range",
                    seen=text,
                    expected=f"a range above {_RENDEZVOUS_PORT}",
                ),
                Evidence(where="/proc/sys/net/ipv4/ip_local_reserved_ports", seen=reserved or "(none)"),
            ),
            remedy=Remedy(
                text=f"reserve the port: set net.ipv4.ip_local_reserved_ports to {wider}",
                settings=(Setting(key="net.ipv4.ip_local_reserved_ports", value=wider),),
            ),
            source=f"{_IP_SYSCTL} (ip_local_reserved_ports); torchrun's default master port",
        )


def _is_reserved(port: int, text: str) -> bool:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and int(first) <= port <= int(last if last.isdigit() else first):
            return True
    return False


CHECKS = (buffers, slow_start_after_idle, queues)
