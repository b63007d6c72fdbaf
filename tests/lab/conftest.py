"""What every lab test needs: a state folder of its own, and the proof that nothing was left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_tools import processes_of, wait_until

from wirespeed.lab import why_unavailable

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # The shell that started the tests in the background had Ctrl-C ignored for them, and so for all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
