"""What both sides of a connection share: reading, sending, credit owed, keepalive, and the end.

A connection that breaks a rule is told why (GOODBYE) and closed; nothing after the first broken frame is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Literal

from wirespeed.errors import DataError, MissingCapability, PeerFailure
from wirespeed.units import format_size
from wirespeed.wire.buffers import BufferPool
from wirespeed.wire.frames import Header, Kind, pack_header
from wirespeed.wire.limits import MESSAGE_OVERHEAD_BYTES, Limits
from wirespeed.wire.reader import FrameReader, Payload, Placement
from wirespeed.wire.segments import PLACE_BYTES, OwnSegment, PeerSegment, Said, decode_said, encode_said
from wirespeed.wire.sender import Buffer, Sender
from wirespeed.wire.sockets import SocketSettings, describe_socket, name_of


class Endpoint(asyncio.BufferedProtocol):
    """One end of one connection. The two sides derive from it and say what their frames mean."""

    def __init__(self, limits: Limits, settings: SocketSettings, pool: BufferPool) -> None:
        self.limits = limits
        self.peer = "a peer"
        self.received_bytes = 0
        self.is_closed = False
        self._settings = settings
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._sender: Sender | None = None
        self._owed_bytes = 0
        self._owe_until_bytes = -(-limits.credit_bytes // 4)
        self._heard_s = self._loop.time()
        self._progress_s = self._heard_s
        self._reader = FrameReader(
            self,
            allowed=frozenset(),
            max_message_bytes=limits.max_message_bytes,
            pool=pool,
            expect=self._set_low_water,
        )
        self._socket: socket.socket | None = None
        self._low_water = 1
        self._own_segment: OwnSegment | None = None
        """Memory that this side writes messages to; used once the peer has mapped it."""
        self._peer_segment: PeerSegment | None = None
        self._is_segment_mapped = False
        self._memory = "off"
        self.closed: asyncio.Future[BaseException | None] = self._loop.create_future()
        """Resolved when the connection is over, with what ended it, or None where it was closed on purpose."""

    # --- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the transport."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self._transport = transport  # type: ignore[assignment]
        if not self.peer or self.peer == "a peer":
            self.peer = name_of(transport.get_extra_info("peername"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the transport."""
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the transport."""
        if self.is_closed:
            return
        self.received_bytes += nbytes
        try:
            self._reader.buffer_updated(nbytes)
        except DataError as fault:
            self._refuse(fault)

    def eof_received(self) -> bool:
        """Called by the transport. A half-closed connection is of no use."""
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the transport."""
        if not self.is_closed:
            reason = "it closed the connection" if exc is None else str(exc) or type(exc).__name__
            self._end(PeerFailure(f"lost {self.peer}: {reason}"))
        self._reader.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def pause_writing(self) -> None:
        """Called by the transport."""
        if self._sender is not None:
            self._sender.pause()

    def resume_writing(self) -> None:
        """Called by the transport."""
        self._progress_s = self._loop.time()
        if self._sender is not None:
            self._sender.resume()

    @property
    def sent_bytes(self) -> int:
        """What this side has sent, headers included."""
        return self._greeting_bytes + (0 if self._sender is None else self._sender.sent_bytes)

    _greeting_bytes = 0

    # --- for the owner of the connection

    def describe(self) -> dict[str, str]:
        """The socket's options as the kernel holds them, and TLS's version and cipher, or "off"."""
        if self._transport is None:
            return {}
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        shown = {} if sock is None or sock.fileno() < 0 else describe_socket(sock, self._settings)
        cipher = self._transport.get_extra_info("cipher")
        shown["TLS"] = "off" if cipher is None else f"{cipher[1]} {cipher[0]}"
        shown["shared memory"] = self._memory
        return shown

    def abort(self, reason: BaseException | None = None) -> None:
        """End the connection now; what was not sent is lost."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """End the connection once what was handed to the transport is sent."""
        self._end(None)
        if self._transport is not None:
            self._transport.close()

    # --- for derived sides

    def place(self, header: Header) -> memoryview | Literal[Placement.DROP, Placement.WAIT]:
        """See reader.Owner."""
        return self._pool.take(header.total)

    def deliver(self, header: Header, meta: bytes, payload: Payload | None) -> None:
        """See reader.Owner."""
        raise NotImplementedError

    def _when_over(self, reason: BaseException | None) -> None:
        """Called once, when the connection is over."""
        raise NotImplementedError

    def _control(self, kind: Kind, payload: bytes = b"", *, stream: int = 0, extra: int = 0) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        size = len(payload)
        frame = pack_header(kind, 0, 0, stream, size, 0, size, extra) + payload
        if self._sender is None:
            self._greeting_bytes += len(frame)
            self._transport.write(frame)
        else:
            self._sender.write_control(frame)

    def _owe(self, num_bytes: int) -> None:
        """A message was consumed: the peer may send as much again."""
        self._owed_bytes += num_bytes
        if self._owed_bytes >= self._owe_until_bytes:
            owed, self._owed_bytes = self._owed_bytes, 0
            self._control(Kind.CREDIT, extra=owed)

    def _deliver_control(self, header: Header, payload: Payload | None) -> None:
        kind = header.kind
        if kind == Kind.CREDIT:
            if self._sender is None or not self._sender.grant(header.extra):
                raise DataError(f"got {header.extra} bytes of credit that were never used")
            self._progress_s = self._loop.time()
        elif kind == Kind.PING:
            self._control(Kind.PONG, extra=header.extra)
        elif kind == Kind.MEMORY:
            self._take_memory(decode_said(payload or b""))
        elif kind != Kind.PONG:
            raise DataError(f"got a frame of kind {kind} at this point of the connection")

    def _can_share(self) -> bool:
        """Whether the peer is a process of this host, as far as addresses tell, and nothing forbids shared memory."""
        transport = self._transport
        if not self.limits.segment_bytes or transport is None:
            return False
        if transport.get_extra_info("sslcontext") is not None:
            return False
        own, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        return bool(own) and bool(peer) and own[0] == peer[0]

    def _make_segment(self) -> Said:
        """What to tell the peer of this side's segment."""
        try:
            self._own_segment = OwnSegment(self.limits.segment_bytes)
        except MissingCapability as fault:
            self._memory = f"off: {fault.problem}"
            return Said()
        return Said(segment=self._own_segment.offer)

    def _map_peer(self, said: Said) -> str:
        """Map the peer's segment, if it told of one; the reason where that cannot be."""
        if said.segment is None:
            return ""
        if self._peer_segment is not None or not self._can_share():
            return "shared memory is off on this side, or it was mapped before"
        try:
            self._peer_segment = PeerSegment(said.segment, max_message_bytes=self.limits.max_message_bytes)
        except MissingCapability as fault:
            return fault.problem
        return ""

    def _segment_answered(self, refused: str) -> None:
        """The peer has mapped this side's segment, or says why not."""
        if self._own_segment is None:
            return
        self._own_segment.close()
        if refused:
            self._own_segment, self._memory = None, f"off: {refused}"
        else:
            self._is_segment_mapped = True
            self._memory = f"on, {format_size(self.limits.segment_bytes)}"

    def _say_memory(self, said: Said) -> None:
        self._control(Kind.MEMORY, encode_said(said))

    def _take_memory(self, said: Said) -> None:
        """The peer said something of memory."""
        raise NotImplementedError

    def _send_here(  # noqa: PLR0917 - runs once per large message
        self, kind: int, code: int, stream: int, meta: bytes, parts: Sequence[Buffer], total: int, extra: int
    ) -> bool:
        """Send a message by shared memory, if that is on and there is room and nothing waits; else use the socket."""
        segment, sender = self._own_segment, self._sender
        if segment is None or not self._is_segment_mapped or sender is None:
            return False
        place = segment.put(parts, total)
        if place is None:
            return False
        if sender.send_now(kind, code, stream, meta, (place,), PLACE_BYTES, extra):
            sender.flush()  # the peer looks at this one while the next is copied
            return True
        segment.take_back(place)
        return False

    def _found(self, place: Payload | None) -> memoryview:
        """The payload of a message that lies in the peer's segment."""
        if self._peer_segment is None or place is None:
            raise DataError("got a message in memory that is not shared")
        return self._peer_segment.view(place)

    def _set_low_water(self, num_bytes: int) -> None:
        """Be woken when so many bytes are there (0: any): SO_RCVLOWAT, which event loops heed by way of epoll."""
        wanted = max(1, num_bytes)
        transport = self._transport
        if wanted == self._low_water or transport is None or self.is_closed:
            return
        if self._socket is None:
            held = transport.get_extra_info("socket")
            # Under TLS whole records are needed, whose ends are not known here.
            if held is None or held.fileno() < 0 or transport.get_extra_info("sslcontext") is not None:
                return
            self._socket = socket.socket(fileno=os.dup(held.fileno()))
        with contextlib.suppress(OSError):  # it only saves time
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._low_water = wanted

    def _watch(self, now_s: float, idle_s: float, *, late_s: float) -> None:
        """Called about once a second: end a connection whose peer is silent or takes nothing.

        ``late_s``: by how much the call is late. So long this process slept (it was stopped, or got no core): what the
        peer sent meanwhile lies unread, and that time is not counted against it.
        """
        self._heard_s += late_s
        self._progress_s += late_s
        if self.received_bytes != self._seen_bytes:
            self._seen_bytes = self.received_bytes
            self._heard_s = now_s
        else:
            # A link that became thin: what there is of a payload is a sign of life, and is not waited for.
            self._set_low_water(0)
        waits = now_s - self._heard_s
        if self._reader.is_waiting:
            self._heard_s = now_s  # it is us who do not read
        elif self._reader.is_stalled(now_s, self.limits.stall_s + late_s):
            self.abort(PeerFailure(f"lost {self.peer}: a message made no progress for {self.limits.stall_s:g} s"))
            return
        elif waits > idle_s:
            self.abort(PeerFailure(f"lost {self.peer}: it said nothing for {waits:.1f} s"))
            return
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > 0:
            size = transport.get_write_buffer_size()
            if size != self._seen_write_bytes:
                self._seen_write_bytes, self._progress_s = size, now_s
            elif now_s - self._progress_s > self.limits.stall_s:
                self.abort(PeerFailure(f"lost {self.peer}: it took no bytes for {self.limits.stall_s:g} s"))
        else:
            self._progress_s, self._seen_write_bytes = now_s, 0

    _seen_bytes = -1
    _seen_write_bytes = 0

    def _refuse(self, fault: DataError) -> None:
        self._control(Kind.GOODBYE, str(fault).encode()[:1024])
        self._end(
            DataError(f"{self.peer} broke the protocol: {fault.problem}", expected=fault.expected, hint=fault.hint)
        )
        if self._transport is not None:
            self._transport.close()

    def _end(self, reason: BaseException | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._sender is not None:
            if self._transport is not None and not self._transport.is_closing():
                self._sender.flush()
            self._sender.close()
        if self._own_segment is not None:
            self._own_segment.close()
        self._own_segment = self._peer_segment = None  # views that are still looked at keep what they need
        self._when_over(reason)
        if not self.closed.done():
            self.closed.set_result(reason)


def message_cost(header: Header) -> int:
    """The credit that a message costs."""
    return header.total + header.meta_bytes + MESSAGE_OVERHEAD_BYTES
