"""Links: the rate that a lab gives is the rate that was asked for, and faults do what they say and no more."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from lab_tools import python

from wirespeed.errors import UsageError
from wirespeed.lab import Lab, LabSpec
from wirespeed.lab.layout import HEADER_EFFICIENCY

SEND_BYTES = 16_000_000

# Receives `reps` times `size` bytes from each of `flows` connections and answers each with one byte.
RECEIVE = """
import socket, sys, threading
size, reps, flows = map(int, sys.argv[1:])
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
def take(connection):
    buffer = bytearray(1 << 18)
    for _ in range(reps):
        left = size
        while left:
            got = connection.recv_into(buffer, min(left, len(buffer)))
            if not got:
                return
            left -= got
        connection.sendall(b"k")
threads = [threading.Thread(target=take, args=(server.accept()[0],)) for _ in range(flows)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
# Sends that and prints the payload rate of each repetition in bit/s.
SEND = """
import socket, sys, time
host, size, reps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connection = socket.create_connection((host, 5000), timeout=20)
data = bytes(size)
for _ in range(reps):
    began = time.perf_counter()
    connection.sendall(data)
    connection.recv(1)
    print(size * 8 / (time.perf_counter() - began))
"""


def serve(lab: Lab, host: str, *arguments: int) -> subprocess.Popen[bytes]:
    server = lab.popen(host, python(RECEIVE, *arguments), stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return server


def end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.communicate()


def rates(lab: Lab, source: str, target: str, size: int, reps: int) -> list[float]:
    server = serve(lab, target, size, reps, 1)
    done = lab.exec(source, python(SEND, target, size, reps), timeout_s=60.0)
    end(server)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.parametrize("rate_bit_per_s", [100e6, 1e9])
def test_16_mb_take_the_time_that_the_rate_allows(rate_bit_per_s: float) -> None:
    # Within 3 %, headers counted. A busy machine can only slow a transfer, so the best counts against the
    # lower bound and against the upper. The first includes TCP's slow start.
    goodput_bit_per_s = rate_bit_per_s * HEADER_EFFICIENCY
    ratios: list[float] = []
    with Lab(LabSpec(hosts=2, rate_bit_per_s=rate_bit_per_s)) as lab:
        for _ in range(6):
            ratios += [rate / goodput_bit_per_s for rate in rates(lab, "h0", "h1", SEND_BYTES, 3)]
            if max(ratios) >= 0.97:
                break
    assert 0.97 <= max(ratios) <= 1.03, ratios


def test_flows_that_share_an_uplink_add_up_to_its_rate() -> None:
    # Two hosts of rack 0 send to two of rack 1, 200 Mbit/s each, over an uplink of 200. Counted is what both receivers
    # got in the time in which both flows were active.
    spec = LabSpec(hosts=4, racks=2, rate_bit_per_s=200e6, uplink_bit_per_s=200e6)
    program = """
import socket, sys, threading, time
def flow(host):
    connection = socket.create_connection((host, 5000), timeout=20)
    data = bytes(1 << 18)
    while time.monotonic() < stop:
        connection.sendall(data)
stop = time.monotonic() + float(sys.argv[2])
flow(sys.argv[1])
"""
    meter = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
connection = server.accept()[0]
buffer = bytearray(1 << 18)
arrived = []
while True:
    got = connection.recv_into(buffer)
    if not got:
        break
    arrived.append((time.monotonic(), got))
begin, last = arrived[0][0], arrived[-1][0]
print(begin, last)
for moment, got in arrived:
    print(moment, got)
"""
    best = 0.0
    with Lab(spec) as lab:
        for _ in range(10):  # a busy machine can only slow them, so the best counts against the lower bound
            servers = [lab.popen(host, python(meter), stdout=subprocess.PIPE) for host in ("h2", "h3")]
            for server in servers:
                assert server.stdout is not None
                assert server.stdout.readline() == b"ready\n"
            senders = [
                lab.popen(source, python(program, target, 2.0)) for source, target in (("h0", "h2"), ("h1", "h3"))
            ]
            assert [sender.wait(timeout=60) for sender in senders] == [0, 0]
            flows = []
            for server in servers:
                first, *rest = server.communicate(timeout=60)[0].decode().splitlines()
                flows.append((*map(float, first.split()), [tuple(map(float, line.split())) for line in rest]))
            # The common time, less the start (slow start) and the end (the queue of the first to stop).
            begin = max(flow[0] for flow in flows) + 0.4
            until = min(flow[1] for flow in flows) - 0.2
            total = sum(got for *_, arrived in flows for moment, got in arrived if begin <= moment < until)
            # What a receiver reads first in that time may have come since it last found nothing more to read.
            since = min(last_drained(arrived, begin) for *_, arrived in flows)
            assert total * 8 / (until - since) <= 1.05 * 200e6 * HEADER_EFFICIENCY
            best = max(best, total * 8 / (until - begin) / (200e6 * HEADER_EFFICIENCY))
            if best >= 0.95:
                break
    assert best >= 0.95


def last_drained(arrived: list[tuple[float, float]], before_s: float) -> float:
    """When a receiver last read less than its buffer of 256 KiB holds, and so all that there was."""
    return max((moment for moment, got in arrived if moment < before_s and got < 1 << 18), default=arrived[0][0])


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(LabSpec(hosts=3, rate_bit_per_s=1e9)) as made:
        yield made


def test_rates_are_read_back_and_a_changed_one_holds_both_ways(lab: Lab) -> None:
    assert [(h.sends_bit_per_s, h.receives_bit_per_s) for h in lab.status().hosts] == [(1e9, 1e9)] * 3
    lab.fault("h1", "rate", rate_bit_per_s=50e6)
    assert [h.sends_bit_per_s for h in lab.status().hosts] == [1e9, 50e6, 1e9]
    for source, target in (("h0", "h1"), ("h1", "h0")):
        # A burst and a queue's slack apart, nothing passes faster than the new rate.
        assert rates(lab, source, target, 2_000_000, 1)[0] <= 50e6
    lab.fault("h1", "heal")
    assert [(h.sends_bit_per_s, h.receives_bit_per_s) for h in lab.status().hosts] == [(1e9, 1e9)] * 3


KNOCK = """
import socket, sys
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.settimeout(float(sys.argv[2]))
link.sendto(b"?", (sys.argv[1], 7000))
try:
    print(link.recv(9).decode())
except TimeoutError:
    print("silence")
"""
ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 7000))
print("ready", flush=True)
while True:
    _, peer = server.recvfrom(9)
    server.sendto(b"here", peer)
"""


class Line:
    """Whether ``source`` gets an answer from ``target`` over the lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def _answers(self, source: str, target: str, waits_s: tuple[float, ...]) -> bool:
        return any(self._lab.exec(source, python(KNOCK, target, wait_s)).stdout == "here\n" for wait_s in waits_s)

    def hears(self, source: str, target: str) -> bool:
        # An answer takes under a millisecond on an idle machine; a busy one is given its time.
        return self._answers(source, target, (0.3, 3.0, 20.0))

    def is_silent(self, source: str, target: str) -> bool:
        return not self._answers(source, target, (0.3, 1.0))


@pytest.fixture
def line(lab: Lab) -> Iterator[Line]:
    servers = [lab.popen(host.name, python(ECHO), stdout=subprocess.PIPE) for host in lab.hosts]
    for server in servers:
        assert server.stdout is not None
        server.stdout.readline()
    yield Line(lab)
    for server in servers:
        end(server)


def test_a_host_that_is_down_is_silent_until_it_is_up(lab: Lab, line: Line) -> None:
    assert line.hears("h0", "h1")
    lab.fault("h1", "down")
    lab.fault("h1", "down")
    assert line.is_silent("h0", "h1")
    assert line.hears("h0", "h2"), "others are not touched"
    assert [host.is_up for host in lab.status().hosts] == [True, False, True]
    carrier = lab.exec("h1", ["cat", "/sys/class/net/eth0/carrier"]).stdout
    assert carrier in ("0\n", ""), "the host sees that its cable is out"
    lab.fault("h1", "up")
    assert line.hears("h0", "h1")


def test_a_partition_is_silent_both_ways_and_between_these_two_only(lab: Lab, line: Line) -> None:
    assert line.hears("h0", "h1")
    lab.fault("h0", "partition", other="h1")
    lab.fault("h1", "partition", other="h0")
    assert line.is_silent("h0", "h1")
    assert line.is_silent("h1", "h0")
    assert line.hears("h0", "h2")
    assert line.hears("h2", "h1")
    assert lab.status().hosts[0].partitioned_from == ("h1",)
    lab.fault("h1", "heal")
    assert line.hears("h0", "h1")
    assert lab.status().hosts[0].partitioned_from == ()


def test_a_run_over_a_cut_link_ends_at_its_deadline_and_names_the_fault(lab: Lab) -> None:
    lab.fault("h2", "down")
    result = lab.run(["sleep", "600"], timeout_s=0.3)
    assert result.timed_out
    assert result.reason == "the run did not finish within 300 ms (h2 is down)"


@pytest.mark.parametrize(
    ("host", "kind", "options"),
    [
        ("h9", "down", {}),
        ("h0", "rate", {}),
        ("h0", "rate", {"rate_bit_per_s": 0.0}),
        ("h0", "rate", {"rate_bit_per_s": float("nan")}),
        ("h0", "down", {"rate_bit_per_s": 1e9}),
        ("h0", "partition", {}),
        ("h0", "partition", {"other": "h0"}),
        ("h0", "partition", {"other": "h9"}),
        ("h0", "heal", {"other": "h1"}),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(lab: Lab, host: str, kind: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        lab.fault(host, kind, **options)  # type: ignore[arg-type]
    assert all(found.is_up and not found.partitioned_from for found in lab.status().hosts)
