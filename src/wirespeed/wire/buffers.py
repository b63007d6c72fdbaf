"""Memory for large messages: reused, because fresh pages cost more than the copy into them; and bounded.

A buffer is handed out as a memoryview. It returns to the pool by itself: when it is wanted again, the pool takes one
whose views are all gone, which a bytearray tells by letting itself be resized. A view that somebody keeps is therefore
never overwritten; its buffer is just not reused.
"""

from __future__ import annotations

from collections.abc import Callable

from wirespeed.units import MIB

_LEAST_BYTES = 64 * 1024
_TRIES = 4
SCRATCH_BYTES = 64 * 1024


class BufferPool:
    """Buffers of up to ``max_pooled_bytes`` in all, by powers of two. Not for several threads."""

    def __init__(self, max_pooled_bytes: int = 128 * MIB) -> None:
        self._max_pooled_bytes = max_pooled_bytes
        self._pooled_bytes = 0
        self._classes: dict[int, list[bytearray]] = {}
        self.scratch = Scratch()

    @property
    def pooled_bytes(self) -> int:
        """What the pool holds, in use or not."""
        return self._pooled_bytes

    def take(self, num_bytes: int) -> memoryview:
        """A writable view of ``num_bytes``; its content is whatever was there."""
        size = 1 << (num_bytes - 1).bit_length() if num_bytes > _LEAST_BYTES else _LEAST_BYTES
        held = self._classes.setdefault(size, [])
        last = len(held) - 1
        # First the last ones used, which are still in the processor's cache; then the longest unused, most likely free.
        place = last
        while place >= 0:
            buffer = held[place]
            if _is_free(buffer):
                if place != last:
                    del held[place]
                    held.append(buffer)
                return memoryview(buffer)[:num_bytes]
            place -= 1
            if place == last - _TRIES:
                place = min(place, _TRIES - 1)
        if self._pooled_bytes + size > self._max_pooled_bytes:
            self._drop_free()
        buffer = bytearray(size)
        if self._pooled_bytes + size <= self._max_pooled_bytes:
            _is_free(buffer)  # the first resize moves it; later ones stay in place
            held.append(buffer)
            self._pooled_bytes += size
        return memoryview(buffer)[:num_bytes]

    def _drop_free(self) -> None:
        for size, held in self._classes.items():
            kept = [buffer for buffer in held if not _is_free(buffer)]
            self._pooled_bytes -= size * (len(held) - len(kept))
            held[:] = kept


def _is_free(buffer: bytearray) -> bool:
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True


class Scratch:
    """A buffer that all connections of one event loop read into, because between two reads most hold nothing.

    Who has part of a frame in it ``keep``s it, and gives it ``back`` when it is empty. 10,000 connections that say
    something now and then so cost one buffer, not 640 MB of them.
    """

    def __init__(self) -> None:
        self._free: memoryview | None = None

    def view(self) -> memoryview:
        """What to read into next. Nobody else's until something else reads."""
        if self._free is None:
            self._free = memoryview(bytearray(SCRATCH_BYTES))
        return self._free

    def keep(self, view: memoryview) -> None:
        """``view`` holds something: the next reader gets another one."""
        if view is self._free:
            self._free = None

    def back(self, view: memoryview) -> None:
        """``view`` is empty again."""
        self._free = view


class MemoryBudget:
    """Bytes that all connections of a server hold together; who finds it spent is called when some is free."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_spent(self) -> bool:
        """Whether nothing more should be started."""
        return self.used_bytes >= self.limit_bytes

    def take(self, num_bytes: int) -> None:
        """Count bytes in. The caller asked ``has_room`` first where they are many."""
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many fit."""
        return self.used_bytes + num_bytes <= self.limit_bytes

    def give(self, num_bytes: int) -> None:
        """Count bytes out, and call who waits."""
        self.used_bytes -= num_bytes
        if self._waiting and not self.is_spent:
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake()

    def call_when_free(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once, after some bytes were given back."""
        self._waiting.append(wake)
