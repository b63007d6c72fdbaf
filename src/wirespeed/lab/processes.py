"""Find and end the processes of a lab, by what they carry and where they are, never by name.

A process belongs to a lab when its environment holds the lab's token, or when it is in the network namespace
of one of its hosts. Each is signalled through a pidfd opened before the check, so a reused process id cannot
be hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

TOKEN = "WIRESPEED_LAB_TOKEN"  # noqa: S105 - the variable's name
GRACE_S = 2.0


def has_token(token: str) -> Callable[[int], bool]:
    """A test for processes whose environment carries a token that starts with ``token``."""
    mark = f"\0{TOKEN}={token}".encode()

    def test(pid: int) -> bool:
        try:
            return mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # ended, or somebody else's
            return False

    return test


def is_in_network(inodes: frozenset[int]) -> Callable[[int], bool]:
    """A test for processes in one of the network namespaces with these inode numbers."""

    def test(pid: int) -> bool:
        try:
            return os.stat(f"/proc/{pid}/ns/net").st_ino in inodes
        except OSError:
            return False

    return test


def find(test: Callable[[int], bool]) -> list[int]:
    """Process ids, other than our own, that pass a test."""
    own = os.getpid()
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != own and test(int(entry))]


def send(pid: int, test: Callable[[int], bool], number: int) -> bool:
    """Signal a process if it (still) passes the test."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not test(pid):
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def end(test: Callable[[int], bool], *, grace_s: float = GRACE_S) -> int:
    """End every process that passes the test: SIGTERM, then SIGKILL after a grace time. How many were ended.

    Repeats while new ones appear, for as long again as the grace time: a process may fork while it is being
    found.
    """
    ended: set[int] = set()
    kill_at = time.monotonic() + grace_s
    give_up_at = kill_at + max(grace_s, 1.0)
    while found := find(test):
        now = time.monotonic()
        if now > give_up_at:
            break  # in uninterruptible sleep: it ends when the kernel lets it
        for pid in found:
            if now >= kill_at:
                send(pid, test, signal.SIGKILL)
            elif pid not in ended:
                send(pid, test, signal.SIGTERM)
            ended.add(pid)
        time.sleep(0.01)
    return len(ended)


def wait_gone(handle: int, timeout_s: float) -> bool:
    """Wait until the process behind a pidfd has ended; False at the deadline."""
    import select

    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def close_quietly(*descriptors: int) -> None:
    """Close descriptors, some of which may be closed already."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
