"""Run one program on every rank of a lab: start, prefix the output, stop all when one fails, report.

A rank leads a session of its own. Stopping is SIGTERM to each rank's group, SIGKILL after a grace time, then
the keeper ends whatever else carries the run's token (a process may leave its group, as torchrun's workers
do).
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wirespeed import units
from wirespeed.errors import PeerFailure, UsageError, WirespeedError

if TYPE_CHECKING:
    from wirespeed.lab.cluster import Lab
    from wirespeed.lab.layout import LabHost

TAIL_LINES = 50
MAX_LINE_BYTES = 1 << 20
GRACE_S = 3.0
TIMED_OUT = 124
MAX_RANKS = 1024
_DRAIN_S = 2.0

_ASK_S = 0.2

OnLine = Callable[[int, str, str], None]
ShouldStop = Callable[[], str | None]


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended.

    ``returncode`` is 0, or that of the first rank that failed (128 + n when signal n ended it), or 124 at the
    deadline. ``tails`` holds the last lines of each rank, both streams in the order they came.
    """

    returncode: int
    failed_rank: int | None = None
    timed_out: bool = False
    reason: str | None = None
    duration_s: float
    tails: tuple[tuple[str, ...], ...]


def print_line(rank: int, stream: str, line: str) -> None:
    """The default ``on_line``: ``[rank] line`` on the stream it came from."""
    out = sys.stdout if stream == "stdout" else sys.stderr
    out.write(f"[{rank}] {line}\n")
    out.flush()


class _Rank:
    """One rank's process, its open pipes and the lines it wrote last."""

    def __init__(self, number: int, host: str, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.host = host
        self.process = process
        self.handle = os.pidfd_open(process.pid)
        self.partial = {"stdout": b"", "stderr": b""}
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def signal_group(self, number: int) -> None:
        """Signal the rank's session.

        Until it has its own (a moment after the start) only the process itself.
        """
        if self.process.poll() is not None:
            return  # the group's id may be somebody else's by now; the token finds what is left
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self.process.pid) == self.process.pid:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)


