"""NCCL's failure lines, 2.4 to 2.30, and what they mean: which are causes and which only follow from another's.

A rank whose peer is gone says "connection closed" or "work request flushed": such lines are secondary, and so is a
watchdog that waited for a dead peer. The earliest primary failure by time, over all ranks, is where to look.
Opcode and length of a completion with an error are garbage (nccl#1664) and are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of failure on one process, at its first occurrence. ``time_s``: seconds within the year, or None.

    ``age_s`` and ``age_lines`` count from the end of the set-up, as far as the log tells.
    """

    kind: str
    is_primary: bool
    where: str
    text: str
    host: str = ""
    rank: int | None = None
    time_s: float | None = None
    age_s: float | None = None
    age_lines: int | None = None
    code: int | None = None
    peer: str = ""
    device: str = ""
    detail: str = ""
    count: int = 1


class FailureWords(NamedTuple):
    """What one line says."""

    kind: str
    is_primary: bool
    code: int | None = None
    peer: str = ""
    device: str = ""
    detail: str = ""


COMPLETION_WORDS = {
    1: "local length error",
    2: "local QP operation error",
    4: "local protection error",
    5: "work request flushed (follows from another failure)",
    9: "remote invalid request",
    10: "remote access error",
    11: "remote operation error",
    12: "transport retries exceeded: no answer from the peer",
    13: "receiver-not-ready retries exceeded: the peer did not post receives",
}
"""enum ibv_wc_status of rdma-core."""

