"""Read the kernel's log (dmesg, journalctl -k, syslog): links that flap, NICs and GPUs that fail, memory that runs out.

Only lines that name their cause; what a driver says at start-up about a link that comes up once is not a flap. An
interface flaps where it lost its carrier twice or more, or once while the job ran (which the log alone cannot tell).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from wirespeed.doctor.log_lines import shown
from wirespeed.doctor.log_prefix import find_time_s

HEADS = re.compile(
    rb"^(?:\S+ )?(?:<\d+>)?\[ *\d+\.\d{6}\]|^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d |\bkernel: |systemd-networkd\[",
    re.MULTILINE,
)
"""A file that holds such a line is a kernel log or a syslog."""

TRIGGERS = (
    b"carrier", b"ink down", b"ink is down", b"ink is Down", b"ink Down", b"ink DOWN", b"ink status definitely down",
    b"NVRM: ", b"SXid", b"ut of memory: Kill", b"oom-kill", b"NETDEV WATCHDOG", b"AER: ", b"PCIe bandwidth",
    b"table full", b"SYN flooding", b"emperature", b"health compromised", b"device's health", b"Port module event",
    b"nsufficient power", b"response from the link partner", b"martian source", b"consider tuning tcp_mem",
    b"neighbor table overflow", b"neighbour table overflow", b"handling fault status", b"IO_PAGE_FAULT",
    b"Hardware Error", b"soft lockup", b"blocked for more than", b"self-detected stall", b"not responding",
    b"clock throttled", b"page allocation failure", b"TX timeout detected", b"ERR CQE", b"was lost; in progress",
)  # fmt: skip
"""Without digits: see ``log_scan``."""

_NIC = rb"(?:en|eth|ib|bond|mlx|ens|eno|hsn|rdma)[\w.\-]*"
_PATTERNS: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("carrier", re.compile(rb"systemd-networkd\[\d+\]: ([\w.\-]+): [Ll]ost carrier")),
    ("module", re.compile(rb"(?:mlx5_core (\S+?):? )?Port module event(?:\[error\])?: module (\d+), "
                          rb"(Cable unplugged|Cable error[^\n]*|[Bb]us stuck|Unknown[^\n]*|High [Tt]emperature|"
                          rb"Power budget exceeded|Bad or shorted cable)")),
    ("carrier", re.compile(rb"(?:mlx\d_core|bnxt_en|i40e|ice|ixgbe|ena|be2net|qede|igb|e1000e)\S*[: ]+(?:[0-9a-f:.]+ )?"
                           rb"(?:\S+: )?([\w.\-]+): (?:NIC )?[Ll]ink (?:is )?[Dd]own")),
    ("carrier", re.compile(rb"link status definitely down for interface ([\w.\-]+)")),
    ("carrier", re.compile(rb"(mlx\d_\d+|hfi1_\d+)[: ].*[Ll]ink (?:DOWN|[Dd]own)")),
    ("carrier", re.compile(rb"\b(" + _NIC + rb"): (?:NIC )?[Ll]ink (?:is )?[Dd]own")),
    ("xid", re.compile(rb"NVRM: Xid \(([^)]*)\): (\d{1,18})")),
    ("sxid", re.compile(rb"SXid \(([^)]*)\): (\d{1,18})")),
    ("host_memory", re.compile(rb"[Oo]ut of memory: Killed? process (\d{1,18}) \(([^)]*)\)|(oom-kill):")),
    ("nic_hang", re.compile(rb"NETDEV WATCHDOG: ([\w.\-]+)")),
    ("nic_hang", re.compile(rb"mlx5_core (\S+?):? .*(?:health compromised|device's health)")),
    ("nic_hang", re.compile(rb"\b(" + _NIC + rb"): TX timeout detected")),
    ("nic_hang", re.compile(rb"\b(" + _NIC + rb")[: ].*ERR CQE")),
    ("slot_power", re.compile(rb"(?:mlx5_core (\S+?): .*)?Detected insufficient power on the PCIe slot")),
    ("pcie_error", re.compile(rb"(\S+:\S+\.\d): AER: |AER: .*?([0-9a-f]{4}:[0-9a-f:.]+)")),
    ("pcie_width", re.compile(rb"([0-9a-f]{4}:[0-9a-f]{2}:\S+?): ([\d.]+) Gb/s available PCIe bandwidth, "
                              rb"limited by (.*)")),
    ("conntrack", re.compile(rb"nf_conntrack: (?:\S+ )?table full")),
    ("syn_flood", re.compile(rb"Possible SYN flooding on port (\S+)")),
    ("module_hot", re.compile(rb"mlx5_core (\S+?):? .*(?:[Hh]igh [Tt]emperature|temperature warning)")),
    ("lacp", re.compile(rb"\b(bond[\w.\-]*): .*[Nn]o 802\.3ad response from the link partner")),
    ("martian", re.compile(rb"martian source \S+ from (\S+), on dev (\S+)")),
    ("tcp_memory", re.compile(rb"TCP: out of memory -- consider tuning tcp_mem")),
    ("arp_table", re.compile(rb"(?:arp_cache|ndisc_cache|neigh\w*): neighbou?r table overflow")),
    ("iommu_fault", re.compile(rb"handling fault status|IO_PAGE_FAULT(?: device=(\S+))?")),
    ("machine_check", re.compile(rb"\[Hardware Error\]: (?:Machine check|CPU \d+|Corrected error|Uncorrected)")),
    ("host_hang", re.compile(rb"soft lockup - CPU#(\d+)|task (\S+) blocked for more than \d+ seconds|"
                             rb"self-detected stall")),
    ("storage", re.compile(rb"nfs: server (\S+) not responding|"
                           rb"Lustre\S* .*Connection to (\S+) .*was lost; in progress")),
    ("throttled", re.compile(rb"(CPU\d+): .*temperature above threshold, cpu clock throttled")),
    ("allocation", re.compile(rb"(\S+): page allocation failure: order:([4-9]|\d\d)")),
)  # fmt: skip
MAX_KEPT = 2_000

XID_WORDS = {
    13: "graphics engine exception (often the program)", 31: "memory page fault (often the program)",
    43: "GPU stopped processing (the program)", 45: "preemptive clean-up (follows from another failure)",
    48: "double-bit ECC error", 63: "row remapping", 64: "row remapping failed", 74: "NVLink error",
    79: "GPU has fallen off the bus", 94: "contained ECC error", 95: "uncontained ECC error", 119: "GSP timeout",
    120: "GSP error", 145: "NVLink error", 149: "NVLink error",
}  # fmt: skip
"""NVIDIA, Xid errors (docs.nvidia.com/deploy/xid-errors)."""
_SECONDARY_XIDS = (43, 45)


class KernelEvent(msgspec.Struct, kw_only=True):
    """One kind of event on one device: first line, and how often."""

    kind: str
    device: str
    where: str
    text: str
    time_s: float | None
    detail: str = ""
    code: int | None = None
    count: int = 1


class KernelReader:
    """Takes lines that hold a trigger."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, str, str, int | None], KernelEvent] = {}

    def take(self, source: str, number: int, line: bytes) -> None:
        """One line."""
        for kind, pattern in _PATTERNS:
            found = pattern.search(line)
            if found is None:
                continue
            groups = [g.decode(errors="replace") for g in found.groups() if g is not None]
            device = groups[0] if groups else ""
            code = int(groups[1]) if kind in ("xid", "sxid") else None
            key = (source, kind, device, code)
            known = self.events.get(key)
            if known is not None:
                known.count += 1
            elif len(self.events) < MAX_KEPT:
                words = XID_WORDS.get(code, "") if kind == "xid" and code is not None else ""
                self.events[key] = KernelEvent(
                    kind=kind, device=device, where=f"{source}:{number}", text=shown(line), time_s=find_time_s(line),
                    detail=" ".join(groups[1:]) if code is None else words, code=code,
                )  # fmt: skip
            return

    def of(self, kind: str, *, accept: Callable[[KernelEvent], bool] = lambda event: True) -> list[KernelEvent]:
        """The events of a kind, most frequent first."""
        return sorted((e for e in self.events.values() if e.kind == kind and accept(e)), key=lambda e: -e.count)


def is_hardware_xid(event: KernelEvent) -> bool:
    """Whether an Xid is not merely what follows when a program ends."""
    return event.kind == "xid" and event.code not in _SECONDARY_XIDS
