"""Opening a connection: resolve, connect, TLS, and the handshake, all within one deadline."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

from wirespeed.errors import PeerFailure
from wirespeed.wire.buffers import BufferPool
from wirespeed.wire.client import Connection
from wirespeed.wire.limits import Limits
from wirespeed.wire.security import Security
from wirespeed.wire.sockets import SocketSettings, open_stream, split_address

_OF_THREAD = threading.local()


def shared_pool() -> BufferPool:
    """The buffers that all client connections of this thread, and so of its event loop, share."""
    pool: BufferPool | None = getattr(_OF_THREAD, "pool", None)
    if pool is None:
        pool = _OF_THREAD.pool = BufferPool()
    return pool


async def connect(
    address: str,
    *,
    timeout_s: float = 10.0,
    security: Security | None = None,
    limits: Limits | None = None,
    sockets: SocketSettings | None = None,
) -> Connection:
    """A connection with the server at ``host:port``, ready for calls.

    Raises PeerFailure where there is none within ``timeout_s``: nobody listens, the peer is not a wirespeed, or it does
    not accept this side's token.
    """
    security = Security() if security is None else security
    settings = SocketSettings() if sockets is None else sockets
    limits = Limits() if limits is None else limits
    loop = asyncio.get_running_loop()
    host, _ = split_address(address)
    context = security.connecting_context()
    name = None if context is None else (security.server_name or host)
    sock, target = open_stream(address, settings)
    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, target)
            _, connection = await loop.create_connection(
                lambda: Connection(limits, settings, security, shared_pool(), address),
                sock=sock,
                ssl=context,
                server_hostname=name,
            )
            await connection.ready
    except TimeoutError:
        _abandon(connection, sock)
        raise PeerFailure(
            f"no connection with {address} within {timeout_s:g} s",
            hint="is it a wirespeed, and does it speak TLS as this side does?",
        ) from None
    except OSError as fault:
        _abandon(connection, sock)
        # asyncio puts its own words where the kernel's would be ("Connect call failed").
        reason = os.strerror(fault.errno) if fault.errno else str(fault)
        raise PeerFailure(f"no connection with {address}: {reason}") from fault
    except BaseException:
        _abandon(connection, sock)
        raise
    return connection


def _abandon(connection: Connection | None, sock: socket.socket) -> None:
    if connection is None:
        sock.close()
        return
    if connection.ready.done() and not connection.ready.cancelled():
        connection.ready.exception()  # seen
    connection.abort()
    if connection.ready.done() and not connection.ready.cancelled():
        connection.ready.exception()
