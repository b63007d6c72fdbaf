"""Medians, percentiles, spread, and whether a set of timings is worth quoting.

Spread is the median absolute deviation over the median. Timings are skewed (a run can be late, never early), and half
of the runs may be disturbed before this number is; (p90 - p10) / median would let one late run in ten decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

STABLE_SPREAD = 0.05
"""Runs of an undisturbed collective on a shaped link spread by 1 to 3 %; above 5 % a quoted difference may be noise."""
MIN_RUNS = 3


def median(values: Sequence[float]) -> float:
    """The median of at least one value."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of the values lie, interpolated linearly between ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(values: Sequence[float]) -> float:
    """Median absolute deviation over the median (positive values)."""
    middle = median(values)
    return median([abs(value - middle) for value in values]) / middle


def is_stable(values: Sequence[float], *, limit: float = STABLE_SPREAD) -> bool:
    """Whether there are at least three values and they spread by no more than ``limit``."""
    return len(values) >= MIN_RUNS and spread(values) <= limit
