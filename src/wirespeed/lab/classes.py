"""Two traffic classes on a link: frames that carry one DSCP leave first, as a switch's strict queue with a limit does.

    root htb, its one class at the link's rate
      first: frames with the DSCP; 95 % of the rate are its own, and it is the first to be given what is left
      rest:  everything else; 5 % of the rate are its own, so that nothing starves

A class takes what the other does not use. Each has a queue of its own as deep as the link's would be, so a full queue
of one does not drop the other's frames. The rule of real switches differs in words (strict priority with a limit,
weighted queues), not in what a saturated link gives to whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wirespeed.errors import MissingCapability

if TYPE_CHECKING:
    from wirespeed.lab.shaping import Shape

FIRST_SHARE = 0.95
"""Of the rate: what the first class is sure of where the rest wants all."""
ROOT = 0x10000
LINK, FIRST, REST = ROOT + 1, ROOT + 0x10, ROOT + 0x20
_QUEUES = {FIRST: 0x100000, REST: 0x200000}
_QUANTUM_BYTES = 65536
"""A whole segment per turn; htb's own guess from the rate is wrong by far at 64 kbit/s and at 34 Gbit/s."""
_ETH_P_IP = 0x0800


def set_classes(netlink: Any, device: int, shape: Shape, first_dscp: int, *, change: bool = False) -> None:
    """Shape what leaves ``device`` in two classes. Raises MissingCapability where the kernel cannot."""
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.netlink.rtnl.tcmsg import plugins, sched_pfifo

    plugins.setdefault("bfifo", sched_pfifo)  # the same one number, in bytes
    try:
        if not change:
            netlink.tc("add", "htb", device, ROOT, default=REST - ROOT)
        _set_class(netlink, device, shape, LINK, share=1.0, parent=ROOT, change=change)
        for number, (handle, share) in enumerate(((FIRST, FIRST_SHARE), (REST, 1 - FIRST_SHARE))):
            _set_class(netlink, device, shape, handle, share=share, parent=LINK, order=number, change=change)
            command = "change" if change else "add"
            netlink.tc(command, "bfifo", device, _QUEUES[handle], parent=handle, limit=shape.queue_bytes)
        if not change:
            # The second byte of the IPv4 header, without ECN's two bits.
            marked = f"{first_dscp << 2:#04x}/0xfc+1"
            netlink.tc(
                "add-filter", "u32", device, parent=ROOT, prio=1, protocol=_ETH_P_IP, target=FIRST, keys=[marked]
            )
        netlink.link("set", index=device, gso_max_size=shape.segment_bytes)
    except NetlinkError as error:
        raise MissingCapability(
            f"the kernel refused traffic classes: {error}",
            hint="load them with: modprobe -a sch_htb cls_u32 (CONFIG_NET_SCH_HTB, CONFIG_NET_CLS_U32)",
        ) from None


def _set_class(
    netlink: Any, device: int, shape: Shape, handle: int, *, share: float, parent: int, order: int = 0, change: bool
) -> None:
    netlink.tc(
        "change-class" if change else "add-class",
        "htb",
        device,
        handle,
        parent=parent,
        rate=round(shape.rate_bytes_per_s * share),
        ceil=shape.rate_bytes_per_s,
        burst=shape.burst_bytes,
        cburst=shape.burst_bytes,
        prio=order,
        quantum=_QUANTUM_BYTES,
    )


def read_link_rate(netlink: Any, device: int) -> float | None:
    """The rate in bit/s of a device with classes; None where it has none."""
    for held in netlink.get_classes(device):
        if held["handle"] == LINK:
            return float(held.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")["rate"] * 8)
    return None


def read_sent_bytes(netlink: Any, device: int) -> tuple[int, int]:
    """What has left ``device`` in the first class and in the rest, in bytes with Ethernet headers."""
    sent = {
        held["handle"]: int(held.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"])
        for held in netlink.get_classes(device)
    }
    return sent.get(FIRST, 0), sent.get(REST, 0)
