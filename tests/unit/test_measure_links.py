from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from spmd import run_ranks

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.launch import Ranks
from wirespeed.measure.clock import Deadline
from wirespeed.measure.control import Channel, connect, proof
from wirespeed.measure.links import control_port, measure_links
from wirespeed.measure.messages import Challenge, Done, Fault, Go, Hello, Listening, Ready, SocketOptions, Task
from wirespeed.measure.transfers import close_all, open_streams
from wirespeed.records import LinksRecord, from_json
from wirespeed.system import free_port

QUICK = ["bench", "links", "--duration", "50ms", "--windows", "2", "--json"]


def place(rank: int, port: int, world_size: int = 2) -> Ranks:
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=port,
        launcher="torchrun",
    )


def test_three_hosts_measure_every_direction() -> None:
    ended = run_ranks(["-m", "wirespeed", *QUICK, "--streams", "1", "--both"], 3)
    assert [rank.returncode for rank in ended] == [0, 0, 0]
    assert ended[1].stdout == ended[2].stdout == ""
    record = from_json(ended[0].stdout.encode(), LinksRecord)
    assert record.hosts == ("h0", "h1", "h2")
    ways = [(a, b) for a in record.hosts for b in record.hosts if a != b]
    assert [(s.source, s.target, s.is_bidirectional) for s in record.samples] == [
        (*way, both) for way in ways for both in (False, True)
    ]
    for sample in record.samples:
        assert len(sample.bit_per_s) == 2
        assert min(sample.bit_per_s) > 0
        assert (sample.rtt_median_s is None) == sample.is_bidirectional
    assert set(record.socket_options) == {"SO_SNDBUF", "SO_RCVBUF", "TCP_NODELAY", "TCP_CONGESTION"}
    assert "round 3 of 3: 1 pair at once" in ended[0].stderr


def test_only_one_process_per_host_takes_part() -> None:
    ended = run_ranks(["-m", "wirespeed", *QUICK, "--streams", "1"], 4, ranks_per_host=2)
    assert [rank.returncode for rank in ended] == [0] * 4
    assert from_json(ended[0].stdout.encode(), LinksRecord).hosts == ("h0", "h1")


def test_options_of_rank_0_count_for_all_and_are_read_back() -> None:
    ended = run_ranks(["-m", "wirespeed", *QUICK, "--streams", "1,2", "--send-buffer", "64KiB", "--nagle"], 2)
    record = from_json(ended[0].stdout.encode(), LinksRecord)
    assert [(s.source, s.streams) for s in record.samples] == [("h0", 1), ("h0", 2), ("h1", 1), ("h1", 2)]
    assert record.socket_options["SO_SNDBUF"] == "128 KiB (asked for 64 KiB)"
    assert record.socket_options["TCP_NODELAY"] == "off"


def test_ctrl_c_on_rank_0_ends_every_rank_at_once() -> None:
    port = free_port()
    processes = []
    for rank in range(2):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "WIRESPEED_HOST": f"h{rank}",
        }  # fmt: skip
        command = [sys.executable, "-m", "wirespeed", "bench", "links", "--duration", "60s"]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        assert processes[0].stderr is not None
        assert "round 1 of 1" in processes[0].stderr.readline()
        processes[0].send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=50)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [130, 4]
    assert "rank 0 ended the measurement" in errors[1]


def test_two_ranks_of_one_name_are_told_apart_or_refused() -> None:
    ended = run_ranks(["-m", "wirespeed", *QUICK], 2, env={"WIRESPEED_HOST": "same"})
    assert ended[0].returncode == 2
    assert "call themselves host 'same'" in ended[0].stderr
    assert ended[1].returncode == 4
    assert "rank 0 ended the measurement" in ended[1].stderr


def test_a_rank_with_another_token_stays_outside() -> None:
    port = free_port()
    stranger = threading.Thread(target=_knock, args=(port,))
    stranger.start()
    with pytest.raises(PeerFailure, match=r"1 of 2 ranks did not join within 1 s: rank 1"):
        measure_links(place(0, port), join_timeout_s=1.0)
    stranger.join(10)


