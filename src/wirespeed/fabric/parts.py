"""The parts a fabric is put together from: figures, switches, islands of devices, and transports.

A transport says what a message costs beyond its bytes at the NIC's goodput. A collective step of ``s`` bytes over one
hop takes the least over its protocols of ``hop_s + s / (factor * rate)``: libraries switch to a protocol with more
latency and more bandwidth as messages grow. One pair of latency and bandwidth would be wrong by up to 65 % on published
sweeps, so measured curves replace all of this wherever a fabric holds them.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from wirespeed.errors import DataError
from wirespeed.spec.workload import Origin


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A number and where it comes from."""

    value: float
    origin: Origin
    source: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise DataError(f"the fabric holds a figure of {self.value}", expected="a finite number")


def check_rate(bit_per_s: float) -> None:
    """Raise DataError unless the rate is above zero and finite."""
    if not 0 < bit_per_s < math.inf:
        raise DataError(f"the fabric holds a rate of {bit_per_s:g} bit/s", expected="a rate above zero")


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """A switch, and what joins it to the switch above it. The root has no parent.

    ``rate_bit_per_s`` is the whole uplink per direction, of all ``num_links`` parallel links together; None means that
    it never binds.
    """

    name: str
    parent: str | None = None
    rate_bit_per_s: Figure | None = None
    num_links: int = 1

    def __post_init__(self) -> None:
        if self.rate_bit_per_s is not None:
            check_rate(self.rate_bit_per_s.value)
        if self.num_links < 1:
            raise DataError(f"switch {self.name!r} has {self.num_links} links", expected="at least one")


class Dragonfly(msgspec.Struct, frozen=True, kw_only=True):
    """Routers in groups: within a group each router is joined to each, and each group is joined to each group.

    Rack ``g<G>r<R>`` is router R of group G. A message takes the shortest way: to the router that holds the link to the
    other group, over it, and on to the last router. ``detour`` sends it through a random third group instead (Valiant):
    twice the load on the links between groups, which then is even whatever the pattern.
    Kim, Dally, Scott, Abts: Technology-Driven, Highly-Scalable Dragonfly Topology, ISCA 2008.
    """

    num_groups: int
    routers_per_group: int
    local_bit_per_s: Figure
    global_bit_per_s: Figure
    """Of all links between one pair of groups together, per direction."""
    detour: bool = False

    def __post_init__(self) -> None:
        check_rate(self.local_bit_per_s.value)
        check_rate(self.global_bit_per_s.value)
        if self.num_groups < 1 or self.routers_per_group < 1:
            raise DataError(
                f"the dragonfly has {self.num_groups} groups of {self.routers_per_group} routers",
                expected="at least one of each",
            )

    def router(self, rack: str) -> tuple[int, int]:
        """Group and router of a rack's name. Raises DataError where it names none."""
        head, _, tail = rack.removeprefix("g").partition("r")
        if rack.startswith("g") and head.isdecimal() and tail.isdecimal():
            group, router = int(head), int(tail)
            if group < self.num_groups and router < self.routers_per_group:
                return group, router
        raise DataError(
            f"rack {rack!r} is no router of the dragonfly",
            expected=f"g0r0 to g{self.num_groups - 1}r{self.routers_per_group - 1}",
        )

    def check_racks(self, racks: set[str]) -> None:
        """Raise DataError where one of the racks is no router."""
        for rack in racks:
            self.router(rack)


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """One way to send: what a step over a hop costs beyond its bytes, and which share of the rate it reaches."""

    name: str
    hop_s: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.hop_s < math.inf or not 0 < self.factor <= 1:
            raise DataError(
                f"protocol {self.name!r} takes {self.hop_s} s per hop at {self.factor} of the rate",
                expected="a time of 0 or more and a share above 0, at most 1",
            )


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """How messages travel between hosts.

    ``latency_s``: one way, of a small message. ``launch_s``: of a collective, once. ``switch_s``: of each
    switch on the way beyond the first. ``flow_bit_per_s``: most that one
    stream reaches (a core that copies), with ``streams`` of them per pair of ranks. ``window_bytes``: most that one
    stream keeps under way, so that it cannot exceed window / round trip. ``first_window_bytes``: what an idle stream
    sends in its first round trip, doubling each round (slow start, RFC 6928); None where a transport has none.
    ``buffer_bytes``: what a switch port holds; senders that together exceed it lose packets, and ``timeout_s`` passes
    before they are sent again (RFC 6298; Linux uses 200 ms). None where the network does not drop.
    """

    name: str
    latency_s: Figure
    protocols: tuple[Protocol, ...] = ()
    launch_s: float = 0.0
    switch_s: float = 0.0
    flow_bit_per_s: Figure | None = None
    streams: int = 1
    window_bytes: int | None = None
    first_window_bytes: int | None = None
    buffer_bytes: int | None = None
    timeout_s: float = 0.0
    collective_share: float = 1.0
    """Of a NIC's goodput that the best collective reaches."""

    def __post_init__(self) -> None:
        what = f"transport {self.name!r}"
        if self.flow_bit_per_s is not None:
            check_rate(self.flow_bit_per_s.value)
        if not all(0 <= t < math.inf for t in (self.latency_s.value, self.launch_s, self.switch_s, self.timeout_s)):
            raise DataError(f"{what} has a time that is negative or not finite", expected="times of 0 or more")
        if self.streams < 1 or not 0 < self.collective_share <= 1:
            raise DataError(
                f"{what} has {self.streams} streams and a share of {self.collective_share}",
                expected="at least one stream, and a share above 0, at most 1",
            )
        for field in ("window_bytes", "first_window_bytes", "buffer_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise DataError(f"{what} has {field} {value}", expected="at least 1, or none")

    @property
    def ways(self) -> tuple[Protocol, ...]:
        """Its protocols; where none is stated, one at the small message's latency."""
        return self.protocols or (Protocol(name="plain", hop_s=self.latency_s.value),)

    @property
    def flow_limit_bit_per_s(self) -> float:
        """Most that one pair of ranks reaches, over all its streams."""
        limit = math.inf if self.flow_bit_per_s is None else self.flow_bit_per_s.value
        if self.window_bytes is not None and self.latency_s.value > 0:
            limit = min(limit, 8 * self.window_bytes / (2 * self.latency_s.value))
        return limit * self.streams


class Island(msgspec.Struct, frozen=True, kw_only=True):
    """What joins the devices of one host.

    ``switch``: each device has ``rate_bit_per_s`` of its own per direction (NVSwitch). ``bus``: all traffic of the
    host's devices, to each other, to the NICs and back, shares it (PCIe behind one root). ``num_devices``: of
    one island; a host with more has several, joined at ``cross_bit_per_s`` in all per direction (None: as fast as the
    bus or the switch).
    """

    name: str
    kind: Literal["switch", "bus"] = "switch"
    rate_bit_per_s: Figure
    num_devices: int
    protocols: tuple[Protocol, ...] = ()
    cross_bit_per_s: Figure | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_bit_per_s.value)
        if self.cross_bit_per_s is not None:
            check_rate(self.cross_bit_per_s.value)
        if self.num_devices < 1:
            raise DataError(f"island {self.name!r} has {self.num_devices} devices", expected="at least one")

    @property
    def ways(self) -> tuple[Protocol, ...]:
        """Its protocols; where none is stated, one without latency."""
        return self.protocols or (Protocol(name="plain", hop_s=0.0),)


def way(ways: tuple[Protocol, ...], name: str) -> Protocol:
    """The protocol of that name, or the last one where there is none: the one for large messages."""
    return next((protocol for protocol in ways if protocol.name == name), ways[-1])
