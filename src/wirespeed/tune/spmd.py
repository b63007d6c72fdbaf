"""A place that is a job somebody else launched: `tune` itself runs on every rank, under torchrun, srun or mpirun.

Rank 0 leads: it tells the others through torch's TCPStore what to start, and each starts its own child with its own
rank. The hosts need not share a file system: the run's small files travel with the order, and each rank's trace comes
back the same way. Nothing is unpickled; every wait has a deadline.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wirespeed import launch, records
from wirespeed.errors import MissingCapability, PeerFailure
from wirespeed.tune.places import LOG, RunEnd, Tails, Watch, follow, free_port, read_step, start

MAX_FILE_BYTES = 64 * 1024**2
JOIN_TIMEOUT_S = 120.0
POLL_S = 0.25


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank starts. An empty command ends the job."""

    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    folder: str = ""
    files: dict[str, bytes] = {}
    port: int = 0
    timeout_s: float = 0.0


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's child ended."""

    returncode: int
    reason: str | None
    tail: list[str]
    trace: bytes | None


class SpmdPlace:
    """The ranks of a launched job, led by rank 0."""

    is_shaped = True
    declared_bit_per_s: float | None = None

    def __init__(self, ranks: launch.Ranks, store: Store) -> None:
        self._ranks = ranks
        self._store = store
        self._num_orders = 0
        self.num_ranks = ranks.world_size
        self.ranks_per_host = ranks.local_world_size or 1
        store.set(f"host/{ranks.rank}", os.environ.get("WIRESPEED_HOST", os.uname().nodename))
        names = [store.get(f"host/{rank}").decode() for rank in range(self.num_ranks)] if ranks.rank == 0 else []
        self.hosts = tuple(dict.fromkeys(names))
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
            timeout_s=timeout_s,
        )
        self._store.set(f"order/{number}", msgspec.json.encode(order).decode())
        answers: dict[int, _Answer] = {}
        others = threading.Thread(target=self._gather, args=(number, folder, answers, timeout_s), daemon=True)
        others.start()

        def should_stop() -> str | None:
            self._mirror_steps(number, folder)
            bad = next((rank for rank, answer in answers.items() if answer.returncode != 0), None)
            return None if bad is None else f"rank {bad} failed: {answers[bad].reason or _last(answers[bad].tail)}"

        tails = Tails(folder / LOG, 1)
        end = follow(
            [start(command, self._child_env(order))],
            tails,
            first_rank=0,
            watch=watch,
            timeout_s=timeout_s,
            should_stop=should_stop,
        )
        if end.returncode != 0:
            self._store.set(f"abort/{number}", "1")
        others.join(timeout_s if end.returncode == 0 else 15.0)
        bad = next((rank for rank, answer in sorted(answers.items()) if answer.returncode != 0), None)
        if bad is not None:
            answer = answers[bad]
            end = RunEnd(returncode=answer.returncode, failed_rank=bad, reason=answer.reason, tail={bad: answer.tail})
        elif end.returncode == 0 and len(answers) < self.num_ranks - 1:
            end = RunEnd(returncode=4, reason="not every rank answered", is_stalled=True)
        return end

    def close(self) -> None:
        """Send the other ranks home."""
        self._store.set(f"order/{self._num_orders}", msgspec.json.encode(_Order()).decode())
        time.sleep(2 * POLL_S)  # the store lives in this process where no agent holds it: let the others read

    def serve(self) -> None:
        """What every other rank does: carry out orders until the job ends. Raises PeerFailure when rank 0 is gone."""
        number = 0
        while True:
            try:
                content = _wait_get(self._store, f"order/{number}", 24 * 3600.0)
            except dist.DistError as fault:
                raise PeerFailure(f"rank 0 of the tuning job is gone: {fault}") from fault
            order = msgspec.json.decode(content, type=_Order)
            if not order.command:
                return
            answer = msgspec.json.encode(self._obey(number, order)).decode()
            self._store.set(f"answer/{number}/{self._ranks.rank}", answer)
            number += 1

    def _obey(self, number: int, order: _Order) -> _Answer:
        rank, folder = self._ranks.rank, Path(order.folder)
        for name, content in order.files.items():
            records.write_bytes(folder / Path(name).name, content)
        trace, heartbeat = folder / f"trace-{rank}.json", folder / f"step-{rank}"
        trace.unlink(missing_ok=True)
        heartbeat.unlink(missing_ok=True)
        told = [0]

        def should_stop() -> str | None:
            step = read_step(heartbeat)
            if step != told[0]:
                told[0] = step
                self._store.set(f"step/{number}/{rank}", str(step))
            return "rank 0 ended the run" if self._store.check([f"abort/{number}"]) else None

        end = follow(
            [start(order.command, self._child_env(order))],
            Tails(folder / f"log-{rank}.txt", rank + 1),
            first_rank=rank,
            watch=None,
            timeout_s=order.timeout_s,
            should_stop=should_stop,
        )
        left = trace.read_bytes() if trace.is_file() and trace.stat().st_size <= MAX_FILE_BYTES else None
        return _Answer(returncode=end.returncode, reason=end.reason, tail=end.tail.get(rank, []), trace=left)

    def _gather(self, number: int, folder: Path, answers: dict[int, _Answer], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s + 60
        waiting = set(range(1, self.num_ranks))
        while waiting and time.monotonic() < deadline_s:
            for rank in list(waiting):
                if not self._store.check([f"answer/{number}/{rank}"]):
                    continue
                answer = msgspec.json.decode(self._store.get(f"answer/{number}/{rank}"), type=_Answer)
                if answer.trace is not None:
                    records.write_bytes(folder / f"trace-{rank}.json", answer.trace)
                answers[rank] = answer
                waiting.discard(rank)
            time.sleep(POLL_S)

    def _mirror_steps(self, number: int, folder: Path) -> None:
        import struct

        for rank in range(1, self.num_ranks):
            if self._store.check([f"step/{number}/{rank}"]):
                step = int(self._store.get(f"step/{number}/{rank}"))
                (folder / f"step-{rank}").write_bytes(struct.pack("<q", step))

    def _child_env(self, order: _Order) -> dict[str, str]:
        ranks = self._ranks
        return {
            **order.env,
            "RANK": str(ranks.rank),
            "LOCAL_RANK": str(ranks.local_rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": ranks.master_addr,
            "MASTER_PORT": str(order.port),
            # The child makes a rendezvous of its own; the agent's store belongs to this job.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


def join_as_rank() -> SpmdPlace:
    """On rank 0 the place; on every other rank this serves until the job has ended, and exits."""
    ranks = launch.ranks()
    is_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            ranks.master_addr,
            ranks.master_port,
            world_size=None,
            is_master=ranks.rank == 0 and not is_agent_store,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=False,
        )
        place = SpmdPlace(ranks, PrefixStore("wirespeed", store))
    except (dist.DistError, RuntimeError) as fault:
        raise PeerFailure(
            f"cannot reach rank 0 at {ranks.master_addr}:{ranks.master_port} within {JOIN_TIMEOUT_S:.0f} s: {fault}"
        ) from fault
    if ranks.rank != 0:
        place.serve()
        sys.exit(0)
    if ranks.world_size < 2:
        raise MissingCapability(
            "this job has one rank", hint="start it with at least two: there is nothing to exchange"
        )
    return place


def _wait_get(store: Store, key: str, timeout_s: float) -> bytes:
    deadline_s = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline_s:
            raise PeerFailure(f"no word from rank 0 for {timeout_s:.0f} s")
        time.sleep(POLL_S)
    content: bytes = store.get(key)
    return content


def _last(tail: list[str]) -> str:
    return tail[-1] if tail else "it printed nothing"
