"""A place that is a job somebody else launched: `tune` itself runs on every rank, under torchrun, srun or mpirun.

Rank 0 leads: it tells the others through torch's TCPStore what to start, and each starts its own child with its own
rank. The hosts need not share a file system: the run's small files travel with the order, and each rank's trace comes
back the same way. Nothing is unpickled; every wait has a deadline. Every rank notes a beat in the store once a second,
so that a host that is gone is told from a script that hangs.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wirespeed import launch, records
from wirespeed.errors import DataError, PeerFailure, UsageError, WirespeedError
from wirespeed.system import free_port
from wirespeed.tune.beats import Beats
from wirespeed.tune.children import run_children
from wirespeed.tune.places import LOG
from wirespeed.tune.watch import RunEnd, Tails, Watch, read_step

MAX_FILE_BYTES = 64 * 1024**2
JOIN_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 15.0
"""For the other ranks to end their children and answer, after a run was ended. A beat tells of life all the while."""
POLL_S = 0.25


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank starts. An empty command ends the job, with ``exit_code``."""

    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    folder: str = ""
    files: dict[str, bytes] = {}
    port: int = 0
    ranks_per_host: int = 1
    timeout_s: float = 0.0
    exit_code: int = 0


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's child ended. ``is_ended_by_order``: because rank 0 said so."""

    returncode: int
    reason: str | None
    tail: list[str]
    trace: bytes | None
    is_ended_by_order: bool = False


