"""Socket options of the data plane: set, read back and shown, since the kernel may give less than was asked for."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from typing import Any

import msgspec

from wirespeed.errors import MissingCapability, UsageError
from wirespeed.system import System
from wirespeed.units import format_size

_SPARE_FILES = 128
"""What a server has open besides connections: workers, models, logs, and the connections that it is refusing."""


class SocketSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to set. None leaves the kernel's default: for buffers that is autotuning, which a fixed size would end.

    ``user_timeout_s``: how long sent bytes may stay unacknowledged before the kernel gives the connection up.
    """

    send_buffer_bytes: int | None = None
    receive_buffer_bytes: int | None = None
    no_delay: bool = True
    user_timeout_s: float | None = 10.0
    congestion: str | None = None
    dscp: int | None = None
    """Differentiated services code point (0 to 63) of every packet."""
    reuse_port: bool = False
    """Several processes listen on one port; the kernel spreads connections over them."""
    backlog: int = 4096

    def __post_init__(self) -> None:
        if self.dscp is not None and not 0 <= self.dscp <= 63:
            raise UsageError(f"got dscp of {self.dscp}", expected="0 to 63")


def apply_settings(sock: socket.socket, settings: SocketSettings) -> None:
    """Set the options; before connect or listen, because the TCP window scale is fixed there."""
    tcp = socket.IPPROTO_TCP
    if settings.send_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.send_buffer_bytes)
    if settings.receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.receive_buffer_bytes)
    sock.setsockopt(tcp, socket.TCP_NODELAY, int(settings.no_delay))
    if settings.user_timeout_s is not None:
        sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, round(settings.user_timeout_s * 1000))
    if settings.dscp is not None:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, settings.dscp << 2)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, settings.dscp << 2)
    if settings.congestion is not None:
        try:
            sock.setsockopt(tcp, socket.TCP_CONGESTION, settings.congestion.encode())
        except OSError as fault:
            held = System().read_text("/proc/sys/net/ipv4/tcp_available_congestion_control")
            raise MissingCapability(
                f"congestion control {settings.congestion!r} cannot be set: {fault.strerror}",
                expected=None if held is None else f"one of {held}",
            ) from fault


def describe_socket(sock: socket.socket, settings: SocketSettings) -> dict[str, str]:
    """The options as the kernel holds them, by name. A buffer's size is doubled by the kernel and cut at its limit."""
    shown = {}
    for name, number, asked in (
        ("SO_SNDBUF", socket.SO_SNDBUF, settings.send_buffer_bytes),
        ("SO_RCVBUF", socket.SO_RCVBUF, settings.receive_buffer_bytes),
    ):
        held = sock.getsockopt(socket.SOL_SOCKET, number)
        if asked is None:
            shown[name] = f"autotuned, from {format_size(held)}"
        else:
            # The kernel doubles the request for its own bookkeeping.
            note = "" if held >= 2 * asked else "; cut at the kernel's limit, see net.core.wmem_max and rmem_max"
            shown[name] = f"{format_size(held)} (asked for {format_size(asked)}{note})"
    tcp = socket.IPPROTO_TCP
    shown["TCP_NODELAY"] = "on" if sock.getsockopt(tcp, socket.TCP_NODELAY) else "off"
    shown["TCP_USER_TIMEOUT"] = f"{sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT)} ms"
    shown["TCP_CONGESTION"] = sock.getsockopt(tcp, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
    level, option = (
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        if sock.family == socket.AF_INET6
        else (socket.IPPROTO_IP, socket.IP_TOS)
    )
    shown["DSCP"] = str(sock.getsockopt(level, option) >> 2)
    shown["SO_REUSEPORT"] = "on" if sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) else "off"
    return shown


def split_address(address: str) -> tuple[str, int]:
    """Host and port from ``host:port`` or ``[v6]:port``. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if (
        not colon
        or not (port.isascii() and port.isdigit())
        or int(port) > 65535
        or (":" in host and not host.startswith("["))
    ):
        raise UsageError(f"got address {address!r}", expected="HOST:PORT, such as 127.0.0.1:7000 or [::1]:7000")
    return host.strip("[]"), int(port)


def open_listener(address: str, settings: SocketSettings) -> socket.socket:
    """A bound, listening, non-blocking socket. Raises UsageError where the address cannot be used."""
    host, port = split_address(address)
    family, _, _, _, target = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        apply_settings(sock, settings)
        sock.bind(target)
        sock.listen(settings.backlog)
        sock.setblocking(False)
    except OSError as fault:
        sock.close()
        hint = (
            "another process listens there; choose another port, or 0 for any"
            if fault.errno == errno.EADDRINUSE
            else None
        )
        raise UsageError(f"cannot listen on {address}: {fault.strerror}", hint=hint) from fault
    except BaseException:
        sock.close()
        raise
    return sock


def open_stream(address: str, settings: SocketSettings) -> tuple[socket.socket, Any]:
    """A socket that is not yet connected, and where it is to go."""
    host, port = split_address(address)
    family, _, _, _, target = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        apply_settings(sock, settings)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock, target


def name_of(sock_address: object) -> str:
    """``host:port`` of what getsockname or getpeername gave."""
    with contextlib.suppress(TypeError, IndexError):
        host, port = sock_address[0], sock_address[1]  # type: ignore[index]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return str(sock_address)


def raise_file_limit() -> int:
    """Let this process open as many files as it may without asking anyone, and say how many that is.

    For commands that serve: shells start them with room for 1024, which is for programs that use select.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # it may be above what the kernel allows now
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def room_for_connections(max_connections: int) -> int:
    """How many connections a server takes: those for which the process has files, at most ``max_connections``.

    One that is refused is told so; one for which there is no file would wait in the kernel's queue for nothing.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    return max(1, min(max_connections, soft - _SPARE_FILES))


def _resolve(host: str, port: int) -> tuple[int, int, int, str, Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as fault:
        raise UsageError(f"cannot find host {host!r}: {fault.strerror}") from fault
