from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.measure.clock import Deadline
from wirespeed.measure.control import MAX_LINE_BYTES, Channel, admit, connect, listen, proof, receive_from_all
from wirespeed.measure.messages import Challenge, Fault, Go, Hello, Ready


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield Channel(near, "host far"), far


def test_messages_arrive_whole_however_they_are_cut(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    far.sendall(b'{"type":"rea')
    channel.read(1.0)
    assert channel.next_message() is None
    far.sendall(b'dy"}\n{"type":"go"}\n')
    assert channel.receive(Deadline(60, "a message")) == Ready()
    assert channel.receive(Deadline(60, "a message")) == Go()


@pytest.mark.parametrize(
    "line",
    [b"nonsense\n", b'{"type":"launch"}\n', b'{"type":"hello","rank":1}\n', b'{"type":"go","speed":1}\n', b"\xff\n"],
)
def test_what_is_not_a_message_is_refused(ends: tuple[Channel, socket.socket], line: bytes) -> None:
    channel, far = ends
    far.sendall(line)
    with pytest.raises(DataError, match="host far sent a control message that is not understood"):
        channel.receive(Deadline(60, "a message"))


def test_a_line_without_end_is_refused_before_it_fills_memory(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    writer = threading.Thread(target=far.sendall, args=(b"x" * (MAX_LINE_BYTES + 1),))
    writer.start()
    with pytest.raises(DataError, match="above 65536 bytes"):
        channel.receive(Deadline(60, "a message"))
    writer.join(5)


def test_a_closed_and_a_silent_peer_are_named(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    with pytest.raises(PeerFailure, match=r"the greeting did not end within 0\.01 s"):
        channel.receive(Deadline(0.01, "the greeting"))
    far.close()
    with pytest.raises(PeerFailure, match="lost host far"):
        channel.receive(Deadline(60, "a message"))


def test_of_several_hosts_the_silent_one_is_named() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    channels = [Channel(near, f"host h{i}") for i, (near, _) in enumerate(pairs)]
    pairs[0][1].sendall(b'{"type":"ready"}\n')
    pairs[2][1].sendall(b'{"type":"ready"}\n')
    with pytest.raises(PeerFailure, match=r"^host h1 did not answer: connecting did not end within 0\.5 s"):
        receive_from_all(channels, Deadline(0.5, "connecting"))
    pairs[1][1].sendall(b'{"type":"fault","text":"no route to host h0"}\n')
    with pytest.raises(PeerFailure, match=r"^host h1: no route to host h0"):
        receive_from_all(channels[1:2], Deadline(60, "connecting"))
    for pair in pairs:
        for end in pair:
            end.close()


def join(port: int, rank: int, *, wrong: bool = False) -> Channel:
    channel = connect("127.0.0.1", port, Deadline(60, "joining"))
    challenge = channel.receive(Deadline(60, "joining"))
    assert isinstance(challenge, Challenge)
    answer = "0" * 64 if wrong else proof(challenge.nonce, rank)
    channel.send(Hello(rank=rank, local_rank=0, host=f"h{rank}", proof=answer))
    return channel


def test_every_rank_is_admitted_once_and_strangers_are_not() -> None:
    with listen("127.0.0.1", 0) as server:
        port = int(server.getsockname()[1])
        joined: list[Channel] = []

        def newcomers() -> None:
            joined.append(join(port, 1, wrong=True))
            joined.append(join(port, 7))
            joined.append(join(port, 1))
            joined.append(join(port, 0))

        thread = threading.Thread(target=newcomers)
        thread.start()
        admitted = admit(server, 2, Deadline(60, "joining"))
        thread.join(10)
        assert sorted(hello.rank for hello in admitted.values()) == [0, 1]
        for channel in (*joined, *admitted):
            channel.close()


def test_the_token_decides_who_may_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRESPEED_TOKEN", "one")
    signed = proof("abc", 0)
    monkeypatch.setenv("WIRESPEED_TOKEN", "two")
    assert proof("abc", 0) != signed
    assert proof("abc", 1) != proof("abc", 0)


def test_ranks_that_stay_away_are_named() -> None:
    with listen("127.0.0.1", 0) as server, pytest.raises(PeerFailure, match=r"2 of 2 ranks did not join .*rank 0, 1;"):
        admit(server, 2, Deadline(0.02, "joining"))


def test_a_master_that_does_not_listen_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(PeerFailure, match=rf"cannot reach rank 0 at 127\.0\.0\.1 port {port} within 0\.1 s"):
            connect("127.0.0.1", port, Deadline(0.1, "joining"))


def test_a_taken_port_and_a_foreign_address_are_usage_errors() -> None:
    with listen("127.0.0.1", 0) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(UsageError, match=rf"port {port}.*hint: .*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(UsageError, match=r"192\.0\.2\.1.*hint: rank 0 must run on the master's host"):
        listen("192.0.2.1", 0)


def test_a_fault_is_a_message_like_any_other(ends: tuple[Channel, socket.socket]) -> None:
    channel, far = ends
    Channel(far, "host near").send(Fault(text="it broke"))
    assert channel.receive(Deadline(60, "a message")) == Fault(text="it broke")
