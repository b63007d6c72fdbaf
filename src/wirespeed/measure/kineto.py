"""Read a trace of torch.profiler (Kineto, Chrome trace JSON, plain or gzip) into timelines, without torch.

On a GPU, communication is the NCCL (or RCCL) kernels and compute is every other kernel, copies and fills left out. In a
trace without a GPU, communication is the ``gloo:`` spans of the backend's threads and compute is whatever operations
run on the other threads, but for those that hand work to the backend. Sizes need ``record_shapes=True`` under gloo;
NCCL's come by themselves since torch 2.1. It is wrong where an operation itself waits for the network: that counts as
compute.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from wirespeed.errors import DataError
from wirespeed.measure.spans import union
from wirespeed.measure.timeline import MAX_TRACE_BYTES, CollectiveSpan, Timeline, collective_of, step_spans
from wirespeed.units import format_size

_US = 1e-6
_STEP = "ProfilerStep#"
_GLOO = "gloo:"
_KERNEL = ("kernel",)
_ELEMENT_BYTES = {
    "double": 8, "long": 8, "long int": 8, "int64": 8, "float": 4, "int": 4, "float32": 4, "half": 2, "float16": 2,
    "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2, "short": 2, "byte": 1, "char": 1, "bool": 1, "unsigned char": 1,
    "signed char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Group(msgspec.Struct):
    pg_name: str | int | None = None
    ranks: list[int] | None = None
    pg_size: int | None = None


class _Distributed(msgspec.Struct):
    backend: str | None = None
    rank: int | None = None
    world_size: int | None = None
    pg_config: list[_Group] | str | None = None


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 - the file's own name
    distributedInfo: _Distributed | None = None  # noqa: N815
    host_name: str | None = None


def read_kineto(path: str | Path) -> tuple[Timeline, ...]:
    """One timeline per GPU of the trace, or one for its CPU. Raises DataError where it is no such trace."""
    source = Path(path)
    trace = _decode(_content(source), source)
    spans = [e for e in trace.traceEvents if e.ph == "X" and e.ts is not None and e.dur is not None]
    if not spans:
        raise DataError(
            f"{source} holds no events",
            expected="a trace of torch.profiler with at least one active step",
            hint="export it in on_trace_ready: after the schedule's cycle the profiler has let go of it",
        )
    steps = _steps(spans)
    kernels = [e for e in spans if e.cat in _KERNEL]
    about = {
        "source": source.name,
        "profiler": "torch.profiler",
        "rank": None if trace.distributedInfo is None else trace.distributedInfo.rank,
        "num_ranks": None if trace.distributedInfo is None else trace.distributedInfo.world_size,
        "host": trace.host_name,
        "steps": steps,
    }
    if kernels:
        return tuple(_gpu_timelines(kernels, about))
    return (_cpu_timeline(spans, about),)


def _gpu_timelines(kernels: Sequence[_Event], about: dict[str, Any]) -> Iterable[Timeline]:
    by_device: dict[str, list[_Event]] = defaultdict(list)
    for event in kernels:
        by_device[str(event.pid)].append(event)
    for device, events in sorted(by_device.items()):
        collectives = [e for e in events if _is_nccl(e.name)]
        yield Timeline(
            device=f"GPU {device}",
            compute=union([_span(e) for e in events if not _is_nccl(e.name)]),
            collectives=tuple(_nccl(e) for e in sorted(collectives, key=lambda e: e.ts or 0.0)),
            **about,
        )


def _is_nccl(name: str) -> bool:
    return name.lower().startswith(("nccl", "rccl", "void nccl", "void rccl"))


def _nccl(event: _Event) -> CollectiveSpan:
    arguments = _arguments(event)
    told = arguments.get("Collective name")
    kind = collective_of(event.name)
    if isinstance(told, str) and collective_of(told) != "other":
        kind = collective_of(told)
    num_ranks = arguments.get("Group size")
    per_element = _ELEMENT_BYTES.get(str(arguments.get("dtype", "")).lower())
    # The whole output of all_gather, else what goes in: the sizes of ``records``.
    elements = arguments.get("Out msg nelems" if kind == "all_gather" else "In msg nelems")
    size = elements * per_element if isinstance(elements, int) and per_element is not None else None
    begin_s, end_s = _span(event)
    return CollectiveSpan(
        collective=kind,
        begin_s=begin_s,
        end_s=end_s,
        size_bytes=size,
        num_ranks=num_ranks if isinstance(num_ranks, int) and num_ranks > 0 else None,
        group=str(arguments.get("Process Group Name", "")),
    )


def _cpu_timeline(spans: Sequence[_Event], about: dict[str, Any]) -> Timeline:
    gloo = [e for e in spans if e.name.startswith(_GLOO)]
    backend_threads = {e.tid for e in gloo}
    compute = [
        e for e in spans if e.cat == "cpu_op" and e.tid not in backend_threads and not e.name.startswith("c10d::")
    ]
    notes = []
    collectives = tuple(_gloo(e, about["num_ranks"]) for e in sorted(gloo, key=lambda e: e.ts or 0.0))
    if collectives and all(c.size_bytes is None for c in collectives):
        notes.append("the trace holds no sizes: profile with record_shapes=True to see rates")
    return Timeline(
        device="CPU", compute=union([_span(e) for e in compute]), collectives=collectives, notes=tuple(notes), **about
    )


def _gloo(event: _Event, num_ranks: int | None) -> CollectiveSpan:
    arguments = _arguments(event)
    kind = collective_of(event.name.removeprefix(_GLOO))
    size = 0
    for dims, name in zip(arguments.get("Input Dims") or [], arguments.get("Input type") or [], strict=False):
        per_element = _ELEMENT_BYTES.get(str(name).lower())
        if per_element is not None and isinstance(dims, list) and all(isinstance(d, int) for d in dims):
            size += per_element * math.prod(dims)
    if kind == "all_gather" and num_ranks is not None:
        size *= num_ranks
    begin_s, end_s = _span(event)
    return CollectiveSpan(collective=kind, begin_s=begin_s, end_s=end_s, size_bytes=size or None, num_ranks=num_ranks)


def _steps(spans: Sequence[_Event]) -> tuple[tuple[float, float], ...]:
    """Steps as the profiler marks them on the CPU."""
    marks = sorted(_span(e) for e in spans if e.cat == "user_annotation" and e.name.startswith(_STEP))
    return step_spans(marks, max((_span(e)[1] for e in spans if e.cat in _KERNEL), default=-math.inf))


def _span(event: _Event) -> tuple[float, float]:
    assert event.ts is not None
    assert event.dur is not None
    return event.ts * _US, (event.ts + event.dur) * _US


def _arguments(event: _Event) -> dict[str, Any]:
    held = msgspec.json.decode(event.args)
    return held if isinstance(held, dict) else {}


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as plain:
            is_gzip = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
            content = stream.read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as fault:
        told = getattr(fault, "strerror", None) or str(fault)
        raise DataError(f"cannot read {path}: {told}") from fault
    if len(content) > MAX_TRACE_BYTES:
        raise DataError(
            f"{path} is over {format_size(MAX_TRACE_BYTES)}", hint="trace fewer steps: schedule(wait=..., active=3)"
        )
    return content


def _decode(content: bytes, path: Path) -> _Trace:
    try:
        if content.lstrip()[:1] == b"[":
            return _Trace(traceEvents=msgspec.json.decode(content, type=list[_Event]))
        return msgspec.json.decode(content, type=_Trace)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise DataError(
            f"{path} is not a trace of torch.profiler: {fault}", expected="JSON with traceEvents, plain or .gz"
        ) from fault
