"""Move bytes between two hosts over TCP and time it: small messages to and fro, and bulk in one direction or both.

Goodput is counted where bytes arrive, in equal windows of one continuous transfer after a warm-up that lets slow start
and shaper bursts pass. The sender writes for a fixed time and closes its half; the receiver reads to the end, or resets
the connection when a slow link would take long to drain, so no phase leaves a queue behind for the next. Python reads
one stream at 10 to 40 Gbit/s: above that more streams are needed to fill a NIC.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

from wirespeed.errors import MissingCapability, PeerFailure
from wirespeed.measure.clock import Deadline, now_ns
from wirespeed.measure.control import resolve
from wirespeed.measure.messages import Done, SocketOptions, Task
from wirespeed.measure.stats import median, percentile
from wirespeed.system import System
from wirespeed.units import MIB, format_size

PING_BYTES = 64
PING_BUDGET_S = 0.5
NONCE_BYTES = 16
MAX_STREAMS = 64
SEND_MARGIN_S = 0.1
"""The sender goes on this much longer, so that the receiver's windows end while bytes still arrive."""
DRAIN_S = 0.25
_CHUNK_BYTES = MIB


def apply_options(sock: socket.socket, options: SocketOptions) -> None:
    """Set the options; buffers before connect or listen, since the TCP window scale is fixed there."""
    if options.send_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.send_buffer_bytes)
    if options.receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.receive_buffer_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(options.no_delay))
    if options.congestion is not None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion.encode())
        except OSError as fault:
            held = System().read_text("/proc/sys/net/ipv4/tcp_available_congestion_control")
            raise MissingCapability(
                f"congestion control {options.congestion!r} cannot be set: {fault.strerror}",
                expected=None if held is None else f"one of {held}",
                hint="load it with modprobe, or leave --congestion out",
            ) from fault


def describe_options(sock: socket.socket, options: SocketOptions) -> dict[str, str]:
    """The options as the kernel holds them. It doubles what is asked of a buffer, and cuts it at its own limit."""
    shown = {}
    for name, number, asked in (
        ("SO_SNDBUF", socket.SO_SNDBUF, options.send_buffer_bytes),
        ("SO_RCVBUF", socket.SO_RCVBUF, options.receive_buffer_bytes),
    ):
        held = format_size(sock.getsockopt(socket.SOL_SOCKET, number))
        shown[name] = f"autotuned, from {held}" if asked is None else f"{held} (asked for {format_size(asked)})"
    shown["TCP_NODELAY"] = "on" if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) else "off"
    congestion = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    shown["TCP_CONGESTION"] = congestion.split(b"\0")[0].decode()
    return shown


def open_streams(task: Task, listener: socket.socket, options: SocketOptions) -> list[socket.socket]:
    """The task's connections, from the driving or the accepting side. Raises PeerFailure naming the peer."""
    deadline = Deadline(task.timeout_s, f"connecting with {task.peer}")
    streams: list[socket.socket] = []
    try:
        while len(streams) < task.streams:
            streams.append(_connect(task, options, deadline) if task.is_driving else _accept(task, listener, deadline))
    except BaseException as fault:
        close_all(streams)
        if isinstance(fault, OSError):
            reason = fault.strerror or str(fault)
            raise PeerFailure(f"no connection with {task.peer} at {task.address}: {reason}") from fault
        raise
    return streams


def _connect(task: Task, options: SocketOptions, deadline: Deadline) -> socket.socket:
    family, target = resolve(task.address, task.port)
    stream = socket.socket(family, socket.SOCK_STREAM)
    try:
        apply_options(stream, options)
        stream.settimeout(deadline.check())
        stream.connect(target)
        stream.sendall(bytes.fromhex(task.nonce))
    except BaseException:
        stream.close()
        raise
    return stream


def _accept(task: Task, listener: socket.socket, deadline: Deadline) -> socket.socket:
    """The next connection that knows the nonce; others are closed."""
    while True:
        listener.settimeout(deadline.check())
        stream, _ = listener.accept()
        try:
            stream.settimeout(min(2.0, deadline.check()))
            greeting = stream.recv(NONCE_BYTES, socket.MSG_WAITALL)
            if hmac.compare_digest(greeting, bytes.fromhex(task.nonce)):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return stream
        except (TimeoutError, ConnectionError):
            pass
        stream.close()


def perform(task: Task, streams: Sequence[socket.socket]) -> Done:
    """This side's part of the task, on connections that stand. Raises PeerFailure naming the peer."""
    try:
        if task.does_ping:
            return ping(task, streams[0]) if task.is_driving else echo(task, streams[0])
        return _transfer(task, streams)
    except TimeoutError:
        raise PeerFailure(f"{task.peer} stopped answering for {task.timeout_s:g} s") from None
    except OSError as fault:
        raise PeerFailure(f"the connection with {task.peer} broke: {fault.strerror or fault}") from fault