def _knock(port: int) -> None:
    channel = connect("127.0.0.1", port, Deadline(5, "joining"))
    channel.receive(Deadline(5, "joining"))
    channel.send(Hello(rank=1, local_rank=0, host="h1", proof="guess"))
    with pytest.raises(PeerFailure):
        channel.receive(Deadline(5, "being turned away"))
    channel.close()


class Scripted:
    """Rank 1, doing the protocol up to a step and then what a test wants."""

    def __init__(self, port: int) -> None:
        self.channel: Channel = connect("127.0.0.1", port, Deadline(5, "joining"))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.streams: list[socket.socket] = []

    def join(self) -> None:
        challenge = self.channel.receive(Deadline(5, "joining"))
        assert isinstance(challenge, Challenge)
        self.channel.send(Hello(rank=1, local_rank=0, host="h1", proof=proof(challenge.nonce, 1)))
        assert isinstance(self.channel.receive(Deadline(5, "joining")), SocketOptions)

    def listen(self) -> None:
        port = int(self.listener.getsockname()[1])
        self.channel.send(Listening(address="127.0.0.1", port=port, options={}))

    def get_ready(self) -> None:
        task = self.channel.receive(Deadline(5, "a task"))
        assert isinstance(task, Task)
        self.streams = open_streams(task, self.listener, SocketOptions())
        self.channel.send(Ready())

    def go(self) -> None:
        assert isinstance(self.channel.receive(Deadline(5, "the start")), Go)

    def close(self) -> None:
        close_all(self.streams)
        self.channel.close()
        self.listener.close()


STEPS: tuple[Callable[[Scripted], None], ...] = (Scripted.join, Scripted.listen, Scripted.get_ready, Scripted.go)


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("WIRESPEED_HOST", "h0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return free_port()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["dies", "hangs", "lies", "evades"])
def test_a_host_that_fails_at_any_step_is_named_within_the_deadline(master: int, num_steps: int, kind: str) -> None:
    over = threading.Event()

    def fail() -> None:
        peer = Scripted(master)
        for step in STEPS[:num_steps]:
            step(peer)
        if kind == "lies":
            peer.channel.send(Ready() if num_steps in (1, 4) else Done())
        if kind == "evades":
            peer.channel.send(Done())
        if kind != "dies":
            over.wait(100)
        peer.close()

    thread = threading.Thread(target=fail)
    thread.start()
    deadline = Deadline(60.0, "the measurement")
    with pytest.raises(PeerFailure, match="h1"):
        measure_links(place(0, master), timeout_s=0.2, join_timeout_s=30.0, duration_s=0.05)
    assert deadline.remaining_s > 0
    over.set()
    thread.join(10)


def test_a_rank_hears_why_rank_0_gave_up(master: int) -> None:
    heard: list[object] = []

    def listen_on() -> None:
        peer = Scripted(master)
        peer.join()
        peer.channel.send(Fault(text="the disk burns"))
        heard.append(peer.channel.receive(Deadline(60, "the end")))
        peer.close()

    thread = threading.Thread(target=listen_on)
    thread.start()
    with pytest.raises(PeerFailure, match="the disk burns"):
        measure_links(place(0, master), timeout_s=60.0)
    thread.join(10)
    assert heard == [Fault(text="host h1 (rank 1): the disk burns")]


def test_arguments_are_checked_before_anything_is_opened() -> None:
    with pytest.raises(UsageError, match="got one rank"):
        measure_links(place(0, 1, world_size=1))
    with pytest.raises(UsageError, match=r"got streams \[0\]"):
        measure_links(place(0, 1), streams=[0])
    with pytest.raises(UsageError, match="got 0 windows"):
        measure_links(place(0, 1), windows=0)


def test_under_torchrun_the_agent_keeps_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert control_port(place(0, 29500)) == 29500
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert control_port(place(0, 29500)) == 29501
