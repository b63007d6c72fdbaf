"""The only door to /proc, /sys and subprocesses.

A ``System`` takes a root, so that tests read recorded trees; an absent or unreadable file is ``None`` ("unknown"),
never a default. Every subprocess has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wirespeed.errors import MissingCapability


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What a subprocess ended with. ``returncode`` is None when the deadline ended it."""

    returncode: int | None
    stdout: str
    stderr: str


class System:
    """Reads of the host below ``root`` (a recorded tree in tests), and commands run on it."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        """``name`` (absolute, such as ``/proc/net/dev``) below the root."""
        return self.root / name.lstrip("/")

    def read_text(self, name: str) -> str | None:
        """The file's text without the last newline, or None where it is absent or cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except OSError:
            return None

    def read_int(self, name: str) -> int | None:
        """The file's content as an integer (decimal, or hexadecimal after 0x), or None."""
        text = self.read_text(name)
        if text is None:
            return None
        digits = text.strip()
        try:
            # Not base 0: it refuses the leading zeros that some files have.
            return int(digits, 16 if digits.lower().startswith(("0x", "-0x")) else 10)
        except ValueError:
            return None

    def list_dir(self, name: str) -> tuple[str, ...]:
        """Sorted names in a folder; empty where there is none."""
        try:
            return tuple(sorted(entry.name for entry in self.path(name).iterdir()))
        except OSError:
            return ()

    def run(self, command: Sequence[str], *, timeout_s: float = 10.0) -> CommandResult:
        """Run a command to its end. Raises MissingCapability where the program is not installed or may not be run.

        At the deadline, and when this call is interrupted, the command ends with all that it started.
        """
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except FileNotFoundError:
            raise MissingCapability(f"program {command[0]!r} is not installed") from None
        except OSError as fault:
            raise MissingCapability(f"program {command[0]!r} cannot be run: {fault.strerror}") from fault
        with process:
            try:
                stdout, stderr = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as late:
                _end_group(process)
                return CommandResult(returncode=None, stdout=_as_text(late.stdout), stderr=_as_text(late.stderr))
            except BaseException:
                _end_group(process)
                raise
        return CommandResult(returncode=process.returncode, stdout=stdout, stderr=stderr)


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _as_text(output: str | bytes | None) -> str:
    if output is None:
        return ""
    return output if isinstance(output, str) else output.decode(errors="replace")
