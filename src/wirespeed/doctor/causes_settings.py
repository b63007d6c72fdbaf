"""NCCL settings that are wrong, obsolete or differ between hosts, as the log shows them. A table: one row, one rule.

A setting alone is rarely the cause of what hurts; it is ranked below what was seen to go wrong, except where its value
is invalid, so that NCCL does something other than what was asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from wirespeed.doctor.causes import Cause, make_cause, names
from wirespeed.doctor.check import Path, Severity
from wirespeed.doctor.log_scan import JobFacts
from wirespeed.doctor.nccl_facts import NcclFacts
from wirespeed.doctor.nccl_formats import version_key


class SettingRule(NamedTuple):
    """One setting and when its value is a problem."""

    name: str
    is_bad: Callable[[str, NcclFacts], bool]
    title: str
    fix: str
    weight: float
    severity: Severity
    source: str
    path: Path = "rdma"


def _integer(value: str) -> int | None:
    return int(value) if re.fullmatch(r"-?\d+", value.strip()) else None


def _outside(low: int, high: int) -> Callable[[str, NcclFacts], bool]:
    def is_bad(value: str, nccl: NcclFacts) -> bool:
        number = _integer(value)
        return number is not None and not low <= number <= high

    return is_bad


def _is_on(value: str, nccl: NcclFacts) -> bool:
    return value.strip() not in ("0", "")


def _always(value: str, nccl: NcclFacts) -> bool:
    return True


def _fixed_gid(value: str, nccl: NcclFacts) -> bool:
    return nccl.is_roce and version_key(nccl.version) >= (2, 21) and value.strip() != "-1"


def _at_least_mib(value: str, nccl: NcclFacts) -> bool:
    number = _integer(value)
    return number is not None and number >= 2**20


def _replaces_exclusions(value: str, nccl: NcclFacts) -> bool:
    return value.startswith("^") and "lo" not in value.lstrip("^").split(",")


def _few_channels(value: str, nccl: NcclFacts) -> bool:
    number = _integer(value)
    return number is not None and 0 < number < 4


def _bad_level(value: str, nccl: NcclFacts) -> bool:
    return value.strip().upper() in ("SYS", "5")


RULES = (
    SettingRule(
        "NCCL_IB_RETRY_CNT",
        _outside(0, 7),
        "is outside 0 to 7, so the NIC does not do what was asked",
        "set 7 (the default), or unset it",
        0.8,
        "warning",
        "nccl#1453; InfiniBand specification: 3 bits",
    ),
    SettingRule(
        "NCCL_IB_TIMEOUT",
        _outside(1, 31),
        "is outside 1 to 31 (5 bits)",
        "unset it",
        0.8,
        "warning",
        "InfiniBand specification",
    ),
    SettingRule(
        "NCCL_CHUNK_SIZE",
        _at_least_mib,
        "of 1 MiB or more was reported to corrupt results silently",
        "unset it, and check results made with it",
        0.85,
        "critical",
        "nccl#2409, #2408",
    ),
    SettingRule(
        "NCCL_IB_GID_INDEX",
        _fixed_gid,
        "is fixed on RoCE; since 2.21 NCCL chooses it, and an index may differ between hosts",
        "unset it",
        0.45,
        "notice",
        "NCCL environment documentation",
    ),
    SettingRule(
        "NCCL_SOCKET_IFNAME",
        _replaces_exclusions,
        "replaces NCCL's own exclusions, so lo can be picked",
        "use ^docker,lo,virbr, or name the interface",
        0.5,
        "warning",
        "NCCL environment documentation",
        "tcp",
    ),
    SettingRule(
        "NCCL_NET_GDR_LEVEL",
        _bad_level,
        "lets GPUDirect cross CPU sockets, which can be slower than the host's memory",
        "unset it; it is a test, not a setting",
        0.4,
        "notice",
        "NCCL environment documentation",
        "gpu",
    ),
    SettingRule(
        "NCCL_TOPO_FILE",
        _always,
        "replaces the topology that NCCL would find; a file of another machine type misplaces NICs",
        "unset it, or give the file of this machine type",
        0.5,
        "warning",
        "azurehpc-health-checks#142, #143",
    ),
    SettingRule(
        "NCCL_ALGO",
        _always,
        "fixes the algorithm for all sizes",
        "unset it: the tuner chooses by size",
        0.45,
        "notice",
        "NCCL environment documentation",
        "any",
    ),
    SettingRule(
        "NCCL_PROTO",
        _always,
        "fixes the protocol for all sizes",
        "unset it: the tuner chooses by size",
        0.45,
        "notice",
        "NCCL environment documentation",
        "any",
    ),
    SettingRule(
        "NCCL_MAX_NCHANNELS",
        _few_channels,
        "leaves too few channels for a fast network",
        "unset it",
        0.6,
        "warning",
        "NCCL environment documentation",
        "any",
    ),
    SettingRule(
        "NCCL_MIN_NCHANNELS",
        _always,
        "is deprecated (NCCL_MIN_CTAS)",
        "use NCCL_MIN_CTAS, or unset it",
        0.2,
        "notice",
        "NCCL environment documentation",
        "any",
    ),
    SettingRule(
        "NCCL_IB_CUDA_SUPPORT",
        _always,
        "was removed in 2.4 and does nothing",
        "unset it",
        0.15,
        "notice",
        "NCCL release notes",
        "gpu",
    ),
    SettingRule(
        "NCCL_PXN_DISABLE",
        _is_on,
        "turns off PXN, which joins rails inside the host",
        "unset it",
        0.4,
        "notice",
        "NCCL environment documentation",
    ),
    SettingRule(
        "NCCL_SHM_DISABLE",
        _is_on,
        "sends traffic inside a host through the network",
        "unset it",
        0.5,
        "warning",
        "NCCL environment documentation",
        "any",
    ),
    SettingRule(
        "NCCL_DMABUF_ENABLE",
        lambda value, nccl: value.strip() == "0",
        "turns DMA-BUF off, one of the two ways to GPUDirect",
        "unset it",
        0.45,
        "notice",
        "NCCL environment documentation",
        "gpu",
    ),
    SettingRule(
        "NCCL_IB_PCI_RELAXED_ORDERING",
        lambda value, nccl: value.strip() == "0",
        "turns relaxed ordering off: slow on AMD and in virtual machines",
        "unset it: 2 decides by itself",
        0.45,
        "notice",
        "NCCL environment documentation",
    ),
)

_MAY_DIFFER = frozenset(("NCCL_COMM_ID", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_TOPO_DUMP_FILE"))


def setting_causes(job: JobFacts) -> Iterator[Cause]:
    """All causes of this kind."""
    nccl = job.nccl
    for rule in RULES:
        bad = [value for value in nccl.settings.get(rule.name, {}) if rule.is_bad(value, nccl)]
        if bad:
            yield make_cause(
                f"setting.{rule.name.removeprefix('NCCL_').lower().replace('_', '-')}",
                f"{rule.name}={bad[0]} {rule.title}",
                nccl.lines(f"setting {rule.name}"), kind="setting", weight=rule.weight, severity=rule.severity,
                subject=rule.name, path=rule.path, fix=rule.fix, commands=(f"unset {rule.name}",),
                undo=(f"export {rule.name}={bad[0]}",), source=rule.source,
            )  # fmt: skip
    yield from _socket_threads(nccl)
    yield from _differing(nccl)
    yield from _unknown_warnings(nccl)


def _unknown_warnings(nccl: NcclFacts) -> Iterator[Cause]:
    """Warnings of NCCL that no rule knows: shown, since silence would read as "fine"."""
    lines = nccl.lines("warning")
    if lines:
        yield make_cause(
            "nccl.unknown-warning", "NCCL warns of something that no rule here knows", lines, kind="setting",
            weight=0.2, severity="notice", subject="warning", path="any",
            fix="read the line; nothing is concluded from it", source="NCCL WARN",
        )  # fmt: skip


def _socket_threads(nccl: NcclFacts) -> Iterator[Cause]:
    threads = [_integer(v) for v in nccl.settings.get("NCCL_SOCKET_NTHREADS", {})]
    sockets = [_integer(v) for v in nccl.settings.get("NCCL_NSOCKS_PERTHREAD", {})]
    if threads and sockets and threads[0] and sockets[0] and threads[0] * sockets[0] > 64:
        yield make_cause(
            "setting.sockets-product",
            f"NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD = {threads[0] * sockets[0]}, above the 64 that are allowed",
            nccl.lines("setting NCCL_SOCKET_NTHREADS", "setting NCCL_NSOCKS_PERTHREAD"), kind="setting", weight=0.7,
            subject="sockets", path="tcp", fix="4 and 4 suit a generic 100 Gbit/s network",
            commands=("export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4",),
            source="NCCL environment documentation",
        )  # fmt: skip


def _differing(nccl: NcclFacts) -> Iterator[Cause]:
    for name, values in nccl.settings.items():
        hosts = [set(held) - {""} for held in values.values()]
        if len(values) < 2 or name in _MAY_DIFFER or not all(hosts) or set.intersection(*hosts):
            continue
        few = min(values, key=lambda value: len(values[value]))
        yield make_cause(
            "setting.differs",
            f"{name} differs between hosts: {few} on {names(values[few])}, "
            f"{next(value for value in values if value != few)} elsewhere",
            nccl.lines(f"setting {name}"), kind="setting", weight=0.65, subject=name, path="any",
            fix="make it the same everywhere; look for leftovers in the environment and in nccl.conf",
            commands=("env | grep NCCL_; cat /etc/nccl.conf ~/.nccl.conf",), source="NCCL environment documentation",
        )  # fmt: skip
    if len(nccl.versions) > 1:
        yield make_cause(
            "setting.versions-differ",
            f"NCCL versions differ: {', '.join(nccl.versions[:4])}", nccl.lines("version"), kind="setting", weight=0.7,
            subject="version", path="any", fix="run one version on all hosts (unless these are several jobs)",
        )  # fmt: skip
