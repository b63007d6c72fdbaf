"""How a run is followed: the ranks' heartbeats, their last words, and how it ended.

A heartbeat is a file of one number, the optimizer steps that a rank has done. It appears when the rank's script makes
its DistributedDataParallel model, so a run that hangs can be told from one that trains without DDP.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TAIL_LINES = 40
MAX_LOG_BYTES = 64 * 1024**2
"""Of one run: a script that prints without end shall not fill the disk."""


@dataclass(kw_only=True)
class RunEnd:
    """How a run ended. ``reason`` says in words why it was not fine; ``tail`` holds each rank's last lines.

    ``is_stalled``: given up for want of progress. ``is_peer_failure``: a host or a link is known to have failed, so
    that the user's program is not to blame. ``log_problem``: why the log is not whole.
    """

    returncode: int
    failed_rank: int | None = None
    reason: str | None = None
    is_stalled: bool = False
    is_peer_failure: bool = False
    tail: dict[int, list[str]] = field(default_factory=dict)
    log_problem: str | None = None


class Watch:
    """Progress and patience: how far the ranks are, and for how long nothing has moved."""

    def __init__(
        self,
        heartbeats: Callable[[int], Path],
        num_ranks: int,
        *,
        start_timeout_s: float,
        stall_timeout_s: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._paths = [heartbeats(rank) for rank in range(num_ranks)]
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._on_progress = on_progress
        self._last = -1
        self._moved_s = time.monotonic()

    def check(self) -> str | None:
        """Look once. A text when the run has to be given up."""
        step = min((read_step(path) for path in self._paths), default=0)
        now = time.monotonic()
        if step > self._last:
            if step > 0 and self._on_progress is not None:
                self._on_progress(step)
            self._last, self._moved_s = step, now
        limit_s = self._start_timeout_s if self._last <= 0 else self._stall_timeout_s
        if now - self._moved_s <= limit_s:
            return None
        if self._last > 0:
            behind = [rank for rank, path in enumerate(self._paths) if read_step(path) <= self._last]
            return f"no progress for {limit_s:g} s after step {self._last} ({_ranks(behind)} behind)"
        without = [rank for rank, path in enumerate(self._paths) if not path.exists()]
        if without:
            return f"no DistributedDataParallel model within {limit_s:g} s ({_ranks(without)})"
        behind = [rank for rank, path in enumerate(self._paths) if read_step(path) <= 0]
        return f"no optimizer step within {limit_s:g} s ({_ranks(behind)})"


def _ranks(numbers: list[int]) -> str:
    told = ", ".join(str(rank) for rank in numbers[:8])
    return f"rank{'s' if len(numbers) > 1 else ''} {told}{' ...' if len(numbers) > 8 else ''}"


def read_step(path: Path) -> int:
    """The step number in a heartbeat file; 0 when there is none yet."""
    try:
        content = path.read_bytes()
    except OSError:
        return 0
    return int(struct.unpack("<q", content)[0]) if len(content) == 8 else 0


class Tails:
    """Writes every rank's lines to a log and keeps the last ones.

    A log that cannot be written (a full disk) ends the log and not the run: ``problem`` then says why.
    """

    def __init__(self, log: Path, ranks: range) -> None:
        self._lock = threading.Lock()
        self.lines = {rank: deque[str](maxlen=TAIL_LINES) for rank in ranks}
        self.problem: str | None = None
        self._num_bytes = 0
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._stream = log.open("w", encoding="utf-8", errors="replace")
        except OSError as fault:
            self.problem = f"cannot write {log}: {fault.strerror or fault}"
        self._log = log

    def add(self, rank: int, _stream: str, line: str) -> None:
        """One more line of a rank."""
        with self._lock:
            self.lines[rank].append(line)
            if self.problem is not None or self._stream.closed:
                return
            if self._num_bytes > MAX_LOG_BYTES:
                return
            self._num_bytes += len(line)
            text = f"[{rank}] {line}\n"
            if self._num_bytes > MAX_LOG_BYTES:
                text += f"[{rank}] wirespeed: the log ends here, after {MAX_LOG_BYTES} bytes\n"
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError as fault:
                self.problem = f"cannot write {self._log}: {fault.strerror or fault}"

    def close(self) -> dict[int, list[str]]:
        """Close the log and give the last lines of every rank."""
        with self._lock:
            if hasattr(self, "_stream"):
                try:
                    self._stream.close()
                except OSError as fault:  # what was buffered cannot be written either
                    self.problem = f"cannot write {self._log}: {fault.strerror or fault}"
            return {rank: list(lines) for rank, lines in self.lines.items()}
