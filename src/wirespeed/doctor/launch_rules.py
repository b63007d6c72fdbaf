"""Values of single NCCL settings that hurt, with what is true instead.

Ranges and defaults are those of NCCL 2.23 and later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from wirespeed.doctor.check import Severity
from wirespeed.doctor.inventory import HostView

ENV_DOCS = "NCCL user guide, environment variables"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A value of one variable that should not be. ``is_bad`` gets the value and the host."""

    variable: str
    id: str
    severity: Severity
    title: str
    expected: str
    remedy: str
    is_bad: Callable[[str, HostView], bool]
    source: str = ENV_DOCS


def number(text: str) -> int | None:
    """The integer that a setting holds, or None."""
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _outside(low: int, high: int) -> Callable[[str, HostView], bool]:
    def is_bad(text: str, _: HostView) -> bool:
        value = number(text)
        return value is None or not low <= value <= high

    return is_bad


def _is_set(text: str, _: HostView) -> bool:
    return text not in ("", "0")


def _has_rdma(text: str, view: HostView) -> bool:
    return text not in ("", "0") and view.has_active_rdma


def _any(_text: str, _: HostView) -> bool:
    return True


RULES = (
    Rule(
        variable="NCCL_IB_DISABLE",
        id="launch.ib-disabled",
        severity="critical",
        is_bad=_has_rdma,
        title="NCCL_IB_DISABLE=1 on a host with active RDMA: every byte goes by TCP, 4 to 5 times slower.",
        expected="unset",
        remedy="unset it; if NCCL then fails, that is the fault to mend",
        source="sglang PR #1427",
    ),
    Rule(
        variable="NCCL_NET",
        id="launch.net-socket",
        severity="critical",
        is_bad=lambda text, view: text.lower() == "socket" and view.has_active_rdma,
        title="NCCL_NET=Socket on a host with active RDMA: every byte goes by TCP.",
        expected="IB or unset",
        remedy="unset it",
    ),
    Rule(
        variable="NCCL_P2P_DISABLE",
        id="launch.p2p-disabled",
        severity="warning",
        is_bad=_is_set,
        title="NCCL_P2P_DISABLE=1: GPUs of one host talk through host memory instead of NVLink or PCI Express.",
        expected="unset",
        remedy="unset it; it is a means of diagnosis",
    ),
    Rule(
        variable="NCCL_SHM_DISABLE",
        id="launch.shm-disabled",
        severity="warning",
        is_bad=_is_set,
        title="NCCL_SHM_DISABLE=1: ranks of one host talk through the network.",
        expected="unset",
        remedy="unset it; give the container a larger /dev/shm instead",
    ),
    Rule(
        variable="NCCL_IB_GID_INDEX",
        id="launch.gid-index",
        severity="warning",
        is_bad=lambda text, view: text != "-1" and any(port.is_roce for port in view.rdma_ports),
        title="NCCL_IB_GID_INDEX is fixed: harmful since NCCL 2.21 where the index differs between hosts.",
        expected="unset with NCCL 2.21 and later",
        remedy="unset it; with older NCCL: the index of the RoCE v2 IPv4 address",
        source=f"{ENV_DOCS}; nccl#426, #769",
    ),
    Rule(
        variable="NCCL_NET_GDR_LEVEL",
        id="launch.gdr-level",
        severity="notice",
        is_bad=lambda text, _: text.upper() in ("SYS", "5", "LOC", "0"),
        title="NCCL_NET_GDR_LEVEL is forced: SYS can be slower than host memory, LOC switches GPUDirect off.",
        expected="unset (PXB)",
        remedy="unset it, and mend the distance between GPU and NIC",
    ),
    Rule(
        variable="NCCL_IB_RETRY_CNT",
        id="launch.retry-count",
        severity="critical",
        is_bad=_outside(0, 7),
        title="NCCL_IB_RETRY_CNT is outside what the hardware field holds: connections may fail or lose their retries.",
        expected="0 to 7",
        remedy="set 7",
        source="InfiniBand specification (3-bit field); nccl#1453",
    ),
    Rule(
        variable="NCCL_IB_TIMEOUT",
        id="launch.ib-timeout",
        severity="warning",
        is_bad=_outside(18, 31),
        title="NCCL_IB_TIMEOUT is low or invalid: a short disturbance ends the job with status 12.",
        expected="18 to 31 (20 by default since 2.23)",
        remedy="unset it",
    ),
    Rule(
        variable="NCCL_CHUNK_SIZE",
        id="launch.chunk-size",
        severity="critical",
        is_bad=lambda text, _: (number(text) or 0) >= 1 << 20,
        title="NCCL_CHUNK_SIZE of 1 MiB and more is reported to corrupt data silently.",
        expected="unset",
        remedy="unset it",
        source="nccl#2409, #2408",
    ),
    Rule(
        variable="NCCL_MIN_NCHANNELS",
        id="launch.deprecated",
        severity="notice",
        is_bad=_any,
        title="NCCL_MIN_NCHANNELS is deprecated.",
        expected="NCCL_MIN_CTAS",
        remedy="use NCCL_MIN_CTAS or unset it",
    ),
    Rule(
        variable="NCCL_IB_CUDA_SUPPORT",
        id="launch.removed",
        severity="notice",
        is_bad=_any,
        title="NCCL_IB_CUDA_SUPPORT was removed in NCCL 2.4 and does nothing.",
        expected="unset",
        remedy="unset it",
    ),
    Rule(
        variable="NCCL_DEBUG",
        id="launch.debug-trace",
        severity="notice",
        is_bad=lambda text, _: text.upper() == "TRACE",
        title="NCCL_DEBUG=TRACE writes a line per call and slows training.",
        expected="WARN or INFO",
        remedy="set WARN",
    ),
    Rule(
        variable="NCCL_ALGO",
        id="launch.pinned-algorithm",
        severity="notice",
        is_bad=_any,
        title="NCCL_ALGO is pinned: NCCL no longer chooses by size.",
        expected="unset",
        remedy="unset it in production",
    ),
    Rule(
        variable="NCCL_PROTO",
        id="launch.pinned-protocol",
        severity="notice",
        is_bad=_any,
        title="NCCL_PROTO is pinned: NCCL no longer chooses by size.",
        expected="unset",
        remedy="unset it in production",
    ),
)
