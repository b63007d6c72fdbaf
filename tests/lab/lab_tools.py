"""What lab tests share: polling, the processes of a lab, commands that run some Python."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from wirespeed.lab.processes import TOKEN


def processes_of(folder: Path) -> list[int]:
    """Processes whose environment names this test's state folder and that belong to a lab, or keep one."""
    mark = f"WIRESPEED_STATE_DIR={folder}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        is_lab = b"wirespeed.lab.keeper" in command or any(v.startswith(TOKEN.encode()) for v in environment)
        if mark in environment and is_lab:
            found.append(int(entry))
    return found


def wait_until(test: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Poll until true; fail at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not test():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def python(code: str, *arguments: object) -> list[str]:
    """The command that runs some Python."""
    return [sys.executable, "-c", code, *map(str, arguments)]
