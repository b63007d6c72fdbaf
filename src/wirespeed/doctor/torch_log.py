"""Read what torch, its launcher and the operating system say about a dying job: watchdog, exceptions, kills.

A watchdog's time-out is a symptom: some rank did not arrive. Where one rank's own program failed first (out of memory,
a Python error, a kill), that is the cause, and every network error of the other ranks follows from it. The rank
whose *last enqueued* work lags behind is the one that did not arrive.
"""

from __future__ import annotations

import re

import msgspec

from wirespeed.doctor import job_failures
from wirespeed.doctor.job_failures import said_signal
from wirespeed.doctor.log_lines import shown
from wirespeed.doctor.log_prefix import find_process, find_rank, find_time_s
from wirespeed.doctor.nccl_failures import Failure, parse_failure

TRIGGERS = (
    b"Watchdog caught",
    b"last enqueued NCCL",
    b"ut of memory",
    b"SIGKILL",
    b"exitcode",
    b"Last error:",
    b"illegal memory access",
    b"Segmentation fault",
    b"Bus error",
    b"DUE TO ",
    b"Traceback (most",
    b"gloo/transport",
    b"ECC error",
    b"SIGSEGV",
    b"SIGBUS",
    *job_failures.TRIGGERS,
)
"""A line of these is looked at; one that holds none of them costs nothing but the search."""

_TIMEOUT = re.compile(
    rb"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w+)"
    rb"(?:, NumelIn=(\d{1,18}), NumelOut=(\d{1,18}))?.{0,80}?(?:Timeout\(ms\)=(\d{1,18}))?\)"
)
_RAN_FOR = re.compile(rb"ran for (\d{1,18}) milliseconds")
_PROGRESS = re.compile(rb"last enqueued NCCL work: (-?\d{1,18}), last completed NCCL work: (-?\d{1,18})")
_EXIT = re.compile(rb"exitcode\s*:?\s*(-?\d{1,18})|Signal (\d{1,18}) \(SIG\w+\) received by PID")
_ERROR_LINE = re.compile(
    rb"^[\w\[\]:\s.,\-<>|]{0,60}?\b((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt))\b(?:: (.*))?"
)
_NETWORK_ERRORS = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "ConnectionResetError",
    "BrokenPipeError",
    "ChildFailedError",
    "RendezvousTimeoutError",
    "RendezvousConnectionError",
    "gaierror",
    "KeyboardInterrupt",
    "SignalException",
)
_GLOO = re.compile(
    rb"gloo/transport/\S+\] ?(?:.*?)(Connection closed by peer \[?([^\]\s]*)|Timed out waiting \d+ms|"
    rb"Connection re(?:set|fused)[^\n]*|connect \[?([^\]\s]*)\]?[^\n]*: ([A-Z][\w ]+))"
)
MAX_KEPT = 2_000


class WorkProgress(msgspec.Struct, kw_only=True):
    """How far one rank came: numbers of works. The one with the lowest ``enqueued`` did not arrive."""

    rank: int
    enqueued: int
    completed: int
    where: str


