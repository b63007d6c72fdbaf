"""Where a run takes place: in a lab, on loopback, or as one rank of a job under torchrun, srun or mpirun.

A place starts one process per rank with the SPMD variables, watches the ranks' heartbeats, ends all when one fails or
none makes progress, and brings home the files that the ranks left in the run's folder.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from wirespeed.lab import Lab

LOG = "log.txt"
TAIL_LINES = 40
GRACE_S = 3.0


@dataclass(kw_only=True)
class RunEnd:
    """How a run ended. ``reason`` says in words why it was not fine; ``tail`` holds each rank's last lines."""

    returncode: int
    failed_rank: int | None = None
    reason: str | None = None
    is_stalled: bool = False
    tail: dict[int, list[str]] = field(default_factory=dict)


class Watch:
    """Progress and patience: how far the ranks are, and for how long nothing has moved."""

    def __init__(
        self,
        heartbeats: Callable[[int], Path],
        num_ranks: int,
        *,
        start_timeout_s: float,
        stall_timeout_s: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._paths = [heartbeats(rank) for rank in range(num_ranks)]
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._on_progress = on_progress
        self._last = -1
        self._moved_s = time.monotonic()

    def check(self) -> str | None:
        """Look once. A text when the run has to be given up."""
        step = min((read_step(path) for path in self._paths), default=0)
        now = time.monotonic()
        if step > self._last:
            if step > 0 and self._on_progress is not None:
                self._on_progress(step)
            self._last, self._moved_s = step, now
        limit_s = self._start_timeout_s if self._last <= 0 else self._stall_timeout_s
        if now - self._moved_s <= limit_s:
            return None
        slowest = [rank for rank, path in enumerate(self._paths) if read_step(path) <= self._last]
        ranks = ", ".join(str(rank) for rank in slowest[:8])
        if self._last <= 0:
            return f"no optimizer step within {limit_s:.0f} s (rank {ranks})"
        return f"no progress for {limit_s:.0f} s after step {self._last} (rank {ranks} behind)"


def read_step(path: Path) -> int:
    """The step number in a heartbeat file; 0 when there is none yet."""
    try:
        content = path.read_bytes()
    except OSError:
        return 0
    return int(struct.unpack("<q", content)[0]) if len(content) == 8 else 0


class Place(Protocol):
    """One way to run a command on all ranks."""

    num_ranks: int
    ranks_per_host: int
    description: str
    hosts: tuple[str, ...]
    declared_bit_per_s: float | None
    cpus_per_rank: float | None
    is_shaped: bool

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, watch: Watch | None, timeout_s: float
    ) -> RunEnd:
        """Run to the end, or until the watch or ``timeout_s`` gives it up.

        ``folder`` holds what the ranks read and takes what they write, and the log of their output.
        """
        ...

    def close(self) -> None:
        """Take down what the place made."""
        ...


class Tails:
    """Writes every rank's lines to a log and keeps the last ones."""

    def __init__(self, log: Path, num_ranks: int) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._stream = log.open("w", encoding="utf-8", errors="replace")
        self._lock = threading.Lock()
        self.lines = {rank: deque[str](maxlen=TAIL_LINES) for rank in range(num_ranks)}

    def add(self, rank: int, _stream: str, line: str) -> None:
        """One more line of a rank."""
        with self._lock:
            self.lines[rank].append(line)
            if not self._stream.closed:
                self._stream.write(f"[{rank}] {line}\n")
                self._stream.flush()

    def close(self) -> dict[int, list[str]]:
        """Close the log and give the last lines of every rank."""
        with self._lock:
            self._stream.close()
        return {rank: list(lines) for rank, lines in self.lines.items()}


