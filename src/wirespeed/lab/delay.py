"""The delay line in user space, for kernels without netem: read a frame, hold it, send it on.

Raw packet sockets with virtio headers pass whole segments of up to 64 KiB, checksums unfinished, as the
kernel would. What a host sends is held for the delay; what comes to it passes at once, so that each frame of
a path is held once. Measured: 0.1 ms more than asked on an idle machine, and about 1 Gbit/s over all hosts
per core. It can be wrong when the machine is busy: a frame then leaves late, never early, and never out of
order.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import os
import random
import select
import signal
import socket
import time

from wirespeed.lab import namespaces, segments

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_ETH_P_ALL = 0x0003
_MAX_FRAME_BYTES = segments.VNET_BYTES + 14 + 65536 + 64
_BUFFER_BYTES = 16 << 20
_BATCH = 64
_PR_SET_TIMERSLACK = 29
SEED = 20240


def start(pairs: list[tuple[str, str]], *, delay_s: float, loss: float) -> int:
    """Fork the line for all hosts of a lab; its process id. It ends with the keeper.

    ``pairs`` are the devices towards the host and towards the bridge, in the current network namespace.
    """
    keeper = os.getpid()
    # The sockets are made before the fork, so that their errors reach whoever makes the lab.
    ways = [Way(socket_of(near), socket_of(far)) for near, far in pairs]
    pid = os.fork()
    if pid:
        for way in ways:
            way.near.close()
            way.far.close()
        return pid
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
        namespaces.prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds; the default of 50 us would add to each delay
        _close_all_but(ways)
        _go_first()
        if os.getppid() == keeper:
            Line(ways, delay_s=delay_s, loss=loss, seed=SEED).run()
    finally:
        os._exit(code)


def _go_first() -> None:
    """Run before ordinary processes where allowed: a frame should not wait for a training step to be preempted.

    With one core only, real-time priority could keep the hosts themselves from running.
    """
    if (os.cpu_count() or 1) > 1:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _close_all_but(ways: list[Way]) -> None:
    """Let go of the keeper's descriptors: its lock, its answer's pipe and the hosts must end when it does."""
    kept = {2} | {end.fileno() for way in ways for end in (way.near, way.far)}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def socket_of(device: str) -> socket.socket:
    """A raw socket that sees what comes in on a device, and sends out of it, offloads and all."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, name, _BUFFER_BYTES)
    with contextlib.suppress(OSError):  # beyond rmem_max: only with rights over the whole machine
        made.setsockopt(socket.SOL_SOCKET, 33, _BUFFER_BYTES)  # SO_RCVBUFFORCE
        made.setsockopt(socket.SOL_SOCKET, 32, _BUFFER_BYTES)  # SO_SNDBUFFORCE
    made.bind((device, _ETH_P_ALL))
    made.setblocking(False)
    return made


class Way:
    """A host's two sockets: ``near`` towards the host, ``far`` towards the bridge."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near = near
        self.far = far


class Losses:
    """Which frames are lost: each with the same chance, independently, from a seeded generator.

    It draws the distance to the next loss (geometric), not one number per frame: a segment of 16 KiB stands
    for 11.
    """

    def __init__(self, loss: float, seed: int) -> None:
        self._loss = loss
        self._random = random.Random(seed)  # noqa: S311 - repeatable losses, no secret
        self._left = self._draw()

    def _draw(self) -> int:
        if self._loss <= 0:
            return 1 << 62
        return int(math.log(1.0 - self._random.random()) / math.log(1.0 - self._loss))

    def of(self, num_frames: int) -> list[int]:
        """The numbers of those, among the next frames, that are lost."""
        lost = []
        start = 0
        while self._left < num_frames - start:
            start += self._left
            lost.append(start)
            start += 1
            self._left = self._draw()
        self._left -= num_frames - start
        return lost


class Line:
    """The loop over all hosts. One queue serves them: every frame is held for the same time."""

    def __init__(self, ways: list[Way], *, delay_s: float, loss: float, seed: int) -> None:
        self._delay_s = delay_s
        self._losses = Losses(loss, seed)
        self._has_loss = loss > 0
        self._held: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
        self._from_host = {way.near.fileno(): way for way in ways}
        self._from_bridge = {way.far.fileno(): way for way in ways}

    def run(self) -> None:
        """Until killed."""
        descriptors = [*self._from_host, *self._from_bridge]
        wait = _Poll(descriptors)
        while True:
            timeout_s = -1.0
            if self._held:
                timeout_s = max(0.0, self._held[0][0] - time.monotonic())
            for descriptor in wait(timeout_s):
                if descriptor in self._from_host:
                    way = self._from_host[descriptor]
                    self._hold(way.near, way.far)
                else:
                    way = self._from_bridge[descriptor]
                    for frame in _receive(way.far):
                        _send(way.near, frame)
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                _, target, frame = self._held.popleft()
                _send(target, frame)

    def _hold(self, source: socket.socket, target: socket.socket) -> None:
        due = time.monotonic() + self._delay_s
        for frame in _receive(source):
            if self._has_loss:
                lost = self._losses.of(segments.count(frame))
                for kept in segments.without(frame, lost) if lost else (frame,):
                    self._held.append((due, target, kept))
            else:
                self._held.append((due, target, frame))


def _receive(source: socket.socket) -> list[bytes]:
    frames = []
    with contextlib.suppress(OSError):  # nothing more; or the link is down, which the next frame shows to be over
        for _ in range(_BATCH):
            frames.append(source.recv(_MAX_FRAME_BYTES))  # noqa: PERF401 - keeps what came before the error
    return frames


def _send(target: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue drops, as a switch's does; a link that is down drops all
        target.send(frame)


class _Poll:
    """ppoll(2): poll with a time-out in nanoseconds, which Python's own poll rounds up to milliseconds."""

    def __init__(self, descriptors: list[int]) -> None:
        self._select = select.poll()
        for descriptor in descriptors:
            self._select.register(descriptor, select.POLLIN)
        self._libc = ctypes.CDLL(None, use_errno=True)
        entries = [_PollFd(descriptor, select.POLLIN, 0) for descriptor in descriptors]
        self._fds = (_PollFd * len(entries))(*entries)

    def __call__(self, timeout_s: float) -> list[int]:
        """Descriptors with something to read; waits at most ``timeout_s`` (negative: as long as it takes)."""
        if timeout_s == 0:
            return [descriptor for descriptor, _ in self._select.poll(0)]
        limit = _TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9)) if timeout_s >= 0 else None
        pointer = None if limit is None else ctypes.byref(limit)
        if self._libc.ppoll(self._fds, len(self._fds), pointer, None) <= 0:
            return []
        return [entry.fd for entry in self._fds if entry.revents]


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))
