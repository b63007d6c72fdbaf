"""`tune` as a job that somebody else launched: torchrun, plain variables, Slurm's variables."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tune_scripts import assert_nothing_left, command, plain, run, wait_for, write_script

from wirespeed.system import free_port

QUICK = ["--budget", "10s", "--steps", "10", "--out", "out"]


def start_rank(tmp_path, rank, variables, *arguments):
    return subprocess.Popen(
        command("tune", "train.py", *QUICK, *arguments),
        cwd=tmp_path,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def plain_variables(rank, port):
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def slurm_variables(rank, port):
    return {
        "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip


def finish(processes, timeout_s=150):
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout_s)
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return ended


@pytest.mark.slow
def test_tune_under_torchrun_measures_chooses_and_writes(tmp_path):
    write_script(tmp_path, plain())
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    done = run(
        [
            *words,
            "-m",
            "wirespeed",
            "tune",
            "train.py",
            *QUICK,
            "--json",
            "--strategies",
            "int8",
            "--fidelity",
            "compressed",
        ],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["kind"] == "tune"
    assert record["is_complete"]
    assert record["fabric"]["num_ranks"] == 2
    measured = [s["name"] for s in record["strategies"] if s["measured_step_s"] is not None]
    assert measured == ["dense", "int8"]
    assert (tmp_path / "out" / "strategy.toml").is_file()
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_script_that_fails_ends_every_rank_with_the_same_code(tmp_path):
    write_script(tmp_path, plain("if step == 3 and rank == 1: raise ValueError('bad batch')"))
    port = free_port()
    first, second = finish([start_rank(tmp_path, rank, plain_variables(rank, port)) for rank in range(2)])
    assert (first[0], second[0]) == (1, 1), first[2]
    assert "on rank 1 with exit code 1: ValueError: bad batch" in first[2]
    assert (second[1], second[2]) == ("", "")
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_follower_that_dies_ends_the_job_as_a_peer_failure(tmp_path):
    write_script(tmp_path, plain("time.sleep(0.05)", num_steps=10_000))
    port = free_port()
    ranks = [start_rank(tmp_path, rank, plain_variables(rank, port)) for rank in range(2)]
    wait_for((tmp_path / "out/compute/step-1").exists, "training has begun", 120)
    ranks[1].kill()
    first, _ = finish(ranks, timeout_s=120)
    assert first[0] == 4, first[2]
    assert "rank 1 does not answer" in first[2]
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_followers_end_as_a_peer_failure_when_rank_0_dies(tmp_path):
    write_script(tmp_path, plain("time.sleep(0.05)", num_steps=10_000))
    port = free_port()
    ranks = [start_rank(tmp_path, rank, plain_variables(rank, port)) for rank in range(2)]
    wait_for((tmp_path / "out/compute/step-1").exists, "training has begun", 120)
    ranks[0].kill()
    _, second = finish(ranks, timeout_s=120)
    assert second[0] == 4, second[2]
    assert "rank 0 of the tuning job is gone" in second[2]
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_signal_to_rank_0_sends_every_rank_home(tmp_path):
    write_script(tmp_path, plain("time.sleep(0.05)", num_steps=10_000))
    port = free_port()
    ranks = [start_rank(tmp_path, rank, slurm_variables(rank, port)) for rank in range(2)]
    wait_for((tmp_path / "out/compute/step-1").exists, "training has begun", 120)
    ranks[0].send_signal(signal.SIGINT)
    first, second = finish(ranks, timeout_s=120)
    assert (first[0], second[0]) == (130, 130), first[2]
    assert_nothing_left(tmp_path)