class LabPlace:
    """A virtual cluster of network namespaces."""

    is_shaped = True

    def __init__(self, lab: Lab, *, ranks_per_host: int = 1) -> None:
        self._lab = lab
        self.ranks_per_host = ranks_per_host
        self.hosts = tuple(host.name for host in lab.hosts)
        self.num_ranks = len(self.hosts) * ranks_per_host
        self.declared_bit_per_s: float | None = lab.spec.rate_bit_per_s
        self.description = f"lab of {len(self.hosts)} hosts"
        self.cpus_per_rank: float | None = len(os.sched_getaffinity(0)) / self.num_ranks

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, watch: Watch | None, timeout_s: float
    ) -> RunEnd:
        """See ``Place``. The lab ends the other ranks when one fails."""
        tails = Tails(folder / LOG, self.num_ranks)
        try:
            result = self._lab.run(
                command,
                ranks_per_host=self.ranks_per_host,
                env={"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"), **env},
                on_line=tails.add,
                should_stop=None if watch is None else watch.check,
                timeout_s=timeout_s,
            )
        finally:
            lines = tails.close()
        return RunEnd(
            returncode=4 if result.timed_out else result.returncode,
            failed_rank=result.failed_rank,
            reason=result.reason,
            is_stalled=result.timed_out,
            tail=lines,
        )

    def close(self) -> None:
        """Take the lab down."""
        self._lab.down()


class LoopbackPlace:
    """Processes of this machine over loopback: no shaping, for machines where no namespace can be had."""

    is_shaped = False
    declared_bit_per_s: float | None = None

    def __init__(self, num_ranks: int, *, why: str) -> None:
        self.num_ranks = num_ranks
        self.ranks_per_host = num_ranks
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        self.description = f"loopback, unshaped ({why})"
        self.cpus_per_rank: float | None = len(os.sched_getaffinity(0)) / num_ranks

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, watch: Watch | None, timeout_s: float
    ) -> RunEnd:
        """See ``Place``."""
        tails = Tails(folder / LOG, self.num_ranks)
        port = free_port()
        processes = [
            start(
                command,
                {
                    **env,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.num_ranks),
                    "LOCAL_WORLD_SIZE": str(self.num_ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                },
            )
            for rank in range(self.num_ranks)
        ]
        try:
            return follow(processes, tails, first_rank=0, watch=watch, timeout_s=timeout_s)
        finally:
            stop(processes)

    def close(self) -> None:
        """Nothing to take down."""


def follow(
    processes: list[subprocess.Popen[str]],
    tails: Tails,
    *,
    first_rank: int,
    watch: Watch | None,
    timeout_s: float,
    should_stop: Callable[[], str | None] = lambda: None,
) -> RunEnd:
    """Wait until all have ended well, or one has not, or the watch, ``should_stop`` or the deadline says so."""
    readers = [
        threading.Thread(target=_drain, args=(process, tails, first_rank + index), daemon=True)
        for index, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    deadline_s = time.monotonic() + timeout_s
    end = RunEnd(returncode=0)
    while True:
        codes = [process.poll() for process in processes]
        failed = next((i for i, code in enumerate(codes) if code not in (None, 0)), None)
        if failed is not None:
            code = codes[failed]
            assert code is not None
            end = RunEnd(returncode=code if code > 0 else 128 - code, failed_rank=first_rank + failed)
            break
        if all(code == 0 for code in codes):
            break
        reason = should_stop() or (None if watch is None else watch.check())
        if reason is None and time.monotonic() > deadline_s:
            reason = f"not done within {timeout_s:.0f} s"
        if reason is not None:
            end = RunEnd(returncode=4, reason=reason, is_stalled=True)
            break
        time.sleep(0.1)
    stop(processes)
    for reader in readers:
        reader.join(2.0)
    end.tail = tails.close()
    return end


def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start one rank in a session of its own, output joined in one pipe."""
    return subprocess.Popen(
        list(command),
        env={**os.environ, **env, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _drain(process: subprocess.Popen[str], tails: Tails, rank: int) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            tails.add(rank, "stdout", line.rstrip("\n"))


def stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End what still runs, with everything it started: SIGTERM to its session, then SIGKILL."""
    running = [process for process in processes if process.poll() is None]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                try:
                    os.killpg(process.pid, sign)
                except ProcessLookupError:
                    continue
        deadline_s = time.monotonic() + GRACE_S
        for process in running:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that is free on an address of this host at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def worker_command(module: str, *arguments: str) -> list[str]:
    """The command line of one of our own workers."""
    return [sys.executable, "-m", module, *arguments]
