"""Signs of life between the ranks of a launched job: every rank counts up a key of the store once a second.

A rank whose count stands still for ``SILENT_S`` counts as gone: its process, its host or its link. The beats have a
connection and a thread of their own, so they go on while the rank waits for something else; a host that is merely slow
is not silent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection

import torch.distributed as dist
from torch._C._distributed_c10d import Store

BEAT_S = 1.0
SILENT_S = 20.0
JOIN_S = 2.0


class Beats:
    """This rank's own beat, and when each other rank's beat last changed. ``store`` is used by nobody else."""

    def __init__(self, store: Store, rank: int, *, silent_s: float = SILENT_S) -> None:
        self._store = store
        self._rank = rank
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="wirespeed-beats", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed.is_set()

    def silent(self, ranks: Collection[int], *, longer_s: float = 0.0) -> list[int]:
        """Those of ``ranks`` that have not been heard of for too long (and ``longer_s``), in order."""
        now = time.monotonic()
        with self._lock:
            for rank in ranks:
                self._seen.setdefault(rank, (b"", now))
            return sorted(rank for rank in ranks if now - self._seen[rank][1] > self._silent_s + longer_s)

    def close(self) -> None:
        """Stop beating."""
        self._is_closed.set()
        self._thread.join(JOIN_S)

    def _beat(self) -> None:
        number = 0
        while not self._is_closed.wait(BEAT_S):
            number += 1
            # Rank 0's process may be gone, and the store with it: then nothing changes any more, which tells.
            with contextlib.suppress(dist.DistError):
                self._store.set(f"beat/{self._rank}", str(number))
                self._look()

    def _look(self) -> None:
        with self._lock:
            ranks = list(self._seen)
        for rank in ranks:
            if not self._store.check([f"beat/{rank}"]):
                continue
            value = self._store.get(f"beat/{rank}")
            with self._lock:
                if self._seen[rank][0] != value:
                    self._seen[rank] = (value, time.monotonic())
