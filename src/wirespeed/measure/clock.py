"""Monotonic time and deadlines for everything that waits. Times of different hosts are never compared."""

from __future__ import annotations

import time

from wirespeed.errors import PeerFailure


def now_ns() -> int:
    """Nanoseconds of a clock that never steps; its zero means nothing."""
    return time.monotonic_ns()


class Deadline:
    """A point in time after which waiting ends. ``what`` completes "... did not end within 5 s"."""

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.what = what
        self._end_ns = now_ns() + round(seconds * 1e9)

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 when it has passed."""
        return max(0.0, (self._end_ns - now_ns()) / 1e9)

    def check(self) -> float:
        """Seconds left, above zero. Raises PeerFailure when it has passed."""
        remaining_s = self.remaining_s
        if remaining_s <= 0:
            raise PeerFailure(f"{self.what} did not end within {self.seconds:g} s")
        return remaining_s
