"""The answering side: a listener, and handlers by method name.

    async def embed(request: Request) -> Answer:
        return Answer(model(request.payload), meta=b"f32")

    server = await listen("127.0.0.1:0", {"embed": embed})

A handler may be a plain function where it never waits: that saves a task per request. A request's payload and the
memory behind it belong to the handler until it returns; what it keeps a view of is not reused. Handlers that raise
CallFailed answer with its status; any other exception answers INTERNAL with the exception's text and is handed to
``on_error``.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping

from wirespeed.errors import UsageError
from wirespeed.wire.answering import ErrorCallback, Handler, Request, ServerConnection
from wirespeed.wire.buffers import BufferPool, MemoryBudget
from wirespeed.wire.handshake import MAX_METHODS, Challenge, encode
from wirespeed.wire.limits import Limits
from wirespeed.wire.security import NONCE_BYTES, Security
from wirespeed.wire.sockets import SocketSettings, name_of, open_listener, room_for_connections, split_address

_SWEEP_S = 0.01
_WATCH_S = 1.0


class Server:
    """A listener and its connections. Made by ``listen``."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        security: Security,
        limits: Limits,
        settings: SocketSettings,
        on_error: ErrorCallback | None,
    ) -> None:
        if not handlers or len(handlers) > MAX_METHODS:
            raise UsageError(f"got {len(handlers)} handlers", expected=f"1 to {MAX_METHODS}")
        self.handlers = tuple(handlers.items())
        self.security = security
        self.limits = limits
        self.settings = settings
        self.pool = BufferPool()
        self.budget = MemoryBudget(limits.memory_bytes)
        self.connections: set[ServerConnection] = set()
        self._max_connections = room_for_connections(limits.max_connections)
        self.address = ""
        """Where it listens, with the port that the kernel chose."""
        self.draining: str | None = None
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._watch_due_s = self._loop.time() + _WATCH_S
        self._watcher = self._loop.call_later(_WATCH_S, self._watch)
        self._swept: set[ServerConnection] = set()
        self._sharing: set[ServerConnection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def num_running(self) -> int:
        """Requests without an answer, over all connections."""
        return sum(connection.num_running for connection in self.connections)

    async def drain(self, *, timeout_s: float = 30.0, reason: str = "it is shutting down") -> bool:
        """Take no new calls, wait for those under way, then close.

        False where some did not end within ``timeout_s``.
        """
        self.draining = reason
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.say_goodbye(reason)
        end_s = self._loop.time() + timeout_s
        while any(c.num_running or c.num_unsent for c in self.connections) and self._loop.time() < end_s:
            await asyncio.sleep(_SWEEP_S)
        is_empty = not any(c.num_running or c.num_unsent for c in self.connections)
        await self.close()
        return is_empty

    async def close(self) -> None:
        """Stop listening and close every connection; requests under way are cancelled."""
        self._watcher.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.abort() if connection.num_unsent else connection.finish()
        await asyncio.sleep(0)

    # --- for connections

    def admit(self, connection: ServerConnection) -> bool:
        """Whether one more connection is taken."""
        if len(self.connections) >= self._max_connections:
            return False
        self.connections.add(connection)
        return True

    def may_share(self, connection: ServerConnection) -> bool:
        """Whether one more connection may share memory: as many as ``memory_bytes`` allows."""
        if len(self._sharing) >= self.limits.memory_bytes // max(1, self.limits.segment_bytes):
            return False
        self._sharing.add(connection)
        return True

    def forget(self, connection: ServerConnection) -> None:
        """A connection is over."""
        self.connections.discard(connection)
        self._sharing.discard(connection)
        self._swept.discard(connection)

    def challenge(self) -> bytes:
        """What a new connection is greeted with; its nonce is new each time."""
        return encode(
            Challenge(
                nonce=os.urandom(NONCE_BYTES),
                max_message_bytes=self.limits.max_message_bytes,
                credit_bytes=self.limits.credit_bytes,
                methods=tuple(name for name, _ in self.handlers),
                wants_token=self.security.token is not None,
                max_streams=self.limits.max_streams,
                idle_s=3 * self.limits.keepalive_s,
            )
        )

    def report(self, request: Request, fault: BaseException) -> None:
        """A handler failed with something that it did not mean to say."""
        if self._on_error is not None:
            self._on_error(request, fault)

    def watch_deadlines(self, connection: ServerConnection) -> None:
        """A connection has a request with a deadline."""
        self._swept.add(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        now_s = self._loop.time()
        for connection in list(self._swept):
            connection.sweep(now_s)
            if not connection.num_running:
                self._swept.discard(connection)
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep) if self._swept else None

    def _watch(self) -> None:
        now_s, idle_s = self._loop.time(), 3 * self.limits.keepalive_s
        late_s = max(0.0, now_s - self._watch_due_s)
        for connection in list(self.connections):
            if connection.is_established:
                connection.watch(now_s, idle_s, late_s=late_s)
        self._watch_due_s = now_s + _WATCH_S
        self._watcher = self._loop.call_later(_WATCH_S, self._watch)

    def _listen(self, listener: asyncio.Server, address: str) -> None:
        self._listener = listener
        self.address = address


async def listen(
    address: str,
    handlers: Mapping[str, Handler],
    *,
    security: Security | None = None,
    limits: Limits | None = None,
    sockets: SocketSettings | None = None,
    on_error: ErrorCallback | None = None,
) -> Server:
    """Listen on ``host:port`` (port 0: any) and answer calls with ``handlers``.

    Raises UsageError where the address cannot be used, or can be reached from elsewhere while nothing protects it.
    """
    security = Security() if security is None else security
    settings = SocketSettings() if sockets is None else sockets
    host, _ = split_address(address)
    security.check_listening(host)
    context: ssl.SSLContext | None = security.listening_context()
    server = Server(
        handlers, security=security, limits=Limits() if limits is None else limits, settings=settings, on_error=on_error
    )
    sock = open_listener(address, settings)
    loop = asyncio.get_running_loop()
    try:
        listener = await loop.create_server(
            lambda: ServerConnection(server), sock=sock, ssl=context, backlog=settings.backlog
        )
    except BaseException:
        sock.close()
        raise
    server._listen(listener, name_of(sock.getsockname()))
    return server
