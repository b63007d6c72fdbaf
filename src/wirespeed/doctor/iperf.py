"""Read iperf3: the JSON of ``-J``, one document, and the summary lines of its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from wirespeed.doctor.measurements import Measurement, Point
from wirespeed.errors import DataError

STARTS = (b"bits/sec",)

_SUMMARY = re.compile(
    rb"\[\s*(SUM|\d+)\]\s+0\.00-\s*(\d+\.\d+)\s+sec\s+\S+ \S?Bytes\s+(\d+(?:\.\d+)?) ([KMGT]?)bits/sec"
    rb"(?:\s+(\d{1,18}))?\s+(sender|receiver)"
)
_FACTORS = {b"": 1.0, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"T": 1e12}


class IperfReader:
    """Takes the lines of a log that holds iperf3's text: the last receiver's line, of the sum where there is one."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.found: list[Measurement] = []
        self.progress = 0
        self._streams: set[bytes] = set()
        self._best: tuple[bool, float] | None = None
        self._retransmits: int | None = None
        self._line = 1

    def take(self, number: int, line: bytes) -> None:
        """One line of any kind."""
        if b"iperf Done" in line:
            self.close()
            return
        found = _SUMMARY.search(line)
        if found is None:
            return
        self.progress += 1
        is_sum = found[1] == b"SUM"
        if not is_sum:
            self._streams.add(found[1])
        if found[6] == b"sender":
            if found[5] is not None and (is_sum or self._retransmits is None):
                self._retransmits = int(found[5])
        elif self._best is None or is_sum or not self._best[0]:
            self._best = (is_sum, float(found[3]) * _FACTORS[found[4]])
            self._line = number

    def close(self) -> None:
        """The log, or one run of it, has ended."""
        if self._best is not None:
            self.found.append(
                Measurement(
                    tool="iperf3",
                    test="tcp",
                    where=f"{self._source}:{self._line}",
                    points=(Point(size_bytes=0, bit_per_s=self._best[1]),),
                    streams=max(1, len(self._streams)),
                    retransmits=self._retransmits,
                )
            )
        self._streams, self._best, self._retransmits = set(), None, None


class _Sum(msgspec.Struct):
    bits_per_second: float = 0.0
    bytes: float = 0.0
    retransmits: int | None = None


class _End(msgspec.Struct):
    sum_sent: _Sum | None = None
    sum_received: _Sum | None = None
    sum: _Sum | None = None


class _TestStart(msgspec.Struct):
    protocol: str = "TCP"
    num_streams: int = 1
    reverse: int = 0


class _Connected(msgspec.Struct):
    local_host: str = ""
    remote_host: str = ""


class _Start(msgspec.Struct):
    connected: list[_Connected] = []
    test_start: _TestStart | None = None


class _Document(msgspec.Struct):
    start: _Start
    end: _End
    error: str = ""


def is_document(document: Mapping[str, Any]) -> bool:
    """Whether a JSON document is one of iperf3."""
    return "start" in document and "end" in document and ("intervals" in document or "error" in document)


def read_document(content: bytes, source: str) -> Measurement:
    """The JSON of ``iperf3 -J``. Raises DataError where it is not that."""
    try:
        held = msgspec.json.decode(content, type=_Document)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise DataError(f"{source} is not iperf3 JSON: {fault}", expected="the output of iperf3 -J") from fault
    received = held.end.sum_received or held.end.sum or held.end.sum_sent
    test = held.start.test_start or _TestStart()
    rate = 0.0 if received is None else received.bits_per_second
    pair = held.start.connected[0] if held.start.connected else _Connected()
    return Measurement(
        tool="iperf3",
        test=test.protocol.lower(),
        where=source,
        points=(Point(size_bytes=0, bit_per_s=rate),) if rate > 0 else (),
        hosts=tuple(name for name in (pair.local_host, pair.remote_host) if name),
        streams=test.num_streams,
        retransmits=None if held.end.sum_sent is None else held.end.sum_sent.retransmits,
        num_bytes=None if held.end.sum_sent is None else held.end.sum_sent.bytes,
        notes=(held.error[:200],) if held.error else (),
    )
