"""The calling side: a connection to a server, and calls on it, many at once.

    async with await connect("node7:7000") as connection:
        reply = await connection.call("embed", image_bytes, meta=b"jpeg", timeout_s=2.0)

A call ends with a reply, or with CallFailed whose ``status`` says why: after its deadline at the latest (to within 10
ms), at once when the connection is lost. Cancelling the awaiting task cancels the call on the server too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Literal

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError, WirespeedError
from wirespeed.wire.buffers import BufferPool
from wirespeed.wire.endpoint import Endpoint, message_cost
from wirespeed.wire.frames import MAX_META_BYTES, Header, Kind, pack_start
from wirespeed.wire.handshake import (
    Challenge,
    Hello,
    client_proof,
    decode_challenge,
    decode_welcome,
    encode,
    server_proof,
)
from wirespeed.wire.limits import MESSAGE_OVERHEAD_BYTES, SMALL_BYTES, Limits
from wirespeed.wire.reader import Payload, Placement
from wirespeed.wire.security import NONCE_BYTES, Security, is_proof
from wirespeed.wire.segments import Said
from wirespeed.wire.sender import Buffer, Outgoing, Sender, as_parts
from wirespeed.wire.sockets import SocketSettings
from wirespeed.wire.status import CallFailed, Status

SWEEP_S = 0.01
"""How often deadlines are looked at. Shorter ones than ten of these get a timer of their own."""
_REQUEST, _REPLY = int(Kind.REQUEST), int(Kind.REPLY)
_REQUEST_HERE, _REPLY_HERE = int(Kind.REQUEST_HERE), int(Kind.REPLY_HERE)
"""Plain numbers: packing and comparing members of an enum takes longer."""
_MAX_STREAM = 2**32 - 2
_MAX_TIMEOUT_S = 4_294_967
_SHORT_S = 10 * SWEEP_S
_HANDSHAKE = frozenset((Kind.CHALLENGE, Kind.WELCOME, Kind.GOODBYE))
_ESTABLISHED = frozenset(
    (Kind.REPLY, Kind.ERROR, Kind.CREDIT, Kind.PING, Kind.PONG, Kind.GOODBYE, Kind.MEMORY, Kind.REPLY_HERE)
)
_LARGE_BEFORE_SHARING = 2
"""Large messages, either way, before memory is shared with a server on this host: one alone is not worth it."""


class Reply(msgspec.Struct, frozen=True, gc=False):
    """An answer. ``payload`` is bytes, or a view of memory that stays untouched for as long as the view lives."""

    payload: Payload
    meta: bytes


_Call = tuple[asyncio.Future[Reply], Outgoing | None, float, float, memoryview | None]
"""Its future; the message, where it had to wait; time-out and deadline in seconds; where the reply is wanted.

