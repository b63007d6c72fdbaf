"""Run one command inside a host of a lab: join its namespaces, then become the command.

Started as a script by its path with ``python -I -S``, never imported by the package: it needs only the
standard library and starts in about 15 ms, and the caller may have threads, which a Python function between
fork and exec does not survive. Arguments: descriptors of the user (-1: none), mount, network and UTS
namespace, 1 for SCHED_BATCH, 1 for a session of its own, the parent's process id, the working folder, then
the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def main(arguments: list[str]) -> NoReturn:
    """Become the command.

    Returns an exit code only where the parent is gone; raises OSError where it fails.
    """
    *namespaces, batch, session, parent = (int(text) for text in arguments[:7])
    folder, command = arguments[7], arguments[8:]
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in namespaces:  # the user namespace first: it gives the right to join the others
        if descriptor >= 0:
            _check(libc.setns(descriptor, 0), "setns")
            os.close(descriptor)
    os.chdir(folder)
    if session:
        os.setsid()
    # After setns: joining a user namespace changes credentials, which clears this setting.
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(137)
    if batch:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.execvp(command[0], command)  # noqa: S606 - becoming the user's command is what this file is for


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FileNotFoundError as error:
        sys.stderr.write(f"wirespeed lab: cannot run {sys.argv[9]!r} in {sys.argv[8]}: {error.strerror}\n")
        code = 127
    except OSError as error:
        sys.stderr.write(f"wirespeed lab: cannot run {sys.argv[9]!r}: {error}\n")
        code = 126
    os._exit(code)
