"""Messages between a lab's keeper and its clients: JSON over a Unix socket that keeps message borders.

Descriptors travel beside a message, so a client enters a host without any access to the keeper's /proc. Both
ends are the same user (the folder has mode 0700).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from wirespeed import errors
from wirespeed.errors import PeerFailure, WirespeedError
from wirespeed.lab import layout

MAX_MESSAGE_BYTES = 128 * 1024
_MAX_DESCRIPTORS = 8

FaultKind = Literal["down", "up", "rate", "partition", "heal"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to make, from the process that starts the keeper. ``owner_pid`` None: until told to end."""

    folder: str
    name: str
    token: str
    lock: int
    owner_pid: int | None
    spec: layout.LabSpec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``end`` ends the processes whose token starts with ``token``; ``down`` ends the lab."""

    op: Literal["hello", "enter", "port", "fault", "status", "end", "down"]
    host: str = ""
    kind: FaultKind = "heal"
    rate_bit_per_s: float | None = None
    other: str | None = None
    token: str = ""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A WirespeedError on its way to the other process."""

    kind: str
    problem: str
    expected: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: WirespeedError) -> Problem:
        """The message for an error."""
        return cls(kind=type(error).__name__, problem=error.problem, expected=error.expected, hint=error.hint)

    def as_error(self) -> WirespeedError:
        """The error again."""
        kind = getattr(errors, self.kind, errors.InternalError)
        made = kind(self.problem, expected=self.expected, hint=self.hint)
        assert isinstance(made, WirespeedError)
        return made


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A host as the kernel has it now; rates in bit/s are read back from the shapers."""

    name: str
    rack: int
    address: str
    is_up: bool
    sends_bit_per_s: float | None
    receives_bit_per_s: float | None
    partitioned_from: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    sent_by_class: tuple[int, int] | None = None
    """Bytes since the lab is up in the first class and in the rest; None in a lab without classes."""
    received_by_class: tuple[int, int] | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A lab as it is now.

    ``delay_by``: netem, line (user space) or none. ``notes`` say what this kernel could not give.
    """

    name: str
    spec: layout.LabSpec
    keeper_pid: int
    rootless: bool
    delay_by: Literal["netem", "line", "none"]
    hosts: tuple[HostStatus, ...]
    notes: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request: what was asked for, or a problem."""

    problem: Problem | None = None
    name: str = ""
    token: str = ""
    keeper_pid: int = 0
    spec: layout.LabSpec | None = None
    port: int = 0
    status: Status | None = None


def listen(folder: Path) -> socket.socket:
    """The keeper's listening socket in a lab's folder."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with _short_path(folder) as path:
        server.bind(path)
    server.listen(64)
    return server


def connect(folder: Path, timeout_s: float) -> socket.socket:
    """A connection to the keeper of a lab's folder. Raises OSError where there is none."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    client.settimeout(timeout_s)
    try:
        with _short_path(folder) as path:
            client.connect(path)
    except OSError:
        client.close()
        raise
    return client


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """The socket's path by way of a descriptor: an address holds 107 bytes, and folders can be deep."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/control"
    finally:
        os.close(descriptor)


def send(connection: socket.socket, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
    """Send one message."""
    socket.send_fds(connection, [msgspec.json.encode(message)], list(descriptors))


def ask(connection: socket.socket, request: Request) -> tuple[Reply, list[int]]:
    """Send a request and wait for its answer; problems are raised as the errors they are."""
    try:
        send(connection, request)
        data, descriptors, flags, _ = socket.recv_fds(
            connection, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except TimeoutError:
        raise PeerFailure(f"the lab's keeper did not answer {request.op!r} in time") from None
    except OSError as error:
        raise PeerFailure(f"the lab's keeper is gone: {error.strerror}") from None
    if not data:
        raise PeerFailure("the lab's keeper is gone")
    assert not flags & socket.MSG_TRUNC, "a status of 200 hosts fits in a message"
    reply = msgspec.json.decode(data, type=Reply)
    if reply.problem is not None:
        raise reply.problem.as_error()
    return reply, descriptors