A plain tuple: one is made for every call.
"""


class Connection(Endpoint):
    """A connection to a server. Made by ``connect``; not for several threads."""

    def __init__(
        self, limits: Limits, settings: SocketSettings, security: Security, pool: BufferPool, address: str
    ) -> None:
        super().__init__(limits, settings, pool)
        self.peer = address
        self.methods: tuple[str, ...] = ()
        """What the server answers to."""
        self.goodbye: str | None = None
        """Why the server takes no new calls, once it said so."""
        self._security = security
        self._reader.allowed = _HANDSHAKE
        self._codes: dict[str, tuple[int, bytes]] = {}
        """By method: its number, and how the header of a request of it begins."""
        self._calls: dict[int, _Call] = {}
        self._placed: set[int] = set()
        """Streams whose reply is being received into the memory that the caller gave."""
        self._next_stream = 1
        self._challenge: Challenge | None = None
        self._expected_proof = b""
        self._max_request_bytes = 0
        self._num_large = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._watcher: asyncio.TimerHandle | None = None
        self.ready: asyncio.Future[None] = self._loop.create_future()

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return len(self._calls)

    @property
    def is_usable(self) -> bool:
        """Whether a new call has a chance."""
        return not self.is_closed and self.goodbye is None

    async def call(
        self,
        method: str,
        payload: object = b"",
        *,
        meta: bytes = b"",
        timeout_s: float | None = None,
        into: memoryview | None = None,
    ) -> Reply:
        """Call ``method`` and wait for its reply.

        ``payload``: bytes or a contiguous buffer, or a list of them; not copied when large, so leave it alone until the
        reply is there. ``into``: writable bytes that a reply of exactly that size or less is received into, without a
        copy when large; the reply's payload is then a view of it. Raises CallFailed, and UsageError for what could
        never be sent.
        """
        future = self.call_soon(method, payload, meta=meta, timeout_s=timeout_s, into=into)
        try:
            return await future
        except asyncio.CancelledError:
            self._drop_cancelled()
            raise

    def call_soon(  # noqa: PLR0912 - runs once per call: a function more would cost more than it tells
        self,
        method: str,
        payload: object = b"",
        *,
        meta: bytes = b"",
        timeout_s: float | None = None,
        into: memoryview | None = None,
    ) -> asyncio.Future[Reply]:
        """As ``call``, without waiting. A future that is cancelled cancels the call within 10 ms."""
        coded = self._codes.get(method)
        if coded is None or self.is_closed or self.goodbye is not None:
            raise self._why_not(method)
        parts: list[Buffer] | None = None
        if type(payload) is bytes:
            total = len(payload)
        else:
            parts, total = as_parts(payload)
        if total > self._max_request_bytes or len(meta) > MAX_META_BYTES:
            raise UsageError(
                f"got a message of {total} bytes and {len(meta)} bytes of meta for {self.peer}",
                expected=f"at most {self._max_request_bytes} and {MAX_META_BYTES}",
                hint="send it in parts, or raise max_message_bytes on the server",
            )
        if timeout_s is None:
            timeout_s = self.limits.default_timeout_s
        elif not timeout_s > 0:
            raise UsageError(f"got timeout_s of {timeout_s}", expected="seconds above zero")
        timeout_ms = int(timeout_s * 1000 + 0.5) if timeout_s < _MAX_TIMEOUT_S else _MAX_TIMEOUT_S * 1000
        if timeout_ms == 0:
            timeout_ms = 1
        stream = self._next_stream
        self._next_stream = stream + 1
        if stream >= _MAX_STREAM:
            self.goodbye = "all stream numbers of this connection are used"
        loop, sender = self._loop, self._sender
        future: asyncio.Future[Reply] = loop.create_future()
        assert sender is not None
        outgoing: Outgoing | None = None
        if (
            parts is not None
            or meta
            or total > SMALL_BYTES
            or not sender.send_bytes(coded[1], stream, payload, total, timeout_ms)  # type: ignore[arg-type]
        ):
            code, parts = coded[0], [payload] if parts is None else parts  # type: ignore[list-item]
            if total > SMALL_BYTES and self._send_here(_REQUEST_HERE, code, stream, meta, parts, total, timeout_ms):
                pass
            elif not sender.send_now(_REQUEST, code, stream, meta, parts, total, timeout_ms):
                outgoing = Outgoing(_REQUEST, code, stream, meta, parts, total, timeout_ms)
                sender.submit(outgoing)
            if total > SMALL_BYTES:
                self._count_large()
        self._calls[stream] = (future, outgoing, timeout_s, loop.time() + timeout_s, into)
        if timeout_s < _SHORT_S:
            self._loop.call_later(timeout_s, self._expire, stream)
        elif self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        return future

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """Close the connection. Calls that are under way fail with CANCELLED."""
        if not self.is_closed:
            self._end(None)
        if self._transport is not None:
            self._transport.close()

    # --- frames

    def deliver(self, header: Header, meta: bytes, payload: Payload | None) -> None:
        """See reader.Owner."""
        kind = header.kind
        if kind == _REPLY:
            if header.total > SMALL_BYTES:
                self._count_large()
            self._take_reply(0, header.stream, 0, header.total, meta, payload)
        elif kind == _REPLY_HERE:
            self._take_reply(0, header.stream, 0, header.total, meta, self._found(payload))
        elif kind == Kind.ERROR:
            self._owe(message_cost(header))
            call = self._calls.pop(header.stream, None)
            if call is not None and not call[0].done():
                call[0].set_exception(self._failure(header.code, payload))
        elif kind == Kind.GOODBYE:
            self._take_goodbye(payload)
        elif not self.ready.done():
            self._greet(header, payload)
        else:
            self._deliver_control(header, payload)

    def _take_reply(
        self, _code: int, stream: int, _extra: int, total: int, meta: bytes, payload: Payload | None
    ) -> None:
        call = self._calls.pop(stream, None)
        if call is not None and payload is not None:
            future, _, _, _, into = call
            if not future.done():
                if into is not None:
                    payload = self._moved(stream, payload, into)
                future.set_result(Reply(payload, meta))
        owed_bytes = self._owed_bytes + total + len(meta) + MESSAGE_OVERHEAD_BYTES
        if owed_bytes < self._owe_until_bytes:
            self._owed_bytes = owed_bytes
        else:
            self._owe(owed_bytes - self._owed_bytes)

    def _count_large(self) -> None:
        """Offer shared memory to a server of this host that large messages go to or come from."""
        self._num_large += 1
        if self._num_large == _LARGE_BEFORE_SHARING and self._can_share():
            said = self._make_segment()
            if said.segment is not None:
                self._say_memory(said)

    def _take_memory(self, said: Said) -> None:
        self._segment_answered(said.refused)
        if said.segment is not None:
            self._say_memory(Said(refused=self._map_peer(said)))

    def place(self, header: Header) -> memoryview | Literal[Placement.DROP, Placement.WAIT]:
        """See reader.Owner."""
        call = self._calls.get(header.stream)
        if call is None or call[0].done():
            return Placement.DROP
        into = call[4]
        if into is not None and header.total <= len(into):
            self._placed.add(header.stream)
            return into[: header.total]
        return self._pool.take(header.total)

    def _moved(self, stream: int, payload: Payload, into: memoryview) -> Payload:
        """The reply where its caller wants it, if it fits and is not there already."""
        if stream in self._placed:
            self._placed.discard(stream)
            return payload
        if len(payload) > len(into):
            return payload
        view = into[: len(payload)]
        view[:] = payload
        return view

    def _greet(self, header: Header, payload: Payload | None) -> None:
        if header.kind == Kind.CHALLENGE and self._challenge is None:
            said = bytes(payload or b"")
            challenge = self._challenge = decode_challenge(said)
            if challenge.wants_token and self._security.token is None:
                self.abort(
                    CallFailed(
                        f"{self.peer} asks for a token",
                        status=Status.REFUSED,
                        hint="set WIRESPEED_TOKEN to the server's",
                    )
                )
                return
            nonce, secret = os.urandom(NONCE_BYTES), self._security.secret
            limits = (self.limits.max_message_bytes, self.limits.credit_bytes)
            name = socket.gethostname()[:64]
            hello = Hello(
                nonce=nonce,
                max_message_bytes=limits[0],
                credit_bytes=limits[1],
                name=name,
                proof=client_proof(secret, said, nonce, limits, name),
            )
            sent = encode(hello)
            self._expected_proof = server_proof(secret, said, sent)
            self._control(Kind.HELLO, sent)
        elif header.kind == Kind.WELCOME and self._challenge is not None:
            if not is_proof(decode_welcome(payload or b"").proof, self._expected_proof):
                self.abort(CallFailed(f"{self.peer} does not hold this token", status=Status.REFUSED))
                return
            self._begin(self._challenge)
        else:
            raise DataError(f"got a frame of kind {header.kind} in the handshake")

    def _begin(self, challenge: Challenge) -> None:
        assert self._transport is not None
        self.methods = challenge.methods
        self._codes = {name: (code, pack_start(_REQUEST, code)) for code, name in enumerate(challenge.methods)}
        self._max_request_bytes = challenge.max_message_bytes
        self._sender = Sender(self._transport, credit_bytes=challenge.credit_bytes, chunk_bytes=self.limits.chunk_bytes)
        self._reader.allowed = _ESTABLISHED
        self._reader.quick_kind, self._reader.quick = _REPLY, self._take_reply
        self._idle_s = challenge.idle_s
        self._keepalive_s = min(self.limits.keepalive_s, challenge.idle_s / 3)
        self._wait_to_watch(self._loop.time())
        self.ready.set_result(None)

    _idle_s = 10.0
    _keepalive_s = 1.0
    _watch_due_s = 0.0

    def _wait_to_watch(self, now_s: float) -> None:
        self._watch_due_s = now_s + self._keepalive_s
        self._watcher = self._loop.call_later(self._keepalive_s, self._keep_alive)

    def _keep_alive(self) -> None:
        now_s = self._loop.time()
        late_s = max(0.0, now_s - self._watch_due_s)
        self._wait_to_watch(now_s)
        self._watch(now_s, 3 * self.limits.keepalive_s, late_s=late_s)
        if not self.is_closed:
            self._control(Kind.PING, extra=self._next_stream)

    def _take_goodbye(self, payload: Payload | None) -> None:
        reason = bytes(payload or b"").decode(errors="replace")
        self.goodbye = reason
        if not self.ready.done():
            self.abort(CallFailed(f"{self.peer} refused the connection: {reason}", status=Status.REFUSED))

    # --- deadlines and ends

    def _sweep(self) -> None:
        now_s = self._loop.time()
        late = [s for s, call in self._calls.items() if call[3] <= now_s or call[0].cancelled()]
        for stream in late:
            self._expire(stream)
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if self._calls else None

    def _drop_cancelled(self) -> None:
        for stream in [s for s, call in self._calls.items() if call[0].cancelled()]:
            self._expire(stream)

    def _expire(self, stream: int) -> None:
        call = self._calls.pop(stream, None)
        if call is None:
            return
        future, outgoing, timeout_s, _, _ = call
        self._reader.drop(stream)
        self._placed.discard(stream)
        if self._sender is not None and (outgoing is None or not self._sender.withdraw(outgoing)):
            self._control(Kind.CANCEL, stream=stream)
        if not future.done():
            future.set_exception(
                CallFailed(f"{self.peer} did not answer within {timeout_s:g} s", status=Status.DEADLINE)
            )

    def _failure(self, code: int, payload: Payload | None) -> CallFailed:
        text = bytes(payload or b"").decode(errors="replace")
        status = Status(code) if code in Status.__members__.values() else Status.INTERNAL
        return CallFailed(f"{self.peer}: {text}", status=status)

    def _why_not(self, method: str) -> WirespeedError:
        if self.is_closed:
            return CallFailed(f"the connection with {self.peer} is closed", status=Status.UNAVAILABLE)
        if self.goodbye is not None:
            return CallFailed(f"{self.peer} takes no new calls: {self.goodbye}", status=Status.UNAVAILABLE)
        held = ", ".join(self.methods) or "none"
        return CallFailed(
            f"{self.peer} has no method {method!r}", status=Status.UNKNOWN_METHOD, expected=f"one of: {held}"
        )

    def _when_over(self, reason: BaseException | None) -> None:
        for timer in (self._sweeper, self._watcher):
            if timer is not None:
                timer.cancel()
        calls, self._calls = self._calls, {}
        said = f"; it had said: {self.goodbye}" if self.goodbye else ""
        for future, *_ in calls.values():
            if future.done():
                continue
            if reason is None:
                fault = CallFailed("the connection was closed on this side", status=Status.CANCELLED)
            elif isinstance(reason, CallFailed):
                fault = reason
            else:
                fault = CallFailed(f"{reason}{said}", status=Status.UNAVAILABLE)
            future.set_exception(fault)
        if not self.ready.done():
            problem = f"no connection with {self.peer}: {reason}"
            self.ready.set_exception(reason if isinstance(reason, PeerFailure) else CallFailed(problem))
