"""One operation on a repository in a process of its own that kills itself (SIGKILL) at the n-th effect.

Effects are the calls by which the operation changes anything outside itself: requests to the store, and calls that
change files. They are counted from outside: the product knows nothing of it. Each is a place to die before it, after
it, and, for writes, in the middle of it (half of the bytes are written). Run by crash_points.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

STORE_CALLS = ("put", "get", "get_range", "head", "delete", "list", "list_with_delimiter")
FILE_CALLS = (
    "replace",
    "rename",
    "unlink",
    "pwrite",
    "ftruncate",
    "posix_fallocate",
    "symlink",
    "mkdir",
    "fchmod",
    "chmod",
    "utime",
    "write",
)


class Injector:
    """Counts effects, and dies at the wanted one. ``at`` is (index, when) or None to only count."""

    def __init__(self, at: tuple[int, str] | None) -> None:
        self.effects: list[str] = []
        self._at = at
        self._lock = threading.Lock()

    def install(self) -> None:
        """Wrap the calls, in this process only."""
        import obstore

        for name in STORE_CALLS:
            setattr(obstore, name, self._wrap(f"store.{name}", getattr(obstore, name), None))
        for name in FILE_CALLS:
            half = self._half_pwrite if name == "pwrite" else None
            setattr(os, name, self._wrap(f"os.{name}", getattr(os, name), half))

    def _half_pwrite(self, real: Callable[..., Any], handle: int, content: Any, offset: int) -> None:
        real(handle, content[: len(content) // 2], offset)

    def _wrap(self, name: str, real: Callable[..., Any], half: Callable[..., Any] | None) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                index = len(self.effects)
                self.effects.append(name)
            when = self._at[1] if self._at is not None and self._at[0] == index else None
            if when == "before":
                _die()
            if when == "half" and half is not None:
                half(real, *args, **options)
                _die()
            result = real(*args, **options)
            if when is not None:
                _die()
            return result

        return call


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(60)
