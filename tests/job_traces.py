"""Traces of one job as torch.profiler and Nsight Systems write them, as small as they can be: for tests of the verdict."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,
    color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,
    uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
"""


def kineto(
    path: Path,
    *,
    rank: int = 0,
    num_ranks: int = 2,
    compute_us: float = 600.0,
    nccl_us: float = 400.0,
    begins_us: float | None = None,
    num_elements: int = 1 << 20,
    count: int = 1,
    steps: int = 2,
    host: str = "node-a",
) -> Path:
    """Steps of 1 ms: compute from 0, then ``count`` all_reduces that share ``nccl_us`` and end together."""
    events: list[dict[str, object]] = []
    for step in range(steps):
        start = 1000.0 * step
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 9, "tid": 9, "ts": start,
             "dur": 1000.0}
        )  # fmt: skip
        events.append(_kernel("ampere_sgemm_128x64", start, compute_us, 7))
        at = start + (compute_us if begins_us is None else begins_us)
        for index in range(count):
            arguments = {
                "Collective name": "allreduce", "In msg nelems": num_elements, "Out msg nelems": num_elements,
                "Group size": num_ranks, "dtype": "Float", "Process Group Name": "0",
            }  # fmt: skip
            length = nccl_us / count
            event = _kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + index * length, length, 20)
            event["args"] = arguments
            events.append(event)
    path.write_text(
        json.dumps({
            "schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": num_ranks},
            "host_name": host, "traceEvents": events,
        })
    )  # fmt: skip
    return path


def _kernel(name: str, ts: float, duration: float, stream: int) -> dict[str, object]:
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": duration,
        "args": {"device": 0, "stream": stream},
    }  # fmt: skip


def nsight(path: Path, *, compute_us: int = 600, nccl_us: int = 400) -> Path:
    """The SQLite export of one step of one GPU: compute, then NCCL's kernel."""
    connection = sqlite3.connect(path)
    connection.executescript(_SCHEMA)
    names = ("ampere_sgemm_128x64", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names, start=1))
    for name, begin, end in ((1, 0, compute_us), (2, compute_us, compute_us + nccl_us)):
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, NULL, 7, 1, 42, ?, ?, NULL)",
            (begin * 1000, end * 1000, name, name),
        )
    connection.commit()
    connection.close()
    return path
