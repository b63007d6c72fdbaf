"""The set-up lines of NCCL 2.4 to 2.30 as patterns, each with what it says.

A pattern is searched for, never matched from column 0, and tolerates what follows it, since lines of several ranks run
into each other. Formats are from NCCL's source at the tags (NVIDIA/nccl); where a number means another thing in another
version (distance codes, the brackets of a channel) it is named only with the version seen beside it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VERSION = re.compile(rb"(?:NCCL )?version (\d+\.\d+(?:\.\d+)?)(?:\+cuda([\w.]+))?")
BOOTSTRAP = re.compile(rb"Bootstrap ?: Using (?:\[\d+\])?([\w.\-]+):([0-9a-fA-F:.%\w]+?)(?:<\d+>|\s|$)")
IB_USING = re.compile(rb"NET/(IB\w*) ?: Using (.*?)\s*(?:;\s*OOB ([\w.\-]+):|$)")
HCA = re.compile(rb"\[(\d{1,18})\]([\w.\-]+):(\d{1,18})(?::(-?\d*)(?::(-?\d{1,18}))?)?/(IB|RoCE)")
PORT_SPEED = re.compile(
    rb"NET/IB\w* ?: \[(\d{1,18})\] ([\w.\-+]+):[^\s:]*:(\d{1,18})/(IB|RoCE) (?:provider=\S+ )?speed=(\d{1,9})\b"
)
"""Since 2.18, in the NET subsystem; the speed is in Mbit/s."""
SOCKET_USING = re.compile(rb"NET/(?:Fast)?Socket ?: Using (.*)")
INTERFACE = re.compile(rb"\[\d+\]([\w.\-]+):([0-9a-fA-F:.%\w]+?)<\d+>")
NETWORK = re.compile(rb"Using network ([A-Za-z][\w ]*?)(?:\s*$|\s+\(|(?=[\w.\-]+:\d+:\d+))")
PLUGIN_ASSIGNED = re.compile(rb"Assigned NET plugin ([A-Za-z][\w ]*?) to comm")
CHANNEL = re.compile(
    rb"(?:Channel|Ring) (\d{1,18})(?:/(\d{1,18}))? : (\d{1,18})(?:\[([0-9a-f]+)\])? -> (\d{1,18})(?:\[([0-9a-f]+)\])? "
    rb"(?:\[(send|receive)\] )?via "
)
NET_VIA = re.compile(rb"(?:COLL)?NET/([\w ]+?)/(\d{1,18})(?:\((\d{1,18})\))?((?:/GDRDMA)?)((?:\(PCI\))?)((?:/Shared)?)")
ORDER = re.compile(rb"Channel (\d{1,18})/(\d{1,18}) :\s+((?:\d+\s*)+)$")
TREES = re.compile(rb"Trees ((?:\[\d+\] \S+\s*)+)")
GDR_HCA = re.compile(
    rb"NET/IB\w* ?: GPU Direct RDMA (Enabled|Disabled) for (?:GPU \S+ / )?HCA (\d{1,18}) '([\w.\-]+)'(?: \(([^)]*)\))?"
)
GDR_GPU = re.compile(
    rb"GPU Direct RDMA (Enabled|Disabled) for GPU ([0-9a-f]+)(?:\[\d+\])? / HCA ([0-9a-f]+) "
    rb"\(distance (\d{1,18}) ([<>]=?) (\d{1,18})\)"
)
GDR_SUMMARY = re.compile(rb"Connected all (?:rings|trees).*GDR (\d)")
DMABUF = re.compile(rb"DMA-BUF is available on GPU device (\d{1,18})")
COMM = re.compile(rb"comm (0x[0-9a-f]+) rank (\d{1,18}) n[rR]anks (\d{1,18})")
COMM_ID = re.compile(rb"commId (0x[0-9a-f]+)")
COLL_CHANNELS = re.compile(rb"(\d{1,18}) coll channels")
ALGORITHM = re.compile(rb"(\w+): (\d{1,18}) Bytes -> Algo (\w+) proto (\w+)")
SET_BY = re.compile(rb"(NCCL_[A-Z0-9_]+) set (?:by (?:environment|\S+) )?to (\S.*?)\.?\s*$")
NO_SPEED = re.compile(rb"Could not get speed from /sys/class/net/([^/\s]+)/speed")
NO_PATH = re.compile(rb"Could not find real path of (\S+)")
NO_VERBS = re.compile(rb"Failed to open libibverbs\.so|Could not (?:open|find|load) libibverbs")
NO_IB = re.compile(rb"NET/IB\w* ?: No device found")
EFA = re.compile(rb"NET/OFI Selected [Pp]rovider is (\w+)")
NO_PLUGIN = re.compile(rb"NET/Plugin ?: (?:No plugin found|Could not find)")
MAX_BW = re.compile(rb"=== System : maxBw ([\d.]+) totalBw ([\d.]+)")


class Via(NamedTuple):
    """How one channel leaves a rank. ``kind``: NET, P2P, SHM, COLLNET or unknown; the rest is for NET alone."""

    kind: str
    network: str = ""
    device: int | None = None
    has_gdr: bool = False
    pxn_rank: int | None = None
    detail: str = ""


class Hca(NamedTuple):
    """One RDMA port that NCCL uses. ``layer``: IB or RoCE."""

    number: int
    name: str
    port: int
    layer: str
    rail: str = ""

    @property
    def family(self) -> str:
        """The driver family: ``mlx5_3`` is ``mlx5``, ``bnxt_re0`` is ``bnxt_re``; of a given name, its letters."""
        return re.sub(r"(?:_?bond_?|_)?\d+$", "", self.name)


def parse_via(text: bytes) -> Via:
    """What stands after ``via``."""
    found = NET_VIA.match(text)
    if found is not None:
        network, device, pxn, gdr, pci, shared = found.groups()
        return Via(
            kind="COLLNET" if text.startswith(b"COLL") else "NET",
            network=network.decode(errors="replace"),
            device=int(device),
            has_gdr=bool(gdr),
            pxn_rank=None if pxn is None else int(pxn),
            detail=(pci + shared).decode(errors="replace"),
        )
    words = text.split(None, 1)
    word = words[0] if words else b""
    if word.startswith(b"P2P/"):
        return Via(kind="P2P", detail=_token(word[4:]))
    if word.startswith(b"SHM") or text.startswith(b"direct shared memory"):
        return Via(kind="SHM", detail=_token(word[4:]) if word.startswith(b"SHM/") else "")
    return Via(kind="unknown")


def _token(word: bytes) -> str:
    found = re.match(rb"[\w/\[\]]*", word)
    return "" if found is None else found[0].decode(errors="replace")


def parse_hcas(text: bytes) -> tuple[Hca, ...]:
    """The list in ``NET/IB : Using``."""
    return tuple(
        Hca(
            int(index),
            name.decode(errors="replace"),
            int(port),
            layer.decode(errors="replace"),
            (rail or b"").decode(errors="replace"),
        )
        for index, name, port, rail, _, layer in HCA.findall(text)
    )


def parse_interfaces(text: bytes) -> tuple[tuple[str, str], ...]:
    """Interface and address pairs in ``NET/Socket : Using``."""
    return tuple(
        (name.decode(errors="replace"), address.decode(errors="replace")) for name, address in INTERFACE.findall(text)
    )


_DISTANCES: tuple[tuple[tuple[int, int], dict[int, str]], ...] = (
    ((2, 27), {3: "C2C", 4: "PIX", 5: "PXB", 6: "P2C", 7: "PXN", 8: "PHB", 9: "SYS", 10: "NET", 11: "DIS"}),
    ((2, 26), {3: "C2C", 4: "PIX", 5: "PXB", 6: "PXN", 7: "PHB", 8: "SYS", 9: "NET", 10: "DIS"}),
    ((2, 12), {3: "PIX", 4: "PXB", 5: "PXN", 6: "PHB", 7: "SYS"}),
    ((2, 10), {3: "PIX", 4: "PXB", 5: "PHB", 6: "SYS"}),
    ((2, 7), {2: "PIX", 3: "PXB", 4: "PHB", 5: "SYS"}),
    ((2, 4), {0: "PIX", 1: "PXB", 2: "PHB", 3: "NODE", 4: "SYS"}),
)
"""graph.h at the tags; 2.5, 2.6, 2.8, 2.9 and 2.11 were not read and are taken as the read version below them."""


def version_key(version: str | None) -> tuple[int, int]:
    """``(2, 18)`` from ``2.18.3``; ``(0, 0)`` where unknown."""
    found = re.match(r"(\d{1,18})\.(\d{1,18})", version or "")
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def distance_name(code: int, version: str | None) -> str | None:
    """PIX, PHB, SYS ... of a distance code in that version, or None where either is unknown."""
    key = version_key(version)
    if key == (0, 0):
        return None
    return next((names.get(code) for since, names in _DISTANCES if key >= since), None)
