"""Mark a process's TCP sockets with a DSCP and a priority, from outside: gloo and NCCL have no setting for that.

``IP_TOS`` (``IPV6_TCLASS``) puts the DSCP into every packet, which switches and tc read; ``SO_PRIORITY`` tells this
host's own queue. Sockets of another process are reached by pidfd_getfd(2) (Linux 5.6), which needs the right to trace
it: the same user, or for a child also where ``kernel.yama.ptrace_scope`` is 1. Sockets that a process opens later are
marked when ``mark_sockets`` is called again; those that a marked listening socket accepts carry its mark from the
start. Loopback connections are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from wirespeed.errors import MissingCapability

_SYS_PIDFD_GETFD = 438
"""The same number on every architecture: it is younger than their common table."""
_EF, _CS6 = 46, 48
_PRIORITY_NORMAL, _PRIORITY_HIGH = 4, 6
"""Of SO_PRIORITY; above 6 needs CAP_NET_ADMIN."""


@dataclass(frozen=True, kw_only=True)
class Marked:
    """What ``mark_sockets`` did: sockets newly marked, and those that carry the mark."""

    num_new: int
    num_marked: int


def mark_sockets(
    dscp: int, pids: Iterable[int], *, loopback: bool = False, peers: Collection[bytes] | None = None
) -> Marked:
    """Mark the TCP sockets of the processes. Those that have ended meanwhile are passed over. 0 takes a mark away.

    ``loopback``: also mark connections within this host (for tests). ``peers``: only connections to these addresses, 16
    bytes each as ``packed_address`` gives them; None: all, and listening sockets too. Raises MissingCapability where
    the kernel does not let this process reach the sockets of another.
    """
    num_new = num_marked = 0
    for pid in pids:
        for held in _sockets_of(pid):
            with held:
                done = _mark(held, dscp, loopback=loopback) if _is_to(held, peers) else None
                num_new += done is True
                num_marked += done is not None
    return Marked(num_new=num_new, num_marked=num_marked)


def process_tree(pid: int) -> tuple[int, ...]:
    """A process and all that descend from it, as far as the kernel lists children."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{one}/task/{task}/children", encoding="ascii") as file:
                    left += [int(number) for number in file.read().split()]
    return tuple(found)


def packed_address(address: str) -> bytes:
    """The 16 bytes of an IPv6 address, or of an IPv4 address as one."""
    bare = address.partition("%")[0]
    return socket.inet_pton(socket.AF_INET6, bare if ":" in bare else f"::ffff:{bare}")


def _is_to(held: socket.socket, peers: Collection[bytes] | None) -> bool:
    if peers is None:
        return True
    if held.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return packed_address(held.getpeername()[0]) in peers
    except OSError:  # not connected
        return False


def _mark(held: socket.socket, dscp: int, *, loopback: bool) -> bool | None:
    """True: marked now; False: was so already; None: not a socket to mark."""
    if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
        return None
    try:
        own = held.getsockname()[0]
        if not loopback and _is_loopback(own):
            return None
        level, option = (
            (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
            if held.family == socket.AF_INET6
            else (socket.IPPROTO_IP, socket.IP_TOS)
        )
        wanted = dscp << 2
        # The two lowest bits are ECN's and TCP's own.
        if held.getsockopt(level, option) & 0xFC == wanted:
            return False
        held.setsockopt(level, option, wanted)
        if held.family == socket.AF_INET6:  # an IPv4 peer on a dual-stack socket is sent IPv4 packets
            with contextlib.suppress(OSError):
                held.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, wanted)
        # After IP_TOS, which sets a priority of its own making.
        held.setsockopt(
            socket.SOL_SOCKET,
            socket.SO_PRIORITY,
            0 if dscp == 0 else _PRIORITY_HIGH if dscp in (_EF, _CS6) else _PRIORITY_NORMAL,
        )
    except OSError:
        return None  # it was closed, or is of a kind that has no such option
    return True


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def _sockets_of(pid: int) -> Iterator[socket.socket]:
    """Copies of the TCP sockets of a process, each to be closed by the caller; closing one leaves the original open."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
        handle = None if pid == os.getpid() else os.pidfd_open(pid)
    except (ProcessLookupError, FileNotFoundError):
        return
    except PermissionError as fault:
        raise MissingCapability(
            f"process {pid} belongs to another user", hint="run as that user, or as root"
        ) from fault
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                copied = _copy(handle, int(name))
                if copied is not None:
                    yield copied
    finally:
        if handle is not None:
            os.close(handle)


def _copy(handle: int | None, number: int) -> socket.socket | None:
    if handle is None:
        try:
            return socket.socket(fileno=os.dup(number))
        except OSError:
            return None
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_SYS_PIDFD_GETFD, handle, number, 0)
    if descriptor < 0:
        code = ctypes.get_errno()
        if code in (1, 13, 38):  # EPERM, EACCES, ENOSYS
            raise MissingCapability(
                f"this process may not reach the sockets of another: {os.strerror(code)}",
                hint="kernel.yama.ptrace_scope must be 0 or 1, and in a container CAP_SYS_PTRACE may be needed",
            )
        return None
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
