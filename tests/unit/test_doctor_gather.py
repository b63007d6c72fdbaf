"""`doctor host` as ranks of a job: real processes on loopback, each pretending to be a host of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
from spmd import run_ranks

from wirespeed.cli.main import main
from wirespeed.doctor.examine import Question
from wirespeed.doctor.gather import gather
from wirespeed.errors import PeerFailure
from wirespeed.launch import Ranks
from wirespeed.system import free_port

COMMAND = ["-m", "wirespeed", "doctor", "host", "--only", "host.identity"]


def rank(number: int, world_size: int, port: int, *, local: int = 0) -> Ranks:
    return Ranks(
        rank=number, world_size=world_size, local_rank=local, local_world_size=None, master_addr="127.0.0.1", master_port=port, launcher="torchrun"
    )  # fmt: skip


def test_rank_0_puts_all_hosts_side_by_side_and_the_others_print_nothing():
    ended = run_ranks([*COMMAND, "--json"], 4, ranks_per_host=2)
    assert [one.returncode for one in ended] == [0, 0, 0, 0], [one.stderr for one in ended]
    report = json.loads(ended[0].stdout)
    assert [host["host"] for host in report["hosts"]] == [
        "h0",
        "h1",
    ]  # one report per host, though two ranks run on each
    assert report["failures"] == []
    assert {one.stdout for one in ended[1:]} == {""}


def test_a_rank_that_does_not_come_is_named_and_the_others_are_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WIRESPEED_TOKEN", "t")
    port, question = free_port(), Question(only=("host.identity",))
    other = threading.Thread(target=lambda: gather(rank(1, 3, port), question, timeout_s=60))
    other.start()
    report = gather(rank(0, 3, port), question, timeout_s=5)
    other.join()
    assert report is not None
    assert len(report.hosts) == 2
    assert [(f.host, f.why) for f in report.failures] == [("rank 2", "did not report within 5 s")]


def test_strangers_and_other_tokens_are_turned_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WIRESPEED_TOKEN", "ours")
    port, question = free_port(), Question(only=("host.identity",))
    reports = []
    master = threading.Thread(target=lambda: reports.append(gather(rank(0, 2, port), question, timeout_s=3)))
    master.start()
    for content in (
        b"GET / HTTP/1.0\r\n\r\n" + b"x" * 200,
        b"\xff" * 200,
        (1).to_bytes(4, "big") + (4).to_bytes(4, "big") + b"0" * 64 + b"null",
    ):
        with connected(port) as stranger:
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it was closed before all was read
                stranger.sendall(content)
                while stranger.recv(4096):
                    pass
    master.join()
    assert reports[0] is not None
    assert [f.host for f in reports[0].failures] == ["rank 1"]


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_sbatch_script_is_one_process_and_looks_at_its_own_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "64",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_NODELIST": "n[1-64]",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "host", "--only", "host.identity", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "host_report"


def test_without_rank_0_the_others_end_with_a_peer_failure():
    with pytest.raises(PeerFailure, match="cannot reach rank 0"):
        gather(rank(1, 2, free_port()), Question(only=("host.identity",)), timeout_s=0.5)