_COMPLETION = re.compile(
    rb"Got completion (?:from peer (\S+) )?with (?:error (\d{1,18})|status=(?:([A-Z_]+)\()?(\d{1,18})\)?)"
)
_VENDOR = re.compile(rb"vendor[ _]err[ =](\d{1,18})")
_GIDS = re.compile(rb"local ?G(?:id|ID) ?([0-9a-f:.]{2,})|local GID ([0-9a-f:.]{2,})")
_REMOTE_GID = re.compile(rb"remote(?:Gids?| GID)\s?([0-9a-f:.]{2,})")
_DEVICE = re.compile(rb"(?:hca|on dev) ([\w.\-]+?)(?::\d+)?(?:[,\s]|$)")
_MODIFY_QP = re.compile(rb"Call to ibv_modify_qp failed with (?:error )?(\d{1,18})? ?([A-Z][\w ]*\w)")
_GID_INDEX = re.compile(rb"local GID index (\d{1,18})")
_ASYNC = re.compile(
    rb"(?:([\w.\-]+?)(?::\d+)? )?(?:Got async (?:fatal )?event|async fatal event|Got non-fatal async event)[^:]*: ?(.+)"
)
_MEMLOCK = re.compile(rb"Call to ibv_(?:reg_\w+|create_\w+) failed with error Cannot allocate memory")
_REG_MR = re.compile(rb"Call to ibv_reg_\w+ failed with error (\w[\w ]*\w)")
_CLOSED = re.compile(
    rb"[Cc]onnection closed by (?:remote )?peer ?([^\s<]*)|Call to recv\w* from (\S+?)(?:<\d+>)? failed|"
    rb"Connection reset by peer|Broken pipe"
)
_NO_INTERFACE = re.compile(rb"[Nn]o (?:socket )?interface found|Bootstrap ?: no socket interface")
_CONNECT = re.compile(
    rb"[Cc]onnect to ([^\s<]+?)(?:<\d+>)? (?:failed ?: |returned )"
    rb"(No route to host|Connection refused|Connection timed out|Network is unreachable|"
    rb"Software caused connection abort|Host is unreachable|Connection reset by peer)"
)
_RETRY = re.compile(rb",? retrying \((\d{1,18})/(\d{1,18})\)")
_CONNECT_CALL = re.compile(
    rb"Call to (?:connect|bind|getsockname|poll)\w*[^:]*failed ?: (No route to host|Connection timed out|"
    rb"Connection refused|Network is unreachable|Cannot assign requested address|Software caused connection abort)"
)
_TRUNCATED = re.compile(rb"message truncated : receiv\w+ (\d{1,18}) bytes instead of (\d{1,18})")
_RANK_COUNT = re.compile(rb"mismatch in rank count from procs (\d{1,18}) : (\d{1,18})")
_DUPLICATE_GPU = re.compile(rb"Duplicate GPU detected : rank (\d{1,18}) and rank (\d{1,18})")
_VERSION_MISMATCH = re.compile(rb"mismatched NCCL version|NCCL version mismatch|wrong magic", re.IGNORECASE)
_SHM = re.compile(
    rb"[Ff]ailed to extend (/dev/shm\S*)|[Ee]rror while (?:creating|attaching to) shared memory|"
    rb"(?:shm_open|posix_fallocate|ftruncate)[^:]*: ?(?:No space left|No such file)|No space left on device"
)
_OPEN_FILES = re.compile(rb"[Tt]oo many open files")
_FABRIC_MANAGER = re.compile(rb"system not yet initialized")
_NVLS = re.compile(rb"NVLS\)? [Mm]ulticast[^:\n]{0,60}: ([^\n.]{1,80})")
_NO_NETWORK = re.compile(rb"Error ?: network (\S+) not found")
_NOT_OPEN = re.compile(rb"[Uu]nable to open device (\S+)")
_P2P_DISABLED = re.compile(rb"P2P is disabled between (connected GPUs \d+ and \d+)")
_IOMMU = re.compile(rb"Missing \"?iommu=pt\"? from kernel command line")
_NUMA = re.compile(rb"NUMA auto balancing enabled")
_DRIVER = re.compile(rb"(driver version is insufficient[^'\n]{0,60})")
_NO_GPU = re.compile(rb"(no CUDA-capable device is detected)")
_LOST = re.compile(
    rb"Call to (?:recv|send)\w* (?:from|to) (\S+?)(?:<\d+>)? failed ?: "
    rb"(Connection timed out|No route to host|Network is unreachable|Host is unreachable)"
)
_EFA_LOST = re.compile(rb"NET/OFI.*?([Uu]nresponsive receiver|Request completed with error[^\n]{0,80})")
_CUDA = re.compile(rb"Cuda failure (?:\d+ )?'([^']+)'|Failed to CUDA (\w+)")
_OFI = re.compile(rb"Could not find any optimal provider|Only EFA provider is supported|Unable to find libfabric")
_ACS = re.compile(rb"ACS is enabled on PCI switch|PCI-E ACS")
_LOCAL_ACCESS = re.compile(rb"local access violation", re.IGNORECASE)
_RAS_DEAD = re.compile(rb"RAS .*(?:peer|process) \S+ .*(?:dead|unresponsive)")
_HINT = re.compile(rb"HINT ?:? ?(.+)")
_TIMEOUT_INIT = re.compile(rb"(?:Bootstrap|bootstrap).*(?:timed? ?out|Timeout)")
_UNHANDLED = re.compile(rb"[\w./]+\.(?:cc|cu|h):\d+ -> \d")

LIKELY = re.compile(
    rb"fail|Fail|error|Error|closed|refused|truncated|async|HINT|No route|no socket|No socket|no interface|mismatch|"
    rb"violation|reset by|dead|Duplicate|-> \d|too many|Too many|Unable to open|is disabled between|nresponsive"
)
"""What an INFO line must hold to be looked at as a failure."""


def parse_failure(text: bytes) -> FailureWords | None:
    """What a WARN line, or an INFO line about an error, says; None where it is not a failure this module knows."""
    found = _COMPLETION.search(text)
    if found is not None:
        return _completion(text, found)
    found = _MODIFY_QP.search(text)
    if found is not None:
        number, words = found.groups()
        return FailureWords(
            "modify_qp",
            True,
            None if number is None else int(number),
            _remote_gid(text),
            _device(text),
            _text(words.strip()) + _gid_words(text),
        )
    for pattern, reader in _READERS:
        found = pattern.search(text)
        if found is not None:
            return reader(found)
    return None


def _completion(text: bytes, found: re.Match[bytes]) -> FailureWords:
    peer, error, _, status = found.groups()
    code = int(error if error is not None else status)
    vendor = _VENDOR.search(text)
    detail = COMPLETION_WORDS.get(code, "an error this version does not know")
    if vendor is not None:
        detail += f", vendor error {int(vendor[1])}"
    remote = _remote_gid(text)
    return FailureWords(
        "completion",
        code != 5,
        code,
        _text(peer) if peer is not None else remote,
        _device(text),
        detail + _gid_words(text),
    )


