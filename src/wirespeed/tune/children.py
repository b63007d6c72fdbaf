"""The ranks that this process starts on its own host: started, followed and ended, with all that they start.

A rank leads a session of its own and dies with this process, however that ends (the kernel's parent-death signal).
Stopping is SIGTERM to its session, SIGKILL after a grace time, and then the same for whatever else carries the run's
token: loader workers of a rank that ended abruptly, or children that left the session.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from wirespeed import lab
from wirespeed.lab import processes
from wirespeed.tune.watch import RunEnd, Tails, Watch

GRACE_S = 3.0
POLL_S = 0.1
_LAST_WORDS_S = 10.0
"""For reading what ended children have left in their pipes. Only one that got away with a pipe makes that long."""
TOKEN = "WIRESPEED_RUN_TOKEN"  # noqa: S105 - the variable's name
_ENTER = str(Path(lab.__file__).with_name("enter.py"))
"""Started with no namespace to join it sets the parent-death signal and the session, and becomes the command."""


def run_children(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    tails: Tails,
    first_rank: int,
    watch: Watch | None,
    timeout_s: float,
    should_stop: Callable[[], str | None] = lambda: None,
) -> RunEnd:
    """Start one child per environment and wait until all have ended well, or something ends the run.

    That is a child's failure, the watch, ``should_stop`` or the deadline. Nothing of the run is left afterwards,
    whatever is raised on the way.
    """
    token = secrets.token_hex(8)
    children: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for index, environment in enumerate(environments):
            child = _start(command, {**environment, TOKEN: token})
            children.append(child)
            readers.append(threading.Thread(target=_drain, args=(child, tails, first_rank + index), daemon=True))
            readers[-1].start()
        end = _wait(children, first_rank, watch, timeout_s, should_stop)
    finally:
        _stop(children, token)
        for reader in readers:
            reader.join(_LAST_WORDS_S)
        lines = tails.close()
    end.tail, end.log_problem = lines, tails.problem
    return end


def _wait(
    children: Sequence[subprocess.Popen[str]],
    first_rank: int,
    watch: Watch | None,
    timeout_s: float,
    should_stop: Callable[[], str | None],
) -> RunEnd:
    deadline_s = time.monotonic() + timeout_s
    while True:
        codes = [child.poll() for child in children]
        failed = _to_blame(codes)
        if failed is not None:
            code = codes[failed]
            assert code is not None
            return RunEnd(returncode=code if code > 0 else 128 - code, failed_rank=first_rank + failed)
        if all(code == 0 for code in codes):
            return RunEnd(returncode=0)
        reason = should_stop() or (None if watch is None else watch.check())
        if reason is None and time.monotonic() > deadline_s:
            reason = f"not done within {timeout_s:g} s"
        if reason is not None:
            return RunEnd(returncode=4, reason=reason, is_stalled=True)
        time.sleep(POLL_S)


def _to_blame(codes: Sequence[int | None]) -> int | None:
    """Of the children that failed between two looks, one that was killed: the others' failures followed from that.

    None where none failed. (SIGABRT is what a broken connection may end in, so it counts as a failure of one's own.)
    """
    failed = [index for index, code in enumerate(codes) if code not in (None, 0)]
    killed = [index for index in failed if (codes[index] or 0) < 0 and codes[index] != -signal.SIGABRT]
    return next(iter(killed or failed), None)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    namespaces = ["-1"] * 4
    return subprocess.Popen(
        [sys.executable, "-I", "-S", _ENTER, *namespaces, "0", "1", str(os.getpid()), os.getcwd(), *command],
        env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _drain(child: subprocess.Popen[str], tails: Tails, rank: int) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            tails.add(rank, "stdout", line.rstrip("\n"))


def _stop(children: Sequence[subprocess.Popen[str]], token: str) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [child for child in children if child.poll() is None]
        for child in running:
            _signal_session(child, number)
        deadline_s = time.monotonic() + GRACE_S
        for child in running:
            try:
                child.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
    processes.end(_carries(token))


def _signal_session(child: subprocess.Popen[str], number: int) -> None:
    try:
        if os.getpgid(child.pid) == child.pid:  # else it has not made its session yet
            os.killpg(child.pid, number)
        else:
            os.kill(child.pid, number)
    except ProcessLookupError:
        return


def _carries(token: str) -> Callable[[int], bool]:
    mark = f"{TOKEN}={token}".encode()

    def test(pid: int) -> bool:
        try:
            return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # ended, or somebody else's
            return False

    return test
