"""A system that notes what may not be read, for each thread by itself.

A check that got nothing because it was denied must not pass, whatever it made of the nothing. So the runner asks here
what was denied while the check looked. Answers that are kept and used again carry their notes with them.

Standard library only: this module travels to hosts that have nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from wirespeed.system import CommandResult, Reading, System


class Notes(threading.local):
    """Names that were denied to this thread since it last asked."""

    def __init__(self) -> None:
        self.denied: list[str] = []


class WatchedSystem(System):
    """``inner``, with notes."""

    def __init__(self, inner: System) -> None:
        super().__init__(inner.root)
        self.inner = inner
        self.notes = Notes()

    def read(self, name: str) -> Reading:
        """As ``inner``, noted where it is denied."""
        reading = self.inner.read(name)
        if reading.problem == "denied":
            self.notes.denied.append(name)
        return reading

    def list_dir(self, name: str) -> tuple[str, ...]:
        """As ``inner``, noted where it is denied."""
        names = self.inner.list_dir(name)
        if not names and self.inner.read(name).problem == "denied":
            self.notes.denied.append(name)
        return names

    def read_bytes(self, name: str) -> bytes | None:
        """As ``inner``. Not noted: those who read bytes tell by themselves what a missing answer means."""
        return self.inner.read_bytes(name)

    def path(self, name: str) -> Path:
        """As ``inner``."""
        return self.inner.path(name)

    def exists(self, name: str) -> bool:
        """As ``inner``."""
        return self.inner.exists(name)

    def real_path(self, name: str) -> str | None:
        """As ``inner``."""
        return self.inner.real_path(name)

    def environ(self) -> Mapping[str, str]:
        """As ``inner``."""
        return self.inner.environ()

    def process_environ(self, pid: int) -> Mapping[str, str] | None:
        """As ``inner``."""
        return self.inner.process_environ(pid)

    def process_sockets(self, pid: int) -> frozenset[int] | None:
        """As ``inner``. Not noted: None says it."""
        return self.inner.process_sockets(pid)

    def tcp_diagnostics(self, family: int) -> bytes | None:
        """As ``inner``."""
        return self.inner.tcp_diagnostics(family)

    def run(self, command: Sequence[str], *, timeout_s: float = 10.0, stdin: bytes | None = None) -> CommandResult:
        """As ``inner``."""
        return self.inner.run(command, timeout_s=timeout_s, stdin=stdin)
