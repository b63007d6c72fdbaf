"""One client's connection, on the answering side: its requests, their handlers, and their answers.

A handler may be a plain function where it never waits: that saves a task per request. A request's payload and the
memory behind it belong to the handler until it returns; what it keeps a view of is not reused.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError, WirespeedError
from wirespeed.wire.endpoint import Endpoint, message_cost
from wirespeed.wire.frames import MAX_META_BYTES, Header, Kind, pack_start
from wirespeed.wire.handshake import Welcome, client_proof, decode_hello, encode, server_proof
from wirespeed.wire.limits import MESSAGE_OVERHEAD_BYTES, SMALL_BYTES
from wirespeed.wire.reader import Payload, Placement
from wirespeed.wire.security import is_proof
from wirespeed.wire.segments import Said
from wirespeed.wire.sender import Buffer, Outgoing, Sender, as_parts
from wirespeed.wire.status import CallFailed, Status

if TYPE_CHECKING:
    from wirespeed.wire.server import Server

_HANDSHAKE = frozenset((Kind.HELLO,))
_ESTABLISHED = frozenset(
    (Kind.REQUEST, Kind.CREDIT, Kind.CANCEL, Kind.PING, Kind.PONG, Kind.GOODBYE, Kind.MEMORY, Kind.REQUEST_HERE)
)


class Request(msgspec.Struct, frozen=True, gc=False):
    """One call, as its handler sees it. ``deadline_s`` is on the event loop's clock."""

    method: str
    payload: Payload
    meta: bytes
    deadline_s: float
    peer: str
    stream: int

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller gives up; below zero when it has."""
        return self.deadline_s - asyncio.get_running_loop().time()


class Answer:
    """What a handler gives back when it has meta to give. ``payload`` as in ``Connection.call``."""

    __slots__ = ("meta", "payload")

    def __init__(self, payload: object = b"", *, meta: bytes = b"") -> None:
        self.payload = payload
        self.meta = meta


Handler = Callable[[Request], object]
"""Takes a Request; gives an Answer, a payload, or an awaitable of one."""
ErrorCallback = Callable[[Request, BaseException], None]
_REQUEST, _REPLY, _OK = int(Kind.REQUEST), int(Kind.REPLY), int(Status.OK)
"""Plain numbers: packing and comparing members of an enum takes longer."""
_REQUEST_HERE, _REPLY_HERE = int(Kind.REQUEST_HERE), int(Kind.REPLY_HERE)
_REPLY_START = pack_start(_REPLY, _OK)
_AT_ONCE = (bytes, memoryview, Answer)  # asking whether something is an Awaitable takes longer


class ServerConnection(Endpoint):
    """One client's connection. Made by the server."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.limits, server.settings, server.pool)
        self.client_name = ""
        self._server = server
        self._reader.allowed = _HANDSHAKE
        self._challenge = b""
        self._running: dict[int, tuple[asyncio.Future[object], Request]] = {}
        self._answers: dict[int, Outgoing] = {}
        self._held_bytes = 0
        self._placed: dict[int, int] = {}
        """Bytes that are counted as held, by stream."""
        self._handshake_timer = self._loop.call_later(self.limits.handshake_s, self._handshake_late)
        self._max_reply_bytes = 0
        self._last_stream = 0
        self._is_paused = False
        self.is_established = False

    @property
    def num_running(self) -> int:
        """Requests that have no answer yet."""
        return len(self._running)

    @property
    def num_unsent(self) -> int:
        """Answers that are not wholly handed to the transport."""
        return len(self._answers)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the transport."""
        super().connection_made(transport)
        if not self._server.admit(self):
            self._control(Kind.GOODBYE, b"the server has all the connections that it takes")
            self._end(PeerFailure("too many connections"))
            transport.close()
            return
        self._challenge = self._server.challenge()
        self._control(Kind.CHALLENGE, self._challenge)

    # --- frames

    def place(self, header: Header) -> memoryview | Literal[Placement.DROP, Placement.WAIT]:
        """See reader.Owner."""
        if not self._server.budget.has_room(header.total):
            self._wait_for_memory()
            return Placement.WAIT
        self._hold(header.total)
        self._placed[header.stream] = header.total
        return self._pool.take(header.total)

    def deliver(self, header: Header, meta: bytes, payload: Payload | None) -> None:
        """See reader.Owner."""
        kind = header.kind
        if kind == _REQUEST:
            self._take_request(header, meta, payload)
        elif kind == _REQUEST_HERE:
            self._take_request(header, meta, self._found(payload))
        elif kind == Kind.CANCEL:
            self._cancel(header.stream)
        elif kind == Kind.HELLO and not self.is_established:
            self._take_hello(bytes(payload or b""))
        elif kind == Kind.GOODBYE:
            self.abort(PeerFailure(f"{self.peer} said goodbye: {bytes(payload or b'').decode(errors='replace')}"))
        else:
            self._deliver_control(header, payload)

    def _take_hello(self, said: bytes) -> None:
        hello = decode_hello(said)
        security = self._server.security
        limits = (hello.max_message_bytes, hello.credit_bytes)
        expected = client_proof(security.secret, self._challenge, hello.nonce, limits, hello.name)
        if not is_proof(hello.proof, expected):
            self._control(Kind.GOODBYE, b"the token is not this server's")
            self._end(PeerFailure(f"{self.peer} does not hold this server's token"))
            if self._transport is not None:
                self._transport.close()
            return
        self._handshake_timer.cancel()
        assert self._transport is not None
        self._sender = Sender(self._transport, credit_bytes=hello.credit_bytes, chunk_bytes=self.limits.chunk_bytes)
        self._max_reply_bytes = hello.max_message_bytes
        self.client_name = hello.name
        self.is_established = True
        self._reader.allowed = _ESTABLISHED
        self._reader.quick_kind, self._reader.quick = _REQUEST, self._take_small
        self._control(Kind.WELCOME, encode(Welcome(proof=server_proof(security.secret, self._challenge, said))))
        if self._server.draining is not None:
            self._control(Kind.GOODBYE, self._server.draining.encode())

    def _take_request(self, header: Header, meta: bytes, payload: Payload | None) -> None:
        stream = header.stream
        if payload is None:  # cancelled while it came in
            self._owe(message_cost(header))
            return
        if stream > self._last_stream:
            self._last_stream = stream
        elif stream in self._running or stream in self._answers:
            raise DataError(f"got stream {stream} twice")
        server = self._server
        handlers = server.handlers
        deadline_s = self._loop.time() + header.extra / 1000
        if header.code >= len(handlers):
            self._fail(header, Status.UNKNOWN_METHOD, f"no method of number {header.code}")
        elif server.draining is not None:
            self._fail(header, Status.UNAVAILABLE, f"it takes no new calls: {server.draining}")
        elif len(self._running) + len(self._answers) >= self.limits.max_streams:
            self._fail(header, Status.EXHAUSTED, f"{self.limits.max_streams} requests are under way on this connection")
        else:
            name, handler = handlers[header.code]
            self._run(header, Request(name, payload, meta, deadline_s, self.peer, stream), handler)
        budget = server.budget
        if budget.used_bytes >= budget.limit_bytes:
            self._wait_for_memory()

    def _take_small(  # noqa: PLR0917 - runs once per request, see reader.Quick
        self, code: int, stream: int, extra: int, total: int, meta: bytes, payload: bytes
    ) -> None:
        """What ``_take_request`` and ``_run`` do, for a small request that is answered at once with small bytes."""
        server = self._server
        handlers = server.handlers
        if (
            stream <= self._last_stream
            or code >= len(handlers)
            or server.draining is not None
            or len(self._running) + len(self._answers) >= self.limits.max_streams
        ):
            self._take_request(Header(_REQUEST, code, len(meta), stream, total, 0, total, extra), meta, payload)
            return
        self._last_stream = stream
        name, handler = handlers[code]
        request = Request(name, payload, meta, self._loop.time() + extra / 1000, self.peer, stream)
        sender, result, fault = self._sender, None, None
        try:
            result = handler(request)
        except Exception as raised:
            fault = raised
        if (
            type(result) is bytes
            and (num_bytes := len(result)) <= SMALL_BYTES
            and num_bytes <= self._max_reply_bytes
            and not self.is_closed
            and sender is not None
            and sender.send_bytes(_REPLY_START, stream, result, num_bytes, 0)
        ):
            owed_bytes = self._owed_bytes + total + len(meta) + MESSAGE_OVERHEAD_BYTES
            if owed_bytes < self._owe_until_bytes:
                self._owed_bytes = owed_bytes
            else:
                self._owe(owed_bytes - self._owed_bytes)
        else:
            header = Header(_REQUEST, code, len(meta), stream, total, 0, total, extra)
            if fault is None:
                self._settle(header, request, result)
            else:
                self._fail_with(header, request, fault)
        budget = server.budget
        if budget.used_bytes >= budget.limit_bytes:
            self._wait_for_memory()

    def _run(self, header: Header, request: Request, handler: Handler) -> None:
        try:
            result = handler(request)
        except Exception as fault:
            self._fail_with(header, request, fault)
            return
        self._settle(header, request, result)

    def _settle(self, header: Header, request: Request, result: object) -> None:
        if type(result) is bytes and len(result) <= SMALL_BYTES and not self.is_closed and self._sender is not None:
            total, send = len(result), self._sender.send_bytes
            if total <= self._max_reply_bytes and send(_REPLY_START, header.stream, result, total, 0):
                self._consumed(header)
                return
        if not isinstance(result, _AT_ONCE) and isinstance(result, Awaitable):
            self._hold_for(header)
            task = asyncio.ensure_future(result)
            self._running[request.stream] = (task, request)
            task.add_done_callback(functools.partial(self._finished, header, request))
            self._server.watch_deadlines(self)
        else:
            self._answer(header, result)

    def _finished(self, header: Header, request: Request, task: asyncio.Future[object]) -> None:
        fault = None if task.cancelled() else task.exception()
        # Whoever cancelled for the caller, for its deadline or at the end of the connection has taken the entry out.
        if self._running.pop(request.stream, None) is None:
            self._consumed(header)
        elif task.cancelled():
            self._fail(header, Status.CANCELLED, "the handler was cancelled")
        elif isinstance(fault, Exception):
            self._fail_with(header, request, fault)
        elif fault is not None:
            self._fail(header, Status.INTERNAL, f"the handler was ended by {type(fault).__name__}")
        else:
            self._answer(header, task.result())

    def _take_memory(self, said: Said) -> None:
        if said.segment is None:
            self._segment_answered(said.refused)
            return
        if not self._server.may_share(self):
            self._say_memory(Said(refused="the server shares as much memory as it may hold"))
            return
        refused = self._map_peer(said)
        self._say_memory(Said(refused=refused) if refused else self._make_segment())

    # --- answers

    def _answer(self, header: Header, answer: object) -> None:
        meta = b""
        if isinstance(answer, Answer):
            meta, answer = answer.meta, answer.payload
        try:
            parts, total = as_parts(b"" if answer is None else answer)
        except UsageError as fault:
            self._fail(header, Status.INTERNAL, f"the handler gave something that cannot be sent: {fault}")
            return
        if total > self._max_reply_bytes or len(meta) > MAX_META_BYTES:
            text = f"the reply has {total} bytes and {len(meta)} of meta; "
            text += f"the caller takes {self._max_reply_bytes} and {MAX_META_BYTES}"
            self._fail(header, Status.EXHAUSTED, text)
            return
        self._send(header, _REPLY, _OK, meta, parts, total)

    def _fail(self, header: Header, status: Status, text: str) -> None:
        said = text.encode()[:4096]
        self._send(header, Kind.ERROR, status, b"", [said], len(said))

    def _fail_with(self, header: Header, request: Request, fault: Exception) -> None:
        if isinstance(fault, CallFailed):
            self._fail(header, fault.status, str(fault))
        elif isinstance(fault, UsageError | DataError):
            self._fail(header, Status.INVALID, str(fault))
        else:
            text = str(fault) if isinstance(fault, WirespeedError) else f"{type(fault).__name__}: {fault}"
            self._fail(header, Status.INTERNAL, text)
            self._server.report(request, fault)

    def _send(  # noqa: PLR0917 - runs once per request
        self, header: Header, kind: int, status: int, meta: bytes, parts: list[Buffer], total: int
    ) -> None:
        if self.is_closed or self._sender is None:
            return
        stream = header.stream
        if (
            total > SMALL_BYTES
            and kind == _REPLY
            and self._send_here(_REPLY_HERE, status, stream, meta, parts, total, 0)
        ):
            self._consumed(header)
            return
        if self._sender.send_now(kind, status, stream, meta, parts, total, 0):
            self._consumed(header)
            return
        self._hold_for(header)

        def when_sent() -> None:
            self._answers.pop(stream, None)
            self._consumed(header)

        outgoing = Outgoing(kind, status, stream, meta, parts, total, 0, when_sent)
        self._answers[stream] = outgoing
        self._sender.submit(outgoing)

    def _consumed(self, header: Header) -> None:
        """The request's memory is free, and its answer, if any, is on its way: the client may send as much again."""
        if self._placed:
            self._release(self._placed.pop(header.stream, 0))
        if not self.is_closed:
            self._owe(header.total + header.meta_bytes + MESSAGE_OVERHEAD_BYTES)

    def _cancel(self, stream: int) -> None:
        entry = self._running.pop(stream, None)
        if entry is not None:
            entry[0].cancel()
            return
        self._reader.drop(stream)
        placed = self._placed.pop(stream, None)
        if placed is not None:
            self._release(placed)
        outgoing = self._answers.get(stream)
        if outgoing is not None and self._sender is not None and self._sender.withdraw(outgoing):
            assert outgoing.when_sent is not None
            outgoing.when_sent()

    def sweep(self, now_s: float) -> None:
        """Cancel what is past its deadline: nobody waits for it."""
        for stream in [s for s, (_, request) in self._running.items() if request.deadline_s <= now_s]:
            self._cancel(stream)

    # --- memory

    def _hold_for(self, header: Header) -> None:
        """Count a request's memory that is not counted yet: one that was answered at once never is."""
        if header.total and header.stream not in self._placed:
            self._hold(header.total)
            self._placed[header.stream] = header.total

    def _hold(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self._server.budget.take(num_bytes)

    def _release(self, num_bytes: int) -> None:
        num_bytes = min(num_bytes, self._held_bytes)
        self._held_bytes -= num_bytes
        self._server.budget.give(num_bytes)

    def _wait_for_memory(self) -> None:
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()
            self._server.budget.call_when_free(self._read_again)

    def _read_again(self) -> None:
        self._is_paused = False
        if self.is_closed or self._transport is None:
            return
        self._transport.resume_reading()
        try:
            self._reader.resume()
        except DataError as fault:
            self._refuse(fault)

    # --- ends

    def watch(self, now_s: float, idle_s: float, *, late_s: float) -> None:
        """See Endpoint._watch."""
        self._watch(now_s, idle_s, late_s=late_s)

    def say_goodbye(self, reason: str) -> None:
        """Tell the client that no new calls are taken."""
        self._control(Kind.GOODBYE, reason.encode())

    def _handshake_late(self) -> None:
        self.abort(PeerFailure(f"{self.peer} did not introduce itself within {self.limits.handshake_s:g} s"))

    def _when_over(self, reason: BaseException | None) -> None:
        self._handshake_timer.cancel()
        running, self._running = self._running, {}
        for task, _ in running.values():
            task.cancel()
        self._answers.clear()
        self._server.budget.give(self._held_bytes)
        self._held_bytes = 0
        self._server.forget(self)
