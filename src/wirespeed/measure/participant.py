"""One rank's part in a links measurement: join, open a listener, and do the tasks that rank 0 hands out."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import NoReturn

import psutil

from wirespeed.errors import PeerFailure, UsageError, WirespeedError
from wirespeed.launch import Ranks
from wirespeed.measure.clock import Deadline
from wirespeed.measure.control import Channel, connect, proof, resolve
from wirespeed.measure.environment import host_name
from wirespeed.measure.messages import Challenge, Fault, Go, Hello, Listening, Message, Ready, SocketOptions, Task
from wirespeed.measure.transfers import (
    MAX_STREAMS,
    apply_options,
    close_all,
    describe_options,
    open_streams,
    perform,
)

_ENDED = "rank 0 ended the measurement"
_VERDICT_S = 3.0
"""Rank 0 hears of a fault at once; if it does not answer within this, it is the one that failed."""


def take_part(ranks: Ranks, port: int, join_timeout_s: float, patience_s: float) -> None:
    """Join rank 0 and serve it to the end. Raises PeerFailure where rank 0 or a peer fails.

    ``join_timeout_s`` bounds joining, ``patience_s`` every wait for the next task.
    """
    channel = connect(ranks.master_addr, port, Deadline(join_timeout_s, "joining"))
    try:
        challenge = channel.receive(Deadline(join_timeout_s, "joining"))
        if not isinstance(challenge, Challenge):
            raise PeerFailure(f"port {port} of {ranks.master_addr} is not rank 0 of this measurement")
        channel.send(
            Hello(
                rank=ranks.rank,
                local_rank=ranks.local_rank,
                host=host_name(),
                proof=proof(challenge.nonce, ranks.rank),
            )
        )
        options = _next(channel, join_timeout_s)
        if not isinstance(options, SocketOptions):
            return
        try:
            address = data_address(channel)
            with _listener(address, options) as listener:
                channel.send(
                    Listening(
                        address=address,
                        port=int(listener.getsockname()[1]),
                        options=describe_options(listener, options),
                    )
                )
                _serve(channel, listener, options, patience_s)
        except WirespeedError as fault:
            _give_up(channel, fault)
    finally:
        channel.close()


def _give_up(channel: Channel, fault: WirespeedError) -> NoReturn:
    """Tell rank 0, and raise what it makes of it: only rank 0 knows which host failed first."""
    with contextlib.suppress(PeerFailure):
        channel.send(Fault(text=str(fault)))
    deadline = Deadline(_VERDICT_S, "waiting for rank 0")
    try:
        while True:
            _next(channel, deadline.check())
    except WirespeedError as verdict:
        if verdict.problem.startswith(_ENDED):
            raise verdict from fault
    raise fault


def _next(channel: Channel, patience_s: float) -> Message:
    message = channel.receive(Deadline(patience_s, "waiting for rank 0"))
    if isinstance(message, Fault):
        raise PeerFailure(f"{_ENDED}: {message.text}")
    return message


def _serve(channel: Channel, listener: socket.socket, options: SocketOptions, patience_s: float) -> None:
    while True:
        task = _next(channel, patience_s)
        if not isinstance(task, Task):
            return
        streams = open_streams(task, listener, options)
        try:
            channel.send(Ready())
            if not isinstance(_next(channel, patience_s), Go):
                return
            channel.send(perform(task, streams))
        finally:
            close_all(streams)


def data_address(channel: Channel) -> str:
    """The address of GLOO_SOCKET_IFNAME's interface, where it names one; else the one that reached rank 0."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name:
        return str(channel.connection.getsockname()[0])
    held = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in held:
            if address.family == family:
                return str(address.address)
    raise UsageError(
        f"got GLOO_SOCKET_IFNAME={name}, which has no address on host {host_name()}",
        expected=f"one of {', '.join(sorted(psutil.net_if_addrs()))}",
    )


@contextlib.contextmanager
def _listener(address: str, options: SocketOptions) -> Iterator[socket.socket]:
    family, target = resolve(address, 0)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        apply_options(listener, options)
        listener.bind(target)
        listener.listen(MAX_STREAMS)
        yield listener
