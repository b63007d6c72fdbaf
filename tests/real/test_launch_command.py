"""`wirespeed launch` as a command: what it shows, what it becomes, and what it passes on when it stays above."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from wirespeed.cli.main import app
from wirespeed.errors import UsageError

RANK_1_OF_2 = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
SLURM_1_OF_2 = {
    "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[07-08]",
}  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    launcher = ("SLURM_", "PMI", "OMPI_", "NCCL_", "GLOO_", "OMP_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launcher) and k not in RANK_1_OF_2}
    return {**kept, **more}


def launched(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "wirespeed", "launch", *arguments]


def run(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(launched(*arguments), env=env, capture_output=True, text=True, timeout=120, check=False)


def test_the_choices_are_shown_as_one_document_and_nothing_runs(monkeypatch):
    for name in (*RANK_1_OF_2, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["launch", "--show", "--json", "--sl", "2"])
    assert result.exit_code == 0, result.output
    held = json.loads(result.stdout)
    assert (held["local_rank"], held["local_size"]) == (0, 1)
    assert set(held["cpus"]) <= os.sched_getaffinity(0)
    assert held["environment"]["NCCL_IB_SL"] == "2"


def test_a_program_is_needed():
    result = CliRunner().invoke(app, ["launch"])
    assert isinstance(result.exception, UsageError)


TELL = (
    "import json,os; print(json.dumps([sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), dict(os.environ)]))"
)


def test_a_rank_becomes_its_program_on_its_own_cores():
    done = run("--batch", "--", sys.executable, "-c", TELL, env=environment(**RANK_1_OF_2))
    assert done.returncode == 0, done.stderr
    cpus, policy, env = json.loads(done.stdout)
    allowed = sorted(os.sched_getaffinity(0))
    assert policy == os.SCHED_BATCH
    assert set(cpus) <= set(allowed)
    if len(allowed) > 1:
        assert len(cpus) < len(allowed)
        assert env["OMP_NUM_THREADS"] == str(len(cpus)) or int(env["OMP_NUM_THREADS"]) < len(
            cpus
        )  # threads share cores


def test_under_slurm_a_plain_program_learns_who_it_is():
    done = run("--no-bind", "--", sys.executable, "-c", TELL, env=environment(**SLURM_1_OF_2))
    cpus, _, env = json.loads(done.stdout)
    assert {name: env[name] for name in RANK_1_OF_2} == {
        **RANK_1_OF_2, "MASTER_ADDR": "node07", "MASTER_PORT": "15007",
    }  # fmt: skip
    assert set(cpus) == os.sched_getaffinity(0)


@pytest.mark.parametrize("options", [(), ("--dscp", "26")])
def test_the_exit_code_is_the_programs(options):
    assert run(*options, "--", "bash", "-c", "exit 7", env=environment()).returncode == 7


@pytest.mark.parametrize("options", [(), ("--dscp", "26")])
def test_a_program_that_is_not_there_is_told(options):
    done = run(*options, "--", "no-such-program", env=environment())
    assert done.returncode == 3
    assert "cannot run 'no-such-program'" in done.stderr


def test_a_signal_reaches_the_program_below():
    env = environment()
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(5)))\n"
        "print('ready', flush=True)\nsignal.pause()"
    )
    process = subprocess.Popen(
        launched("--dscp", "26", "--", sys.executable, "-c", code), env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (out, process.returncode) == ("saved\n", 5)
