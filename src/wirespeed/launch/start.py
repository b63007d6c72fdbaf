"""Become the user's program, bound to its place; or stay above it, to mark its sockets as they appear.

Without a DSCP the program replaces this process: nothing of wirespeed remains. With one this process stays as its
parent, passes signals on, marks new sockets every second and ends with the program's own exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence

from wirespeed.errors import MissingCapability
from wirespeed.launch.binding import Binding, apply
from wirespeed.launch.traffic import mark_sockets, process_tree

MARK_EVERY_S = 1.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def start(
    command: Sequence[str],
    binding: Binding,
    environ: Mapping[str, str],
    *,
    dscp: int | None = None,
    on_problem: Callable[[str], None] = lambda _: None,
) -> int:
    """Bind this process and run the command in it. Returns only in a marked run, with the exit code for a shell.

    ``on_problem`` hears, once, why sockets cannot be marked: the command goes on without.

    Raises MissingCapability where the command or the binding is not possible here.
    """
    try:
        apply(binding)
    except OSError as fault:
        raise MissingCapability(
            f"cannot bind to cores {list(binding.cpus or ())}: {fault.strerror}",
            hint="a container or scheduler may have taken them away; --no-bind leaves cores alone",
        ) from fault
    env = {**environ, **binding.environment}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if dscp is None:
            os.execvpe(command[0], list(command), env)  # noqa: S606 - becoming the user's command is what this is for
        return _run_marked(command, env, dscp, on_problem)
    except OSError as fault:
        raise MissingCapability(f"cannot run {command[0]!r}: {fault.strerror}") from fault


def _run_marked(command: Sequence[str], env: Mapping[str, str], dscp: int, on_problem: Callable[[str], None]) -> int:
    process = subprocess.Popen(list(command), env=dict(env))

    def pass_on(number: int, _: types.FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        told = False
        while True:
            try:
                code = process.wait(MARK_EVERY_S)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                pass
            if told:
                continue
            try:
                mark_sockets(dscp, process_tree(process.pid))
            except MissingCapability as fault:
                told = True
                on_problem(f"sockets are not marked: {fault}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()