def ping(task: Task, stream: socket.socket) -> Done:
    """Round trips of a small message: at most ``num_pings`` or half a second of them, at least ten."""
    message, reply = os.urandom(PING_BYTES), bytearray(PING_BYTES)
    stream.settimeout(task.timeout_s)
    rtts_s: list[float] = []
    begin_ns = now_ns()
    for turn in range(task.num_pings + 5):
        start_ns = now_ns()
        stream.sendall(message)
        _receive_exactly(stream, reply, task.peer)
        end_ns = now_ns()
        if turn >= 5:  # the first ones meet cold caches and an idle CPU
            rtts_s.append((end_ns - start_ns) / 1e9)
        if len(rtts_s) >= 10 and end_ns - begin_ns > PING_BUDGET_S * 1e9:
            break
    stream.shutdown(socket.SHUT_WR)
    return Done(rtts_s=(min(rtts_s), median(rtts_s), percentile(rtts_s, 0.99)))


def echo(task: Task, stream: socket.socket) -> Done:
    """Send back whatever comes until the peer ends."""
    stream.settimeout(task.timeout_s)
    while got := stream.recv(PING_BYTES):
        stream.sendall(got)
    return Done()


def _receive_exactly(stream: socket.socket, target: bytearray, peer: str) -> None:
    view = memoryview(target)
    while view:
        num = stream.recv_into(view)
        if num == 0:
            raise PeerFailure(f"{peer} closed the connection")
        view = view[num:]


def _transfer(task: Task, streams: Sequence[socket.socket]) -> Done:
    logs: list[list[tuple[int, int]]] = [[] for _ in streams]
    jobs: list[Callable[[], None]] = []
    for stream, log in zip(streams, logs, strict=True):
        sends, receives = task.is_driving or task.is_bidirectional, not task.is_driving or task.is_bidirectional
        # With a timeout a socket is non-blocking for the whole file description; reader and writer may share it.
        stream.settimeout(task.timeout_s)
        if sends:
            jobs.append(lambda stream=stream: _send(task, stream, waits=not task.is_bidirectional))  # type: ignore[misc]
        if receives:
            jobs.append(lambda stream=stream, log=log: _receive(task, stream, log))  # type: ignore[misc]
    _run_all(jobs)
    if task.is_driving and not task.is_bidirectional:
        return Done()
    rates, num_bytes = window_rates(logs, task.warmup_s, task.duration_s, task.windows)
    return Done(num_bytes=num_bytes, bit_per_s=tuple(rates))


def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    faults: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs[1:]]
    for thread in threads:
        thread.start()
    run(jobs[0])
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def _send(task: Task, stream: socket.socket, *, waits: bool) -> None:
    # Random bytes: a path that compresses would make zeros fast.
    chunk = memoryview(os.urandom(_CHUNK_BYTES))
    end_ns = now_ns() + round((task.warmup_s + task.duration_s + SEND_MARGIN_S) * 1e9)
    try:
        while now_ns() < end_ns:
            stream.send(chunk)
        stream.shutdown(socket.SHUT_WR)
        if waits:
            stream.recv(1)
    except OSError as fault:
        # The receiver resets a link that is slow to drain; whether it got its bytes is for the receiver to say.
        if fault.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            raise


def _receive(task: Task, stream: socket.socket, log: list[tuple[int, int]]) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    limit_ns: int | None = None
    while num := stream.recv_into(buffer):
        at_ns = now_ns()
        log.append((at_ns, num))
        if limit_ns is None:
            limit_ns = at_ns + round((task.warmup_s + task.duration_s + SEND_MARGIN_S + DRAIN_S) * 1e9)
        elif at_ns > limit_ns:
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
    if not log:
        raise PeerFailure(f"{task.peer} closed the connection before it sent anything")


def window_rates(
    logs: Sequence[Sequence[tuple[int, int]]], warmup_s: float, duration_s: float, windows: int
) -> tuple[list[float], int]:
    """Goodput in bit/s of all streams together, per window, and the bytes of all windows.

    ``logs``: per stream, when (ns) how many bytes arrived. A stream's bytes count as having arrived evenly since its
    arrival before, so that a coarse reader is not taken for a bursty link. Windows begin ``warmup_s`` after the last
    stream's first bytes.
    """
    start_ns = max(log[0][0] for log in logs) + round(warmup_s * 1e9)
    edges = [start_ns + round(duration_s * 1e9 * i / windows) for i in range(windows + 1)]
    totals = [0.0] * len(edges)
    for log in logs:
        times = [at_ns for at_ns, _ in log]
        sums = [0]
        for _, num in log[1:]:  # what came first may have waited for the reader: only later bytes have a known time
            sums.append(sums[-1] + num)
        for place, edge in enumerate(edges):
            above = bisect.bisect_right(times, edge)
            if above == 0:
                continue
            held = float(sums[above - 1])
            if above < len(times):
                share = (edge - times[above - 1]) / (times[above] - times[above - 1])
                held += share * (sums[above] - sums[above - 1])
            totals[place] += held
    width_s = duration_s / windows
    rates = [8 * (high - low) / width_s for low, high in pairwise(totals)]
    return rates, round(totals[-1] - totals[0])


def close_all(streams: Sequence[socket.socket]) -> None:
    """Close every connection, whatever state it is in."""
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()
