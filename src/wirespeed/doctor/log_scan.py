"""One pass over any files a user has: tells what each is, reads it, and gives all facts of the job together.

A text file may hold everything at once (NCCL, torch, tables of benchmarks, kernel messages): every reader sees it. A
block of it is searched for each reader's trigger words, at memory speed; only lines with one are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from wirespeed.doctor import flight_recorder, iperf, nccl_tests, perftest
from wirespeed.doctor.flight_recorder import Desync, RankTrace, find_desync
from wirespeed.doctor.kernel_log import HEADS, KernelEvent, KernelReader
from wirespeed.doctor.kernel_log import TRIGGERS as KERNEL_TRIGGERS
from wirespeed.doctor.log_lines import HEAD_BYTES, LogFile
from wirespeed.doctor.log_prefix import find_time_s
from wirespeed.doctor.measurements import Measurement
from wirespeed.doctor.nccl_facts import NcclFacts
from wirespeed.doctor.nccl_failures import Failure
from wirespeed.doctor.nccl_log import NcclReader
from wirespeed.doctor.torch_log import TRIGGERS as TORCH_TRIGGERS
from wirespeed.doctor.torch_log import TorchReader, WatchdogTimeout, WorkProgress
from wirespeed.errors import DataError

MAX_DOCUMENT_BYTES = 256 * 1024**2
MAX_LINE_BYTES = 16 * 1024
"""Of a longer line, what is around the trigger is read."""
FOLLOWING_BYTES = 16 * 1024

TableReader = nccl_tests.NcclTestsReader | perftest.PerftestReader | iperf.IperfReader
_TABLES: tuple[tuple[tuple[bytes, ...], Callable[[str], TableReader]], ...] = (
    (nccl_tests.STARTS, nccl_tests.NcclTestsReader),
    (perftest.STARTS, perftest.PerftestReader),
    (iperf.STARTS, iperf.IperfReader),
)


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that the files of one job say. ``failures`` are in the order of their times where those are known."""

    sources: tuple[str, ...] = ()
    num_bytes: int = 0
    nccl: NcclFacts = NcclFacts()
    failures: tuple[Failure, ...] = ()
    timeouts: tuple[WatchdogTimeout, ...] = ()
    laggards: tuple[WorkProgress, ...] = ()
    desync: Desync | None = None
    kernel: tuple[KernelEvent, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    has_job_log: bool = False
    """Some text file was read that holds lines of NCCL or torch."""


class _Rest(NamedTuple):
    """The lines of a block that no rank of NCCL wrote, one by one and joined, with their numbers."""

    source: str
    numbers: Sequence[int]
    lines: Sequence[bytes]
    data: bytes


class Scan:
    """Takes files, gives the facts of the job."""

    def __init__(self) -> None:
        self._nccl = NcclReader()
        self._torch = TorchReader()
        self._kernel = KernelReader()
        self._traces: list[RankTrace] = []
        self._measurements: list[Measurement] = []
        self._notes: list[str] = []
        self._sources: list[str] = []
        self._num_bytes = 0

    def read(self, path: str | Path) -> None:
        """One file of any kind. Raises DataError where it cannot be read at all."""
        file = LogFile(path)
        head = file.head()
        self._sources.append(file.name)
        if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            self._traces.append(flight_recorder.read_trace(file.whole(MAX_DOCUMENT_BYTES), file.name))
        elif not (head.lstrip()[:1] == b"{" and self._read_document(file)):
            self._read_text(file)
        self._num_bytes += file.num_bytes
        self._notes += file.notes

    def _read_document(self, file: LogFile) -> bool:
        """A JSON document of a kind that is known; False where it is to be read as text."""
        try:
            content = file.whole(MAX_DOCUMENT_BYTES)
            document: Any = msgspec.json.decode(content)
        except (DataError, msgspec.MsgspecError, RecursionError, UnicodeError):
            file.num_bytes = 0
            return False
        if not isinstance(document, dict):
            return False
        if flight_recorder.is_document(document):
            self._traces.append(flight_recorder.read_trace(content, file.name))
        elif nccl_tests.is_document(document):
            self._measurements.append(nccl_tests.read_document(content, file.name))
        elif iperf.is_document(document):
            self._measurements.append(iperf.read_document(content, file.name))
        else:
            file.num_bytes = 0
            return False
        return True

    def _read_text(self, file: LogFile) -> None:
        tables: dict[int, TableReader] = {}
        is_kernel = False
        was_timed = False
        for block in file.blocks():
            data = block.data
            if not was_timed and data:
                was_timed = True
                self._nccl.start(file.name, _first_time_s(data[:HEAD_BYTES]))
            is_kernel = is_kernel or HEADS.search(data[:HEAD_BYTES]) is not None
            numbers: Sequence[int]
            if b"NCCL " in data:
                numbers, lines = self._nccl.take_block(block)
                data = b"\n".join(lines)
            else:
                lines = data.split(b"\n")
                numbers = range(block.first_line, block.first_line + len(lines))
            rest = _Rest(file.name, numbers, lines, data)
            self._read_triggered(rest, TORCH_TRIGGERS, self._take_torch)
            if is_kernel:
                self._read_triggered(rest, KERNEL_TRIGGERS, self._take_kernel)
            for index, (starts, make) in enumerate(_TABLES):
                if index not in tables and any(start in data for start in starts):
                    tables[index] = make(file.name)
            if tables:
                for number, line in zip(numbers, lines, strict=True):
                    for reader in tables.values():
                        reader.take(number, line[:MAX_LINE_BYTES])
        for reader in tables.values():
            reader.close()
            self._measurements += reader.found

    def _read_triggered(
        self, rest: _Rest, triggers: Sequence[bytes], take: Callable[[str, int, bytes, bytes], None]
    ) -> None:
        data = rest.data
        starts: set[int] = set()
        for trigger in triggers:
            at = data.find(trigger)
            while at >= 0:
                end = data.find(b"\n", at)
                starts.add(max(data.rfind(b"\n", 0, at) + 1, at - MAX_LINE_BYTES))
                at = -1 if end < 0 else data.find(trigger, end)
        index, counted = 0, 0
        for start in sorted(starts):
            index += data.count(b"\n", counted, start)
            counted = start
            end = data.find(b"\n", start, start + 2 * MAX_LINE_BYTES)
            end = min(len(data), start + 2 * MAX_LINE_BYTES) if end < 0 else end
            take(rest.source, rest.numbers[index], data[start:end], data[end + 1 : end + FOLLOWING_BYTES])

    def _take_torch(self, source: str, number: int, line: bytes, following: bytes) -> None:
        self._torch.take(source, number, line, following)

    def _take_kernel(self, source: str, number: int, line: bytes, following: bytes) -> None:
        self._kernel.take(source, number, line)

    def facts(self) -> JobFacts:
        """What all files together say."""
        failures = [*self._nccl.failures.values(), *self._torch.failures.values()]
        failures.sort(key=lambda f: (f.time_s is None, f.time_s or 0.0))
        nccl = self._nccl.facts()
        return JobFacts(
            sources=tuple(self._sources),
            num_bytes=self._num_bytes,
            nccl=nccl,
            failures=tuple(failures),
            timeouts=tuple(self._torch.timeouts),
            laggards=self._torch.laggards,
            desync=find_desync(self._traces),
            kernel=tuple(self._kernel.events.values()),
            measurements=tuple(self._measurements),
            notes=tuple(dict.fromkeys([*self._notes, *self._nccl.notes])),
            has_job_log=bool(nccl.num_lines or self._torch.failures or self._torch.timeouts),
        )


def _first_time_s(data: bytes) -> float | None:
    for line in data.split(b"\n")[:200]:
        time_s = find_time_s(line)
        if time_s is not None:
            return time_s
    return None


def scan(paths: Iterable[str | Path]) -> JobFacts:
    """Read all files as those of one job."""
    held = Scan()
    for path in paths:
        held.read(path)
    return held.facts()
