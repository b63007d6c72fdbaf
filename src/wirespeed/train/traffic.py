"""Mark this job's connections with a DSCP, so that switches and the hosts' queues can tell training from the rest.

Done from inside the process, which needs no rights, and to connections with hosts of the job's other ranks only: what a
data loader or a logger sends elsewhere keeps its class. A mark is put on a connection that exists; so it is done again
when a strategy has made new groups, and after the first steps, which open what a backend opens late. RDMA takes its
class from NCCL's environment, which has to be set before the program starts (``wirespeed launch --dscp``).

A mark by itself changes nothing: the switches, and a queueing discipline on each host, have to map it to a queue.
"""

from __future__ import annotations

import os
import socket

import psutil
import torch
import torch.distributed as dist

from wirespeed.errors import UsageError
from wirespeed.launch.binding import TrafficClass
from wirespeed.launch.traffic import mark_sockets, packed_address
from wirespeed.measure.counters import training_interfaces
from wirespeed.train.lanes import peer_failures

VARIABLE = "WIRESPEED_DSCP"
NUM_STEPS = 3
"""After each of so many steps it is looked for connections that were opened late."""
_MAX_ADDRESSES = 32
_ADDRESS_BYTES = 16
_LOCAL = ("127.", "169.254.", "::1", "fe80:")


def wanted_dscp(argument: int | None) -> int | None:
    """What the argument or, without one, the environment asks for. Raises UsageError where it is no DSCP."""
    text = os.environ.get(VARIABLE)
    if argument is None and text:
        if not text.isdecimal():
            raise UsageError(f"got {VARIABLE}={text!r}", expected="0 to 63, such as 26")
        argument = int(text)
    return TrafficClass(dscp=argument).dscp


class TrafficMark:
    """The mark of one rank's connections to the hosts of all others. Making it is a collective."""

    def __init__(self, dscp: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.dscp = TrafficClass(dscp=dscp).dscp or 0
        self.num_marked = 0
        """Connections that carry the mark, as of the last look."""
        own = _own_addresses()
        self._peers = _addresses_of_all(own, group, device) - set(own)
        self._num_looks_left = 0
        self.apply()

    def apply(self) -> None:
        """Mark what is not marked yet, now and after each of the next steps."""
        self._num_looks_left = NUM_STEPS
        self._look()

    def step_ended(self) -> None:
        """Look for connections that the step has opened, if it is one of the first."""
        if self._num_looks_left > 0:
            self._num_looks_left -= 1
            self._look()

    def _look(self) -> None:
        self.num_marked = mark_sockets(self.dscp, [os.getpid()], peers=self._peers).num_marked

    @property
    def text(self) -> str:
        """For a report."""
        if self.num_marked:
            return f"traffic class: DSCP {self.dscp} on {self.num_marked} connections to other hosts"
        return (
            f"traffic class: no TCP connection to another host to put DSCP {self.dscp} on; RDMA takes its own from the "
            "environment (wirespeed launch --dscp)"
        )


def _own_addresses() -> list[bytes]:
    """Of this host, those of the interfaces that training was given first."""
    by_interface = psutil.net_if_addrs()
    given = training_interfaces(dict(os.environ))
    first = [] if given is None else [name for name in given if name in by_interface]
    names = [*first, *sorted(set(by_interface) - set(first))]
    found = [
        packed_address(held.address)
        for name in names
        for held in by_interface[name]
        if held.family in (socket.AF_INET, socket.AF_INET6) and not held.address.startswith(_LOCAL)
    ]
    return found[:_MAX_ADDRESSES]


def _addresses_of_all(own: list[bytes], group: dist.ProcessGroup, device: torch.device) -> set[bytes]:
    nothing = bytes(_ADDRESS_BYTES)
    padded = b"".join(own) + nothing * (_MAX_ADDRESSES - len(own))
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with peer_failures():
        dist.all_gather(every, mine, group=group)
    found: set[bytes] = set()
    for held in every:
        packed = bytes(held.tolist())
        found |= {packed[at : at + _ADDRESS_BYTES] for at in range(0, len(packed), _ADDRESS_BYTES)}
    return found - {nothing}