class WatchdogTimeout(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that did not end in time on one rank."""

    rank: int | None
    sequence: int
    operation: str
    num_elements: int | None
    where: str
    text: str
    time_s: float | None


class TorchReader:
    """Takes lines that hold a trigger, and the line after "Last error:"."""

    def __init__(self) -> None:
        self.timeouts: list[WatchdogTimeout] = []
        self.progress: dict[int, WorkProgress] = {}
        self.failures: dict[tuple[str, str, int | None, str], Failure] = {}

    def take(self, source: str, number: int, line: bytes, following: bytes) -> None:
        """One line and what follows it (a few KiB, for an exception's own last line)."""
        rank = find_rank(line)
        if (found := _TIMEOUT.search(line)) is not None:
            if len(self.timeouts) < MAX_KEPT:
                self.timeouts.append(
                    WatchdogTimeout(
                        rank=rank,
                        sequence=int(found[1]),
                        operation=found[2].decode(errors="replace"),
                        num_elements=None if found[3] is None else int(found[3]),
                        where=f"{source}:{number}",
                        text=shown(line),
                        time_s=find_time_s(line),
                    )
                )
        elif (found := _PROGRESS.search(line)) is not None:
            if rank is not None and (rank in self.progress or len(self.progress) < 100_000):
                self.progress[rank] = WorkProgress(
                    rank=rank, enqueued=int(found[1]), completed=int(found[2]), where=f"{source}:{number}"
                )
        elif b"Last error:" in line:
            end = line.find(b"Last error:") + len(b"Last error:")
            words = line[end:].strip() or following.lstrip().split(b"\n", 1)[0]
            read = parse_failure(words)
            if read is not None and read.kind != "unhandled":
                self._keep(
                    read.kind,
                    (source, number, line + b" " + words),
                    rank,
                    is_primary=read.is_primary,
                    detail=read.detail,
                    code=read.code,
                )
        elif (said := job_failures.read_line(line)) is not None:
            self._keep(
                said.kind,
                (source, number, line),
                rank if said.rank is None else said.rank,
                is_primary=said.is_primary,
                detail=said.detail,
                code=said.code,
                host=said.host,
                device=said.device,
                peer=said.peer,
            )
        elif b"gloo/transport" in line and (found := _GLOO.search(line)) is not None:
            is_primary = not any(words in found[1] for words in (b"onnection closed", b"reset", b"Timed out"))
            detail = found[1].decode(errors="replace")[:120]
            self._keep(
                "connect" if is_primary else "gloo", (source, number, line), rank, is_primary=is_primary, detail=detail
            )
        else:
            self._take_program(source, number, line, rank, following)

    def _take_program(self, source: str, number: int, line: bytes, rank: int | None, following: bytes) -> None:
        if b"DUE TO " in line:
            if b"CANCELLED" in line:
                self._keep("cancelled", (source, number, line), rank, detail=shown(line[line.find(b"DUE TO ") :]))
        elif b"CUDA out of memory" in line or b"torch.OutOfMemoryError" in line or b"HIP out of memory" in line:
            self._keep("gpu_memory", (source, number, line), rank, detail="CUDA out of memory")
        elif b"illegal memory access" in line or b"ECC error" in line:
            self._keep("gpu", (source, number, line), rank, detail="the GPU reported an error")
        elif b"Segmentation fault" in line:
            self._keep("crash", (source, number, line), rank, detail="segmentation fault")
        elif b"Bus error" in line:
            self._keep("shared_memory", (source, number, line), rank, detail="bus error (often /dev/shm is full)")
        elif (found := _EXIT.search(line)) is not None:
            number_of = found[1].lstrip(b"-") if found[1] is not None and found[1].startswith(b"-") else found[2]
            said = None if number_of is None else said_signal(number_of)
            if said is not None:
                self._keep(said.kind, (source, number, line), rank, detail=said.detail)
        elif b"oom_kill" in line or b"oom-kill" in line or b"Out of memory" in line or b"out of memory" in line:
            if b"Kill" in line or b"kill" in line:
                self._keep("host_memory", (source, number, line), rank, detail="the host ran out of memory")
        elif b"Traceback" in line:
            self._take_traceback(source, number, line, rank, following)

    def _take_traceback(self, source: str, number: int, line: bytes, rank: int | None, following: bytes) -> None:
        for after, text in enumerate(following.split(b"\n")[:120]):
            if b"Traceback" in text:
                return  # another rank's, or the exception that this one led to
            found = _ERROR_LINE.search(text)
            if found is None or b"File " in text:
                continue
            name = found[1].decode(errors="replace")
            words = (found[2] or b"")[:200]
            short = name.rsplit(".", 1)[-1]
            if short in _NETWORK_ERRORS or b"NCCL" in words or b"gloo" in words or b"ProcessGroup" in words:
                return
            where = number + after + 1
            if "OutOfMemory" in short or b"out of memory" in words:
                self._keep("gpu_memory", (source, where, text), rank, detail=shown(text))
            elif b"CUDA error" in words:
                self._keep("gpu", (source, where, text), rank, detail=shown(text))
            else:
                time_s = find_time_s(text)
                self._keep(
                    "program",
                    (source, where, text),
                    rank,
                    detail=shown(text),
                    time_s=find_time_s(line) if time_s is None else time_s,
                )
            return

    def _keep(
        self,
        kind: str,
        place: tuple[str, int, bytes],
        rank: int | None,
        *,
        is_primary: bool = True,
        detail: str,
        code: int | None = None,
        time_s: float | None = None,
        host: str = "",
        device: str = "",
        peer: str = "",
    ) -> None:
        source, number, line = place
        if not host:
            process = find_process(line)
            host = "" if process is None else process.host
        key = (kind, host, rank, detail if kind == "program" else "")
        known = self.failures.get(key)
        if known is not None:
            self.failures[key] = msgspec.structs.replace(known, count=known.count + 1)
        elif len(self.failures) < MAX_KEPT:
            self.failures[key] = Failure(
                kind=kind,
                is_primary=is_primary,
                where=f"{source}:{number}",
                text=shown(line),
                host=host,
                rank=rank,
                time_s=find_time_s(line) if time_s is None else time_s,
                detail=detail[:300],
                code=code,
                device=device,
                peer=peer,
            )

    @property
    def laggards(self) -> tuple[WorkProgress, ...]:
        """Ranks whose last enqueued work is behind that of the others: what the others wait for."""
        if len(self.progress) < 2:
            return ()
        furthest = max(p.enqueued for p in self.progress.values())
        behind = tuple(p for p in self.progress.values() if p.enqueued < furthest)
        return behind if len(behind) * 2 <= len(self.progress) else ()
