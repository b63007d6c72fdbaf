"""Reads NCCL's INFO and WARN lines out of a log, one pass, bounded memory: what NCCL chose, and what failed.

Works on lines of any launcher, interleaved (several messages in one line) and cut. What was said often is kept once, so
memory follows the number of processes and channels, not the length of the log; limits below bound even that, and a
limit that is reached is noted. Absence proves little: NCCL_DEBUG_SUBSYS hides lines, a log may begin late.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import compress, repeat
from operator import itemgetter, not_

import msgspec

from wirespeed.doctor import nccl_formats as formats
from wirespeed.doctor.log_lines import Block, shown
from wirespeed.doctor.log_prefix import Process, find_process, find_rank, find_time_s, plain_process
from wirespeed.doctor.nccl_facts import NcclFacts, ViaCount
from wirespeed.doctor.nccl_failures import LIKELY, Failure, parse_failure
from wirespeed.doctor.nccl_setup import Place, SetupReader

MAX_SEEN = 20_000
"""Distinct (host, message) pairs, and as many paths, that are remembered."""
MANY_CHANNEL_LINES = 512
"""After as many lines of one host and path no new channel number is expected."""
MAX_HEAD_BYTES = 256
MAX_LINE_BYTES = 16 * 1024
"""Of a longer line, what is around its first message is read."""
MAX_FAILURES = 2_000

_MARK = b"NCCL "
_INFO_MARK = b"NCCL INFO "
_NUMBER = re.compile(rb"(?:Channel|Ring) (\d{1,6})")
_INFO, _WARN, _VERSION = b"INFO ", b"WARN ", b"version "
_CHANNELS = frozenset((b"Chan", b"Ring"))
_CHANNEL_MARKS = (b"NCCL INFO Channel ", b"NCCL INFO Ring ")
SAMPLED = 7
"""Of known paths every so many line gives its channel number; odd, so that no cycle of channels hides one."""
_VIA = b" via "
_COLLECTIVES = frozenset((b"AllR", b"AllG", b"Redu", b"Broa", b"Send", b"Recv", b"Allt", b"AllT", b"Gath", b"Scat"))
_UNKNOWN = Process("", 0, None)


class _HostLines:
    """What one host has said already: how often each path, and which messages."""

    __slots__ = ("seen", "vias")

    def __init__(self) -> None:
        self.vias: dict[bytes, int] = {}
        self.seen: set[bytes] = set()


class NcclReader:
    """Takes lines that hold ``NCCL``, gives facts."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, str, int, int | None, str], Failure] = {}
        self.notes: list[str] = []
        self._num_lines = 0
        self._setup = SetupReader()
        self._process_of: dict[tuple[bytes, ...], Process] = {}
        self._processes: set[Process] = set()
        self._by_head: dict[bytes, _HostLines] = {}
        self._by_host: dict[str, _HostLines] = {}
        self._num_seen = 0
        self._num_messages = 0
        self._numbers: set[bytes] = set()
        self._start_s: dict[str, float] = {}

    def take_block(self, block: Block) -> tuple[Sequence[int], Sequence[bytes]]:
        """All lines of a block. Gives the numbers and texts of those that no rank wrote at INFO: other readers' lines.

        The dense path: a log of many ranks is mostly channel lines, a million of each kind. They are cut and counted by
        process and path in a few calls for the whole block; what is not known yet, and everything else, goes to
        ``take``.
        """
        lines = block.data.split(b"\n")
        word = next((one for one in _CHANNEL_MARKS if one in block.data), None)
        numbers: Sequence[int] = range(block.first_line, block.first_line + len(lines))
        if word is not None:
            marks = list(map(bytes.find, lines, repeat(word)))
            is_channel = [mark >= 0 for mark in marks]
            self._count_channels(block, lines, marks, is_channel)
            last = len(lines) - 1 - is_channel[::-1].index(True)
            self._setup.setup_end[block.source] = block.first_line + last
            is_other = list(map(not_, is_channel))
            numbers, lines = list(compress(numbers, is_other)), list(compress(lines, is_other))
        by_head, num_known = self._by_head, 0
        other_numbers: list[int] = []
        others: list[bytes] = []
        for number, line in zip(numbers, lines, strict=True):
            head, mark, message = line.partition(_INFO_MARK)
            if mark:
                known = by_head.get(head)
                if (known is not None and message in known.seen) or (
                    message[:4] in _COLLECTIVES and b"Algo " not in message and _MARK not in message
                ):
                    num_known += 1
                    continue
            else:
                other_numbers.append(number)
                others.append(line)
                if _MARK not in line:
                    continue
            self._take_whole(block.source, number, line)
        self._num_lines += num_known
        return other_numbers, others

    def _count_channels(
        self, block: Block, lines: Sequence[bytes], marks: Sequence[int], is_channel: Sequence[bool]
    ) -> None:
        """Count channel lines by process and path; of what is not known yet the first line is read in full.

        No tuple outlives its line: kept by the thousand, they would wake the garbage collector, which costs half.
        """
        held = list(compress(lines, is_channel))
        starts = list(compress(marks, is_channel))
        whose = [line[:mark] for line, mark in zip(held, starts, strict=True)]
        if len(set(whose)) > len(whose) // 4:  # each has its own time: the process stands in the last two words
            whose = [head if _MARK in head else b" ".join(head.rsplit(None, 2)[-2:]) for head in whose]
        vias = list(map(itemgetter(2), map(bytes.partition, held, repeat(_VIA))))
        unknown: dict[tuple[bytes, bytes], int] = {}
        is_counted = True
        for (head, via), number in Counter(zip(whose, vias, strict=True)).items():
            known = self._by_head.get(head)
            if known is None:
                known = self._known(head)
            before = known.vias.get(via)
            if before is None or _MARK in head:
                unknown[head, via] = number
            else:
                known.vias[via] = before + number
                self._num_lines += number
                is_counted = is_counted and before >= MANY_CHANNEL_LINES
        is_new = any(via for _, via in unknown)  # a line without a path is one of order
        if is_new or not is_counted:
            stride, skip = 1 if is_new else SAMPLED, len(_INFO_MARK)
            self._numbers.update(
                line[mark + skip : mark + skip + 11]
                for line, mark in zip(held[::stride], starts[::stride], strict=True)
            )
        if unknown:
            places = compress(range(block.first_line, block.first_line + len(lines)), is_channel)
            for number, line, head, via in zip(places, held, whose, vias, strict=True):
                key = (head, via)
                if key in unknown:
                    self._take_whole(block.source, number, line)
                    vias_of = self._known(head).vias
                    if via in vias_of and _MARK not in head:  # it is a channel: the others of its kind are counted
                        count_left = unknown.pop(key) - 1
                        vias_of[via] += count_left
                        self._num_lines += count_left

    def _take_whole(self, source: str, number: int, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES:
            at = line.find(_MARK)
            line = line[max(0, at - 512) : at + MAX_LINE_BYTES]
        self.take(Place(source, number, line))

    def take(self, place: Place) -> None:
        """One line that holds ``NCCL ``; several ranks may have written into it."""
        self._num_lines += 1
        parts = place.line.split(_MARK)
        head = parts[0]
        for tail in parts[1:]:
            if tail.startswith(_INFO):
                key = tail[5:9]
                at = tail.find(b" via ") if key in _CHANNELS else -1
                if at > 0:
                    self._take_channel(place, head, tail[5:at], tail[at + 5 :])
                elif key not in _COLLECTIVES or b"Algo " in tail:
                    self._take_info(place, head, tail[5:], is_alone=len(parts) == 2)
            elif tail.startswith(_WARN):
                self._take_warning(place, head, tail[5:])
            elif tail.startswith(_VERSION):
                self._setup.take_version(tail, place)
            head = tail

    def _take_channel(self, place: Place, head: bytes, channel: bytes, via: bytes) -> None:
        if formats.CHANNEL.search(channel + b" via ") is None:
            return
        known = self._of_host(self._process(head).host)
        self._numbers.add(channel[:11])
        self._setup.setup_end[place.source] = place.number
        count = known.vias.get(via)
        if count is None:
            self._setup.first("via " + formats.parse_via(via).kind, place)
            self._num_seen += 1
            if self._num_seen > MAX_SEEN:
                # Only rubbish has this many distinct paths: what is known goes on being counted, the rest is not.
                self._note("more paths of channels than can be kept apart: some are not counted")
                return
        known.vias[via] = 1 if count is None else count + 1

    def _known(self, head: bytes) -> _HostLines:
        """What is known of the host that a head names; heads without a time come again and are remembered."""
        process = plain_process(head)
        if process is None:
            process = self._process(head)
        elif len(self._processes) < MAX_SEEN:
            self._processes.add(process)
        known = self._of_host(process.host)
        if len(head) < MAX_HEAD_BYTES:
            if len(self._by_head) >= MAX_SEEN:
                self._by_head.clear()
            self._by_head[head] = known
        return known

    def _of_host(self, host: str) -> _HostLines:
        known = self._by_host.get(host)
        if known is None:
            known = _HostLines()
            if len(self._by_host) < MAX_SEEN:
                self._by_host[host] = known
        return known

    def _process(self, head: bytes) -> Process:
        key = tuple(head.rsplit(None, 2)[-2:])
        found = self._process_of.get(key)
        if found is None:
            found = find_process(head) or _UNKNOWN
            if len(self._process_of) >= MAX_SEEN:
                self._process_of.clear()
            self._process_of[key] = found
            if found.pid and len(self._processes) < MAX_SEEN:
                self._processes.add(found)
        return found

    def _take_info(self, place: Place, head: bytes, message: bytes, *, is_alone: bool) -> None:
        process = self._process(head)
        seen = self._of_host(process.host).seen
        if message in seen:
            return
        is_setup = self._setup.take(process, message, place)
        if not is_setup and LIKELY.search(message) is not None and self._take_failure(place, head, message, process):
            return
        if is_alone and len(message) < MAX_HEAD_BYTES * 8:
            if self._num_messages >= MAX_SEEN:
                for known in self._by_host.values():
                    known.seen.clear()
                self._num_messages = 0
            self._num_messages += 1
            seen.add(message)

    def _take_warning(self, place: Place, head: bytes, message: bytes) -> None:
        process = self._process(head)
        # Some builds say at WARN what others say at INFO.
        if not self._setup.take(process, message, place) and not self._take_failure(place, head, message, process):
            self._setup.first("warning", place)

    def _take_failure(self, place: Place, head: bytes, message: bytes, process: Process) -> bool:
        words = parse_failure(message)
        if words is None:
            return False
        if words.kind == "unhandled":
            return True
        key = (words.kind, process.host, process.pid, words.code, words.device)
        known = self.failures.get(key)
        if known is not None:
            self.failures[key] = msgspec.structs.replace(known, count=known.count + 1)
            return True
        if len(self.failures) >= MAX_FAILURES:
            self._note("more kinds of failures than are kept: the first ones of the log are")
            return True
        time_s, start_s = find_time_s(place.line), self._start_s.get(place.source)
        setup_end = self._setup.setup_end.get(place.source)
        rank = self._setup.ranks.get(process)
        self.failures[key] = Failure(
            kind=words.kind,
            is_primary=words.is_primary,
            where=f"{place.source}:{place.number}",
            text=shown(place.line),
            host=process.host,
            rank=find_rank(head) if rank is None else rank,
            time_s=time_s,
            age_s=None if time_s is None or start_s is None else max(0.0, time_s - start_s),
            age_lines=None if setup_end is None else place.number - setup_end,
            code=words.code,
            peer=words.peer,
            device=words.device,
            detail=words.detail,
        )
        return True

    def start(self, source: str, time_s: float | None) -> None:
        """The first time that a file states: how old the job was at a failure counts from there."""
        if time_s is not None:
            self._start_s.setdefault(source, time_s)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def facts(self) -> NcclFacts:
        """What has been read so far."""
        vias: Counter[tuple[str, formats.Via]] = Counter()
        for host, known in self._by_host.items():
            for text, count in known.vias.items():
                vias[host, formats.parse_via(text)] += count
        numbers = {int(found[1]) for found in map(_NUMBER.match, self._numbers) if found is not None}
        return NcclFacts(
            num_lines=self._num_lines,
            hosts=tuple(sorted({process.host for process in self._processes if process.host})),
            num_processes=len({(process.host, process.pid) for process in self._processes}),
            vias=tuple(
                ViaCount(host=host, via=via, count=count)
                for (host, via), count in sorted(vias.items(), key=lambda item: (item[0][0], -item[1], str(item[0][1])))
            ),
            num_channels=len(numbers),
            **self._setup.facts(),
        )
