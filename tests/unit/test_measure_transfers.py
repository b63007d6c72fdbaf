from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

from wirespeed.errors import MissingCapability, PeerFailure
from wirespeed.measure.clock import Deadline
from wirespeed.measure.links import rounds
from wirespeed.measure.messages import Done, SocketOptions, Task
from wirespeed.measure.transfers import (
    apply_options,
    close_all,
    describe_options,
    open_streams,
    perform,
    window_rates,
)

NONCE = "00112233445566778899aabbccddeeff"
S = 10**9


@pytest.mark.parametrize("num_hosts", range(2, 24))
def test_rounds_are_disjoint_and_meet_every_pair_once(num_hosts: int) -> None:
    table = rounds(num_hosts)
    assert len(table) == num_hosts - 1 + num_hosts % 2
    for pairs in table:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))
    met = sorted(pair for pairs in table for pair in pairs)
    assert met == list(itertools.combinations(range(num_hosts), 2))


def test_window_rates_of_a_steady_stream() -> None:
    # 1000 bytes every 10 ms: 800 kbit/s, whatever the windows.
    log = [(i * S // 100, 1000) for i in range(200)]
    rates, num_bytes = window_rates([log], warmup_s=0.5, duration_s=1.0, windows=4)
    assert rates == pytest.approx([800e3] * 4)
    assert num_bytes == 100_000


def test_a_coarse_reader_is_not_a_bursty_link() -> None:
    # One large piece per 0.7 s, read across the edges of the windows: still 8 * 700 bytes per 0.7 s.
    log = [(i * 7 * S // 10, 700) for i in range(6)]
    rates, _ = window_rates([log], warmup_s=0.1, duration_s=3.0, windows=3)
    assert rates == pytest.approx([8000.0] * 3)


def test_streams_add_up_and_a_stall_shows_in_its_window() -> None:
    steady = [(i * S // 10, 100) for i in range(31)]
    stalls = [(at, num) for at, num in steady if not S < at < 2 * S]
    rates, _ = window_rates([steady, steady], warmup_s=0.0, duration_s=2.0, windows=2)
    assert rates == pytest.approx([16e3, 16e3])
    # Between 1 s and 2 s one piece of 100 bytes arrives, at its end.
    rates, _ = window_rates([stalls], warmup_s=0.0, duration_s=3.0, windows=3)
    assert rates == pytest.approx([8e3, 800.0, 8e3])


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(8)
        yield held


def task(listener: socket.socket, *, is_driving: bool, **changes: object) -> Task:
    fields: dict[str, object] = {
        "does_ping": False, "peer": "host other", "address": "127.0.0.1", "port": listener.getsockname()[1],
        "nonce": NONCE, "warmup_s": 0.02, "duration_s": 0.5, "windows": 2, "timeout_s": 60.0, "num_pings": 20,
    }  # fmt: skip
    return Task(is_driving=is_driving, **{**fields, **changes})  # type: ignore[arg-type]


def run_pair(listener: socket.socket, **changes: object) -> tuple[Done, Done]:
    """Both sides of a task; the driving side in a thread."""
    results: dict[str, Done] = {}

    def side(name: str, *, is_driving: bool) -> None:
        job = task(listener, is_driving=is_driving, **changes)
        streams = open_streams(job, listener, SocketOptions())
        try:
            results[name] = perform(job, streams)
        finally:
            close_all(streams)

    thread = threading.Thread(target=side, args=("driving",), kwargs={"is_driving": True})
    thread.start()
    side("serving", is_driving=False)
    thread.join(60)
    return results["driving"], results["serving"]


def test_pings_come_back_in_order_of_size(listener: socket.socket) -> None:
    driving, serving = run_pair(listener, does_ping=True)
    assert driving.rtts_s is not None
    least, middle, late = driving.rtts_s
    assert 0 < least <= middle <= late < 60
    assert serving == Done()


@pytest.mark.parametrize("streams", [1, 3])
def test_the_receiver_counts_one_direction(listener: socket.socket, streams: int) -> None:
    driving, serving = run_pair(listener, streams=streams)
    assert driving == Done()
    assert len(serving.bit_per_s) == 2
    assert serving.num_bytes > 0
    # Both windows are 250 ms: their rates and the bytes are one and the same count.
    assert sum(serving.bit_per_s) * 0.25 / 8 == pytest.approx(serving.num_bytes, rel=1e-3)


def test_both_directions_at_once_are_counted_on_both_sides(listener: socket.socket) -> None:
    driving, serving = run_pair(listener, is_bidirectional=True)
    assert driving.num_bytes > 0
    assert serving.num_bytes > 0


def test_a_stranger_on_the_data_port_is_turned_away(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"\xff" * 16)
        driving, serving = run_pair(listener)
        assert stranger.recv(1) == b""
    assert driving == Done()
    assert serving.num_bytes > 0


def test_a_peer_that_does_not_come_is_named(listener: socket.socket) -> None:
    with pytest.raises(PeerFailure, match=r"host other"):
        open_streams(task(listener, is_driving=False, timeout_s=0.05), listener, SocketOptions())


def test_a_peer_that_refuses_is_named() -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        job = task(gone, is_driving=True)
        with pytest.raises(PeerFailure, match=r"no connection with host other at 127\.0\.0\.1: Connection refused"):
            open_streams(job, gone, SocketOptions())


@pytest.mark.parametrize("does_ping", [True, False])
def test_a_peer_that_closes_at_once_is_named(listener: socket.socket, does_ping: bool) -> None:
    near, far = socket.socketpair()
    far.close()
    job = task(listener, is_driving=does_ping, does_ping=does_ping)
    with near, pytest.raises(PeerFailure, match="host other"):
        perform(job, [near])


def test_a_peer_that_goes_silent_is_named_within_the_deadline(listener: socket.socket) -> None:
    near, far = socket.socketpair()
    deadline = Deadline(60.0, "this test")
    job = task(listener, is_driving=True, does_ping=True, timeout_s=0.05)
    with near, far, pytest.raises(PeerFailure, match=r"host other stopped answering for 0\.05 s"):
        perform(job, [near])
    assert deadline.remaining_s > 0


def test_socket_options_are_set_and_read_back() -> None:
    options = SocketOptions(send_buffer_bytes=64 * 1024, receive_buffer_bytes=32 * 1024, no_delay=True)
    with socket.socket() as sock:
        apply_options(sock, options)
        shown = describe_options(sock, options)
    # Linux holds twice what was asked for.
    assert shown["SO_SNDBUF"] == "128 KiB (asked for 64 KiB)"
    assert shown["SO_RCVBUF"] == "64 KiB (asked for 32 KiB)"
    assert shown["TCP_NODELAY"] == "on"
    assert shown["TCP_CONGESTION"] != ""


def test_a_congestion_control_that_is_not_there_is_named() -> None:
    with socket.socket() as sock, pytest.raises(MissingCapability, match=r"'smoke-signals' cannot be set"):
        apply_options(sock, SocketOptions(congestion="smoke-signals"))
