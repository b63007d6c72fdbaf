"""Read nccl-tests: its table, old and new, between lines of other programs, and its JSON (``-J``, version 3).

GB/s are 10^9 bytes. The table does not always name the collective: then the ratio of bus to algorithm bandwidth tells
it, as far as it can. In the JSON booleans are the strings "true" and "false", NaN is "nan", and ``env`` is the whole
environment, which is neither kept nor shown. A row with wrong results makes the run incorrect, whatever its footer is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from wirespeed.doctor.measurements import Measurement, Point
from wirespeed.errors import DataError

MAX_ROWS = 10_000

_NUMBER = rb"(-?(?:\d[\d.]*(?:[eE][+-]?\d+)?|nan|inf))"
_ROW = re.compile(
    rb"(?:^|[\s:>\]])(\d{1,18})\s+(\d{1,18})\s+([a-z][a-z0-9_]*)\s+(sum|prod|min|max|avg|all|none|mulsum)\s+"
    rb"(?:(-?\d{1,18})\s+)?"
    + rb"\s+".join([_NUMBER] * 3) + rb"\s+(N/A|" + _NUMBER[1:-1] + rb")"
    + rb"(?:\s+" + rb"\s+".join([_NUMBER] * 3) + rb"\s+(N/A|" + _NUMBER[1:-1] + rb"))?"
)  # fmt: skip
_RANK = re.compile(
    rb"#\s+Rank\s+(\d{1,18})\s+(?:Group\s+(\d{1,18})\s+)?Pid\s+(\d{1,18}) on\s+(\S+) device\s+(\d{1,18}) "
    rb"\[([^\]]+)\] (.*)"
)
_TEST = re.compile(rb"# Collective test starting: (\w+?)(?:_perf)?\s*$")
_COMMAND = re.compile(rb"\b(\w+)_perf\b")
_BOUNDS = re.compile(rb"# Out of bounds values : (\d{1,18}) (OK|FAILED)")
_AVERAGE = re.compile(rb"# Avg bus bandwidth\s+: ([\d.]+|nan)")
_HEADER = re.compile(rb"#\s*nThread")

NAMES = {
    "AllReduce": "all_reduce", "all_reduce": "all_reduce", "AllGather": "all_gather", "all_gather": "all_gather",
    "ReduceScatter": "reduce_scatter", "reduce_scatter": "reduce_scatter", "AlltoAll": "all_to_all",
    "alltoall": "all_to_all", "Broadcast": "broadcast", "broadcast": "broadcast",
    "Reduce": "reduce", "reduce": "reduce",
    "SendRecv": "sendrecv", "sendrecv": "sendrecv", "Gather": "gather", "gather": "gather", "Scatter": "scatter",
    "scatter": "scatter", "HyperCube": "hypercube", "hypercube": "hypercube",
}  # fmt: skip

STARTS = (b"# nThread", b"#  Rank", b"# Collective test", b"out-of-place")
"""A log that holds one of these holds a table."""


class NcclTestsReader:
    """Takes the lines of a log that holds tables."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.found: list[Measurement] = []
        self.progress = 0
        self._reset(0)

    def _reset(self, number: int) -> None:
        self._line = number
        self._points: list[Point] = []
        self._hosts: dict[str, None] = {}
        self._ranks: set[tuple[int, int]] = set()
        self._num_wrong = 0
        self._test = ""
        self._ratio: float | None = None

    def take(self, number: int, line: bytes) -> None:
        """One line of any kind."""
        if b"#" in line:
            self._take_comment(number, line)
        elif (found := _ROW.search(line)) is not None:
            self._take_row(number, found)

    def _take_comment(self, number: int, line: bytes) -> None:
        if _HEADER.search(line) is not None:
            self.close()
            self._reset(number)
        elif (found := _RANK.search(line)) is not None:
            self.progress += 1
            if len(self._ranks) < 1_000_000:
                self._ranks.add((int(found[2] or 0), int(found[1])))
            self._hosts.setdefault(found[4].decode(errors="replace"))
        elif (found := _TEST.search(line)) is not None or (found := _COMMAND.search(line)) is not None:
            self._test = NAMES.get(found[1].decode(errors="replace"), found[1].decode(errors="replace"))
        elif (found := _BOUNDS.search(line)) is not None:
            self._num_wrong += int(found[1]) if found[2] == b"FAILED" else 0
        elif _AVERAGE.search(line) is not None:
            self.close()
            self._reset(number)

    def _take_row(self, number: int, found: re.Match[bytes]) -> None:
        self.progress += 1
        if not self._line:
            self._line = number
        size = int(found[1])
        sides = [(found[6], found[7], found[8], found[9]), (found[10], found[11], found[12], found[13])]
        for time_us, algbw, busbw, wrong in sides:
            if time_us is None or len(self._points) >= MAX_ROWS:
                continue
            time_s, algorithm, bus = float(time_us) * 1e-6, float(algbw), float(busbw)
            if wrong != b"N/A" and not float(wrong) <= 1e-2:  # old builds print the largest error, new ones a count
                self._num_wrong += 1
            if not (math.isfinite(time_s) and math.isfinite(bus)):
                continue
            if algorithm > 0 and size >= 1024 * 1024:
                self._ratio = bus / algorithm
            self._points.append(Point(size_bytes=size, bit_per_s=bus * 8e9, time_s=time_s))

    def close(self) -> None:
        """The log, or a table of it, has ended."""
        if not self._points:
            return
        num_ranks = len(self._ranks) or None
        self.found.append(
            Measurement(
                tool="nccl-tests", test=self._test or infer_test(self._ratio, num_ranks),
                where=f"{self._source}:{max(1, self._line)}", points=tuple(self._points), hosts=tuple(self._hosts),
                num_ranks=num_ranks, is_correct=self._num_wrong == 0, uses_gpu=True,
            )
        )  # fmt: skip
        self._points = []


