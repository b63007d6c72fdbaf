"""What one host has of one version, chunk by chunk, and who waits for which piece of it.

A piece is given on as soon as it has arrived, before its chunk can be verified, but for a chunk's last piece: that one
leaves only once the whole chunk was found right. So nobody gets a whole wrong chunk from a host that works, and whoever
does knows that the sender, or the link from it, is at fault. Chunks that are on disk are read back whole and verified
before any of them is given. Everything here runs on the event loop; hashing and reading do not.

A buffer's ``generation`` travels with each piece: a receiver that put a chunk together from two generations knows that
a mismatch proves nothing about the sender.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from wirespeed.errors import DataError
from wirespeed.repo.cache import Cache
from wirespeed.repo.manifest import Manifest
from wirespeed.repo.swarm.messages import MAX_ASKS, PAYLOAD, PIECE_BYTES, Ask
from wirespeed.units import MIB
from wirespeed.wire import Answer, BufferPool, CallFailed, Status

BUDGET_BYTES = 96 * MIB
"""Chunks kept in memory for those behind. Beyond it those that are on disk go."""
GIVEN_BYTES = 16 * MIB
"""Of these, chunks that somebody behind was given whole: most hosts have one host behind them. Memory that is used
again soon is still in the processor's cache, and no fresh pages are needed for it."""
PAYLOADS_BYTES = 256 * MIB
"""Differences, kept as they are stored. Beyond it the oldest go: whoever asks for them gets whole chunks instead."""
NO_PAYLOAD = Status.EXHAUSTED
"""The status of an answer that means: ask for the whole chunk."""


class Buffer:
    """A chunk in memory. ``arrived``: a flag per piece. ``sources``: who sent its pieces, with their generation."""

    __slots__ = ("arrived", "content", "generation", "is_on_disk", "is_right", "num_missing", "sources")

    def __init__(self, content: memoryview, generation: int, num_pieces: int) -> None:
        self.content = content
        self.generation = generation
        self.arrived = bytearray(num_pieces)
        self.num_missing = num_pieces
        self.is_right = False
        self.is_on_disk = False
        self.sources: set[tuple[str, bytes]] = set()


