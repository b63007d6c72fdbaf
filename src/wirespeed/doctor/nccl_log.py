"""Reads NCCL's INFO and WARN lines out of a log, one pass, bounded memory: what NCCL chose, and what failed.

Works on lines of any launcher, interleaved (several messages in one line) and cut. What was said often is kept once, so
memory follows the number of processes and channels, not the length of the log; limits below bound even that, and a
limit that is reached is noted. Absence proves little: NCCL_DEBUG_SUBSYS hides lines, a log may begin late.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from wirespeed.doctor import nccl_formats as formats
from wirespeed.doctor.log_lines import shown
from wirespeed.doctor.log_prefix import Process, find_process, find_rank, find_time_s
from wirespeed.doctor.nccl_facts import NcclFacts, ViaCount
from wirespeed.doctor.nccl_failures import LIKELY, Failure, parse_failure
from wirespeed.doctor.nccl_setup import Place, SetupReader

MAX_SEEN = 50_000
"""Distinct (process, message) pairs and channels that are remembered."""
MAX_FAILURES = 2_000

_MARK = b"NCCL "
_INFO, _WARN, _VERSION = b"INFO ", b"WARN ", b"version "
_CHANNELS = frozenset((b"Chan", b"Ring"))
_COLLECTIVES = frozenset((b"AllR", b"AllG", b"Redu", b"Broa", b"Send", b"Recv", b"Allt", b"AllT", b"Gath", b"Scat"))
_UNKNOWN = Process("", 0, None)


class NcclReader:
    """Takes lines that hold ``NCCL``, gives facts."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, str, int, int | None, str], Failure] = {}
        self.notes: list[str] = []
        self._num_lines = 0
        self._setup = SetupReader()
        self._process_of: dict[tuple[bytes, ...], Process] = {}
        self._processes: set[Process] = set()
        self._seen: set[tuple[Process, bytes]] = set()
        self._vias: Counter[tuple[Process, bytes]] = Counter()
        self._channels: set[bytes] = set()
        self._start_s: dict[str, float] = {}

    # The dense path: a log of many ranks is mostly channel lines and collectives, a million of each.

    def take(self, source: str, number: int, line: bytes) -> None:
        """One line that holds ``NCCL ``; several ranks may have written into it."""
        self._num_lines += 1
        parts = line.split(_MARK)
        head = parts[0]
        for tail in parts[1:]:
            if tail.startswith(_INFO):
                key = tail[5:9]
                at = tail.find(b" via ") if key in _CHANNELS else -1
                if at > 0:
                    self._take_channel(Place(source, number, line), head, tail[5:at], tail[at + 5 :])
                elif key not in _COLLECTIVES or b"Algo " in tail:
                    self._take_info(Place(source, number, line), head, tail[5:])
            elif tail.startswith(_WARN):
                self._take_warning(Place(source, number, line), head, tail[5:])
            elif tail.startswith(_VERSION):
                self._setup.take_version(tail, Place(source, number, line))
            head = tail

    def _take_channel(self, place: Place, head: bytes, channel: bytes, via: bytes) -> None:
        key = (self._process(head), via)
        self._vias[key] += 1
        if self._vias[key] == 1:
            self._setup.first("via " + formats.parse_via(via).kind, place)
            if len(self._vias) > MAX_SEEN:
                self._fold_vias()
        if channel not in self._channels and len(self._channels) < MAX_SEEN:
            self._channels.add(channel)
            self._setup.setup_end[place.source] = place.number

    def _fold_vias(self) -> None:
        """Forget which process used which path, keep how many did: only rubbish has this many distinct paths."""
        folded: Counter[tuple[Process, bytes]] = Counter()
        for (process, text), count in self._vias.items():
            found = formats.NET_VIA.match(text)
            folded[process if len(folded) < MAX_SEEN // 4 else _UNKNOWN, text[:4] if found is None else found[0]] += (
                count
            )
        # Whatever is still distinct beyond this was no path.
        self._vias = Counter(dict(folded.most_common(MAX_SEEN // 2)))
        self._note("more paths of channels than could be kept apart: some are counted together")

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

    def _take_info(self, place: Place, head: bytes, message: bytes) -> None:
        process = self._process(head)
        key = (process, message)
        if key in self._seen:
            return
        if self._setup.take(process, message, place):
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen.add(key)
        elif LIKELY.search(message) is not None:
            self._take_failure(place, head, message, process)

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
            kind=words.kind, is_primary=words.is_primary, where=f"{place.source}:{place.number}",
            text=shown(place.line), host=process.host, rank=find_rank(head) if rank is None else rank, time_s=time_s,
            age_s=None if time_s is None or start_s is None else max(0.0, time_s - start_s),
            age_lines=None if setup_end is None else place.number - setup_end,
            code=words.code, peer=words.peer, device=words.device, detail=words.detail,
        )  # fmt: skip
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
        for (process, text), count in self._vias.items():
            vias[process.host, formats.parse_via(text)] += count
        channels = (formats.CHANNEL.match(channel + b" via ") for channel in self._channels)
        return NcclFacts(
            num_lines=self._num_lines,
            hosts=tuple(sorted({process.host for process in self._processes if process.host})),
            num_processes=len({(process.host, process.pid) for process in self._processes}),
            vias=tuple(
                ViaCount(host=host, via=via, count=count)
                for (host, via), count in sorted(vias.items(), key=lambda item: (item[0][0], -item[1], str(item[0][1])))
            ),
            num_channels=len({int(found[1]) for found in channels if found is not None}),
            **self._setup.facts(),
        )
