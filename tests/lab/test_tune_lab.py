"""`wirespeed tune` from the command line in a lab: a whole run, faults and signals in the middle of one, what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_tools import processes_of, wait_until

from wirespeed.lab import Lab
from wirespeed.lab.journal import list_labs

TUNE = [sys.executable, "-m", "wirespeed", "tune"]
QUICK = ["--lab", "2x1gbit", "--budget", "20s", "--steps", "12", "--strategies", "int8", "--fidelity", "compressed"]

SCRIPT = """\
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

EXPECTED = {arguments}
assert sys.argv[1:] == EXPECTED, sys.argv
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(1, 10_000):
    {at_step}
    loss = ddp(torch.randn(16, 64, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def write_script(folder: Path, *, at_step: str = "pass", arguments: tuple[str, ...] = ()) -> None:
    (folder / "train.py").write_text(SCRIPT.format(at_step=at_step, arguments=list(arguments)))


def is_under_way(folder: Path, run: str) -> bool:
    """Whether every rank of a run has done a step."""
    return all(
        (folder / run / f"step-{rank}").exists() and (folder / run / f"step-{rank}").stat().st_size == 8
        for rank in (0, 1)
    )


@pytest.fixture
def tuning(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A tuning whose steps take 0.1 s, so that every run lasts long enough for the test to step in."""
    write_script(tmp_path, at_step="time.sleep(0.1)")
    process = subprocess.Popen(
        [*TUNE, *QUICK, "--stall-timeout", "6s", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def left_in(folder: Path) -> list[str]:
    """Half-written files."""
    return [str(path) for path in folder.rglob(".*") if path.is_file()]


@pytest.mark.slow
def test_a_whole_tuning_passes_arguments_on_writes_all_and_leaves_no_lab(tmp_path: Path) -> None:
    write_script(tmp_path, arguments=("--lr", "0.1", "data", "--steps", "3", "--json", "--", "-x"))
    done = subprocess.run(
        [*TUNE, *QUICK, "train.py", "--lr", "0.1", "data", "--json", "--", "--steps", "3", "--json", "--", "-x"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["is_complete"]
    assert record["fabric"]["declared_bit_per_s"] == 1e9
    assert record["loss_kind"] == "none", "12 steps of training loss are too few to compare"
    measured = {s["name"]: s["num_steps"] for s in record["strategies"] if s["measured_step_s"] is not None}
    assert measured == {"dense": 12, "int8": 12}
    assert record["chosen"] == "dense", "without a loss nothing below half is chosen"
    for name in ("tune.json", "strategy.toml", "fabric.toml", "report.html"):
        assert (tmp_path / "out" / "tune" / name).is_file()
    assert left_in(tmp_path) == []
    assert list_labs() == ()


@pytest.mark.slow
def test_a_link_that_goes_down_is_a_peer_failure_that_keeps_what_was_measured(
    tuning: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_until(lambda: is_under_way(tmp_path / "out/tune", "run-int8") or tuning.poll(), "int8 runs", timeout_s=200)
    with Lab.attach(list_labs()[0].name) as lab:
        lab.fault("h1", "down")
    began_s = time.monotonic()
    out, err = tuning.communicate(timeout=120)
    assert tuning.returncode == 4, err
    assert time.monotonic() - began_s < 100, "6 s of patience, the grace of both signals, and the report"
    assert "h1 is down" in err
    record = json.loads((tmp_path / "out/tune/tune.json").read_text())
    assert not record["is_complete"]
    assert [s["name"] for s in record["strategies"] if s["measured_step_s"] is not None] == ["dense"]
    assert any(w.startswith("ended early: ") and "h1 is down" in w for w in record["warnings"])
    assert "dense" in out
    assert list_labs() == ()
    assert left_in(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_after_the_baseline_keeps_it(tuning: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_until(lambda: is_under_way(tmp_path / "out/tune", "run-int8") or tuning.poll(), "int8 runs", timeout_s=200)
    tuning.send_signal(signal.SIGINT)
    _, err = tuning.communicate(timeout=120)
    assert tuning.returncode == 130, err
    assert "Traceback" not in err
    record = json.loads((tmp_path / "out/tune/tune.json").read_text())
    assert not record["is_complete"]
    assert record["chosen"] == "dense"
    assert list_labs() == ()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_before_the_baseline_leaves_nothing(
    number: signal.Signals, code: int, tuning: subprocess.Popen[str], tmp_path: Path, state_dir: Path
) -> None:
    wait_until(lambda: is_under_way(tmp_path / "out/tune", "compute"), "the probe runs", timeout_s=200)
    tuning.send_signal(number)
    _, err = tuning.communicate(timeout=120)
    assert tuning.returncode == code, err
    assert "Traceback" not in err
    assert not (tmp_path / "out/tune/tune.json").exists()
    wait_until(lambda: not processes_of(state_dir), "keeper and ranks have ended")
    assert left_in(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system of fixed size needs root")
def test_a_full_disk_is_what_this_host_lacks(tmp_path: Path) -> None:
    write_script(tmp_path, at_step="print('x' * 10_000, flush=True)")
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k none out && exec "$@"', "sh", *TUNE, *QUICK, "train.py", "--out", "out"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert list_labs() == ()


# A user namespace that may make no other namespace, and has no rights of its own: where no lab can be had.
CONFINED = [
    "unshare", "--user", "--map-root-user", "sh", "-c",
    ("echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces;"
    ' exec setpriv --bounding-set=-all --inh-caps=-all "$@"'), "sh",
]  # fmt: skip


def is_confinable() -> bool:
    return all(map(shutil.which, ("unshare", "setpriv"))) and (
        subprocess.run([*CONFINED, "true"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not is_confinable(), reason="no user namespace can be had to confine the command in")
def test_where_no_lab_can_be_had_it_runs_on_loopback_and_says_so(tmp_path: Path) -> None:
    write_script(tmp_path)
    done = subprocess.run(
        [*CONFINED, sys.executable, "-m", "wirespeed", "profile", "--lab", "2x1gbit", "--budget", "10s", "--steps", "10", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "running unshaped on loopback, so the network is NOT 2x1gbit" in done.stderr
    record = json.loads((tmp_path / "out/profile/tune.json").read_text())
    assert record["fabric"]["description"].startswith("loopback, unshaped")
    assert record["fabric"]["declared_bit_per_s"] is None
    assert any("loopback, unshaped" in warning for warning in record["warnings"])
    assert left_in(tmp_path) == []
