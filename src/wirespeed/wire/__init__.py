"""The data plane between nodes: framed, multiplexed messages over TCP, with credit, deadlines and proof of identity.

    server = await listen("0.0.0.0:7000", {"embed": embed}, security=Security(token=token))
    connection = await connect("node7:7000", security=Security(token=token))
    reply = await connection.call("embed", image, timeout_s=2.0)

This is the whole public interface. docs/reference/wire.md holds the format and its rules. uvloop, where it is installed
(``new_event_loop``), makes it about twice as fast; without it everything works on asyncio's own loop.
"""

from wirespeed.wire.answering import Answer, Handler, Request
from wirespeed.wire.buffers import BufferPool
from wirespeed.wire.client import Connection, Reply
from wirespeed.wire.connecting import connect
from wirespeed.wire.limits import Limits
from wirespeed.wire.loops import new_event_loop, run
from wirespeed.wire.security import Security
from wirespeed.wire.server import Server, listen
from wirespeed.wire.sockets import SocketSettings
from wirespeed.wire.status import CallFailed, Status

__all__ = [
    "Answer",
    "BufferPool",
    "CallFailed",
    "Connection",
    "Handler",
    "Limits",
    "Reply",
    "Request",
    "Security",
    "Server",
    "SocketSettings",
    "Status",
    "connect",
    "listen",
    "new_event_loop",
    "run",
]
