"""Bytes to messages, without copying large payloads: the receiving half of a connection, apart from any socket.

The transport asks where to put bytes (``get_buffer``) and says how many came (``buffer_updated``). Small frames are cut
out of a scratch buffer, which readers between frames share. Where messages of medium size come, bytes go into an arena
of the pool, and payloads are delivered as views of it: one system call per message, and no copy but of what lies across
an arena's end. Once the header of a large payload has been seen, the transport writes the rest of it where it belongs.
Whoever owns the reader decides where that is, or that the message is to be dropped, or that reading has to wait for
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, Protocol
from zlib import crc32

from wirespeed.errors import DataError
from wirespeed.wire.buffers import SCRATCH_BYTES, BufferPool, Scratch
from wirespeed.wire.frames import (
    CARRIES_MESSAGE,
    HEADER_BYTES,
    MAGIC,
    MAX_META_BYTES,
    VERSION,
    Header,
    unpack_fields,
    unpack_header,
)
from wirespeed.wire.limits import SMALL_BYTES

HEAD_BYTES = 1024
MEDIUM_BYTES = 320 * 1024
"""Up to here a payload is delivered as a view of an arena, which it keeps from being used again. Arenas are twice as
large as the last such payload, at least, so that what is kept holds at most four times its own size."""
WORTH_WAITING_BYTES = 256 * 1024
"""In a large or medium payload: on a shaped link a read per burst, of 16 KiB or so, costs more than moving bytes."""
LEAST_WAIT_BYTES = 32 * 1024
_LEAST_ROOM = HEADER_BYTES + MAX_META_BYTES
MAX_CONTROL_BYTES = 8 * 1024
"""The payload of a frame that is not part of a message. In the handshake nothing else is accepted."""

_BLOCK_BYTES = 16 * 1024
"""Small frames are cut out of a copy of so many bytes: slicing bytes costs half of slicing a view."""
_CHECKED_BYTES = HEADER_BYTES - 4

Payload = bytes | memoryview
Quick = Callable[[int, int, int, int, bytes, bytes], None]
"""Takes code, stream, extra, total, meta and payload of a small message."""
_NOTHING = memoryview(b"")


class Placement(Enum):
    """What ``place`` may answer instead of a buffer."""

    DROP = "drop"
    """Read past it; it is delivered without a payload."""
    WAIT = "wait"
    """Stop before this frame until ``resume`` is called."""


class Owner(Protocol):
    """What a reader needs of the connection that it serves."""

    def place(self, header: Header) -> memoryview | Literal[Placement.DROP, Placement.WAIT]:
        """Where the payload of this message (``header.total`` bytes) goes. Asked once, at its first frame."""

    def deliver(self, header: Header, meta: bytes, payload: Payload | None) -> None:
        """A whole message, or a control frame. None: it was dropped, as ``place`` wanted."""


def _no_quick(code: int, stream: int, extra: int, total: int, meta: bytes, payload: bytes) -> None:  # noqa: PLR0917
    raise AssertionError


class _Assembly:
    """A message of which some frames have come."""

    __slots__ = ("header", "meta", "received", "seen_bytes", "since_s", "view")

    def __init__(self, header: Header, meta: bytes, view: memoryview | None) -> None:
        self.header = header
        self.meta = meta
        self.view = view
        self.received = 0
        self.seen_bytes = -1
        self.since_s = 0.0


class FrameReader:
    """Cuts a stream of bytes into messages for ``owner``.

    ``buffer_updated`` raises DataError at the first frame that breaks a rule; the connection is of no use after that.
    ``allowed`` are the kinds of frames that may come; the reader's owner changes it with the connection's state.
    """

    def __init__(
        self,
        owner: Owner,
        *,
        allowed: frozenset[int],
        max_message_bytes: int,
        pool: BufferPool | None = None,
        expect: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.allowed = allowed
        self.quick_kind = -1
        """A small message of this kind goes to ``quick``, as plain values: making a Header of them takes longer."""
        self.quick: Quick = _no_quick
        self._expect = expect
        self._owner = owner
        self._max_message_bytes = max_message_bytes
        self._small_bytes = min(max_message_bytes, MAX_CONTROL_BYTES)
        """Up to here a frame is within its limit, whatever its kind."""
        self._medium_bytes = min(max_message_bytes, MEDIUM_BYTES)
        self._pool = pool
        self._scratch = Scratch() if pool is None else pool.scratch
        self._buffer = _NOTHING
        """Where bytes go and frames are cut: the scratch, or an arena; let go of when it is empty."""
        self._is_scratch = True
        self._is_after_medium = False
        self._arena_bytes = SCRATCH_BYTES
        self._start = 0
        self._end = 0
        self._assemblies: dict[int, _Assembly] = {}
        self._current: _Assembly | None = None
        self._left_bytes = 0
        """Payload bytes of the current frame still to come, straight into their place."""
        self._told_bytes = 0
        self._is_after_large = False
        self._wanted_end = 0
        """Where the frame ends of which a part is here; 0 where that is not known."""
        self.is_waiting = False

    @property
    def num_assemblies(self) -> int:
        """Messages of which only a part has come."""
        return len(self._assemblies)

    def drop(self, stream: int) -> None:
        """Nobody wants this message any more: what still comes of it goes nowhere."""
        assembly = self._assemblies.get(stream)
        if assembly is not None:
            assembly.view = None

    def is_stalled(self, now_s: float, limit_s: float) -> bool:
        """Whether some message has not grown for so long. To be asked about once a second."""
        for assembly in self._assemblies.values():
            if assembly.received != assembly.seen_bytes:
                assembly.seen_bytes, assembly.since_s = assembly.received, now_s
            elif now_s - assembly.since_s > limit_s:
                return True
        return False

    def close(self) -> None:
        """Let go of all memory."""
        self._assemblies.clear()
        self._current = None
        self._buffer, self._is_scratch = _NOTHING, True
        self._start = self._end = 0

    def get_buffer(self, _hint: int) -> memoryview:
        """Where the transport's next bytes go."""
        current = self._current
        if current is not None and current.view is not None:
            return current.view[current.received : current.received + self._left_bytes]
        if current is not None:
            return self._scratch.view()[: min(SCRATCH_BYTES, self._left_bytes)]
        if self._start == self._end:
            self._start = self._end = 0
            self._is_scratch = not self._is_after_medium or self._pool is None
            if self._is_after_medium and self._pool is not None:
                self._buffer = self._pool.take(self._arena_bytes)
            else:
                self._buffer = self._scratch.view()
        elif len(self._buffer) < (self._wanted_end if self._wanted_end else self._end + _LEAST_ROOM):
            self._move()
        if self._is_after_large:
            # Another large one is likely: what of it lands here is copied, what comes after its header is not.
            return self._buffer[self._end : self._end + HEAD_BYTES]
        return self._buffer[self._end :]

    def _move(self) -> None:
        """Make room behind a frame of which only a part is here. Views of what was there before stay as they are."""
        left = self._end - self._start
        rest = self._buffer[self._start : self._end]
        if self._pool is not None and (self._is_after_medium or not self._is_scratch):
            if self._is_scratch:
                self._scratch.back(self._buffer)  # read from below, before anything else is received
            self._buffer = self._pool.take(max(self._arena_bytes, self._wanted_end - self._start, left + _LEAST_ROOM))
            self._is_scratch = False
        self._buffer[:left] = rest
        self._wanted_end = max(0, self._wanted_end - self._start)
        self._start, self._end = 0, left

    def buffer_updated(self, num_bytes: int) -> None:
        """``num_bytes`` were written where ``get_buffer`` said."""
        current = self._current
        if current is not None:
            self._left_bytes -= num_bytes
            current.received += num_bytes
            if self._left_bytes == 0:
                self._current = None
                self._tell(0)
                self._end_frame(current)
            elif self._left_bytes < self._told_bytes:
                self._tell(self._left_bytes)
            return
        self._end += num_bytes
        self._parse()

    def resume(self) -> None:
        """Go on after Placement.WAIT."""
        self.is_waiting = False
        self._parse()

    def _parse(self) -> None:
        worth_bytes = self._cut()
        if self._current is None:
            self._tell(worth_bytes)
        if self._start == self._end:
            if self._is_scratch and self._buffer is not _NOTHING:
                self._scratch.back(self._buffer)
            self._buffer, self._is_scratch = _NOTHING, True
            self._start = self._end = 0
        elif self._is_scratch:
            self._scratch.keep(self._buffer)

    def _cut(self) -> int:
        """Deliver the whole frames that are here. Gives how many bytes of the next one are worth waiting for."""
        self._wanted_end = 0
        while self._end - self._start >= HEADER_BYTES and not self.is_waiting:
            if self._cut_small() if self._is_scratch else self._cut_medium():
                continue
            buffer, start = self._buffer, self._start
            header = unpack_header(buffer, start)
            begin = start + HEADER_BYTES + header.meta_bytes
            if begin > self._end:
                self._check(header)
                return 0
            stop = begin + header.length
            is_whole = header.length == header.total
            if is_whole and header.length <= SMALL_BYTES:
                self._check(header)
                if stop > self._end:
                    self._wanted_end = stop
                    return 0
                meta = bytes(buffer[start + HEADER_BYTES : begin]) if header.meta_bytes else b""
                self._start = stop
                self._is_after_large = self._is_after_medium = False
                self._owner.deliver(header, meta, bytes(buffer[begin:stop]))
            elif is_whole and header.length <= MEDIUM_BYTES and not self._is_scratch:
                self._check(header)
                if header.stream in self._assemblies:
                    raise DataError(f"got two messages of stream {header.stream} at once")
                assert stop > self._end  # whole ones are for _cut_medium
                self._wanted_end = stop
                return min(stop - self._end, WORTH_WAITING_BYTES)
            elif not self._begin_frame(header, begin):
                break
        return 0

    def _cut_small(self) -> bool:
        """Deliver the small, whole and flawless frames at the front. False: the first frame is none of those.

        What is checked here is all that ``_cut`` and ``unpack_header`` check, which say what is wrong with the others.
        """
        origin, deliver = self._start, self._owner.deliver
        quick_kind, quick = self.quick_kind, self.quick
        block = self._buffer[origin : min(self._end, origin + _BLOCK_BYTES)].tobytes()
        num_bytes, small_bytes, start = len(block), self._small_bytes, 0
        while num_bytes - start >= HEADER_BYTES:
            magic, version, kind, code, meta_bytes, stream, total, offset, length, extra, crc = unpack_fields(
                block, start
            )
            begin = start + HEADER_BYTES + meta_bytes
            stop = begin + length
            if (
                length > small_bytes
                or stop > num_bytes
                or crc != crc32(block[start : start + _CHECKED_BYTES])
                or magic != MAGIC
                or version != VERSION
                or kind not in self.allowed
                or length != total
                or offset
                or meta_bytes > MAX_META_BYTES
            ):
                break
            meta = block[start + HEADER_BYTES : begin] if meta_bytes else b""
            if start == 0:
                self._is_after_large = self._is_after_medium = False
            start = stop
            self._start = place = origin + stop
            if kind == quick_kind:
                quick(code, stream, extra, total, meta, block[begin:stop])
            else:
                deliver(Header(kind, code, meta_bytes, stream, total, offset, length, extra), meta, block[begin:stop])
            if self._start != place:
                return True  # what it did freed memory, and reading went on from within
        return start > 0

    def _cut_medium(self) -> bool:
        """As ``_cut_small``, for medium messages in an arena, whose payloads are views of it."""
        buffer, origin, deliver = self._buffer, self._start, self._owner.deliver
        limit, place = self._medium_bytes, origin
        while self._end - place >= HEADER_BYTES:
            magic, version, kind, code, meta_bytes, stream, total, offset, length, extra, crc = unpack_fields(
                buffer, place
            )
            begin = place + HEADER_BYTES + meta_bytes
            stop = begin + length
            if (
                not SMALL_BYTES < length <= limit
                or stop > self._end
                or crc != crc32(buffer[place : place + _CHECKED_BYTES])
                or magic != MAGIC
                or version != VERSION
                or kind not in self.allowed
                or kind not in CARRIES_MESSAGE
                or length != total
                or offset
                or meta_bytes > MAX_META_BYTES
                or stream in self._assemblies
            ):
                break
            meta = bytes(buffer[place + HEADER_BYTES : begin]) if meta_bytes else b""
            self._start = place = stop
            header = Header(kind, code, meta_bytes, stream, total, offset, length, extra)
            deliver(header, meta, buffer[begin:stop])
            if self._start != place or self._buffer is not buffer:
                return True
        return place > origin

    def _check(self, header: Header) -> None:
        if header.kind not in self.allowed:
            raise DataError(f"got a frame of kind {header.kind} at this point of the connection")
        limit = self._max_message_bytes if header.kind in CARRIES_MESSAGE else MAX_CONTROL_BYTES
        if header.total > limit:
            raise DataError(f"got a message of {header.total} bytes", expected=f"at most {limit}")
        if header.length == 0 and header.total:
            raise DataError("got an empty frame of a message that is not empty")

    def _begin_frame(self, header: Header, begin: int) -> bool:
        """Start on a frame that is large, in parts, or not all here. False: wait for memory, or for more bytes."""
        self._check(header)
        if header.kind not in CARRIES_MESSAGE:
            raise DataError("got a control frame in parts")  # a whole one is small
        assembly = self._assemblies.get(header.stream)
        if header.offset == 0:
            if assembly is not None:
                raise DataError(f"got two messages of stream {header.stream} at once")
            placed = self._owner.place(header)
            if placed is Placement.WAIT:
                self.is_waiting = True
                return False
            meta = bytes(self._buffer[self._start + HEADER_BYTES : begin]) if header.meta_bytes else b""
            assembly = _Assembly(header, meta, None if placed is Placement.DROP else placed)
            self._assemblies[header.stream] = assembly
        elif assembly is None or assembly.received != header.offset or assembly.header.total != header.total:
            raise DataError(f"got bytes at {header.offset} of stream {header.stream}, out of order")
        self._is_after_medium = header.total <= MEDIUM_BYTES
        self._is_after_large = not self._is_after_medium
        if self._is_after_medium:
            # Of as many such messages as fit: where others of its size follow, none of them lies across its end.
            num_bytes = HEADER_BYTES + header.meta_bytes + header.total
            self._arena_bytes = (1 << (2 * num_bytes - 1).bit_length()) // num_bytes * num_bytes
        here = min(header.length, self._end - begin)
        if assembly.view is not None:
            assembly.view[assembly.received : assembly.received + here] = self._buffer[begin : begin + here]
        assembly.received += here
        self._start = begin + here
        if here == header.length:
            self._end_frame(assembly)
        else:
            self._current, self._left_bytes = assembly, header.length - here
            self._tell(min(self._left_bytes, WORTH_WAITING_BYTES))
        return self._current is None

    def _tell(self, num_bytes: int) -> None:
        """How many bytes are worth waiting for before the next read; 0: any."""
        told = num_bytes if num_bytes >= LEAST_WAIT_BYTES else 0
        if told != self._told_bytes:
            self._told_bytes = told
            self._expect(told)

    def _end_frame(self, assembly: _Assembly) -> None:
        if assembly.received == assembly.header.total:
            del self._assemblies[assembly.header.stream]
            self._owner.deliver(assembly.header, assembly.meta, assembly.view)
