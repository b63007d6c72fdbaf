"""What one rank did when, as far as it bears on communication: the common form of traces of every profiler.

Times are seconds on the trace's own clock; its zero means nothing, and clocks of two traces are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from wirespeed.measure.spans import EMPTY, Spans

MAX_TRACE_BYTES = 8 * 1024**3
"""Uncompressed. A larger one is of too many steps: trace fewer."""


@dataclass(frozen=True, kw_only=True)
class CollectiveSpan:
    """One collective on this rank, waiting for the others included.

    ``size_bytes`` as ``records`` counts it, and ``num_ranks`` of its group: None where the trace does not say.
    ``group`` tells collectives of different groups apart, as the trace names them.
    """

    collective: str
    begin_s: float
    end_s: float
    size_bytes: int | None = None
    num_ranks: int | None = None
    group: str = ""

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, kw_only=True)
class NicSeries:
    """Counted traffic of one port: ``spans`` (n, 2) in seconds and the bytes per second sent and received in each."""

    name: str
    spans: Spans
    sent_bytes_per_s: tuple[float, ...]
    received_bytes_per_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One rank (or one device of a process) in one trace. ``compute`` is disjoint and holds no communication."""

    source: str
    profiler: str
    device: str
    rank: int | None = None
    num_ranks: int | None = None
    host: str | None = None
    compute: Spans = field(default_factory=lambda: EMPTY)
    collectives: tuple[CollectiveSpan, ...] = ()
    steps: tuple[tuple[float, float], ...] = ()
    nics: tuple[NicSeries, ...] = ()
    notes: tuple[str, ...] = ()


def step_spans(marks: Sequence[tuple[float, float]], work_end_s: float) -> tuple[tuple[float, float], ...]:
    """Steps from the ranges that mark them on the host, in order of begin: each lasts until the next begins.

    A device runs on after the range that launched its work. The last step has no next one: it ends with the work
    (``work_end_s``) where that is no more than a step later, else where its range ends.
    """
    if not marks:
        return ()
    begins = [begin for begin, _ in marks]
    last_begin, last_end = marks[-1]
    longest = max([last_end - last_begin, *(after - before for before, after in pairwise(begins))])
    end = work_end_s if last_end < work_end_s <= last_end + longest else last_end
    return tuple((begin, until) for begin, until in zip(begins, [*begins[1:], end], strict=True) if until > begin)


_NAMES = (
    ("reduce_scatter", ("reducescatter", "reduce_scatter")),
    ("all_reduce", ("allreduce", "all_reduce", "allreduced")),
    ("all_gather", ("allgather", "all_gather")),
    ("all_to_all", ("alltoall", "all_to_all")),
    ("broadcast", ("broadcast",)),
    ("barrier", ("barrier",)),
    ("send_recv", ("sendrecv", "send", "recv")),
    ("gather", ("gather",)),
    ("scatter", ("scatter",)),
    ("reduce", ("reduce",)),
)


def collective_of(name: str) -> str:
    """The collective that a kernel, an operation or a range is: ``all_reduce`` of ``ncclDevKernel_AllReduce_Sum_f32``.

    What is none of the known ones is ``other``.
    """
    lowered = name.lower()
    return next((word for word, marks in _NAMES if any(mark in lowered for mark in marks)), "other")
