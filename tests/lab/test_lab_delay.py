"""Delay and loss, by netem or by the line in user space, whichever this kernel gives."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from lab_tools import python, wait_until

from wirespeed.lab import Lab, LabSpec

PING = """
import socket, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.settimeout(5)
times = []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    link.sendto(b"?", (sys.argv[1], 7000))
    link.recv(9)
    times.append(time.perf_counter() - began)
print(min(times))
"""
ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 7000))
print("ready", flush=True)
while True:
    _, peer = server.recvfrom(9)
    server.sendto(b"!", peer)
"""
COUNT = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 7000))
print("ready", flush=True)
seen = 0
while True:
    data, peer = server.recvfrom(99)
    if data == b"x":
        seen += 1
    else:
        server.sendto(data + b" %d" % seen, peer)
"""
# Small datagrams, twenty at a time. Then the receiver is asked how many came, until an answer to this very question is
# heard: whoever is late on the way, no queue ever holds more than these twenty and some questions.
SEND = """
import socket, sys
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.connect((sys.argv[1], 7000))
link.settimeout(0.05)
for batch in range(int(sys.argv[2]) // 20):
    for _ in range(20):
        link.send(b"x")
    answer = []
    while answer[:1] != [b"%d" % batch]:
        link.send(b"%d" % batch)
        try:
            answer = link.recv(99).split()
        except TimeoutError:
            pass
print(int(answer[1]))
"""
TAKE = """
import hashlib, socket
server = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
connection = server.accept()[0]
found = hashlib.sha256()
while data := connection.recv(1 << 18):
    found.update(data)
print(found.hexdigest())
"""
GIVE = """
import hashlib, random, socket, sys
data = random.Random(1).randbytes(int(sys.argv[2]))
socket.create_connection((sys.argv[1], 7000), timeout=30).sendall(data)
print(hashlib.sha256(data).hexdigest())
"""


def serve(lab: Lab, host: str, code: str) -> subprocess.Popen[bytes]:
    server = lab.popen(host, python(code), stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return server


def test_a_round_trip_takes_twice_the_delay() -> None:
    with Lab(LabSpec(hosts=2, rate_bit_per_s=1e9, delay_s=0.02)) as lab:
        assert lab.status().delay_by in ("netem", "line")
        server = serve(lab, "h1", ECHO)
        # Never early. The best of 20 is late by 0.4 ms on an idle machine; a busy one may need some more of them.
        best_s = 1.0
        for _ in range(10):
            best_s = min(best_s, float(lab.exec("h0", python(PING, "h1", 20)).stdout))
            if best_s < 0.044:
                break
        server.kill()
        server.communicate()
        assert 0.040 <= best_s < 0.044


def test_frames_are_lost_with_the_chance_asked_for() -> None:
    # 4000 frames at 5 %: mean 200, standard deviation 13.8; five of them either side.
    with Lab(LabSpec(hosts=2, rate_bit_per_s=1e9, loss=0.05)) as lab:
        server = serve(lab, "h1", COUNT)
        done = lab.exec("h0", python(SEND, "h1", 4000), timeout_s=100.0)
        server.kill()
        server.communicate()
        lost = 4000 - int(done.stdout)
        assert 131 <= lost <= 269


def test_bytes_arrive_whole_over_a_link_that_loses_frames() -> None:
    """TCP sees losses inside large segments as it would on a wire, and every checksum holds."""
    with Lab(LabSpec(hosts=2, rate_bit_per_s=200e6, delay_s=0.001, loss=0.01)) as lab:
        server = serve(lab, "h1", TAKE)
        sent = lab.exec("h0", python(GIVE, "h1", 4_000_000), timeout_s=60.0)
        assert server.communicate(timeout=60)[0].decode() == sent.stdout


def test_the_line_carries_a_cable_that_was_out() -> None:
    with Lab(LabSpec(hosts=2, rate_bit_per_s=1e9, delay_s=0.001)) as lab:
        server = serve(lab, "h1", ECHO)
        lab.fault("h1", "down")
        lab.fault("h1", "up")
        assert float(lab.exec("h0", python(PING, "h1", 3)).stdout) > 0.002
        server.kill()
        server.communicate()


def test_a_dead_delay_line_is_named_in_the_status() -> None:
    with Lab(LabSpec(hosts=2, rate_bit_per_s=1e9, delay_s=0.001)) as lab:
        status = lab.status()
        if status.delay_by != "line":
            return
        (line,) = Path(f"/proc/{status.keeper_pid}/task/{status.keeper_pid}/children").read_text().split()
        os.kill(int(line), signal.SIGKILL)
        wait_until(lambda: lab.status().notes, "the note")
        assert "delay line has ended" in lab.status().notes[0]
