"""The way to another host hop by hop: who answers, how late, and how many answers are missing. Needs no privilege.

UDP probes with a rising time to live, answered by ICMP that the kernel hands over through the socket's error queue
(ip(7), IP_RECVERR). Rounds are a second apart, since Linux and most routers answer about once per second and hop. A hop
that stays silent while later ones answer only declines to answer; a loss is one that lasts up to the target. A switch
is no hop.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable

import msgspec

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.records import Record

MAX_HOPS = 30
BASE_PORT = 33434  # as traceroute: nobody listens there
_IP_RECVERR, _MSG_ERRQUEUE = 11, 0x2000
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3
_ORIGIN_ICMP = 2
_UNREACHABLE, _TIME_EXCEEDED, _PORT_UNREACHABLE = 3, 11, 3
_REASONS = {
    0: "network unreachable",
    1: "host unreachable",
    4: "packet too big",
    9: "prohibited",
    10: "prohibited",
    13: "filtered",
}


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One distance. ``addresses`` has several where packets take several ways; none where nobody answered."""

    distance: int
    addresses: tuple[str, ...]
    num_sent: int
    rtts_s: tuple[float, ...]
    """Of the answers, in order."""
    is_target: bool
    problem: str = ""
    """What a router or the target refused."""

    @property
    def loss(self) -> float:
        """Share of probes without an answer."""
        return 1 - len(self.rtts_s) / self.num_sent


class PathReport(Record, frozen=True, kw_only=True, tag="path_report"):
    """The way to one host."""

    target: str
    address: str
    hops: tuple[Hop, ...]

    @property
    def is_reached(self) -> bool:
        """Whether the target itself answered."""
        return any(hop.is_target for hop in self.hops)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One ICMP answer: who, and what it means."""

    address: str
    is_target: bool
    problem: str = ""


def parse_answer(content: bytes) -> Answer | None:
    """A ``struct sock_extended_err`` with the offender's address behind it; None where it is not ICMP, or cut."""
    if len(content) < 24:
        return None
    _, origin, kind, code = struct.unpack_from("=IBBB", content)
    family = struct.unpack_from("=H", content, 16)[0]
    if origin != _ORIGIN_ICMP or family != socket.AF_INET:
        return None
    address = socket.inet_ntoa(content[20:24])
    if kind == _TIME_EXCEEDED:
        return Answer(address=address, is_target=False)
    if kind == _UNREACHABLE and code == _PORT_UNREACHABLE:
        return Answer(address=address, is_target=True)
    known = _REASONS.get(code) if kind == _UNREACHABLE else None
    return Answer(address=address, is_target=False, problem=known or f"ICMP type {kind} code {code}")


def trace(
    target: str,
    *,
    num_rounds: int = 5,
    max_hops: int = MAX_HOPS,
    num_bytes: int = 32,
    interval_s: float = 1.0,
    on_round: Callable[[int], None] = lambda number: None,
) -> tuple[str, tuple[Hop, ...]]:
    """The target's address and its hops. Takes ``num_rounds`` times ``interval_s``.

    ``num_bytes`` of payload are sent without permission to fragment: with the MTU less 28 it tests the whole path.
    Raises PeerFailure where the name is unknown or there is no route.
    """
    if not 1 <= num_rounds <= 1000 or not 1 <= max_hops <= 255 or not 0 <= num_bytes <= 65507:
        raise UsageError(
            f"got {num_rounds} rounds, {max_hops} hops, {num_bytes} bytes", expected="1 to 1000, 1 to 255, 0 to 65507"
        )
    try:
        address = str(socket.getaddrinfo(target, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0])
    except OSError as fault:
        raise PeerFailure(f"{target} has no IPv4 address: {fault.strerror or fault}") from fault
    seen: dict[int, _Seen] = {}
    reach = max_hops
    for number in range(num_rounds):
        ends_at = time.monotonic() + interval_s
        for distance, (answer, rtt_s) in _round(address, reach, num_bytes, interval_s).items():
            seen.setdefault(distance, _Seen()).take(answer, rtt_s)
        reached = [distance for distance, one in seen.items() if one.is_target]
        if reached:
            reach = min(reached)
        for distance in range(1, reach + 1):
            seen.setdefault(distance, _Seen()).num_sent += 1
        on_round(number + 1)
        if number + 1 < num_rounds:
            time.sleep(max(0.0, ends_at - time.monotonic()))
    last = max((d for d, one in seen.items() if d <= reach and one.rtts_s), default=0)
    # Beyond the last that answered there is nothing to tell but that nobody did.
    shown = min(reach, last + 1)
    return address, tuple(seen[d].hop(d) for d in range(1, shown + 1) if d in seen)


class _Seen:
    """What was heard from one distance so far."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.rtts_s: list[float] = []
        self.addresses: dict[str, None] = {}
        self.is_target = False
        self.problem = ""

    def take(self, answer: Answer, rtt_s: float) -> None:
        self.rtts_s.append(rtt_s)
        self.addresses[answer.address] = None
        self.is_target = self.is_target or answer.is_target
        self.problem = answer.problem or self.problem

    def hop(self, distance: int) -> Hop:
        return Hop(
            distance=distance,
            addresses=tuple(self.addresses),
            num_sent=max(self.num_sent, len(self.rtts_s)),
            rtts_s=tuple(self.rtts_s),
            is_target=self.is_target,
            problem=self.problem,
        )


def _round(address: str, reach: int, num_bytes: int, timeout_s: float) -> dict[int, tuple[Answer, float]]:
    """One probe per distance, all at once; answers by distance."""
    sockets: dict[int, tuple[int, socket.socket, float]] = {}
    got: dict[int, tuple[Answer, float]] = {}
    poller = select.poll()
    try:
        for distance in range(1, reach + 1):
            probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            probe.setblocking(False)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, distance)
            probe.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
            sockets[probe.fileno()] = (distance, probe, time.monotonic())
            poller.register(probe, select.POLLERR)
            try:
                probe.sendto(bytes(num_bytes), (address, BASE_PORT + distance))
            except OSError as fault:
                hint = "fewer bytes: the interface's MTU less 28 is the most" if fault.errno == 90 else None
                raise PeerFailure(f"cannot send to {address}: {fault.strerror}", hint=hint) from fault
        ends_at = time.monotonic() + timeout_s
        target = reach
        while any(distance <= target and distance not in got for distance, _, _ in sockets.values()):
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                break
            for handle, _ in poller.poll(left_s * 1000):
                distance, probe, sent_at = sockets[handle]
                answer = _receive(probe)
                if answer is not None and distance not in got:
                    got[distance] = (answer, time.monotonic() - sent_at)
                    target = min(target, distance) if answer.is_target else target
    finally:
        for _, probe, _ in sockets.values():
            probe.close()
    return {distance: answer for distance, answer in got.items() if distance <= target}


def _receive(probe: socket.socket) -> Answer | None:
    try:
        _, ancillary, _, _ = probe.recvmsg(256, 512, _MSG_ERRQUEUE)
    except BlockingIOError:
        return None
    except OSError:
        return None
    for level, kind, content in ancillary:
        if level == socket.IPPROTO_IP and kind == _IP_RECVERR:
            return parse_answer(content)
    return None
