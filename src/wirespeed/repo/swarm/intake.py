"""What becomes of pieces that have arrived: chunks put together, verified, handed on and written.

A chunk is hashed and written on ``executor``, one task per chunk, and is given to those behind between the two. A
difference is applied to the base that is here and then treated alike. What is wrong is told to the ``Owner``, who knows
whom to ask again. Everything here but those tasks runs on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.repo.swarm.board import Board, Buffer
from wirespeed.repo.swarm.messages import PAYLOAD, Ask

Use = Callable[[int, memoryview], None]
Decode = Callable[[int, memoryview], memoryview]
"""A chunk from its difference; verified. Raises where it is wrong, or the base is not here."""


class Owner(Protocol):
    """What an intake tells."""

    def when_written(self, index: int) -> None:
        """The chunk is verified and on disk."""

    def when_wrong(self, index: int, buffer: Buffer) -> None:
        """The chunk is whole and wrong; it was dropped."""

    def when_useless(self, index: int, address: str, problem: str) -> None:
        """A difference did not give its chunk. The base may be at fault as well as the sender."""

    def when_broken(self, fault: BaseException) -> None:
        """This host cannot go on: its disk is full, or it was told to stop."""

    def pump(self) -> None:
        """There is room for more."""


class Intake:
    """Takes in pieces of one version. ``use`` gets every verified chunk, on another thread, and writes it."""

    def __init__(self, owner: Owner, board: Board, *, executor: Executor, decode: Decode | None) -> None:
        self.use: Use = lambda index, content: None
        self.unwritten_bytes = 0
        """Here and not yet on disk."""
        self._owner = owner
        self._board = board
        self._executor = executor
        self._decode = decode
        self._loop = asyncio.get_running_loop()

    def take(self, asks: tuple[Ask, ...], payload: memoryview, source: tuple[str, bytes], *, is_placed: bool) -> None:
        """What an answer holds. ``is_placed``: a single piece was received where it belongs.

        ``source``: the sender, and the generation of what it sent.
        """
        first = asks[0]
        if first.offset == PAYLOAD:
            self._apply(asks, payload, source[0])
        elif len(asks) > 1:
            self._split(asks, payload, source)
        else:
            if not is_placed:
                self._board.buffer(first.index).content[first.offset : first.offset + first.length] = payload
            buffer = self._board.arrive(first.index, first.offset, source)
            if buffer.num_missing == 0:
                self._check(first.index, buffer)

    def _split(self, asks: tuple[Ask, ...], payload: memoryview, source: tuple[str, bytes]) -> None:
        at = 0
        for ask in asks:
            buffer = self._board.buffer(ask.index)
            buffer.content[:] = payload[at : at + ask.length]
            at += ask.length
            self._board.arrive(ask.index, 0, source)
            self._check(ask.index, buffer)

    # --- whole chunks

    def _check(self, index: int, buffer: Buffer) -> None:
        self.unwritten_bytes += len(buffer.content)
        task = self._loop.run_in_executor(self._executor, self._check_and_use, index, buffer)
        task.add_done_callback(functools.partial(self._checked, index, buffer))

    def _check_and_use(self, index: int, buffer: Buffer) -> bool:
        """On another thread: whether the chunk is right; then it is handed on, and goes to its files."""
        from blake3 import blake3

        if blake3(buffer.content).digest() != self._board.manifest.chunks[index].digest:
            return False
        self._loop.call_soon_threadsafe(self._board.right, index)
        self.use(index, buffer.content)
        return True

    def _checked(self, index: int, buffer: Buffer, task: asyncio.Future[bool]) -> None:
        self.unwritten_bytes -= len(buffer.content)
        if self._has_failed(task):
            return
        if task.result():
            self._owner.when_written(index)
        else:
            self._board.drop(index)
            self._owner.when_wrong(index, buffer)
        self._owner.pump()

    # --- differences

    def _apply(self, asks: tuple[Ask, ...], payload: memoryview, address: str) -> None:
        at = 0
        for ask in asks:
            # Kept for those behind, longer than the wire's buffer.
            part = bytes(payload[at : at + ask.length])
            at += ask.length
            self.unwritten_bytes += self._board.manifest.chunks[ask.index].length
            task = self._loop.run_in_executor(self._executor, self._apply_and_use, ask.index, part)
            task.add_done_callback(functools.partial(self._applied, ask.index, address))

    def _apply_and_use(self, index: int, payload: bytes) -> str:
        """On another thread. Gives what is wrong with the difference, or "" where the chunk is on disk."""
        assert self._decode is not None
        try:
            content = self._decode(index, memoryview(payload))
        except (DataError, PeerFailure, UsageError) as fault:
            return str(fault)
        self._loop.call_soon_threadsafe(self._board.keep_payload, index, payload)
        self._loop.call_soon_threadsafe(self._board.right, index, content)
        self.use(index, content)
        return ""

    def _applied(self, index: int, address: str, task: asyncio.Future[str]) -> None:
        self.unwritten_bytes -= self._board.manifest.chunks[index].length
        if self._has_failed(task):
            return
        if task.result():
            self._owner.when_useless(index, address, task.result())
        else:
            self._owner.when_written(index)
        self._owner.pump()

    def _has_failed(self, task: asyncio.Future[bool] | asyncio.Future[str]) -> bool:
        fault = PeerFailure("the download was ended") if task.cancelled() else task.exception()
        if fault is None:
            return False
        self._owner.when_broken(fault)
        return True
