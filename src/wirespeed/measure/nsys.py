"""Read an SQLite export of Nsight Systems into timelines, without its tools: ``nsys export --type sqlite``.

Kernels come from CUPTI_ACTIVITY_KIND_KERNEL, one timeline per process and device; steps from NVTX ranges whose text
says so; counted NIC traffic from NET_NIC_METRIC (``nsys profile --nic-metrics=true``, bytes/ms since 2023). Sizes of
collectives come from the payload of NCCL's own NVTX ranges where the export holds one for every kernel. The schema is
NVIDIA's published one ("SQLite Schema Reference"); tables are made lazily, so an absent one means "not traced".
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wirespeed.errors import DataError, UsageError
from wirespeed.measure.spans import union
from wirespeed.measure.timeline import CollectiveSpan, NicSeries, Timeline, collective_of, step_spans

_NS = 1e-9
MAGIC = b"SQLite format 3\x00"
DEFAULT_STEPS = r"(?i)(profiler|train|training|global)?[ _-]?(step|iter|iteration)([ _#:=-]*\d+)?"
"""NVTX ranges whose whole text matches are steps: "step 12", "ProfilerStep#3", "iteration_7", "train_step"."""
_PUSH_POP, _START_END = 59, 60
"""NVTX_EVENTS.eventType of ranges that have an end."""
_RATE_UNITS = {"bytes/ms": 1e3, "bytes/s": 1.0, "bytes/us": 1e6}


def read_nsys(path: str | Path, *, steps: str = DEFAULT_STEPS) -> tuple[Timeline, ...]:
    """One timeline per process and device; one without compute where only NICs were traced.

    ``steps``: a regular expression that the whole text of an NVTX range matches where it is a step. Raises DataError
    where the file is no such export or holds nothing of use.
    """
    source = Path(path)
    try:
        pattern = re.compile(steps)
    except re.error as fault:
        raise UsageError(f"got {steps!r} for the name of a step", expected="a regular expression") from fault
    try:
        with contextlib.closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return _Export(connection, source.name).timelines(pattern)
    except (sqlite3.Error, OSError) as fault:
        raise DataError(f"cannot read {source} as an export of Nsight Systems: {fault}") from fault


class _Export:
    """An open export."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def timelines(self, steps: re.Pattern[str]) -> tuple[Timeline, ...]:
        kernels = self._kernels()
        nics = self._nics()
        if not kernels and not nics:
            raise DataError(
                f"{self._name} holds neither kernels nor NIC metrics",
                expected="CUPTI_ACTIVITY_KIND_KERNEL or NET_NIC_METRIC",
                hint="nsys profile --trace=cuda,nvtx --nic-metrics=true ..., then nsys export --type sqlite",
            )
        ranges = self._ranges()
        host = self._host()
        if not kernels:
            marks = _steps(ranges, steps, None)
            return (
                Timeline(
                    source=self._name, profiler="Nsight Systems", device="NICs", host=host, steps=marks, nics=nics
                ),
            )
        made = []
        for (process, device), rows in sorted(kernels.items()):
            mine = [row for row in ranges if process is None or row[3] is None or row[3] == process]
            collectives = _collectives([row for row in rows if "nccl" in row[2].lower()], mine)
            made.append(
                Timeline(
                    source=self._name,
                    profiler="Nsight Systems",
                    device=f"GPU {device}" if process is None else f"GPU {device} of process {process}",
                    host=host,
                    compute=union([(row[0], row[1]) for row in rows if "nccl" not in row[2].lower()]),
                    collectives=collectives,
                    steps=_steps(mine, steps, (rows[0][0], max(row[1] for row in rows))),
                    nics=nics,
                )
            )
        return tuple(made)

    def _columns(self, table: str) -> set[str]:
        if table not in self._tables:
            return set()
        return {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}  # our own literals

    def _kernels(self) -> dict[tuple[int | None, int], list[tuple[float, float, str]]]:
        """``(begin, end, name)`` in order of begin, by process and device."""
        columns = self._columns("CUPTI_ACTIVITY_KIND_KERNEL")
        if not {"start", "end"} <= columns:
            return {}
        name = next((c for c in ("shortName", "demangledName", "mangledName") if c in columns), None)
        device = "k.deviceId" if "deviceId" in columns else "0"
        process = "k.globalPid" if "globalPid" in columns else "NULL"
        text = "''" if name is None or "StringIds" not in self._tables else "s.value"
        join = "" if text == "''" else f"LEFT JOIN StringIds s ON s.id = k.{name}"
        rows = self._connection.execute(
            f'SELECT k.start, k."end", {text}, {process}, {device} '  # noqa: S608 - columns from a list of our own
            f"FROM CUPTI_ACTIVITY_KIND_KERNEL k {join} ORDER BY k.start"
        )
        held: dict[tuple[int | None, int], list[tuple[float, float, str]]] = defaultdict(list)
        for begin, end, kernel, global_pid, number in rows:
            held[_process_of(global_pid), number].append((begin * _NS, end * _NS, kernel or ""))
        return dict(held)

    def _ranges(self) -> list[tuple[float, float, str, int | None, str]]:
        """NVTX ranges in order of begin: ``(begin, end, text, process, payload as JSON text)``."""
        columns = self._columns("NVTX_EVENTS")
        if not {"start", "end", "text"} <= columns:
            return []
        has_ids = "textId" in columns and "StringIds" in self._tables
        text = "COALESCE(n.text, s.value)" if has_ids else "n.text"
        join = "LEFT JOIN StringIds s ON s.id = n.textId" if has_ids else ""
        thread = "n.globalTid" if "globalTid" in columns else "NULL"
        payload = "n.jsonText" if "jsonText" in columns else "NULL"
        kinds = f"AND n.eventType IN ({_PUSH_POP}, {_START_END})" if "eventType" in columns else ""
        rows = self._connection.execute(
            f'SELECT n.start, n."end", {text}, {thread}, {payload} FROM NVTX_EVENTS n {join} '  # noqa: S608 - ours
            f'WHERE n."end" IS NOT NULL AND n."end" >= n.start {kinds} ORDER BY n.start'
        )
        return [
            (begin * _NS, end * _NS, name or "", _process_of(thread_id), json_text or "")
            for begin, end, name, thread_id, json_text in rows
        ]

    def _nics(self) -> tuple[NicSeries, ...]:
        needed = {"NET_NIC_METRIC", "TARGET_INFO_NETWORK_METRICS"}
        if not needed <= self._tables:
            return ()
        has_names = {"NIC_ID_MAP", "TARGET_INFO_NIC_INFO"} <= self._tables
        name = "i.name" if has_names else "NULL"
        join = (
            "LEFT JOIN NIC_ID_MAP d ON d.globalId = m.globalId LEFT JOIN TARGET_INFO_NIC_INFO i ON i.nicId = d.nicId"
            if has_names
            else ""
        )
        rows = self._connection.execute(
            f'SELECT m.start, m."end", m.globalId, m.portId, {name}, t.name, t.unit, m.value '  # noqa: S608 - ours
            "FROM NET_NIC_METRIC m JOIN TARGET_INFO_NETWORK_METRICS t "
            f"ON t.metricsListId = m.metricsListId AND t.metricsIdx = m.metricsIdx {join} ORDER BY m.start"
        )
        held: dict[tuple[str, int], dict[tuple[int, int], list[float]]] = defaultdict(dict)
        for begin, end, number, port, nic, metric, unit, value in rows:
            side = {"bytes sent": 0, "bytes received": 1}.get(str(metric).partition(": ")[2].lower())
            factor = _RATE_UNITS.get(str(unit).lower().replace(" ", ""))
            # IPoIB's bytes are InfiniBand's bytes once more.
            if side is None or factor is None or str(metric).startswith("IPoIB") or end <= begin:
                continue
            sample = held[nic or f"NIC {number}", port].setdefault((begin, end), [0.0, 0.0])
            sample[side] += value * factor
        return tuple(
            NicSeries(
                name=nic if len({p for n, p in held if n == nic}) == 1 else f"{nic} port {port}",
                spans=np.array(sorted(samples), dtype=np.float64).reshape(-1, 2) * _NS,
                sent_bytes_per_s=tuple(samples[key][0] for key in sorted(samples)),
                received_bytes_per_s=tuple(samples[key][1] for key in sorted(samples)),
            )
            for (nic, port), samples in sorted(held.items())
        )

    def _host(self) -> str | None:
        if not {"name", "value"} <= self._columns("TARGET_INFO_SYSTEM_ENV"):
            return None
        row = self._connection.execute("SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'").fetchone()
        return None if row is None else str(row[0])


