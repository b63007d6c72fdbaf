"""The way to a host: real packets on loopback, and the kernel's error messages byte by byte."""

from __future__ import annotations

import json
import socket
import struct

import pytest

from wirespeed.cli.main import main
from wirespeed.doctor.hops import Hop, parse_answer, trace
from wirespeed.errors import PeerFailure, UsageError


def error(kind: int, code: int, *, origin: int = 2, address: str = "198.51.100.1") -> bytes:
    sockaddr = struct.pack("=HH", socket.AF_INET, 0) + socket.inet_aton(address) + bytes(8)
    return struct.pack("=IBBBBII", 113, origin, kind, code, 0, 0, 0) + sockaddr


@pytest.mark.parametrize(
    ("kind", "code", "is_target", "problem"),
    [
        (11, 0, False, ""),
        (3, 3, True, ""),
        (3, 13, False, "filtered"),
        (3, 4, False, "packet too big"),
        (3, 6, False, "ICMP type 3 code 6"),
        (12, 1, False, "ICMP type 12 code 1"),
    ],
)
def test_icmp_answers_are_told_apart(kind: int, code: int, is_target: bool, problem: str):
    answer = parse_answer(error(kind, code))
    assert answer is not None
    assert (answer.address, answer.is_target, answer.problem) == ("198.51.100.1", is_target, problem)


def test_local_errors_and_cut_messages_are_no_answer():
    assert parse_answer(error(11, 0, origin=1)) is None
    for length in range(24):
        assert parse_answer(error(11, 0)[:length]) is None


def test_this_host_is_one_hop_away():
    address, hops = trace("127.0.0.1", num_rounds=2, interval_s=0.2)
    assert address == "127.0.0.1"
    assert [(h.distance, h.addresses, h.is_target) for h in hops] == [(1, ("127.0.0.1",), True)]
    assert hops[0].num_sent == 2
    assert all(0 < rtt < 0.2 for rtt in hops[0].rtts_s)


def test_loss_is_the_share_without_answer():
    assert Hop(distance=1, addresses=(), num_sent=4, rtts_s=(0.1,), is_target=False).loss == 0.75


def test_wrong_names_and_numbers_are_said():
    with pytest.raises(PeerFailure, match="no IPv4 address"):
        trace("no-such-host.invalid")
    with pytest.raises(UsageError, match="0 rounds"):
        trace("127.0.0.1", num_rounds=0)


def test_the_command_prints_one_document(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "path", "127.0.0.1", "--count", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["hops"][0]["addresses"]) == ("path_report", ["127.0.0.1"])
    assert main(["doctor", "path", "127.0.0.1", "--count", "1"]) == 0
    assert "127.0.0.1" in capsys.readouterr().out
