"""One pass over any files a user has: tells what each is, reads it, and gives all facts of the job together.

A text file may hold everything at once (NCCL, torch, tables of benchmarks, kernel messages): every reader sees it. What
varies in a log is mostly numbers. So lines are told apart without their digits and hexadecimal letters, and a form that
holds no reader's trigger word is remembered as dull: it is looked at once, however often it comes. Trigger words are
compared without those letters too, which lets a few lines pass that hold none, and never loses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from wirespeed.doctor import flight_recorder, iperf, nccl_tests, perftest, tool_outputs
from wirespeed.doctor.check import Finding
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

FOLLOWING_LINES = 200
MAX_DULL = 20_000
"""Forms of lines that are remembered."""
MAX_IDLE_BLOCKS = 32
"""Blocks of 1 MiB without a row after which a table has ended; the next header opens it again."""
VARYING = b"0123456789abcdefABCDEF"


class TableReader(Protocol):
    """Takes all lines of a file in which its header was seen. ``progress`` counts the rows it understood."""

    progress: int
    found: list[Any]

    def take(self, number: int, line: bytes) -> None:
        """One line of any kind."""

    def close(self) -> None:
        """The log has ended."""


class _Table:
    """A reader that is at work in a file, and for how many blocks it has read nothing."""

    def __init__(self, reader: TableReader) -> None:
        self.reader = reader
        self.num_idle = 0
        self._progress = 0

    def is_over(self) -> bool:
        """After a block: whether it has been without a row for long."""
        self.num_idle = self.num_idle + 1 if self.reader.progress == self._progress else 0
        self._progress = self.reader.progress
        return self.num_idle > MAX_IDLE_BLOCKS


def _lasting(word: bytes) -> bytes:
    return word.translate(None, VARYING)


_TABLES: tuple[tuple[tuple[bytes, ...], Callable[[str], TableReader]], ...] = tuple(
    (tuple(map(_lasting, starts)), make)
    for starts, make in (
        (nccl_tests.STARTS, nccl_tests.NcclTestsReader),
        (perftest.STARTS, perftest.PerftestReader),
        (iperf.STARTS, iperf.IperfReader),
        (tool_outputs.STARTS, tool_outputs.ToolReader),
    )
)
_WORDS: tuple[bytes, ...] = tuple(
    dict.fromkeys(
        [_lasting(word) for word in (*TORCH_TRIGGERS, *KERNEL_TRIGGERS)] + [w for starts, _ in _TABLES for w in starts]
    )
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
    tools: tuple[Finding, ...] = ()
    """What outputs of ibstat, lspci and their like show."""
    notes: tuple[str, ...] = ()
    has_job_log: bool = False
    """Some text file was read that holds lines of NCCL or torch."""


class Scan:
    """Takes files, gives the facts of the job."""

    def __init__(self) -> None:
        self._nccl = NcclReader()
        self._torch = TorchReader()
        self._kernel = KernelReader()
        self._traces: list[RankTrace] = []
        self._measurements: list[Measurement] = []
        self._tools: list[Finding] = []
        self._dull: set[bytes] = set()
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
        tables: dict[int, _Table] = {}
        was_timed = False
        for block in file.blocks():
            data = block.data
            if not was_timed and data:
                was_timed = True
                self._nccl.start(file.name, _first_time_s(data[:HEAD_BYTES]))
            numbers: Sequence[int]
            if b"NCCL " in data:
                numbers, lines = self._nccl.take_block(block)
                data = b"\n".join(lines)
            else:
                lines = data.split(b"\n")
                numbers = range(block.first_line, block.first_line + len(lines))
            keys = data.translate(None, VARYING).split(b"\n")
            unknown = set(keys) - self._dull
            if unknown:
                telling = self._sort(unknown)
                self._start_tables(file.name, telling, tables)
                for index in compress(range(len(keys)), map(telling.__contains__, keys)):
                    self._take_line(file.name, numbers[index], lines, index)
            for index, table in list(tables.items()):
                for number, line in zip(numbers, lines, strict=True):
                    table.reader.take(number, line[:MAX_LINE_BYTES])
                if table.is_over():
                    self._close(tables.pop(index))
        for table in tables.values():
            self._close(table)

    def _sort(self, unknown: set[bytes]) -> set[bytes]:
        """Of forms of lines that are new, those that hold a trigger; the others are remembered as dull."""
        telling = {key for key in unknown if any(word in key for word in _WORDS)}
        if len(self._dull) > MAX_DULL:
            self._dull.clear()
        if len(unknown) < MAX_DULL:
            self._dull |= unknown - telling
        return telling

    def _start_tables(self, source: str, telling: set[bytes], tables: dict[int, _Table]) -> None:
        for index, (starts, make) in enumerate(_TABLES):
            if any(start in key for key in telling for start in starts):
                if index in tables:
                    tables[index].num_idle = 0
                else:
                    tables[index] = _Table(make(source))

    def _take_line(self, source: str, number: int, lines: Sequence[bytes], index: int) -> None:
        """One line that may say something; of a very long one, what is around its first trigger."""
        line = lines[index]
        if len(line) > MAX_LINE_BYTES:
            found = [at for word in (*TORCH_TRIGGERS, *KERNEL_TRIGGERS) if (at := line.find(word)) >= 0]
            if not found:
                return
            line = line[max(0, min(found) - MAX_LINE_BYTES // 2) :][:MAX_LINE_BYTES]
        if any(word in line for word in TORCH_TRIGGERS):
            following = b"\n".join(lines[index + 1 : index + 1 + FOLLOWING_LINES])[:FOLLOWING_BYTES]
            self._torch.take(source, number, line, following)
        if any(word in line for word in KERNEL_TRIGGERS) and HEADS.search(line) is not None:
            self._kernel.take(source, number, line)

    def _close(self, table: _Table) -> None:
        table.reader.close()
        found = table.reader.found
        self._measurements += [one for one in found if isinstance(one, Measurement)]
        self._tools += [one for one in found if isinstance(one, Finding)]

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
            tools=tuple(self._tools),
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