def _process_of(serialized: int | None) -> int | None:
    """The process in a serialized identifier: hardware, VM, 24 bits of process, 24 bits of thread."""
    return None if serialized is None else (serialized >> 24) & 0xFFFFFF


def _steps(
    ranges: Sequence[tuple[Any, ...]], pattern: re.Pattern[str], window: tuple[float, float] | None
) -> tuple[tuple[float, float], ...]:
    """The ranges that are steps and within ``window``, the time from the first kernel to the end of the last."""
    marks = [(row[0], row[1]) for row in ranges if pattern.fullmatch(row[2].strip())]
    if window is None:
        return step_spans(marks, -math.inf)
    # Steps in which this device did nothing were not traced on it.
    return tuple(step for step in step_spans(marks, window[1]) if step[0] < window[1] and step[1] > window[0])


def _collectives(
    kernels: Sequence[tuple[float, float, str]], ranges: Sequence[tuple[Any, ...]]
) -> tuple[CollectiveSpan, ...]:
    sizes = _sizes(kernels, ranges)
    return tuple(
        CollectiveSpan(collective=collective_of(name), begin_s=begin, end_s=end, size_bytes=size, num_ranks=ranks)
        for (begin, end, name), (size, ranks) in zip(kernels, sizes, strict=True)
    )


def _sizes(
    kernels: Sequence[tuple[float, float, str]], ranges: Sequence[tuple[Any, ...]]
) -> list[tuple[int | None, int | None]]:
    """Size and group of each kernel, from NCCL's ranges of its kind in the same order; None where counts differ."""
    told: dict[str, list[tuple[int | None, int | None]]] = defaultdict(list)
    for _, _, text, _, payload in ranges:
        if text.startswith("nccl") and collective_of(text) not in ("other", "send_recv"):
            told[collective_of(text)].append(_payload(payload))
    kinds = [collective_of(name) for _, _, name in kernels]
    fitting = {kind for kind in set(kinds) if len(told[kind]) == kinds.count(kind)}
    queues = {kind: iter(told[kind]) for kind in fitting}
    return [next(queues[kind]) if kind in fitting else (None, None) for kind in kinds]


def _payload(text: str) -> tuple[int | None, int | None]:
    """Message size and ranks of the payload of one of NCCL's ranges."""
    try:
        held = json.loads(text) if text else {}
    except json.JSONDecodeError:
        return None, None
    size = ranks = None
    for key, value in held.items() if isinstance(held, dict) else ():
        if isinstance(value, int) and "message size" in key.lower():
            size = value
        elif isinstance(value, int) and key.lower() in ("nranks", "no. of ranks", "number of ranks"):
            ranks = value
    return size, ranks
