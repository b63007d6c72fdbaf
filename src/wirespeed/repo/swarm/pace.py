"""A rate limit: how long to wait before the next bytes may go."""

from __future__ import annotations

from collections.abc import Callable

BURST_S = 0.05
"""Unused time is saved up for no longer than this: the average holds over any tenth of a second."""


class Pace:
    """``rate_bit_per_s`` None: no limit. Not for several threads."""

    def __init__(self, rate_bit_per_s: float | None, clock: Callable[[], float]) -> None:
        self.rate_bit_per_s = rate_bit_per_s
        self._clock = clock
        self._free_s = clock()

    def delay_s(self, num_bytes: int) -> float:
        """Seconds until so many bytes may go; they count as sent then."""
        if self.rate_bit_per_s is None:
            return 0.0
        now_s = self._clock()
        begin_s = max(self._free_s, now_s - BURST_S)
        self._free_s = begin_s + num_bytes * 8 / self.rate_bit_per_s
        return max(0.0, begin_s - now_s)
