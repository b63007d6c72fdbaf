"""Messages to bytes: credit, chunks and turns; the sending half of a connection.

A message is sent when the peer's credit covers all of it, first come first served, so that two half-sent messages never
wait for each other's credit. Then small ones go out at once, as one piece, and large ones chunk by chunk in turn: a
small message waits for at most one chunk, not for a large message. A chunk is handed to the transport only when the
transport has room, so that little is buffered here and a slow reader stops the sender.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from zlib import crc32

from wirespeed.errors import UsageError
from wirespeed.wire.frames import pack_header, pack_whole
from wirespeed.wire.limits import MESSAGE_OVERHEAD_BYTES, SMALL_BYTES

Buffer = bytes | bytearray | memoryview
FLUSH_EVERY = 16
"""Small messages that one system call carries: enough to share its cost, few enough that the peer can start on them."""
_FLUSH_PARTS = 3 * FLUSH_EVERY


def as_parts(payload: object) -> tuple[list[Buffer], int]:
    """A payload as flat buffers and the sum of their bytes; an object with the buffer protocol is not copied.

    A payload is one such object (bytes, bytearray, memoryview, a C-contiguous array) or a list or tuple of them, sent
    one after another. Raises UsageError for anything else.
    """
    if type(payload) is bytes:
        return [payload], len(payload)
    parts: list[Buffer] = []
    total = 0
    for given in payload if isinstance(payload, list | tuple) else (payload,):
        try:
            part = given if type(given) is bytes else memoryview(given).cast("B")
        except (TypeError, ValueError) as fault:
            raise UsageError(f"got a payload of type {type(given).__name__}", expected="contiguous bytes") from fault
        parts.append(part)
        total += len(part)
    return parts, total


class Outgoing:
    """A message on its way out. ``when_sent`` is called once, after its last byte was handed to the transport."""

    __slots__ = (
        "code",
        "cost",
        "extra",
        "is_dropped",
        "is_started",
        "kind",
        "meta",
        "parts",
        "sent",
        "stream",
        "total",
        "when_sent",
    )

    def __init__(  # noqa: PLR0917 - made once per message
        self,
        kind: int,
        code: int,
        stream: int,
        meta: bytes,
        parts: Sequence[Buffer],
        total: int,
        extra: int,
        when_sent: Callable[[], None] | None = None,
    ) -> None:
        self.kind = kind
        self.code = code
        self.stream = stream
        self.meta = meta
        self.parts = parts
        self.total = total
        self.extra = extra
        self.cost = total + len(meta) + MESSAGE_OVERHEAD_BYTES
        self.sent = 0
        self.is_started = False
        self.is_dropped = False
        self.when_sent = when_sent


class Sender:
    """Sends for one connection. ``credit_bytes`` is what the peer allows; it grows again with ``grant``."""

    def __init__(self, transport: asyncio.Transport, *, credit_bytes: int, chunk_bytes: int) -> None:
        self._transport = transport
        self._credit_bytes = credit_bytes
        self._limit_bytes = credit_bytes
        self._chunk_bytes = chunk_bytes
        self._waiting: deque[Outgoing] = deque()
        self._turns: deque[Outgoing] = deque()
        self._is_paused = False
        self.sent_bytes = 0
        """Handed to the transport so far, headers included."""
        self._small: list[bytes] = []
        """Header, checksum and payload of the small messages of this turn of the event loop."""
        self._loop = asyncio.get_running_loop()
        # uvloop then writes at once instead of at the end of its turn, so that the peer works while this side does. A
        # full socket pauses the sender; what the kernel holds by then keeps the wire busy until it resumes.
        # Under TLS a limit of zero pauses for good: there, what is held back counts as full when it is empty too.
        if transport.get_extra_info("sslcontext") is None:
            transport.set_write_buffer_limits(high=0)

    @property
    def credit_bytes(self) -> int:
        """What may be sent before the peer grants more."""
        return self._credit_bytes

    @property
    def num_waiting(self) -> int:
        """Messages that wait for credit or for their next turn."""
        return len(self._waiting) + len(self._turns)

    def submit(self, message: Outgoing) -> None:
        """Send a message as soon as credit and turns allow."""
        if self._waiting or message.cost > self._credit_bytes:
            self._waiting.append(message)
        else:
            self._start(message)

    def send_now(  # noqa: PLR0917 - runs once per message
        self, kind: int, code: int, stream: int, meta: bytes, parts: Sequence[Buffer], total: int, extra: int
    ) -> bool:
        """Send a message of one frame now, if credit, turns and the transport allow; False: ``submit`` it.

        For most messages: it saves what ``submit`` keeps about one that has to wait.
        """
        cost = total + len(meta) + MESSAGE_OVERHEAD_BYTES
        if self._waiting or cost > self._credit_bytes:
            return False
        if total <= SMALL_BYTES:
            self._credit_bytes -= cost
            self._write_small(pack_header(kind, code, len(meta), stream, total, 0, total, extra), meta, parts)
            return True
        if total > self._chunk_bytes or self._turns or self._is_paused:
            return False
        self._credit_bytes -= cost
        if self._small:
            self.flush()
        head = pack_header(kind, code, len(meta), stream, total, 0, total, extra)
        self.sent_bytes += len(head) + len(meta) + total
        self._transport.writelines((head + meta, *parts))
        return True

    def send_bytes(self, start: bytes, stream: int, payload: bytes, total: int, extra: int) -> bool:
        """As ``send_now``, for at most SMALL_BYTES without meta; ``start`` as ``frames.pack_start`` gives it."""
        credit_bytes = self._credit_bytes - total - MESSAGE_OVERHEAD_BYTES
        if self._waiting or credit_bytes < 0:
            return False
        self._credit_bytes = credit_bytes
        small = self._small
        if not small:
            self._loop.call_soon(self.flush)
        head = pack_whole(start, stream, total, 0, total, extra)
        small += (head, crc32(head).to_bytes(4, "little"), payload)
        if len(small) >= _FLUSH_PARTS:
            self.flush()
        return True

    def write_control(self, frame: bytes) -> None:
        """Send a frame that costs no credit, behind what was sent before it."""
        self._write_small(frame, b"", ())

    def _write_small(self, head: bytes, meta: bytes, parts: Sequence[Buffer]) -> None:
        # One system call carries what one turn of the event loop sends: it costs more than making the message.
        small = self._small
        if not small:
            self._loop.call_soon(self.flush)
        # Copied now: what is not bytes may change before the flush.
        small += (head, meta, b"".join(parts))
        if len(small) >= _FLUSH_PARTS:
            self.flush()

    def flush(self) -> None:
        """Hand the small messages to the transport."""
        if self._small:
            joined = b"".join(self._small)
            self._small.clear()
            self.sent_bytes += len(joined)
            self._transport.write(joined)

    def withdraw(self, message: Outgoing) -> bool:
        """Take a message back if none of it was sent; whether that was so."""
        if message.is_started or message.is_dropped:
            return False
        message.is_dropped = True
        if message in self._waiting:
            self._waiting.remove(message)
        else:
            self._credit_bytes += message.cost
        self._start_waiting()
        return True

    def grant(self, num_bytes: int) -> bool:
        """The peer consumed so much. False where that is more than it was ever sent."""
        self._credit_bytes += num_bytes
        self._start_waiting()
        return self._credit_bytes <= self._limit_bytes

    def pause(self) -> None:
        """The transport is full."""
        self._is_paused = True

    def resume(self) -> None:
        """The transport has room again."""
        self._is_paused = False
        self._pump()

    def close(self) -> None:
        """Drop what was not sent, and say so to nobody: the connection is over."""
        self._waiting.clear()
        self._turns.clear()
        self._small.clear()

    def _start_waiting(self) -> None:
        while self._waiting and self._waiting[0].cost <= self._credit_bytes:
            self._start(self._waiting.popleft())

    def _start(self, message: Outgoing) -> None:
        self._credit_bytes -= message.cost
        if message.total <= SMALL_BYTES:
            total, meta = message.total, message.meta
            head = pack_header(message.kind, message.code, len(meta), message.stream, total, 0, total, message.extra)
            self._write_small(head, meta, message.parts)
            message.is_started = True
            message.sent = total
            if message.when_sent is not None:
                message.when_sent()
            return
        self._turns.append(message)
        self._pump()

    def _pump(self) -> None:
        turns = self._turns
        while turns and not self._is_paused:
            message = turns.popleft()
            if message.is_dropped:
                continue
            self._send_chunk(message)
            if message.sent < message.total:
                turns.append(message)
            elif message.when_sent is not None:
                message.when_sent()

    def _send_chunk(self, message: Outgoing) -> None:
        self.flush()
        offset = message.sent
        length = min(self._chunk_bytes, message.total - offset)
        meta = message.meta if offset == 0 else b""
        head = pack_header(
            message.kind, message.code, len(meta), message.stream, message.total, offset, length, message.extra
        )
        message.is_started = True
        message.sent = offset + length
        self.sent_bytes += len(head) + len(meta) + length
        if len(message.parts) == 1:
            view = (
                message.parts[0] if length == message.total else memoryview(message.parts[0])[offset : offset + length]
            )
            self._transport.writelines((head + meta, view))
        else:
            self._transport.writelines((head + meta, *_slices(message.parts, offset, length)))


def _slices(parts: Sequence[Buffer], offset: int, length: int) -> list[memoryview]:
    found = []
    for part in parts:
        size = len(part)
        if offset < size and length:
            view = memoryview(part)[offset : offset + length]
            found.append(view)
            length -= len(view)
        offset = max(0, offset - size)
    return found
