"""The command ``wirespeed lab``: exit codes, messages, and that each command leaves the machine as it should."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_tools import processes_of, wait_until

WIRESPEED = [sys.executable, "-m", "wirespeed", "lab"]


def wirespeed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WIRESPEED, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def demo() -> Iterator[str]:
    made = wirespeed("up", "--hosts", "2", "--rate", "1gbit", "--name", "demo")
    assert made.returncode == 0, made.stderr
    yield "demo"
    wirespeed("down", "demo")


def test_up_run_exec_status_fault_and_down(state_dir: Path) -> None:
    made = wirespeed("up", "--hosts", "4", "--rate", "1gbit", "--racks", "2", "--uplink", "500mbit", "-n", "demo")
    assert made.returncode == 0, made.stderr
    assert "4 hosts at 1 Gbit/s, 2 racks, uplinks 500 Mbit/s" in made.stdout
    done = wirespeed("run", "--", "sh", "-c", "echo rank $RANK")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [f"[{r}] rank {r}" for r in range(4)])
    done = wirespeed("exec", "h1", "--", "sh", "-c", "hostname; exit 3")
    assert (done.returncode, done.stdout) == (3, "h1\n")
    assert wirespeed("fault", "h1", "rate", "100mbit").returncode == 0
    assert wirespeed("fault", "h2", "down").returncode == 0
    found = json.loads(wirespeed("status", "--json").stdout)
    assert [host["sends_bit_per_s"] for host in found["labs"][0]["hosts"]] == [1e9, 100e6, 1e9, 1e9]
    assert [host["is_up"] for host in found["labs"][0]["hosts"]] == [True, True, False, True]
    assert wirespeed("down").returncode == 0
    assert json.loads(wirespeed("status", "--json").stdout) == {"labs": [], "stale": []}


def test_run_gives_the_code_of_the_rank_that_failed_and_says_which(demo: str) -> None:
    done = wirespeed("run", "--ranks-per-host", "2", "--", "sh", "-c", "test $RANK = 2 && exit 9; exec sleep 600")
    assert done.returncode == 9
    assert "rank 2 on h1 ended with exit code 9" in done.stderr


def test_run_can_make_its_own_lab(state_dir: Path) -> None:
    done = wirespeed("run", "--spec", "3x1gbit", "--", "hostname")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] h0", "[1] h1", "[2] h2"])
    assert list((state_dir / "labs").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--hosts", "0", "--rate", "1gbit"], "got 0 hosts"),
        (["up", "--hosts", "2", "--rate", "1potato"], "got rate '1potato'"),
        (["up", "--hosts", "2", "--rate", "1"], "a rate with its unit"),
        (["up", "--hosts", "2", "--rate", "1kbit"], "64 kbit/s to 34 Gbit/s"),
        (["up", "--hosts", "2"], "got no --hosts or no --rate"),
        (["up", "2x1gbit", "--hosts", "2"], "one of the two"),
        (["up", "2 hosts"], "HOSTSxRATE"),
        (["up", "2x1gbit", "-n", "../x"], "lab name '../x'"),
        (["up", "--hosts", "2", "--rate", "1gbit", "--loss", "200%"], "at most 1"),
        (["run", "--", "true"], "no lab is up"),
        (["exec", "h0", "--", "true"], "no lab is up"),
        (["down"], "no lab is up"),
        (["down", "nosuch"], "no lab is named 'nosuch'"),
        (["fault", "h0", "burn"], "got fault 'burn'"),
        (["fault", "h0", "rate"], "a value with rate and partition only"),
    ],
)
def test_what_cannot_be_done_is_refused_with_2(arguments: list[str], message: str) -> None:
    done = wirespeed(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_in_use_is_refused_and_the_lab_lives_on(demo: str) -> None:
    again = wirespeed("up", "2x1gbit", "-n", demo)
    assert again.returncode == 2
    assert "'demo' is already up" in again.stderr
    assert wirespeed("run", "--", "true").returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_leaves_its_lab_and_nothing_else(
    demo: str, state_dir: Path, number: signal.Signals, code: int
) -> None:
    run = subprocess.Popen(
        [*WIRESPEED, "run", "--", "sh", "-c", "setsid sleep 600 & echo up; exec sleep 600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert run.stdout is not None
    assert sorted(run.stdout.readline() for _ in range(2)) == [b"[0] up\n", b"[1] up\n"]
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode == code
    wait_until(lambda: len(processes_of(state_dir)) == 1, "only the keeper is left")
    assert wirespeed("run", "--", "true").returncode == 0


def test_down_stale_removes_only_what_dead_labs_left(demo: str, state_dir: Path) -> None:
    (state_dir / "labs" / "dead").mkdir()
    (state_dir / "labs" / "dead" / "journal.json").write_text("{")
    assert "left by labs that died: dead" in wirespeed("status").stderr
    assert wirespeed("down", "--stale").stderr == "removed dead\n"
    assert wirespeed("down", "--stale").stderr == "nothing to remove\n"
    assert wirespeed("run", "--", "true").returncode == 0


def test_a_dead_lab_asked_for_by_name_is_a_data_error_until_it_is_taken_down(state_dir: Path) -> None:
    folder = state_dir / "labs" / "dead"
    folder.mkdir(parents=True)
    (folder / "journal.json").write_text("{")
    done = wirespeed("exec", "-n", "dead", "h0", "--", "true")
    assert done.returncode == 2
    assert "corrupt" in done.stderr
    assert wirespeed("down", "dead").returncode == 0
    assert not folder.exists()