def infer_test(ratio: float | None, num_ranks: int | None) -> str:
    """The collective by bus over algorithm bandwidth (nccl-tests doc/PERFORMANCE.md); "collective" where it is open."""
    if ratio is None or num_ranks is None or num_ranks < 2:
        return "collective"
    share = (num_ranks - 1) / num_ranks
    # The table prints two decimals: 2 % is its rounding at 1 GB/s. On two ranks all_reduce has broadcast's factor.
    if num_ranks > 2 and abs(ratio / (2 * share) - 1) < 0.02:
        return "all_reduce"
    if abs(ratio - 1) < 0.02 and num_ranks > 50:
        return "collective"
    return "all_gather, reduce_scatter or all_to_all" if abs(ratio / share - 1) < 0.02 else "collective"


class _Side(msgspec.Struct):
    bus_bw: float | str | None = None
    time: float | str | None = None
    cpu_time: float | str | None = None
    nwrong: int | str | None = None


class _Iterations(msgspec.Struct):
    avg: float | str | None = None
    max: float | str | None = None
    cv_pct: float | str | None = None


class _Result(msgspec.Struct):
    size: int | str
    out_of_place_per_iter: _Iterations | None = None
    out_of_place: _Side | None = None
    in_place: _Side | None = None


class _Device(msgspec.Struct):
    hostname: str = ""
    rank: int | str | None = None


class _Document(msgspec.Struct):
    results: list[_Result]
    nccl_version: Any = None
    args: list[str] = []
    devices: list[_Device] = []
    out_of_bounds: dict[str, Any] = {}
    errors: list[Any] = []


def is_document(document: Mapping[str, Any]) -> bool:
    """Whether a JSON document is one of nccl-tests."""
    return "results" in document and ("nccl_version" in document or "average_bus_bandwidth" in document)


def read_document(content: bytes, source: str) -> Measurement:
    """The JSON of ``-J``. Raises DataError where it is not that."""
    try:
        held = msgspec.json.decode(content, type=_Document, strict=False)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise DataError(f"{source} is not nccl-tests JSON: {fault}", expected="version 3 of its format") from fault
    points = []
    num_wrong = 0
    notes = [str(error)[:200] for error in held.errors[:10]]
    for result in held.results[:MAX_ROWS]:
        notes += _unsteady(result)
        for side in (result.out_of_place, result.in_place):
            if side is None:
                continue
            bus, time_us = _number(side.bus_bw), _number(side.time if side.time is not None else side.cpu_time)
            wrong = _number(side.nwrong)
            num_wrong += wrong is not None and wrong > 0
            if bus is not None:
                time_s = None if time_us is None else time_us * 1e-6
                points.append(Point(size_bytes=int(result.size), bit_per_s=bus * 8e9, time_s=time_s))
    okay = str(held.out_of_bounds.get("okay", "true")).lower() != "false"
    command = next((m[1] for a in held.args if (m := re.search(r"(\w+)_perf\b", str(a))) is not None), "")
    return Measurement(
        tool="nccl-tests", test=NAMES.get(command, command or "collective"), where=source, points=tuple(points),
        hosts=tuple(dict.fromkeys(d.hostname for d in held.devices if d.hostname)),
        num_ranks=len(held.devices) or None, is_correct=okay and num_wrong == 0, uses_gpu=True,
        notes=tuple(notes[:20]),
    )  # fmt: skip


UNSTEADY = "iterations vary"
"""How a note of unsteady iterations begins."""
MAX_VARIATION_PERCENT = 5.0
MAX_SPIKE = 1.5
MIN_STEADY_BYTES = 1024 * 1024


def _unsteady(result: _Result) -> list[str]:
    """Iterations of one size that differ much (tools/analyze_perf_json.py: variation above 5 %, spikes above 1.5)."""
    held = result.out_of_place_per_iter
    if held is None or int(result.size) < MIN_STEADY_BYTES:
        return []
    variation, highest, mean = _number(held.cv_pct), _number(held.max), _number(held.avg)
    spike = highest / mean if highest is not None and mean else 0.0
    if (variation or 0.0) <= MAX_VARIATION_PERCENT and spike <= MAX_SPIKE:
        return []
    return [
        f"{UNSTEADY} at {int(result.size)} bytes: by {variation or 0.0:.3g} %, the slowest {spike:.3g} times the mean"
    ]


def _number(value: float | str | None) -> float | None:
    try:
        number = None if value is None else float(value)
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None
