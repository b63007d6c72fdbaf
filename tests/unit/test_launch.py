"""Ranks from the environments that launchers were seen to set, and errors for those that do not fit."""

from __future__ import annotations

import pytest

from wirespeed import launch
from wirespeed.errors import UsageError
from wirespeed.launch import Ranks

# What each launcher sets, as recorded (shortened to what concerns ranks).
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node01", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_ID": "0",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "3", "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
PMIX = {"PMIX_RANK": "1", "PMIX_SIZE": "2", "PMIX_LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"}


def test_torchrun_and_the_lab() -> None:
    assert launch.ranks(TORCHRUN) == Ranks(
        rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="node01", master_port=29500,
        launcher="torchrun",
    )  # fmt: skip


def test_srun_meets_on_the_first_host_at_a_port_of_the_job() -> None:
    assert launch.ranks(SRUN) == Ranks(
        rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="node07", master_port=15000 + 4242,
        launcher="slurm",
    )  # fmt: skip


def test_srun_needs_only_the_variables_of_the_contract() -> None:
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST")
    found = launch.ranks({name: SRUN[name] for name in names})
    assert (found.rank, found.master_addr, found.master_port, found.local_world_size) == (5, "node07", 29500, None)


def test_an_address_and_port_that_are_given_outrank_the_jobs() -> None:
    found = launch.ranks({**SRUN, "MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert (found.master_addr, found.master_port) == ("other", 1234)


@pytest.mark.parametrize(
    ("text", "node", "expected"),
    [("4(x2)", "1", 4), ("4(x2),3", "2", 3), ("2,1", "0", 2), ("2,1", None, None), ("4", None, 4)],
)
def test_slurms_tasks_per_node_give_the_local_world_size(text: str, node: str | None, expected: int | None) -> None:
    env = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node or ""}
    assert launch.ranks(env).local_world_size == expected


def test_open_mpi_on_one_host_meets_on_loopback_and_elsewhere_needs_an_address() -> None:
    found = launch.ranks(OPENMPI)
    assert (found.rank, found.launcher, found.master_addr) == (3, "openmpi", "127.0.0.1")
    spread = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        launch.ranks(spread)
    assert launch.ranks({**spread, "MASTER_ADDR": "h0"}).master_addr == "h0"


def test_mpich_and_pmix() -> None:
    found = launch.ranks({**HYDRA, "MASTER_ADDR": "h0"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (2, 4, 0, 2)
    assert found.launcher == "pmi"
    assert launch.ranks(PMIX).launcher == "pmix"


def test_mpirun_inside_an_sbatch_script_is_not_taken_for_slurm() -> None:
    """Every process of the script inherits SLURM_PROCID=0: trusting it would make all of them rank 0."""
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1",
             "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
    places = [launch.ranks({**batch, **OPENMPI, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(4)]
    assert [place.rank for place in places] == [0, 1, 2, 3]
    assert len({(place.master_addr, place.master_port) for place in places}) == 1


def test_torchrun_inside_srun_is_torchrun() -> None:
    assert launch.ranks({**SRUN, **TORCHRUN, "SLURM_PROCID": "1"}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "not started by a launcher"),
        ({"WORLD_SIZE": "4"}, "not started by a launcher"),
        ({"RANK": ""}, "not started by a launcher"),
        ({"RANK": "0"}, "without WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without LOCAL_RANK"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "without MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "8"}, "got rank 8 of 8"),
        ({**TORCHRUN, "RANK": "-1"}, "got rank -1 of 8"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "of 0"),
        ({**TORCHRUN, "WORLD_SIZE": "8.0"}, "WORLD_SIZE='8.0'"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "of 9"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "master port 0"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "master port 70000"),
        ({**SRUN, "SLURM_JOB_NODELIST": "n[2-1]", "SLURM_STEP_NODELIST": ""}, "rising range"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "four"}, "TASKS_PER_NODE"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID"),
        ({"PMIX_RANK": "0"}, "without PMIX_SIZE"),
    ],
)
def test_values_that_do_not_fit_are_a_usage_error(env: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        launch.ranks(env)


def test_is_launched_only_asks_whether_somebody_did() -> None:
    assert [launch.is_launched(env) for env in (TORCHRUN, SRUN, OPENMPI, HYDRA, PMIX)] == [True] * 5
    assert launch.is_launched({"RANK": "nonsense"})
    assert not launch.is_launched({"WORLD_SIZE": "2", "MASTER_ADDR": "x"})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launch.is_launched()
    assert launch.ranks().rank == 5