def _gid_words(text: bytes) -> str:
    found = _GIDS.search(text)
    index = _GID_INDEX.search(text)
    words = ""
    if index is not None:
        words += f", local GID index {int(index[1])}"
    if found is not None:
        words += f", local GID {_text(found[1] or found[2])}"
    return words


def _remote_gid(text: bytes) -> str:
    found = _REMOTE_GID.search(text)
    return "" if found is None else _text(found[1])


def _device(text: bytes) -> str:
    found = _DEVICE.search(text)
    return "" if found is None else _text(found[1])


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", errors="replace")


def _async(found: re.Match[bytes]) -> FailureWords:
    words = _text(found[2]).strip()
    is_port = re.search(r"port error|port active|port err", words, re.IGNORECASE) is not None
    return FailureWords("async_event", is_port or "error" in words.lower(), device=_text(found[1]), detail=words)


def _closed(found: re.Match[bytes]) -> FailureWords:
    return FailureWords("closed", False, None, _text(found[1] or found[2]))


def _connect(found: re.Match[bytes]) -> FailureWords:
    words = _text(found[2])
    attempt = _RETRY.match(found.string, found.end())
    if attempt is not None and int(attempt[1]) < int(attempt[2]):
        # A peer that is not up yet refuses, and NCCL tries again: not a failure.
        return FailureWords("retry", False, None, _text(found[1]), "", words)
    return FailureWords("connect", True, None, _text(found[1]), "", words)


def _lost(found: re.Match[bytes]) -> FailureWords:
    return FailureWords("tcp_lost", True, None, _text(found[1]), "", f"{_text(found[1])}: {_text(found[2])}")


def _connect_call(found: re.Match[bytes]) -> FailureWords:
    return FailureWords("connect", True, detail=_text(found[1]))


def _named(kind: str, *, is_primary: bool = True) -> Callable[[re.Match[bytes]], FailureWords]:
    """Reads a line whose groups, where it has any, are the detail."""

    def read(found: re.Match[bytes]) -> FailureWords:
        groups = [_text(group) for group in found.groups() if group is not None]
        return FailureWords(kind, is_primary, detail=" ".join(groups) if groups else _text(found[0]).strip())

    return read


_READERS: tuple[tuple[re.Pattern[bytes], Callable[[re.Match[bytes]], FailureWords]], ...] = (
    (_ASYNC, _async),
    (_LOCAL_ACCESS, _named("async_event")),
    (_MEMLOCK, _named("memlock")),
    (_REG_MR, _named("reg_mr")),
    (_NO_INTERFACE, _named("no_interface")),
    (_DUPLICATE_GPU, _named("duplicate_gpu")),
    (_TRUNCATED, _named("message_truncated")),
    (_RANK_COUNT, _named("rank_count")),
    (_VERSION_MISMATCH, _named("version_mismatch")),
    (_OPEN_FILES, _named("open_files")),
    (_SHM, _named("shared_memory")),
    (_FABRIC_MANAGER, _named("fabric_manager")),
    (_NVLS, _named("nvls")),
    (_NO_NETWORK, _named("network_not_found")),
    (_NOT_OPEN, _named("device_not_open")),
    (_P2P_DISABLED, _named("p2p_disabled")),
    (_IOMMU, _named("iommu_warning")),
    (_NUMA, _named("numa_warning")),
    (_DRIVER, _named("driver")),
    (_NO_GPU, _named("no_gpu")),
    (_EFA_LOST, _named("efa")),
    (_LOST, _lost),
    (_CUDA, _named("cuda")),
    (_OFI, _named("ofi")),
    (_ACS, _named("acs")),
    (_CONNECT, _connect),
    (_CONNECT_CALL, _connect_call),
    (_TIMEOUT_INIT, _named("bootstrap_timeout")),
    (_CLOSED, _closed),
    (_RAS_DEAD, _named("ras_dead", is_primary=False)),
    (_HINT, _named("hint", is_primary=False)),
    (_UNHANDLED, _named("unhandled", is_primary=False)),
)
