"""What a lab is, as data: hosts, racks, rates, and the names and addresses that follow from them.

Nothing here touches the kernel. Hosts are ``h0`` ... in contiguous racks, on one flat IPv4 network
10.77.0.0/16: the racks differ in where traffic queues, not in how it is routed. Two labs use the same
addresses, each in its own namespaces.
"""

from __future__ import annotations

import math
import re

import msgspec

from wirespeed import units
from wirespeed.errors import UsageError

MAX_HOSTS = 200
MIN_RATE_BIT_PER_S = 64e3
MAX_RATE_BIT_PER_S = 34e9
"""tbf's rate field has 32 bits of bytes per second."""
MAX_DELAY_S = 5.0
INTERFACE = "eth0"
PREFIX_LENGTH = 16
HEADER_EFFICIENCY = 1448 / 1514
"""Payload per byte a shaper counts: the MTU of 1500 less IPv4 and TCP with timestamps; Ethernet's header added."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_SPEC = re.compile(
    r"(?P<hosts>\d+)\s*x\s*(?P<rate>[^/+~:@]+?(?:/s)?)"
    r"(?:/(?P<racks>\d+)racks?(?::(?P<uplink>[^+~:@]+))?)?"
    r"(?:\+(?P<delay>[^~@]+))?"
    r"(?:~(?P<loss>[^@]+))?"
    r"(?:@(?P<first>\d{1,3}))?"
)


class LabHost(msgspec.Struct, frozen=True, kw_only=True):
    """One host of a lab: its name, its rack (counted from 0), its IPv4 address and its interface's name."""

    name: str
    rack: int
    address: str
    interface: str = INTERFACE


class LabSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a lab is made of.

    ``rate_bit_per_s`` is each host's link, in both directions. ``uplink_bit_per_s`` is the link of each rack
    to the spine, in both directions; None leaves it as fast as the kernel is. ``delay_s`` is added once to
    every frame on its way from one host to another (so a round trip grows by twice that), ``loss`` is the
    chance that such a frame is dropped. ``first_dscp``: frames with this DSCP leave every link before others
    (see classes.py); None: one queue for all. ``name`` None stands for a unique, generated name.
    """

    hosts: int
    rate_bit_per_s: float
    racks: int = 1
    uplink_bit_per_s: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    first_dscp: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise UsageError(f"got {self.hosts} hosts", expected=f"1 to {MAX_HOSTS}")
        if not 1 <= self.racks <= self.hosts:
            raise UsageError(
                f"got {self.racks} racks for {self.hosts} hosts", expected="at least one host in each rack"
            )
        check_rate("rate", self.rate_bit_per_s)
        if self.uplink_bit_per_s is not None:
            check_rate("uplink", self.uplink_bit_per_s)
            if self.racks == 1:
                raise UsageError("got an uplink for a lab of one rack", hint="add --racks 2: uplinks join racks")
        if not (math.isfinite(self.delay_s) and 0 <= self.delay_s <= MAX_DELAY_S):
            raise UsageError(f"got a delay of {self.delay_s} s", expected=f"0 to {MAX_DELAY_S:g} s")
        if not 0 <= self.loss < 1:
            raise UsageError(f"got a loss of {self.loss}", expected="at least 0 and below 1")
        if self.first_dscp is not None and not 1 <= self.first_dscp <= 63:
            raise UsageError(f"got DSCP {self.first_dscp} to go first", expected="1 to 63; 0 is what carries no mark")
        if self.name is not None:
            check_name(self.name)

    @classmethod
    def parse(cls, text: str) -> LabSpec:
        """A spec from one word: ``HOSTSxRATE[/Nracks[:UPLINK]][+DELAY][~LOSS][@DSCP]``.

        ``4x1gbit``, ``8x200mbit/2racks:100mbit``, ``4x1gbit+1ms``, ``2x100mbit+20ms~0.1%``, ``4x200mbit@26``.
        """
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"got lab {text!r}",
                expected="HOSTSxRATE[/Nracks[:UPLINK]][+DELAY][~LOSS][@DSCP]",
                hint="such as 4x1gbit or 8x200mbit/2racks:100mbit+1ms",
            )
        uplink, delay, loss = match["uplink"], match["delay"], match["loss"]
        return cls(
            hosts=int(match["hosts"]),
            rate_bit_per_s=units.parse_rate(match["rate"]),
            racks=1 if match["racks"] is None else int(match["racks"]),
            uplink_bit_per_s=None if uplink is None else units.parse_rate(uplink),
            delay_s=0.0 if delay is None else units.parse_duration(delay),
            loss=0.0 if loss is None else units.parse_ratio(loss),
            first_dscp=None if match["first"] is None else int(match["first"]),
        )


def check_rate(what: str, rate_bit_per_s: float) -> None:
    """Raise UsageError unless the rate is one that the shaper can hold."""
    if not MIN_RATE_BIT_PER_S <= rate_bit_per_s <= MAX_RATE_BIT_PER_S:  # NaN fails both
        raise UsageError(f"got {what} {rate_bit_per_s:g} bit/s", expected="64 kbit/s to 34 Gbit/s")


def check_name(name: str) -> str:
    """The name, or UsageError: it becomes a folder's name, so it cannot hold a slash or a dot."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"got lab name {name!r}", expected="up to 31 of a-z, 0-9 and -, not starting with -")
    return name


def host_address(index: int) -> str:
    """The IPv4 address of host ``index``."""
    return f"10.77.{index // 250}.{index % 250 + 1}"


def rack_of(index: int, spec: LabSpec) -> int:
    """The rack of host ``index``: contiguous, and as even as the numbers allow."""
    return index * spec.racks // spec.hosts


def lay_out(spec: LabSpec) -> tuple[LabHost, ...]:
    """The hosts of a lab, in order."""
    return tuple(
        LabHost(name=f"h{index}", rack=rack_of(index, spec), address=host_address(index)) for index in range(spec.hosts)
    )


def hosts_file(hosts: tuple[LabHost, ...], system_text: str) -> str:
    """The text of /etc/hosts inside a lab: the lab's names first, so that they win, then the system's lines."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{host.address} {host.name}" for host in hosts]
    # A server on a dual-stack socket (torch's TCPStore) asks for the name of a mapped address, and complains at length
    # when there is none. The name differs, so that looking up h0 still gives one IPv4 address.
    lines += [f"::ffff:{host.address} {host.name}.lab" for host in hosts]
    return "\n".join(lines) + "\n" + system_text
