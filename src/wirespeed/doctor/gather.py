"""The checks on every host of a launched job: each host's first rank looks, rank 0 puts the answers side by side.

Works under srun, torchrun and mpirun, where ssh may not be allowed. Rank 0 listens at the master's address; the others
prove that they hold the same WIRESPEED_TOKEN (empty where none is set), as in measure/control.py. The channel is not
encrypted and carries what a report holds: names, addresses, settings.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import msgspec

from wirespeed.doctor.examine import Examination, Question, examine
from wirespeed.doctor.remote import MAX_REPORT_CHARS
from wirespeed.doctor.reports import (
    ClusterReport,
    HostFailure,
    examination_from_json,
    examination_to_json,
    host_report,
)
from wirespeed.errors import DataError, PeerFailure
from wirespeed.launch import Ranks
from wirespeed.measure.clock import Deadline
from wirespeed.measure.control import connect, listen, proof
from wirespeed.measure.environment import capture, host_name
from wirespeed.measure.links import control_port
from wirespeed.system import System

_NONCE_CHARS = 32
_POLL_S = 0.2
_MAX_PENDING = 64
_PROOF_CHARS = 64
_HEAD = struct.Struct("!II")  # rank, length of what follows


def gather(
    ranks: Ranks, question: Question, *, timeout_s: float = 60.0, port: int | None = None, system: System | None = None
) -> ClusterReport | None:
    """Rank 0: the report of all hosts, those that failed named. Other ranks: None, after they have answered.

    ``timeout_s`` covers all but the time for which counters are watched. The port is that of ``bench links``:
    MASTER_PORT, or one above it under torchrun, whose own that is. Raises PeerFailure where rank 0 cannot be reached.
    """
    chosen = control_port(ranks) if port is None else port
    look = (lambda: examine(System() if system is None else system, question)) if ranks.local_rank == 0 else None
    deadline = Deadline(timeout_s + (question.during_s or 0.0), "gathering reports")
    if ranks.rank == 0:
        return _collect(ranks, chosen, look, deadline)
    _answer(ranks, chosen, look, deadline)
    return None


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank sends: its host's name, and the examination where it is the host's first rank."""

    host: str
    examination: str | None


def _collect(ranks: Ranks, port: int, look: Callable[[], Examination] | None, deadline: Deadline) -> ClusterReport:
    answers: dict[int, _Answer | HostFailure] = {}
    with listen(ranks.master_addr, port) as server, ThreadPoolExecutor(max_workers=_MAX_PENDING + 1) as pool:
        own = None if look is None else pool.submit(look)
        pending: list[Future[tuple[int, _Answer | HostFailure] | None]] = []
        while len(answers) < ranks.world_size - 1 and deadline.remaining_s > 0:
            try:
                # Strangers that say nothing hold a place until the deadline; the queue of the socket waits meanwhile.
                if len(pending) < _MAX_PENDING:
                    server.settimeout(_POLL_S)
                    pending.append(pool.submit(_receive, server.accept()[0], ranks.world_size, deadline))
                else:
                    wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            except TimeoutError:
                pass
            for done in [one for one in pending if one.done()]:
                pending.remove(done)
                received = done.result()
                if received is not None:
                    answers[received[0]] = received[1]
        environment = capture()
        reports = [] if own is None else [host_report(own.result(), environment, name=host_name())]
    failures = [
        HostFailure(host=f"rank {rank}", why=f"did not report within {deadline.seconds:g} s")
        for rank in range(1, ranks.world_size)
        if rank not in answers
    ]
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, HostFailure):
            failures.append(answer)
        elif answer.examination is not None:
            try:
                held = examination_from_json(answer.examination, source=answer.host)
            except DataError as fault:
                failures.append(HostFailure(host=answer.host, why=str(fault)))
                continue
            taken = {report.host for report in reports}
            name = answer.host if answer.host not in taken else f"{answer.host} (rank {rank})"
            reports.append(host_report(held, environment, name=name))
    return ClusterReport(environment=environment, hosts=tuple(reports), failures=tuple(failures))


def _receive(
    connection: socket.socket, world_size: int, deadline: Deadline
) -> tuple[int, _Answer | HostFailure] | None:
    """One rank's answer; None from a stranger."""
    with connection:
        nonce = secrets.token_hex(_NONCE_CHARS // 2)
        try:
            connection.settimeout(deadline.check())
            connection.sendall(nonce.encode())
            rank, length = _HEAD.unpack(_read(connection, _HEAD.size, deadline))
            if not 1 <= rank < world_size or length > 2 * MAX_REPORT_CHARS:
                return None
            if not secrets.compare_digest(_read(connection, _PROOF_CHARS, deadline), proof(nonce, rank).encode()):
                return None
            content = _read(connection, length, deadline)
            connection.sendall(b"k")
        except (OSError, PeerFailure):
            return None
        try:
            return rank, msgspec.json.decode(content, type=_Answer)
        except (msgspec.MsgspecError, RecursionError) as fault:
            return rank, HostFailure(host=f"rank {rank}", why=f"sent what is not understood: {fault}")


def _answer(ranks: Ranks, port: int, look: Callable[[], Examination] | None, deadline: Deadline) -> None:
    examination = None if look is None else examination_to_json(look())
    content = msgspec.json.encode(_Answer(host=host_name(), examination=examination))
    channel = connect(ranks.master_addr, port, deadline)
    with channel.connection as connection:
        try:
            nonce = _read(connection, _NONCE_CHARS, deadline).decode("ascii", "replace")
            connection.sendall(_HEAD.pack(ranks.rank, len(content)) + proof(nonce, ranks.rank).encode() + content)
            taken = _read(connection, 1, deadline)
        except OSError as fault:
            raise PeerFailure(f"rank 0 at {ranks.master_addr} port {port} did not take the report: {fault}") from fault
    if taken != b"k":
        raise PeerFailure(f"port {port} of {ranks.master_addr} is not rank 0 of this job")


def _read(connection: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    held = bytearray()
    while len(held) < num_bytes:
        connection.settimeout(deadline.check())
        part = connection.recv(min(1 << 16, num_bytes - len(held)))
        if not part:
            raise PeerFailure(
                "the other end closed the connection", hint="check that WIRESPEED_TOKEN is the same on all ranks"
            )
        held += part
    return bytes(held)
