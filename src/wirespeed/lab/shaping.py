"""Give a link a rate: tbf on a device, its burst and segment sizes, and the check that the kernel took them.

A link with traffic classes has htb in its place, with the same numbers (see classes.py).

A burst lets that many bytes pass unshaped after a pause; every segment costs timers and soft interrupts, on the cores
that the ranks compute on. Measured on kernel 6.18 (veth, bridge, 2 cores of a virtual machine) at 1 Gbit/s, four hosts,
all_to_all of 4 MiB, beside single messages of 1 and 16 MiB between two hosts as shares of what the rate allows:

    burst    segment  all_to_all  soft interrupts  1 MiB   16 MiB
    262 us   16 KiB   0.68        0.8 cores        1.007   0.993
    524 us   32 KiB   0.83        0.5 cores        1.037   0.997
    1048 us  64 KiB   0.85        0.13 cores       1.118   1.005

The middle one is taken: large messages are exact, a bucket of 1 MiB nearly so, and the network is the limit, not the
cores. Messages below the burst (64 KiB at 1 Gbit/s) pass too fast after a pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from wirespeed import units
from wirespeed.errors import InternalError, MissingCapability
from wirespeed.lab import classes

ROOT_HANDLE = 0x10000
NETEM_HANDLE = 0x20000
QUEUE_S = 0.05
MIN_QUEUE_BYTES = 128 * 1024
MAX_SEGMENT_BYTES = 65536
_FRAME_BYTES = 1514
_SEGMENT_SHARE = 0.95
"""A shaper counts a segment with the headers of all its frames (66 B per 1448); one above the burst is taken apart."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one shaper. All sizes count the Ethernet header."""

    rate_bytes_per_s: int
    burst_bytes: int
    segment_bytes: int
    queue_bytes: int


def shape_of(rate_bit_per_s: float) -> Shape:
    """Burst, largest segment and queue for a rate.

    524 us of the rate as the burst, but 16 KiB down to 100 Mbit/s and 1.3 ms of the rate below, never under three
    frames. Segments of half a burst, or of a whole one where that is 16 KiB or less. The queue holds 50 ms, as a switch
    with deep buffers does.
    """
    rate = round(rate_bit_per_s / 8)
    burst = max(rate * 524e-6, min(16384.0, rate * 1311e-6), 3 * _FRAME_BYTES)
    return Shape(
        rate_bytes_per_s=rate,
        burst_bytes=int(burst),
        segment_bytes=min(MAX_SEGMENT_BYTES, int(max(burst / 2, min(16384, burst * _SEGMENT_SHARE)))),
        queue_bytes=int(max(rate * QUEUE_S, MIN_QUEUE_BYTES)),
    )


def set_rate(netlink: Any, device: int, shape: Shape, *, change: bool = False, first_dscp: int | None = None) -> None:
    """Shape what leaves ``device`` (an index in ``netlink``'s namespace). ``check_rates`` has the last word.

    ``first_dscp``: frames with it leave first; None: one queue.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    if first_dscp is not None:
        classes.set_classes(netlink, device, shape, first_dscp, change=change)
        return
    try:
        netlink.tc(
            "change" if change else "add",
            "tbf",
            device,
            ROOT_HANDLE,
            rate=shape.rate_bytes_per_s,
            burst=shape.burst_bytes,
            limit=shape.queue_bytes,
        )
        netlink.link("set", index=device, gso_max_size=shape.segment_bytes)
    except NetlinkError as error:
        raise MissingCapability(
            f"the kernel refused the shaper tbf: {error}",
            hint="load it with: modprobe sch_tbf (CONFIG_NET_SCH_TBF)",
        ) from None


def read_rates(netlink: Any) -> dict[int, float]:
    """The rates in bit/s that the kernel gives to what leaves each shaped device of a namespace, by index."""
    rates = {}
    for qdisc in netlink.get_qdiscs():
        kind, device = qdisc.get_attr("TCA_KIND"), qdisc["index"]
        if kind == "tbf":
            rates[device] = float(qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"] * 8)
        elif kind == "htb":
            rate = classes.read_link_rate(netlink, device)
            if rate is not None:
                rates[device] = rate
    return rates


def check_rates(netlink: Any, wanted: Mapping[int, Shape]) -> None:
    """Raise InternalError unless the kernel reads back the rates that were set."""
    found = read_rates(netlink)
    for device, shape in wanted.items():
        got = found.get(device)
        if got != shape.rate_bytes_per_s * 8:
            seen = "no shaper" if got is None else units.format_rate(got)
            raise InternalError(f"a link reads back {seen}", expected=units.format_rate(shape.rate_bytes_per_s * 8))


def add_netem(netlink: Any, device: int, *, delay_s: float, loss: float, rate_bit_per_s: float) -> bool:
    """Put netem under the shaper of ``device``. False where this kernel does not have it.

    netem loses what it is given, a segment of 11 frames as easily as one frame: with loss, none larger is made.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    frames_in_flight = int((delay_s + QUEUE_S) * rate_bit_per_s / 8 / _FRAME_BYTES)
    try:
        netlink.tc(
            "add",
            "netem",
            device,
            NETEM_HANDLE,
            parent=ROOT_HANDLE + 1,
            delay=round(delay_s * 1e6),
            loss=loss * 100,
            limit=max(1000, 2 * frames_in_flight),
        )
        if loss > 0:
            netlink.link("set", index=device, gso_max_segs=1)
    except NetlinkError:
        return False
    return any(qdisc.get_attr("TCA_KIND") == "netem" for qdisc in netlink.get_qdiscs(device))