class Board:
    """One version on one host."""

    def __init__(
        self,
        manifest: Manifest,
        cache: Cache,
        *,
        pool: BufferPool,
        executor: Executor,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self.manifest = manifest
        self.places: dict[int, tuple[int, int]] = {}
        """Chunk -> (file, offset in it)."""
        for at, file in enumerate(manifest.files):
            offset = 0
            for index in file.chunks:
                self.places.setdefault(index, (at, offset))
                offset += manifest.chunks[index].length
        self.total_bytes = sum(manifest.chunks[index].length for index in self.places)
        self.held_bytes = 0
        self.used_s = 0.0
        """When a piece was last asked for or received."""
        self._held = bytearray(len(manifest.chunks))
        self._cache = cache
        self._pool = pool
        self._executor = executor
        self._budget_bytes = budget_bytes
        self._buffers: dict[int, Buffer] = {}
        self._buffered_bytes = 0
        self._given: dict[int, int] = {}
        self._given_bytes = 0
        self._generations: dict[int, int] = {}
        self._num_generations = 0
        self._loading: set[int] = set()
        self._payloads: dict[int, bytes] = {}
        self._payload_bytes = 0
        self._waits: dict[int, list[tuple[tuple[Ask, ...], asyncio.Future[Answer]]]] = {}
        self._is_coming = False
        self._problem = "it is not fetching this version"
        self._loop = asyncio.get_running_loop()

    @property
    def is_whole(self) -> bool:
        """Whether every chunk is on disk."""
        return self.held_bytes == self.total_bytes

    @property
    def num_waiting(self) -> int:
        """Asks that wait for something to arrive."""
        return sum(map(len, self._waits.values()))

    @property
    def buffered_bytes(self) -> int:
        """Of chunks in memory."""
        return self._buffered_bytes

    def bitmap(self) -> bytes:
        """A bit per chunk of the manifest, lowest bit first: 1 where it is on disk."""
        held = self._held
        return bytes(
            sum((held[at + bit] << bit) for bit in range(min(8, len(held) - at))) for at in range(0, len(held), 8)
        )

    def has(self, index: int) -> bool:
        """Whether this chunk is on disk."""
        return bool(self._held[index])

    # --- what arrives

    def begin(self) -> None:
        """What is not here yet is on its way: asks for it wait."""
        self._is_coming = True

    def end(self, problem: str = "") -> None:
        """Nothing more comes. Whoever still waits is told why."""
        self._is_coming = False
        self._problem = problem or "it does not have this chunk and is not fetching it"
        for index in list(self._buffers):
            if not self._buffers[index].is_right:
                self.drop(index)
        for index in list(self._waits):
            self._serve(index)

    def keep(self, indices: Iterable[int]) -> None:
        """These are on disk."""
        for index in indices:
            if index in self.places and not self._held[index]:
                self._held[index] = 1
                self.held_bytes += self.manifest.chunks[index].length
            if index in self._waits:
                self._serve(index)

    def buffer(self, index: int) -> Buffer:
        """Where the pieces of a chunk are put together."""
        found = self._buffers.get(index)
        if found is None:
            length = self.manifest.chunks[index].length
            self._num_generations += 1
            found = Buffer(self._pool.take(length), self._num_generations, num_pieces(length))
            self._add(index, found)
        return found

    def arrive(self, index: int, offset: int, source: tuple[str, bytes]) -> Buffer:
        """A piece now lies in the buffer. Whoever waits for it gets it."""
        buffer = self._buffers[index]
        at = offset // PIECE_BYTES
        if not buffer.arrived[at]:
            buffer.arrived[at] = 1
            buffer.num_missing -= 1
        buffer.sources.add(source)
        if index in self._waits:
            self._serve(index)
        return buffer

    def right(self, index: int, content: memoryview | None = None) -> None:
        """The chunk was verified: in its buffer, or as ``content`` that came in one piece."""
        buffer = self._buffers.get(index)
        if content is not None and (buffer is None or not buffer.is_right):
            if buffer is not None:
                self.drop(index)
            self._num_generations += 1
            buffer = Buffer(content, self._num_generations, 1)
            self._add(index, buffer)
        if buffer is None:
            return  # the download was ended meanwhile
        buffer.is_right = True
        self._generations[index] = buffer.generation
        if index in self._waits:
            self._serve(index)

    def keep_payload(self, index: int, payload: bytes) -> None:
        """A difference, of which it was verified that it gives the chunk. To be told before ``right``."""
        if index in self._payloads or index not in self.places:
            return
        self._payloads[index] = payload
        self._payload_bytes += len(payload)
        while self._payload_bytes > PAYLOADS_BYTES:
            self._payload_bytes -= len(self._payloads.pop(next(iter(self._payloads))))
        if index in self._waits:
            self._serve(index)

    def written(self, index: int) -> None:
        """The chunk is on disk as well."""
        buffer = self._buffers.get(index)
        if buffer is not None:
            buffer.is_on_disk = True
        self.keep((index,))
        self._trim_given()
        self._trim(self._budget_bytes)

    def drop(self, index: int) -> None:
        """What came of this chunk is wrong, or no longer wanted."""
        buffer = self._buffers.pop(index, None)
        if buffer is not None:
            self._buffered_bytes -= len(buffer.content)
            self._given_bytes -= self._given.pop(index, 0)

    def rest(self) -> None:
        """Nobody has asked for a while: give the memory back."""
        self._trim(0)
        self._payloads.clear()
        self._payload_bytes = 0

    # --- what is asked for

    def give(self, asks: tuple[Ask, ...]) -> Answer | asyncio.Future[Answer]:
        """The pieces, or a future of them. Raises DataError for an ask that makes no sense."""
        self._check(asks)
        self.used_s = self._loop.time()
        index, answer = self._look(asks)
        if answer is not None:
            return answer
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._wait(index, asks, future)
        return future

    def _check(self, asks: Sequence[Ask]) -> None:
        chunks = self.manifest.chunks
        if not 1 <= len(asks) <= MAX_ASKS:
            raise DataError(f"got {len(asks)} asks", expected=f"1 to {MAX_ASKS}")
        for ask in asks:
            if not 0 <= ask.index < len(chunks) or ask.index not in self.places:
                raise DataError(f"got an ask for chunk {ask.index}, which no file has")
            length = chunks[ask.index].length
            if ask.offset == PAYLOAD:
                if chunks[ask.index].base < 0 or ask.length != chunks[ask.index].stored_bytes:
                    raise DataError(f"got an ask for a difference of {ask.length} bytes of chunk {ask.index}")
                continue
            is_piece = ask.offset % PIECE_BYTES == 0 and ask.length == min(PIECE_BYTES, length - ask.offset)
            if not is_piece or ask.offset < 0 or ask.length <= 0:
                raise DataError(f"got an ask for {ask.length} bytes at {ask.offset} of a chunk of {length}")
        if len(asks) > 1 and sum(ask.length for ask in asks) > PIECE_BYTES:
            raise DataError("got asks for more than one piece holds", expected=f"at most {PIECE_BYTES} bytes")

    def _look(self, asks: tuple[Ask, ...]) -> tuple[int, Answer | None]:
        """The answer, or the first chunk that it waits for."""
        views: list[memoryview | bytes] = []
        generation = 0
        for ask in asks:
            if ask.offset == PAYLOAD:
                payload = self._payloads.get(ask.index)
                if payload is None:
                    return ask.index, None
                views.append(payload)
                continue
            buffer = self._buffers.get(ask.index)
            if buffer is None or not self._may_go(buffer, ask):
                return ask.index, None
            generation = buffer.generation
            views.append(buffer.content[ask.offset : ask.offset + ask.length])
        for ask in asks:
            if ask.offset >= 0 and ask.offset + ask.length == self.manifest.chunks[ask.index].length:
                self._note_given(ask.index, ask.offset + ask.length)
        return -1, Answer(views[0] if len(views) == 1 else views, meta=generation.to_bytes(4, "little"))

    def _may_go(self, buffer: Buffer, ask: Ask) -> bool:
        if buffer.is_right:
            return True
        is_last = ask.offset + ask.length == len(buffer.content)
        return not is_last and bool(buffer.arrived[ask.offset // PIECE_BYTES])

    def _wait(self, index: int, asks: tuple[Ask, ...], future: asyncio.Future[Answer]) -> None:
        if any(ask.index == index and ask.offset == PAYLOAD for ask in asks):
            buffer = self._buffers.get(index)
            if self._held[index] or (buffer is not None and buffer.is_right):
                future.set_exception(CallFailed("it did not keep the difference", status=NO_PAYLOAD))
                return
        if index not in self._buffers and self._held[index]:
            self._load(index)
        elif not self._is_coming and not self._held[index]:
            future.set_exception(CallFailed(self._problem, status=Status.UNAVAILABLE))
            return
        self._waits.setdefault(index, []).append((asks, future))

    def _serve(self, index: int) -> None:
        for asks, future in self._waits.pop(index, []):
            if future.done():
                continue
            at, answer = self._look(asks)
            if answer is not None:
                future.set_result(answer)
            else:
                self._wait(at, asks, future)

    # --- memory and disk

    def _add(self, index: int, buffer: Buffer) -> None:
        self._buffers[index] = buffer
        self._buffered_bytes += len(buffer.content)

    def _trim(self, budget_bytes: int) -> None:
        if self._buffered_bytes <= budget_bytes:
            return
        for index in [at for at, buffer in self._buffers.items() if buffer.is_right and buffer.is_on_disk]:
            self.drop(index)
            if self._buffered_bytes <= budget_bytes:
                return

    def _note_given(self, index: int, length: int) -> None:
        if index not in self._given:
            self._given[index] = length
            self._given_bytes += length

    def _trim_given(self) -> None:
        if self._given_bytes <= GIVEN_BYTES:
            return
        for index in list(self._given):
            if self._buffers[index].is_on_disk:
                self.drop(index)
                if self._given_bytes <= GIVEN_BYTES:
                    return

    def _load(self, index: int) -> None:
        """Read a chunk back from disk, and verify it."""
        if index in self._loading:
            return
        self._loading.add(index)
        chunk = self.manifest.chunks[index]
        at, offset = self.places[index]
        file = self.manifest.files[at]
        paths = (self._cache.path_of(self.manifest.content_id(file)), self._cache.part(self.manifest, file).path)
        content = self._pool.take(chunk.length)
        task = self._loop.run_in_executor(self._executor, _read, paths, offset, content, chunk.digest)

        def loaded(done: asyncio.Future[bool]) -> None:
            self._loading.discard(index)
            is_right = not done.cancelled() and done.exception() is None and done.result()
            if index not in self._buffers and is_right:
                buffer = Buffer(content, self._generations.get(index, 0), 1)
                buffer.is_right = buffer.is_on_disk = True
                self._add(index, buffer)
                self._trim_but(index)
            elif not is_right and self._held[index]:
                # Evicted or damaged since: it is no longer ours to give.
                self._held[index] = 0
                self.held_bytes -= chunk.length
                self._problem = "it no longer has this chunk"
            self._serve(index)

        task.add_done_callback(loaded)

    def _trim_but(self, index: int) -> None:
        newest = self._buffers.pop(index)
        self._trim(self._budget_bytes)
        self._buffers[index] = newest


def num_pieces(length: int) -> int:
    """Of a chunk."""
    return -(-length // PIECE_BYTES)


def _read(paths: Sequence[Path], offset: int, content: memoryview, digest: bytes) -> bool:
    from blake3 import blake3

    for path in paths:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            done = 0
            while done < len(content) and (num := os.preadv(handle, [content[done:]], offset + done)):
                done += num
        except OSError:
            continue
        finally:
            os.close(handle)
        if done == len(content) and blake3(content).digest() == digest:
            return True
    return False
