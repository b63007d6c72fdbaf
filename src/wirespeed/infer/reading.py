"""Inputs read ahead of their turn, by threads, within a bound of memory.

What is read waits until its result is written: it is sent again when the node that had it is lost. So the budget covers
everything between reading and writing, and the threads stop when it is spent. An input that cannot be read is delivered
as an error; the job goes on.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

from wirespeed.infer.inputs import Item, is_sequential, open_archive
from wirespeed.units import MIB, format_size

BATCH_BYTES = 256 * 1024
BATCH_ITEMS = 16
_MAX_OPEN = 64
_READ_BYTES = MIB


class Loaded(NamedTuple):
    """An input's bytes, or why there are none."""

    place: int
    data: bytes
    error: str | None = None


class ReadBounds(NamedTuple):
    """``max_ahead``: inputs between the first that is not yet written and the last that is read."""

    budget_bytes: int = 256 * MIB
    max_ahead: int = 16384
    max_item_bytes: int = 64 * MIB
    num_threads: int = 2


class Reader:
    """Reads ``items`` from place ``start``. ``deliver`` is called in the reading threads. ``start``, then ``stop``."""

    def __init__(
        self, items: Sequence[Item], *, start: int, bounds: ReadBounds, deliver: Callable[[list[Loaded]], None]
    ) -> None:
        self._items = items
        self._bounds = bounds
        self._deliver = deliver
        self._next = start
        self._written = start
        self._used_bytes = 0
        self._is_stopped = False
        self._condition = threading.Condition()
        self._archives = _Archives()
        self._threads = [
            threading.Thread(target=self._run, name=f"read-{place}", daemon=True)
            for place in range(max(1, bounds.num_threads))
        ]

    @property
    def used_bytes(self) -> int:
        """Bytes that were read and not released."""
        return self._used_bytes

    def start(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; nothing is delivered after this returns."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._archives.close()

    def release(self, num_bytes: int) -> None:
        """So many bytes are no longer needed."""
        with self._condition:
            self._used_bytes -= num_bytes
            self._condition.notify_all()

    def written(self, index: int) -> None:
        """All results before ``index`` are written."""
        with self._condition:
            self._written = index
            self._condition.notify_all()

    def _may_read(self) -> bool:
        # An input larger than the whole budget is read when nothing else is held.
        return self._used_bytes < self._bounds.budget_bytes and self._next - self._written < self._bounds.max_ahead

    def _run(self) -> None:
        batch: list[Loaded] = []
        batch_bytes = 0
        while True:
            with self._condition:
                if batch and (not self._may_read() or self._next >= len(self._items)):
                    self._condition.release()
                    try:
                        self._deliver(batch)
                    finally:
                        self._condition.acquire()
                    batch, batch_bytes = [], 0
                while not self._is_stopped and self._next < len(self._items) and not self._may_read():
                    self._condition.wait()
                if self._is_stopped or self._next >= len(self._items):
                    break
                index = self._next
                item = self._items[index]
                self._next += 1
                # Out of an archive that only reads forward, members must be read in their order: under the lock.
                loaded = self._load(index, item) if item.offset >= 0 and is_sequential(item.path) else None
            if loaded is None:
                loaded = self._load(index, item)
            with self._condition:
                self._used_bytes += len(loaded.data)
            batch.append(loaded)
            batch_bytes += len(loaded.data)
            if len(batch) >= BATCH_ITEMS or batch_bytes >= BATCH_BYTES:
                self._deliver(batch)
                batch, batch_bytes = [], 0
        if batch and not self._is_stopped:
            self._deliver(batch)

    def _load(self, index: int, item: Item) -> Loaded:
        limit = self._bounds.max_item_bytes
        try:
            data = self._archives.read(item, limit) if item.offset >= 0 else _read_file(item.path, limit)
        except _TooLargeError:
            return Loaded(index, b"", f"it is larger than {format_size(limit)}")
        except (OSError, EOFError, ValueError) as fault:
            reason = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
            return Loaded(index, b"", f"cannot be read: {reason}")
        return Loaded(index, data, None if data else "it is empty")


class _TooLargeError(Exception):
    pass


def _read_file(path: str, limit: int) -> bytes:
    # Asking for as much as the file has: room for the limit would be mapped, faulted in and unmapped per file.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        if size > limit:
            raise _TooLargeError
        data = os.read(descriptor, size + 1)
        if len(data) == size:
            return data
        # It grows, or is a pipe or a file of /proc, which do not tell their size.
        while data and len(data) <= limit and (more := os.read(descriptor, min(limit + 1 - len(data), _READ_BYTES))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise _TooLargeError
    return data


class _Archives:
    """Archives that stay open between reads. Plain ones are read at an offset, by any thread."""

    def __init__(self) -> None:
        self._open: dict[str, BinaryIO] = {}
        self._lock = threading.Lock()

    def read(self, item: Item, limit: int) -> bytes:
        if item.size > limit:
            raise _TooLargeError
        with self._lock:
            stream = self._open.get(item.path)
            if stream is None:
                stream = self._open[item.path] = open_archive(item.path)
                if len(self._open) > _MAX_OPEN:
                    # Inputs are read in order: no thread is still at the shard that was opened so many shards ago.
                    self._open.pop(next(iter(self._open))).close()
        if is_sequential(item.path):
            stream.seek(item.offset)
            data = stream.read(item.size)
        else:
            data = _read_at(stream.fileno(), item.offset, item.size)
        if len(data) != item.size:
            raise EOFError(f"the archive ends within it, at {len(data)} of {item.size} bytes")
        return data

    def close(self) -> None:
        for stream in self._open.values():
            stream.close()
        self._open.clear()


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    while data and len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
        data += more
    return data
