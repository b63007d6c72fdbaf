from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from wirespeed.errors import MissingCapability
from wirespeed.launch.traffic import mark_sockets, packed_address, process_tree

CHILD = """
import socket, sys
held = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print("ready", flush=True)
sys.stdin.readline()
print(held.getsockopt(socket.IPPROTO_IP, socket.IP_TOS), held.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
      udp.getsockopt(socket.IPPROTO_IP, socket.IP_TOS))
"""


@contextlib.contextmanager
def child_with_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(server.getsockname()[1])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        peer, _ = server.accept()
        try:
            with peer:
                assert process.stdout.readline() == "ready\n"
                yield process
        finally:
            process.kill()
            process.communicate()


def ask(process) -> list[int]:
    out, _ = process.communicate("go\n", timeout=60)
    return [int(word) for word in out.split()]


def test_the_tcp_sockets_of_a_child_are_marked_and_others_are_not():
    with child_with_a_connection() as process:
        try:
            first = mark_sockets(26, [process.pid], loopback=True)
        except MissingCapability as fault:
            pytest.skip(str(fault))
        again = mark_sockets(26, [process.pid], loopback=True)
        assert (first.num_new, first.num_marked) == (1, 1)
        assert (again.num_new, again.num_marked) == (0, 1)
        assert ask(process) == [26 << 2, 4, 0]


def test_loopback_connections_are_left_alone():
    with child_with_a_connection() as process:
        try:
            assert mark_sockets(26, [process.pid]).num_marked == 0
        except MissingCapability as fault:
            pytest.skip(str(fault))
        assert ask(process) == [0, 0, 0]


def test_a_process_marks_its_own_sockets_over_ipv6_too():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as held:
        held.bind(("::1", 0))
        mark_sockets(46, [os.getpid()], loopback=True)
        assert held.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == 46 << 2
        assert held.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6


def test_a_process_that_has_ended_is_passed_over():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert mark_sockets(26, [process.pid]).num_marked == 0


def test_the_tree_of_a_process_holds_its_descendants():
    process = subprocess.Popen(
        [sys.executable, "-c", "import subprocess,sys; p=subprocess.Popen(['sleep','30']); print(p.pid,flush=True); p.wait()"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        grandchild = int(process.stdout.readline())
        assert {process.pid, grandchild} <= set(process_tree(os.getpid()))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_only_connections_to_the_given_peers_are_marked_and_0_takes_the_mark_away():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.2", 0)) as other:
        near = socket.create_connection(server.getsockname())
        far = socket.create_connection(other.getsockname())
        with near, far:

            def marks():
                return [
                    (
                        held.getsockopt(socket.IPPROTO_IP, socket.IP_TOS),
                        held.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
                    )
                    for held in (near, far, server)
                ]

            done = mark_sockets(26, [os.getpid()], loopback=True, peers={packed_address("127.0.0.2")})
            assert (done.num_new, done.num_marked) == (1, 1)
            assert marks() == [(0, 0), (26 << 2, 4), (0, 0)]
            mark_sockets(0, [os.getpid()], loopback=True, peers={packed_address("127.0.0.2")})
            assert marks() == [(0, 0)] * 3


def test_an_ipv4_address_is_packed_as_the_kernel_maps_it():
    assert packed_address("10.77.0.2") == bytes(10) + b"\xff\xff\x0a\x4d\x00\x02"
    assert packed_address("fe80::1%eth0") == b"\xfe\x80" + bytes(13) + b"\x01"
