"""The control channel of a measurement between hosts: one JSON document per line over TCP, bounded, with deadlines.

Rank 0 listens at the master's address; every rank connects, proves that it holds the same WIRESPEED_TOKEN (empty where
none is set) and then does what rank 0 says. Only the types of messages.py are accepted, and no line above 64 KiB. The
channel is not encrypted: it carries host names, addresses and timings.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.measure.clock import Deadline
from wirespeed.measure.messages import Challenge, Fault, Hello, Message
from wirespeed.units import KIB

MAX_LINE_BYTES = 64 * KIB
_RETRY_S = 0.05


_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Channel:
    """One end of a control connection. ``peer`` names the other end in errors."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection = connection
        self.peer = peer
        self._pending = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.connection.fileno()

    def send(self, message: Message, *, timeout_s: float = 10.0) -> None:
        """Send one message. Raises PeerFailure where the peer is gone or does not read."""
        try:
            self.connection.settimeout(timeout_s)
            self.connection.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as fault:
            raise PeerFailure(f"{self.peer} cannot be told anything: {_reason(fault)}") from fault

    def receive(self, deadline: Deadline) -> Message:
        """The next message. Raises PeerFailure at the deadline or when the peer is gone, DataError for nonsense."""
        while True:
            message = self.next_message()
            if message is not None:
                return message
            self.read(deadline.check())

    def next_message(self) -> Message | None:
        """A message that has arrived already, or None."""
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            if len(self._pending) > MAX_LINE_BYTES:
                raise DataError(f"{self.peer} sent a control line above {MAX_LINE_BYTES} bytes")
            return None
        self._pending = rest
        try:
            return _DECODER.decode(line)
        except msgspec.MsgspecError as fault:
            raise DataError(f"{self.peer} sent a control message that is not understood: {fault}") from fault

    def read(self, timeout_s: float) -> None:
        """Wait for bytes from the peer, up to ``timeout_s``; the caller's deadline decides what lateness means."""
        self.connection.settimeout(timeout_s)
        try:
            got = self.connection.recv(MAX_LINE_BYTES)
        except (TimeoutError, BlockingIOError):
            return
        except OSError as fault:
            raise PeerFailure(f"lost {self.peer}: {_reason(fault)}") from fault
        if not got:
            raise PeerFailure(f"lost {self.peer}: it closed the control connection")
        self._pending += got

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def receive_from_all(channels: Iterable[Channel], deadline: Deadline) -> dict[Channel, Message]:
    """One message of each channel. Raises PeerFailure naming the host that failed or those that did not answer."""
    waiting = list(channels)
    got: dict[Channel, Message] = {}
    with selectors.DefaultSelector() as selector:
        for channel in waiting:
            selector.register(channel, selectors.EVENT_READ)
        while True:
            for channel in [c for c in waiting if c not in got]:
                message = channel.next_message()
                if isinstance(message, Fault):
                    raise PeerFailure(f"{channel.peer}: {message.text}")
                if message is not None:
                    got[channel] = message
                    selector.unregister(channel)
            if len(got) == len(waiting):
                return got
            if deadline.remaining_s <= 0:
                late = ", ".join(c.peer for c in waiting if c not in got)
                raise PeerFailure(f"{late} did not answer: {deadline.what} did not end within {deadline.seconds:g} s")
            for key, _ in selector.select(deadline.remaining_s):
                assert isinstance(key.fileobj, Channel)
                key.fileobj.read(0.0)


def token() -> bytes:
    """The shared secret of this measurement's ranks."""
    return os.environ.get("WIRESPEED_TOKEN", "").encode()


def proof(nonce: str, rank: int) -> str:
    """The challenge, signed for one rank."""
    return hmac.new(token(), f"{nonce} {rank}".encode(), hashlib.sha256).hexdigest()


def listen(address: str, port: int) -> socket.socket:
    """Listen on the master's address. Raises UsageError where it is not this host's or the port is taken."""
    family, target = resolve(address, port)
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(target)
        server.listen(1024)
    except OSError as fault:
        server.close()
        hint = "rank 0 must run on the master's host"
        if fault.errno == errno.EADDRINUSE:
            hint = "another program holds the port; choose one with --port, the same on every rank"
        raise UsageError(f"cannot listen at {address} port {port}: {_reason(fault)}", hint=hint) from fault
    return server


def connect(address: str, port: int, deadline: Deadline) -> Channel:
    """Connect to rank 0, again and again until it listens. Raises PeerFailure at the deadline."""
    while True:
        try:
            family, target = resolve(address, port)
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(deadline.remaining_s, _RETRY_S))
                connection.connect(target)
            except OSError:
                connection.close()
                raise
        except OSError as fault:
            if deadline.remaining_s <= 0:
                raise PeerFailure(
                    f"cannot reach rank 0 at {address} port {port} within {deadline.seconds:g} s: {_reason(fault)}",
                    hint="check that rank 0 runs, and that MASTER_ADDR is an address the other hosts reach",
                ) from fault
            time.sleep(min(_RETRY_S, deadline.remaining_s))
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Channel(connection, "rank 0")


def resolve(address: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """The first stream address of a name. Raises OSError where it has none."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return family, target


def admit(server: socket.socket, num_ranks: int, deadline: Deadline) -> dict[Channel, Hello]:
    """Accept every rank once; strangers and broken greetings are turned away.

    Raises PeerFailure naming the ranks that did not come.
    """
    admitted: dict[Channel, Hello] = {}
    try:
        while len(admitted) < num_ranks:
            missing = sorted(set(range(num_ranks)) - {hello.rank for hello in admitted.values()})
            _check_joining(missing, num_ranks, deadline)
            server.settimeout(deadline.remaining_s)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            hello = _greet(connection)
            if hello is None or hello.rank not in missing:
                connection.close()
                continue
            admitted[Channel(connection, f"host {hello.host} (rank {hello.rank})")] = hello
    except BaseException:
        for channel in admitted:
            channel.close()
        raise
    return admitted


def _check_joining(missing: list[int], num_ranks: int, deadline: Deadline) -> None:
    if deadline.remaining_s <= 0:
        raise PeerFailure(
            f"{len(missing)} of {num_ranks} ranks did not join within {deadline.seconds:g} s: "
            f"rank {', '.join(map(str, missing[:20]))}",
            hint="start the same command on every host, with the same MASTER_ADDR, port and WIRESPEED_TOKEN",
        )


def _greet(connection: socket.socket) -> Hello | None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel, nonce = Channel(connection, "a joining rank"), secrets.token_hex(16)
    try:
        channel.send(Challenge(nonce=nonce), timeout_s=2.0)
        hello = channel.receive(Deadline(2.0, "its greeting"))
    except (PeerFailure, DataError):
        return None
    if not isinstance(hello, Hello) or not hmac.compare_digest(hello.proof, proof(nonce, hello.rank)):
        return None
    return hello


def _reason(fault: OSError) -> str:
    return fault.strerror or str(fault) or type(fault).__name__
