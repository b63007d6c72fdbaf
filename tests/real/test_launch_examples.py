"""The launch examples are parsed, and what they run is run: torchrun, Slurm's and Kubernetes' command lines, for real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from wirespeed.system import free_port

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"
MANIFESTS = ("kubernetes-job.yaml", "kubernetes-jobset.yaml")
PROGRAM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
policy = {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch"}[os.sched_getscheduler(0)]
# One write for the line and its end: print makes two where PYTHONUNBUFFERED is set, and ranks share this stream.
told = f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g}, {policy}, {sys.argv[1:]}"
os.write(1, f"{told}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""
# What Slurm's srun does for the example: tasks with SLURM_* variables, and it ends with the worst exit code.
SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
words = sys.argv[1:]
command = words[next(i for i, word in enumerate(words) if not word.startswith("-")):]
num = 2
shared = {"SLURM_NTASKS": str(num), "SLURM_TASKS_PER_NODE": f"{num}", "SLURM_NODEID": "0", "SLURM_JOB_ID": os.environ["JOB"],
          "SLURM_STEP_NODELIST": "127.0.0.1"}
if "--mpi=pmix" in words:
    shared = {"PMIX_SIZE": str(num), "PMIX_LOCAL_SIZE": str(num), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["PORT"]}
    own = lambda rank: {"PMIX_RANK": str(rank), "PMIX_LOCAL_RANK": str(rank)}
else:
    own = lambda rank: {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
tasks = [subprocess.Popen(command, env={**os.environ, **shared, **own(rank)}) for rank in range(num)]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI", "OMPI_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **more}


def run(command, env, cwd) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def told(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


@pytest.mark.slow
def test_the_torchrun_example_starts_bound_ranks(program, tmp_path):
    out = run([str(EXAMPLES / "torchrun.sh"), str(program), "--epochs", "2"], environment(NPROC="2"), tmp_path)
    assert told(out) == [f"rank {rank} of 2: 2, batch, ['--epochs', '2']" for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["none", "pmix"])
def test_the_slurm_example_needs_no_torchrun(program, tmp_path, mpi):
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    # The port is made from the job's number: 15000 + JOB % 15000 (launch.launchers).
    port = next(found for found in iter(free_port, None) if 15_000 <= found < 30_000)
    job = port - 15_000
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", MPI_TYPE=mpi, JOB=str(job), PORT=str(port))
    out = run(["bash", str(EXAMPLES / "slurm.sbatch"), str(program)], env, tmp_path)
    assert told(out) == [f"rank {rank} of 2: 2, batch, []" for rank in range(2)]


def test_the_slurm_example_asks_for_a_task_per_gpu():
    text = (EXAMPLES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert text.index("#SBATCH") < text.index("set -euo pipefail")  # Slurm stops reading at the first command


def job_of(name: str) -> tuple[dict, str]:
    """The Job's spec of a manifest, and the DNS name of its first pod."""
    documents = list(yaml.safe_load_all((EXAMPLES / name).read_text()))
    if name == "kubernetes-job.yaml":
        service, job = documents
        assert service["spec"]["clusterIP"] == "None"  # a headless service: each pod has a name of its own
        pod = job["spec"]["template"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["subdomain"] == service["metadata"]["name"]
        return job["spec"], f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    (jobset,) = documents
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    set_name = jobset["metadata"]["name"]
    # JobSet names pods <set>-<job>-<replica>-<index>, in the subdomain of the set's name.
    return replicated["template"]["spec"], f"{set_name}-{replicated['name']}-0-0.{set_name}"


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_one_indexed_pod_per_host_that_finds_its_first(name):
    job, first = job_of(name)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env["MASTER_ADDR"] == first
    assert env["NNODES"] == str(job["completions"])
    assert env["NPROC"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_command_of_a_manifest_joins_its_pods(name, program, tmp_path):
    job, _ = job_of(name)
    (container,) = job["template"]["spec"]["containers"]
    shared = environment(NNODES="2", NPROC="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    pods = [
        subprocess.Popen(
            [*container["command"], *container["args"]], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**shared, "PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)},
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        outputs = [pod.communicate(timeout=300) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], outputs[0][1][-2000:]
    assert told("".join(out for out, _ in outputs)) == [f"rank {rank} of 2: 2, batch, []" for rank in range(2)]