class _Run:
    """The loop over all ranks: output, exits, the deadline, the lab's end."""

    def __init__(self, lab: Lab, on_line: OnLine, timeout_s: float | None) -> None:
        self.lab = lab
        self.timeout_s = timeout_s
        self.began = time.monotonic()
        self.on_line = on_line
        self.token = lab.new_token()
        self.ranks: list[_Rank] = []
        self.num_running = 0
        self.num_pipes = 0
        self.selector = selectors.DefaultSelector()
        self.failed: _Rank | None = None
        self.lab_ended = False

    def start(self, host: str, command: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        """Start the next rank."""
        process = self.lab.popen(
            host,
            command,
            env=env,
            token=self.token,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )
        rank = _Rank(len(self.ranks), host, process)
        self.ranks.append(rank)
        self.selector.register(rank.handle, selectors.EVENT_READ, (rank, "exit"))
        self.num_running += 1
        for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, (rank, stream))
            self.num_pipes += 1

    def step(self, timeout_s: float | None) -> None:
        """Wait for and handle one batch of events."""
        for key, _ in self.selector.select(timeout_s):
            if key.data is None:
                self.lab_ended = True
                self.selector.unregister(key.fileobj)
                continue
            rank, what = key.data
            if what == "exit":
                self.selector.unregister(key.fileobj)
                self.num_running -= 1
                if rank.process.wait() != 0 and self.failed is None:
                    self.failed = rank
            else:
                self._read(rank, what, key.fileobj)

    def _read(self, rank: _Rank, stream: str, pipe: Any) -> None:
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return
        *lines, rest = (rank.partial[stream] + data).split(b"\n")
        if not data or len(rest) > MAX_LINE_BYTES:  # the end, or a line too long to hold: pass on what there is
            lines, rest = [*lines, *([rest] if rest else [])], b""
        rank.partial[stream] = rest
        for line in lines:
            text = line.decode(errors="replace").removesuffix("\r")
            rank.tail.append(text)
            self.on_line(rank.number, stream, text)
        if not data:
            self.selector.unregister(pipe)
            pipe.close()
            self.num_pipes -= 1

    def wait(self, should_stop: ShouldStop | None) -> str | None:
        """Until all have ended or one has failed; a reason when ``should_stop`` or the deadline ended it."""
        while self.num_running and self.failed is None and not self.lab_ended:
            left = None
            if self.timeout_s is not None:
                left = self.began + self.timeout_s - time.monotonic()
                if left <= 0:
                    return f"the run did not finish within {units.format_duration(self.timeout_s)}"
            if should_stop is not None:
                reason = should_stop()
                if reason is not None:
                    return reason
                left = _ASK_S if left is None else min(left, _ASK_S)
            self.step(left)
        return None

    def stop(self) -> None:
        """End everything of the run and read what it still wrote."""
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            for rank in self.ranks:
                rank.signal_group(number)
            self._pump(grace_s, lambda: self.num_running > 0)
            if not self.num_running:
                break
        try:
            self.lab.end_token(self.token)
        except WirespeedError:  # the keeper is gone, and with it the lab
            self.lab_ended = True
        self._pump(_DRAIN_S, lambda: self.num_pipes > 0)

    def _pump(self, timeout_s: float, is_needed: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while is_needed() and (left := deadline - time.monotonic()) > 0:
            self.step(left)

    def close(self) -> None:
        """Release descriptors; kill, without grace, what an exception on the way left running."""
        for rank in self.ranks:
            rank.signal_group(signal.SIGKILL)
            rank.process.wait()
            os.close(rank.handle)
            for pipe in (rank.process.stdout, rank.process.stderr):
                if pipe is not None:
                    pipe.close()
        self.selector.close()


def run_ranks(
    lab: Lab,
    command: Sequence[str],
    *,
    ranks_per_host: int,
    env: Mapping[str, str] | None,
    sched_batch: bool,
    timeout_s: float | None,
    on_line: OnLine | None,
    should_stop: ShouldStop | None = None,
    cwd: str | Path | None,
    order: Sequence[str] | None = None,
) -> RunResult:
    """See ``Lab.run``."""
    hosts = _in_order(lab, order)
    num_ranks = len(hosts) * ranks_per_host
    if not 1 <= num_ranks <= MAX_RANKS:
        raise UsageError(
            f"got {ranks_per_host} ranks on each of {len(hosts)} hosts",
            expected=f"1 to {MAX_RANKS} in all",
        )
    port = lab.free_port(hosts[0].name)
    run = _Run(lab, print_line if on_line is None else on_line, timeout_s)
    try:
        run.selector.register(lab.keeper_handle, selectors.EVENT_READ, None)
        for number in range(num_ranks):
            variables = {
                "RANK": str(number),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(number % ranks_per_host),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(port),
                **({} if env is None else env),
            }
            host = hosts[number // ranks_per_host].name
            run.start(host, command, variables, sched_batch=sched_batch, cwd=cwd)
        given_up = run.wait(should_stop)
        failed, is_done = run.failed, run.num_running == 0 and run.failed is None
        run.stop()
    finally:
        run.close()
    # `lab down` ends the ranks first, then the keeper: a rank that it ended is no failure of the program.
    if run.lab_ended and not is_done:
        raise PeerFailure(f"lab {lab.name} ended during the run", hint="see who called `lab down`, or the kernel's log")
    return _result(run, failed, given_up)


def _in_order(lab: Lab, order: Sequence[str] | None) -> tuple[LabHost, ...]:
    if order is None:
        return lab.hosts
    known = {host.name: host for host in lab.hosts}
    wrong = [name for name in order if name not in known]
    if wrong or not order or len(set(order)) != len(order):
        raise UsageError(f"got the order {', '.join(order)}", expected=f"each at most once of {', '.join(known)}")
    return tuple(known[name] for name in order)


def _result(run: _Run, failed: _Rank | None, given_up: str | None) -> RunResult:
    duration_s = time.monotonic() - run.began
    tails = tuple(tuple(rank.tail) for rank in run.ranks)
    if given_up is not None:
        reason = f"{given_up}{_known_faults(run.lab)}"
        return RunResult(returncode=TIMED_OUT, timed_out=True, reason=reason, duration_s=duration_s, tails=tails)
    if failed is None:
        return RunResult(returncode=0, duration_s=duration_s, tails=tails)
    code = failed.process.returncode
    how = f"ended with exit code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
    return RunResult(
        returncode=code if code >= 0 else 128 - code,
        failed_rank=failed.number,
        reason=f"rank {failed.number} on {failed.host} {how}{_known_faults(run.lab)}",
        duration_s=duration_s,
        tails=tails,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _known_faults(lab: Lab) -> str:
    """The lab's faults, as part of a reason: a run over a cut link is not the program's mistake."""
    try:
        hosts = lab.status().hosts
    except WirespeedError:
        return ""
    faults = [f"{host.name} is down" for host in hosts if not host.is_up]
    faults += [
        f"{host.name} is cut off from {', '.join(host.partitioned_from)}" for host in hosts if host.partitioned_from
    ]
    return f" ({'; '.join(faults)})" if faults else ""
