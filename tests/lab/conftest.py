"""What every lab test needs: a state folder of its own, and the proof that nothing was left behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wirespeed.lab import why_unavailable
from wirespeed.lab.processes import TOKEN


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "lab" in Path(str(item.fspath)).parts:
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab_available() -> None:
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab_available: None) -> Iterator[Path]:
    """A state folder for this test only; afterwards no keeper, no rank and no folder of a lab may be left."""
    folder = tmp_path / "state"
    monkeypatch.setenv("WIRESPEED_STATE_DIR", str(folder))
    yield folder
    wait_until(lambda: not processes_of(folder), "every process of this test's labs has ended")
    assert not list((folder / "labs").iterdir()) if (folder / "labs").exists() else True


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


def wait_until(test: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Poll until true; fail at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not test():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def python(code: str, *arguments: object) -> list[str]:
    """The command that runs some Python."""
    return [sys.executable, "-c", code, *map(str, arguments)]
