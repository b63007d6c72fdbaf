"""Bytes from the kernel's interface counters."""

import socket

import pytest

from wirespeed.errors import MissingCapability
from wirespeed.measure.counters import InterfaceCounter, parse_net_dev, training_interfaces

NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:  104      2    0    0    0     0          0         0      104       2    0    0    0     0       0          0
  eth0: 5000     10    0    0    0     0          0         0     7000      12    0    0    0     0       0          0
"""


def test_received_and_sent_bytes_are_read_by_interface():
    assert parse_net_dev(NET_DEV) == {"lo": (104, 104), "eth0": (5000, 7000)}


def test_all_interfaces_but_loopback_are_summed(tmp_path):
    path = tmp_path / "dev"
    path.write_text(NET_DEV)
    counter = InterfaceCounter(path=str(path))
    assert (counter.names, counter.tx_bytes()) == (("eth0",), 7000)
    counter.close()


def test_an_interface_that_is_absent_is_named_with_those_present(tmp_path):
    path = tmp_path / "dev"
    path.write_text(NET_DEV)
    with pytest.raises(MissingCapability, match=r"eth7.*lo, eth0"):
        InterfaceCounter(["eth7"], path=str(path))


def test_real_traffic_on_loopback_is_counted():
    counter = InterfaceCounter(["lo"])
    before = counter.tx_bytes()
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    with receiver, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x" * 1000, receiver.getsockname())
        receiver.recv(2000)
    assert counter.tx_bytes() - before >= 1000
    counter.close()


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, ("eth0", "eth1")),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, ("ib0",)),
        ({"NCCL_SOCKET_IFNAME": "^docker0,lo"}, None),
        ({}, None),
    ],
)
def test_interfaces_named_exactly_by_the_backend_are_taken(environ, names):
    assert training_interfaces(environ) == names
