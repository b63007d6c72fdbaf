"""Live TCP connections as ``ss -ti`` shows them: round trips, what limits each, buffers the application fixed.

Parses the kernel's INET_DIAG answer with struct tcp_info (linux/tcp.h, which only ever grows at its end: fields beyond
what this kernel sends are None). Connections within the host are left out. A socket's limits are shares of the time it
was busy, since it was opened: a long idle connection says little.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections import Counter
from dataclasses import dataclass

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.inventory import HostView
from wirespeed.units import format_duration, format_percent, format_size

LIMITED_SHARE = 0.1  # of the busy time, above which a window counts as the limit
_BUSY_S = 0.5  # connections that were busy for less say nothing
_SOURCE = "linux/tcp.h tcp_rwnd_limited, tcp_sndbuf_limited; share above 10 %: own recommendation"


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One established connection to another host. Times in seconds; None: this kernel does not say."""

    local: str
    remote: str
    congestion: str
    rtt_s: float
    min_rtt_s: float | None
    busy_s: float | None
    rwnd_limited_s: float | None
    sndbuf_limited_s: float | None
    bytes_sent: int | None
    bytes_retrans: int | None
    rcvbuf_bytes: int | None
    sndbuf_bytes: int | None


def parse_answer(answer: bytes) -> tuple[Connection, ...]:
    """Connections in a netlink answer; what is cut or of another kind is passed over."""
    found, at = [], 0
    while at + 16 <= len(answer):
        length, kind = struct.unpack_from("=IH", answer, at)
        if length < 16:
            break
        message = answer[at + 16 : at + length]
        if kind == 20 and len(message) >= 72:  # SOCK_DIAG_BY_FAMILY, struct inet_diag_msg
            connection = _parse_message(message)
            if connection is not None:
                found.append(connection)
        at += (length + 3) & ~3
    return tuple(found)


def _parse_message(message: bytes) -> Connection | None:
    family = message[0]
    sport, dport = struct.unpack_from("!HH", message, 4)
    width = 4 if family == socket.AF_INET else 16
    source, target = (ipaddress.ip_address(message[at : at + width]) for at in (8, 24))
    if target.is_loopback or source == target:
        return None
    attributes: dict[int, bytes] = {}
    at = 72
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            break
        attributes[kind] = message[at + 4 : at + length]
        at += (length + 3) & ~3
    info, memory = attributes.get(2), attributes.get(7, b"")
    if info is None or len(info) < 72:
        return None

    def at64(offset: int) -> int | None:
        return int(struct.unpack_from("=Q", info, offset)[0]) if len(info) >= offset + 8 else None

    def seconds(value: int | None) -> float | None:
        return None if value is None else value / 1e6

    min_rtt = struct.unpack_from("=I", info, 148)[0] if len(info) >= 152 else None
    buffers = struct.unpack_from("=IIII", memory) if len(memory) >= 16 else (0, None, 0, None)
    return Connection(
        local=f"{source}:{sport}",
        remote=f"{target}:{dport}",
        congestion=attributes.get(4, b"").rstrip(b"\0").decode("ascii", "replace"),
        rtt_s=struct.unpack_from("=I", info, 68)[0] / 1e6,
        min_rtt_s=None if min_rtt in (None, 0, 0xFFFFFFFF) else min_rtt / 1e6,
        busy_s=seconds(at64(168)),
        rwnd_limited_s=seconds(at64(176)),
        sndbuf_limited_s=seconds(at64(184)),
        bytes_sent=at64(200),
        bytes_retrans=at64(208),
        rcvbuf_bytes=buffers[1],
        sndbuf_bytes=buffers[3],
    )


def connections(view: HostView) -> tuple[Connection, ...] | None:
    """Connections to other hosts, IPv4 and IPv6; None where the kernel does not tell."""
    return view.keep("connections", lambda: _connections(view))


def _connections(view: HostView) -> tuple[Connection, ...] | None:
    answers = [view.system.tcp_diagnostics(family) for family in (socket.AF_INET, socket.AF_INET6)]
    if all(answer is None for answer in answers):
        return None
    return tuple(connection for answer in answers if answer is not None for connection in parse_answer(answer))


def limited_by_window(view: HostView) -> tuple[Connection, ...]:
    """Connections that a window held up for over ``LIMITED_SHARE`` of their busy time."""
    return tuple(c for c in connections(view) or () if max(_shares(c)) > LIMITED_SHARE)


def _shares(connection: Connection) -> tuple[float, float]:
    """Share of the busy time that the receiver's window and the own send buffer took."""
    busy_s = connection.busy_s
    if busy_s is None or busy_s < _BUSY_S:
        return 0.0, 0.0
    return (connection.rwnd_limited_s or 0.0) / busy_s, (connection.sndbuf_limited_s or 0.0) / busy_s


@check("tcp.connections", "what limits the TCP connections that are open now", deadline_s=4.0)
def live_connections(view: HostView) -> list[Outcome]:
    """Windows that limit, losses, and how many connections go where."""
    held = connections(view)
    if held is None:
        return [Unknown(what="TCP connections", why="the kernel refused INET_DIAG", hint="modprobe tcp_diag inet_diag")]
    outcomes: list[Outcome] = [Fact(key="tcp.connections", value=str(len(held)))]
    outcomes += _mixed(held)
    for connection in limited_by_window(view):
        receiver, sender = _shares(connection)
        is_receiver = receiver >= sender
        share, end = (receiver, "the receiver's window") if is_receiver else (sender, "this host's send buffer")
        key = "net.ipv4.tcp_rmem" if is_receiver else "net.ipv4.tcp_wmem"
        where = f"raise the last number of {key} on {'the receiving host' if is_receiver else 'this host'}"
        outcomes.append(
            Finding(
                id="tcp.window-limited",
                subject=connection.remote,
                severity="warning",
                title=f"A connection waited for {end} during {format_percent(share)} of its busy time.",
                evidence=(
                    Evidence(
                        where=f"INET_DIAG {connection.local} -> {connection.remote}",
                        seen=f"limited {format_duration(share * (connection.busy_s or 0.0))} of "
                        f"{format_duration(connection.busy_s or 0.0)} busy, round trip "
                        f"{format_duration(connection.rtt_s)}",
                        expected=f"below {format_percent(LIMITED_SHARE)}",
                    ),
                    Evidence(
                        where="socket buffers",
                        seen=f"receive {_size(connection.rcvbuf_bytes)}, send {_size(connection.sndbuf_bytes)}",
                    ),
                ),
                remedy=Remedy(
                    text=f"{where}, or stop the program from fixing SO_RCVBUF / SO_SNDBUF: that ends autotuning"
                ),
                source=_SOURCE,
                path="tcp",
            )
        )
    return outcomes


def _mixed(held: tuple[Connection, ...]) -> list[Outcome]:
    """Congestion controls side by side; one connection each way is not yet a contest."""
    counts = Counter(connection.congestion for connection in held if connection.congestion)
    if len(counts) < 2 or min(counts.values()) < 2:
        return []
    shown = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return [
        Finding(
            id="tcp.mixed-congestion-control",
            subject="net.ipv4.tcp_congestion_control",
            severity="warning",
            title=f"Connections with different congestion controls share this host's link: {shown}.",
            evidence=(Evidence(where="INET_DIAG", seen=shown, expected="one for all"),),
            remedy=Remedy(
                text="one congestion control on all hosts and in all programs: mixed, one kind starves the other"
            ),
            source="measured in this project's lab: cubic against bbr 36 to 924 Mbit/s, alike 441 to 516",
            path="tcp",
        )
    ]


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_size(num_bytes)