class SpmdPlace:
    """The ranks of a launched job, led by rank 0."""

    is_shaped = True
    declared_bit_per_s: float | None = None

    def __init__(self, ranks: launch.Ranks, store: Store, beats: Beats) -> None:
        self._ranks = ranks
        self._store = store
        self._beats = beats
        self._num_orders = 0
        self.num_ranks = ranks.world_size
        store.set(f"host/{ranks.rank}", os.environ.get("WIRESPEED_HOST", os.uname().nodename))
        names = [store.get(f"host/{rank}").decode() for rank in range(self.num_ranks)] if ranks.rank == 0 else []
        self.hosts = tuple(dict.fromkeys(names))
        self.ranks_per_host = ranks.local_world_size or max(Counter(names).values(), default=1)
        self.description = f"{ranks.launcher} job of {self.num_ranks} ranks"
        self.cpus_per_rank: float | None = len(os.sched_getaffinity(0)) / self.ranks_per_host

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, watch: Watch | None, timeout_s: float
    ) -> RunEnd:
        """See ``Place``. Called on rank 0 only."""
        number = self._num_orders
        self._num_orders += 1
        order = _Order(
            command=tuple(command),
            env=dict(env),
            folder=str(folder),
            files={
                f.name: f.read_bytes() for f in folder.iterdir() if f.suffix == ".json" and f.stat().st_size < 2**20
            },
            port=free_port(""),
            ranks_per_host=self.ranks_per_host,
            timeout_s=timeout_s,
        )
        self._store.set(f"order/{number}", msgspec.json.encode(order).decode())
        answers: dict[int, _Answer] = {}

        def should_stop() -> str | None:
            self._mirror_steps(number, folder)
            self._gather(number, folder, answers)
            bad = next((rank for rank, answer in answers.items() if answer.returncode != 0), None)
            if bad is not None:
                return f"rank {bad} failed"
            gone = self._beats.silent(set(range(1, self.num_ranks)) - set(answers))
            return f"rank {gone[0]} is silent" if gone else None

        try:
            end = run_children(
                command,
                [self._child_env(order)],
                tails=Tails(folder / LOG, range(1)),
                first_rank=0,
                watch=watch,
                timeout_s=timeout_s,
                should_stop=should_stop,
            )
            if end.returncode == 0:
                end = self._wait_for_others(end, number, folder, answers, watch, timeout_s)
        finally:  # also where rank 0 is interrupted: the others end their children and wait for the next order
            self._store.set(f"abort/{number}", "1")
        if end.returncode == 0:
            return end
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._gather(number, folder, answers)
            missing = set(range(1, self.num_ranks)) - set(answers)
            if missing == set(self._beats.silent(missing)):
                break
            time.sleep(POLL_S)
        return self._whose_fault(end, answers)

    def close(self, exit_code: int = 0) -> None:
        """Send the other ranks home, with this exit code."""
        order = msgspec.json.encode(_Order(exit_code=exit_code)).decode()
        with contextlib.suppress(dist.DistError):
            self._store.set(f"order/{self._num_orders}", order)
            # The store lives in this process where no agent holds it: let the others read, while they live.
            waiting = set(range(1, self.num_ranks))
            deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
            while waiting and time.monotonic() < deadline_s:
                waiting -= {rank for rank in waiting if self._store.check([f"home/{rank}"])}
                waiting -= set(self._beats.silent(waiting))
                time.sleep(POLL_S)
        self._beats.close()

    def serve(self) -> int:
        """What every other rank does: carry out orders until the job ends. Gives the job's exit code.

        Raises PeerFailure when rank 0 is gone.
        """
        number = 0
        threading.Thread(target=self._leave_when_cut_off, daemon=True).start()
        try:
            while True:
                while not self._store.check([f"order/{number}"]):
                    if self._beats.silent({0}):
                        raise PeerFailure("rank 0 of the tuning job is silent: its host or its link is gone")
                    time.sleep(POLL_S)
                order = msgspec.json.decode(self._store.get(f"order/{number}"), type=_Order)
                if not order.command:
                    self._store.set(f"home/{self._ranks.rank}", "1")
                    return order.exit_code
                try:
                    answer = self._obey(number, order)
                except (WirespeedError, OSError) as fault:  # a full disk here, say: rank 0 has to hear of it
                    code = fault.exit_code if isinstance(fault, WirespeedError) else 3
                    answer = _Answer(returncode=code, reason=None, tail=[f"wirespeed: {fault}"], trace=None)
                self._store.set(f"answer/{number}/{self._ranks.rank}", msgspec.json.encode(answer).decode())
                number += 1
        except dist.DistError as fault:
            raise PeerFailure(f"rank 0 of the tuning job is gone: {_first_line(fault)}") from fault
        finally:
            self._beats.close()

    def _leave_when_cut_off(self) -> None:
        """End this process when rank 0 is long silent: a call to its store can wait for ever on a link that is down."""
        while not self._beats.is_closed:
            if self._beats.silent({0}, longer_s=ANSWER_TIMEOUT_S):
                sys.stderr.write("wirespeed: rank 0 of the tuning job is silent: its host or its link is gone\n")
                sys.stderr.flush()
                os._exit(PeerFailure.exit_code)  # the child dies with this process
            time.sleep(1.0)

    def _obey(self, number: int, order: _Order) -> _Answer:
        rank, folder = self._ranks.rank, Path(order.folder)
        for name, content in order.files.items():
            records.write_bytes(folder / Path(name).name, content)
        trace, heartbeat = folder / f"trace-{rank}.json", folder / f"step-{rank}"
        trace.unlink(missing_ok=True)
        heartbeat.unlink(missing_ok=True)
        told = [-1]

        def should_stop() -> str | None:
            step = read_step(heartbeat) if heartbeat.exists() else -1
            if step != told[0]:
                told[0] = step
                self._store.set(f"step/{number}/{rank}", str(step))
            if self._store.check([f"abort/{number}"]):
                return "rank 0 ended the run"
            return "rank 0 is silent" if self._beats.silent({0}) else None

        end = run_children(
            order.command,
            [self._child_env(order)],
            tails=Tails(folder / f"log-{rank}.txt", range(rank, rank + 1)),
            first_rank=rank,
            watch=None,
            timeout_s=order.timeout_s,
            should_stop=should_stop,
        )
        left = trace.read_bytes() if trace.is_file() and trace.stat().st_size <= MAX_FILE_BYTES else None
        return _Answer(
            returncode=end.returncode,
            reason=end.reason,
            tail=end.tail.get(rank, []),
            trace=left,
            is_ended_by_order=end.is_stalled,
        )

    def _wait_for_others(  # noqa: PLR0917
        self,
        end: RunEnd,
        number: int,
        folder: Path,
        answers: dict[int, _Answer],
        watch: Watch | None,
        timeout_s: float,
    ) -> RunEnd:
        """Rank 0's child has ended well: so must the others'."""
        deadline_s = time.monotonic() + timeout_s
        while len(answers) < self.num_ranks - 1:
            self._mirror_steps(number, folder)
            self._gather(number, folder, answers)
            missing = set(range(1, self.num_ranks)) - set(answers)
            reason = None if watch is None or not missing else watch.check()
            if time.monotonic() > deadline_s:
                reason = f"rank {min(missing, default=0)} not done within {timeout_s:g} s"
            if reason is not None or self._beats.silent(missing):
                return RunEnd(returncode=4, reason=reason, is_stalled=True, tail=end.tail)
            time.sleep(POLL_S)
        bad = next((rank for rank, answer in answers.items() if answer.returncode != 0), None)
        return end if bad is None else RunEnd(returncode=answers[bad].returncode, tail=end.tail)

    def _whose_fault(self, end: RunEnd, answers: dict[int, _Answer]) -> RunEnd:
        """A rank that does not even answer comes first, then one that failed by itself, then rank 0's own end."""
        gone = [rank for rank in range(1, self.num_ranks) if rank not in answers]
        if gone:
            reason = f"rank {gone[0]} does not answer: its process, its host or its link is gone"
            return RunEnd(returncode=4, failed_rank=gone[0], reason=reason, is_peer_failure=True, tail=end.tail)
        bad = [rank for rank, answer in answers.items() if answer.returncode != 0 and not answer.is_ended_by_order]
        if bad and end.failed_rank is None:
            answer = answers[bad[0]]
            return RunEnd(
                returncode=answer.returncode,
                failed_rank=bad[0],
                reason=answer.reason,
                tail={bad[0]: answer.tail},
                log_problem=end.log_problem,
            )
        return end

    def _gather(self, number: int, folder: Path, answers: dict[int, _Answer]) -> None:
        for rank in range(1, self.num_ranks):
            if rank in answers or not self._store.check([f"answer/{number}/{rank}"]):
                continue
            try:
                answer = msgspec.json.decode(self._store.get(f"answer/{number}/{rank}"), type=_Answer)
            except msgspec.MsgspecError as fault:
                raise DataError(f"the answer of rank {rank} is damaged: {fault}") from fault
            if answer.trace is not None:
                records.write_bytes(folder / f"trace-{rank}.json", answer.trace)
            answers[rank] = answer

    def _mirror_steps(self, number: int, folder: Path) -> None:
        for rank in range(1, self.num_ranks):
            if self._store.check([f"step/{number}/{rank}"]):
                step = int(self._store.get(f"step/{number}/{rank}"))
                if step >= 0:
                    (folder / f"step-{rank}").write_bytes(struct.pack("<q", step))

    def _child_env(self, order: _Order) -> dict[str, str]:
        ranks = self._ranks
        return {
            **order.env,
            "RANK": str(ranks.rank),
            "LOCAL_RANK": str(ranks.local_rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_WORLD_SIZE": str(ranks.local_world_size or order.ranks_per_host),
            "MASTER_ADDR": ranks.master_addr,
            "MASTER_PORT": str(order.port),
            # The child makes a rendezvous of its own; the agent's store belongs to this job.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


def join_as_rank() -> SpmdPlace:
    """On rank 0 the place; on every other rank this serves until the job has ended, and exits as rank 0 does."""
    ranks = launch.ranks()
    if ranks.world_size < 2:
        raise UsageError("got a job of one rank", expected="at least two", hint="one rank has nothing to exchange")
    is_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # torchrun's store outlives a restart of the ranks: what was said before it must not be heard again.
    prefix = f"wirespeed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def connect(*, is_master: bool) -> Store:
        return PrefixStore(
            prefix,
            TCPStore(
                ranks.master_addr,
                ranks.master_port,
                world_size=None,
                is_master=is_master,
                timeout=timedelta(seconds=JOIN_TIMEOUT_S),
                wait_for_workers=False,
            ),
        )

    place = _joined(ranks, lambda: connect(is_master=ranks.rank == 0 and not is_agent_store), connect)
    if ranks.rank != 0:
        sys.exit(place.serve())
    return place


def _joined(ranks: launch.Ranks, connect_first: Callable[[], Store], connect: Callable[..., Store]) -> SpmdPlace:
    try:
        store = connect_first()
        beats = Beats(connect(is_master=False), ranks.rank)
    except (dist.DistError, RuntimeError) as fault:
        raise PeerFailure(
            f"cannot reach rank 0 at {ranks.master_addr}:{ranks.master_port} within {JOIN_TIMEOUT_S:g} s: "
            f"{_first_line(fault)}"
        ) from fault
    try:
        return SpmdPlace(ranks, store, beats)
    except (dist.DistError, RuntimeError) as fault:
        beats.close()
        raise PeerFailure(
            f"not all of {ranks.world_size} ranks have joined within {JOIN_TIMEOUT_S:g} s: {_first_line(fault)}"
        ) from fault


def _first_line(fault: Exception) -> str:
    return str(fault).splitlines()[0] if str(fault) else type(fault).__name__
