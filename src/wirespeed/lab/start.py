"""Start a lab's keeper, or one that only tries whether a lab can be made, and hear what became of it."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import msgspec

from wirespeed.errors import InternalError, MissingCapability, PeerFailure
from wirespeed.lab import control, journal

_START_S = 30.0


def start_keeper(order: bytes, folder: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start a keeper, hand it its order and its folder's lock, and wait until the lab is there."""
    try:
        log = (folder / "keeper.log").open("w+b")
    except OSError as error:
        raise journal.cannot_write(folder, error) from None
    with log:
        keeper = _spawn_keeper(log, (lock,))
        try:
            _exchange(keeper, order, log)
        except BaseException:
            kill(keeper)
            raise
    return keeper


def _spawn_keeper(log: IO[bytes], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    if sys.platform != "linux":
        raise MissingCapability(f"a lab needs Linux, and this is {sys.platform}")
    source = str(Path(__file__).parents[2])
    search = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "wirespeed.lab.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        pass_fds=descriptors,
        cwd="/",
        env={**os.environ, "PYTHONPATH": search},
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a keeper at once and wait for it."""
    process.kill()
    process.wait()


def _exchange(keeper: subprocess.Popen[bytes], order: bytes, log: IO[bytes]) -> None:
    """Give the order and read the answer to its end, within a deadline; its problem is raised as an error."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with keeper.stdin, keeper.stdout:
        with contextlib.suppress(BrokenPipeError), keeper.stdin as pipe:
            pipe.write(order)
        deadline = time.monotonic() + _START_S
        answer = b""
        while select.select([keeper.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(keeper.stdout.fileno(), 65536)
            if not data:
                break
            answer += data
        else:
            raise PeerFailure(f"the lab's keeper did not finish within {_START_S:g} s")
    if not answer:
        log.seek(0)
        raise InternalError(f"the lab's keeper ended: {log.read().decode(errors='replace')[-2000:]}")
    reply = msgspec.json.decode(answer, type=control.Reply)
    if reply.problem is not None:
        raise reply.problem.as_error()


@functools.cache
def why_unavailable() -> str | None:
    """None when a lab can be made here, else what is missing. Tries it, once per process."""
    try:
        journal.labs_dir()
        with tempfile.TemporaryFile() as log:
            keeper = _spawn_keeper(log, ())
            try:
                _exchange(keeper, b"", log)
            finally:
                kill(keeper)
    except (MissingCapability, InternalError, PeerFailure, OSError) as error:
        return str(error)
    return None
