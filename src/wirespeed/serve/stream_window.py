"""How much of one stream is here at once: bytes of requests that run, and of answers that wait to be read.

A client that writes and never reads is stopped by it, instead of filling the server's memory. It bounds what is taken
in, not what a model makes of it: answers that are much larger than their requests are counted once they are there.
"""

from __future__ import annotations

import asyncio


class StreamWindow:
    """``enter`` with a request's bytes, ``turn`` them into its answer's, ``leave`` once that is written."""

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._room = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Wait for room. A message that alone is larger enters when nothing else is held."""
        while self.held_bytes and self.held_bytes + num_bytes > self._limit_bytes:
            self._room.clear()
            await self._room.wait()
        self.held_bytes += num_bytes

    def turn(self, num_bytes: int, answer_bytes: int) -> None:
        """A request became its answer, or nothing (0)."""
        self.held_bytes += answer_bytes - num_bytes
        self._room.set()

    def leave(self, num_bytes: int) -> None:
        """An answer is written."""
        self.turn(num_bytes, 0)
