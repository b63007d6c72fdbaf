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
    mss_bytes: int = 0
    """Largest segment it sends; 0 where the kernel does not say."""
    path_mtu_bytes: int = 0
    options: int = 0
    """TCPI_OPT_* of linux/tcp.h: 1 timestamps, 2 selective acknowledgement, 4 window scaling."""
    tos: int | None = None
    """Type of service (DSCP x 4 and ECN) that its packets carry."""


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
        mss_bytes=struct.unpack_from("=I", info, 16)[0],
        path_mtu_bytes=struct.unpack_from("=I", info, 60)[0],
        options=info[5],
        tos=next((attributes[kind][0] for kind in (5, 6) if attributes.get(kind)), None),
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


MIN_SENT_BYTES = 16 * 1024**2
"""Connections that sent less say nothing of loss."""
MANY_RETRANSMITS = 0.001
_SMALL_MTU = 1400


@check("tcp.socket-options", "options of live connections: window scaling, segment size, fixed buffers, marks, losses")
def socket_options(view: HostView) -> list[Outcome]:
    """What each connection was set up with. One finding per kind, with the connections it is true of."""
    held = connections(view)
    if held is None:
        return [
            Unknown(what="options of TCP connections", why="the kernel refused INET_DIAG", hint="modprobe tcp_diag")
        ]
    near = [c for c in held if (c.min_rtt_s if c.min_rtt_s is not None else c.rtt_s) < _NEAR_S]
    outcomes: list[Outcome] = []
    marks = sorted({c.tos >> 2 for c in near if c.tos is not None})
    if marks:
        outcomes.append(Fact(key="tcp.connections-dscp", value=", ".join(map(str, marks))))
    outcomes += _without_scaling([c for c in near if c.options])
    outcomes += _small_segments(view, near)
    outcomes += _fixed_buffers(view, near)
    outcomes += _lossy([c for c in near if c.bytes_sent is not None and c.bytes_sent >= MIN_SENT_BYTES])
    return outcomes


_NEAR_S = 0.01  # a job's hosts; beyond is the rest of the world, whose paths are not ours


def _of(some: list[Connection]) -> str:
    more = f" and {len(some) - 3} more" if len(some) > 3 else ""
    return ", ".join(c.remote for c in some[:3]) + more


def _without_scaling(near: list[Connection]) -> list[Outcome]:
    bad = [c for c in near if not c.options & 4]
    if not bad:
        return []
    return [
        Finding(
            id="tcp.connection-without-scaling",
            subject=bad[0].remote,
            severity="warning",
            title=f"{len(bad)} connections were opened without window scaling: 64 KiB per round trip at most.",
            evidence=(Evidence(where="INET_DIAG tcpi_options", seen=_of(bad), expected="window scaling on both ends"),),
            remedy=Remedy(
                text="net.ipv4.tcp_window_scaling=1 on both ends, and no middlebox that strips TCP options; "
                "the connections must be opened again"
            ),
            source="RFC 7323; linux/tcp.h",
            path="tcp",
        )
    ]


def _small_segments(view: HostView, near: list[Connection]) -> list[Outcome]:
    """A path of a smaller MTU than the interface's: the other end, or something between, takes less."""
    mtus = [nic.mtu for nic in view.physical_nics if nic.is_up and nic.mtu is not None]
    if not mtus:
        return []
    bad = [c for c in near if c.mss_bytes > 0 and 0 < c.path_mtu_bytes < min(mtus) - 100 and min(mtus) > _SMALL_MTU]
    bad += [c for c in near if c not in bad and 0 < c.mss_bytes < min(mtus) // 2 and min(mtus) >= _SMALL_MTU]
    if not bad or (len(bad) < 2 and len(bad) < len(near)):
        return []
    return [
        Finding(
            id="tcp.small-segments",
            subject=bad[0].remote,
            severity="warning",
            title=f"{len(bad)} connections send segments of {bad[0].mss_bytes} bytes, though the interface takes "
            f"packets of "
            f"{min(mtus)}.",
            evidence=(
                Evidence(
                    where="INET_DIAG snd_mss, pmtu",
                    seen=f"{_of(bad)}: segments of {bad[0].mss_bytes}, path MTU {bad[0].path_mtu_bytes}",
                    expected=f"about {min(mtus) - 52}",
                ),
            ),
            remedy=Remedy(
                text="one MTU on all hosts and switch ports of this network",
                commands=(f"wirespeed doctor path {bad[0].remote.rpartition(':')[0]} --bytes {min(mtus) - 28}",),
            ),
            source="RFC 1191; linux/tcp.h",
            path="tcp",
        )
    ]


def _fixed_buffers(view: HostView, near: list[Connection]) -> list[Outcome]:
    """Autotuning never stops exactly at twice the core maximum: a program asked for more and was cut there."""
    found: list[Outcome] = []
    for key, name in (("net.core.rmem_max", "rcvbuf_bytes"), ("net.core.wmem_max", "sndbuf_bytes")):
        most = view.sysctl_int(key)
        if most is None:
            continue
        bad = [c for c in near if getattr(c, name) == 2 * most]
        if bad:
            option = "SO_RCVBUF" if name == "rcvbuf_bytes" else "SO_SNDBUF"
            found.append(
                Finding(
                    id="tcp.fixed-buffer",
                    subject=key,
                    severity="notice",
                    title=f"{len(bad)} connections have a buffer that their program fixed ({option}), cut by the "
                    f"kernel at "
                    f"{format_size(2 * most)}: it does not grow any more.",
                    evidence=(
                        Evidence(where="INET_DIAG skmeminfo", seen=f"{_of(bad)}: {format_size(2 * most)}"),
                        Evidence(where=f"/proc/sys/{key.replace('.', '/')}", seen=str(most)),
                    ),
                    remedy=Remedy(text=f"leave {option} alone in the program, or raise {key}"),
                    source="socket(7): the kernel doubles the value and caps it; a fixed buffer ends autotuning",
                    path="tcp",
                )
            )
    return found


def _lossy(busy: list[Connection]) -> list[Outcome]:
    bad = [c for c in busy if (c.bytes_retrans or 0) > MANY_RETRANSMITS * (c.bytes_sent or 1)]
    if not bad:
        return []
    worst = max(bad, key=lambda c: (c.bytes_retrans or 0) / (c.bytes_sent or 1))
    share = (worst.bytes_retrans or 0) / (worst.bytes_sent or 1)
    return [
        Finding(
            id="tcp.connection-lossy",
            subject=worst.remote,
            severity="warning",
            title=f"{len(bad)} of {len(busy)} busy connections send much again, the worst {format_percent(share)} "
            "of its bytes.",
            evidence=(
                Evidence(
                    where=f"INET_DIAG {worst.local} -> {worst.remote}",
                    seen=f"{format_size(worst.bytes_retrans or 0)} of {format_size(worst.bytes_sent or 0)} sent again",
                    expected=f"below {format_percent(MANY_RETRANSMITS)}",
                ),
                Evidence(where="of this kind", seen=_of(bad)),
            ),
            remedy=Remedy(
                text="all to one peer: its link; to all peers: this host's. `--during 10s` shows what grows",
                commands=(
                    "wirespeed doctor host --during 10s",
                    f"wirespeed doctor path {worst.remote.rpartition(':')[0]}",
                ),
            ),
            source="linux/tcp.h tcpi_bytes_retrans; above 0.1 % of segments: bad (own rule)",
            path="tcp",
        )
    ]


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


CHECKS = (live_connections, socket_options)
