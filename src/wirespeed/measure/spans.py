"""Sets of time as sorted, disjoint spans: union, intersection, difference, total. Rows of (begin, end) in seconds.

Half open: spans that only touch do not overlap, and a span of no length is no time. Times are kept as they come, so two
timelines with different zeros must not be mixed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from wirespeed.errors import DataError

Spans = NDArray[np.float64]
"""Shape (n, 2); ``union`` makes them sorted and disjoint, which the other functions expect."""

EMPTY: Spans = np.empty((0, 2), dtype=np.float64)


def union(spans: Iterable[tuple[float, float]] | Spans) -> Spans:
    """The time covered by any of the spans. Raises DataError for one that ends before it begins or is not finite."""
    held = np.asarray(spans if isinstance(spans, np.ndarray) else list(spans), dtype=np.float64).reshape(-1, 2)
    if not np.isfinite(held).all() or (held[:, 1] < held[:, 0]).any():
        raise DataError("a trace holds an event that ends before it begins, or without a time")
    held = held[held[:, 1] > held[:, 0]]
    if not len(held):
        return EMPTY
    held = held[np.argsort(held[:, 0], kind="stable")]
    # A span opens a new one where it begins after everything before it has ended.
    reach = np.maximum.accumulate(held[:, 1])
    opens = np.concatenate(([True], held[1:, 0] > reach[:-1]))
    first = np.flatnonzero(opens)
    last = np.concatenate((first[1:] - 1, [len(held) - 1]))
    return np.column_stack((held[first, 0], reach[last]))


def total(spans: Spans) -> float:
    """Seconds that disjoint spans cover."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def intersect(one: Spans, other: Spans) -> Spans:
    """The time in both."""
    if not len(one) or not len(other):
        return EMPTY
    # Of each span of ``one``, the spans of ``other`` that end after it begins and begin before it ends.
    begin = np.searchsorted(other[:, 1], one[:, 0], side="right")
    end = np.searchsorted(other[:, 0], one[:, 1], side="left")
    counts = np.maximum(end - begin, 0)
    mine = np.repeat(np.arange(len(one)), counts)
    offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = np.repeat(begin, counts) + offset
    low = np.maximum(one[mine, 0], other[theirs, 0])
    high = np.minimum(one[mine, 1], other[theirs, 1])
    held: Spans = np.column_stack((low, high))
    kept: Spans = held[high > low]
    return kept


def subtract(one: Spans, other: Spans) -> Spans:
    """The time in ``one`` and not in ``other``."""
    if not len(one) or not len(other):
        return one
    gaps = np.column_stack(
        (np.concatenate(([-np.inf], other[:, 1])), np.concatenate((other[:, 0], [np.inf])))
    )  # spans that touch leave a gap of no length, which intersects nothing
    return intersect(one, gaps)


def shared(windows: Spans, spans: Spans) -> NDArray[np.float64]:
    """Seconds that each of the windows (which may overlap) has in common with the spans."""
    if not len(spans):
        return np.zeros(len(windows))
    before = np.concatenate(([0.0], np.cumsum(spans[:, 1] - spans[:, 0])))

    def covered(times: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the spans cover until each of the times: all that began, less what is still to come of the last."""
        begun = np.searchsorted(spans[:, 0], times, side="right")
        rest = np.where(begun > 0, np.maximum(spans[np.maximum(begun - 1, 0), 1] - times, 0.0), 0.0)
        held: NDArray[np.float64] = before[begun] - rest
        return held

    return covered(windows[:, 1]) - covered(windows[:, 0])


def clip(spans: Spans, begin_s: float, end_s: float) -> Spans:
    """The part within a window."""
    return intersect(spans, np.array([[begin_s, end_s]], dtype=np.float64))
