"""Read a rank's place from the variables of whoever launched it.

Order: RANK (torchrun, ``lab run``, by hand), Slurm, Open MPI, PMIx, PMI. One exception keeps it right: inside
an sbatch script every process inherits SLURM_PROCID=0, so when an MPI launcher's variables are there too and
disagree with Slurm's, the MPI launcher is the inner one and wins. Address and port are found the same way for
every launcher, so that all ranks agree whichever they read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from wirespeed.errors import UsageError
from wirespeed.launch.hostlist import expand_hostlist

DEFAULT_PORT = 29500
_PORT_BASE, _NUM_PORTS = (
    15000,
    15000,
)  # below the range that Linux hands out to outgoing connections (32768 up)
Launcher = Literal["torchrun", "slurm", "openmpi", "pmix", "pmi"]


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """This process's place. ``local_world_size`` is None where the launcher does not say."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    master_addr: str
    master_port: int
    launcher: Launcher

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"got rank {self.rank} of {self.world_size} from {self.launcher}",
                expected="0 <= rank < world size",
            )
        local = self.world_size if self.local_world_size is None else self.local_world_size
        if not 1 <= local <= self.world_size or not 0 <= self.local_rank < local:
            raise UsageError(
                f"got local rank {self.local_rank} of {local}, world size {self.world_size}, from {self.launcher}",
                expected="0 <= local rank < local world size <= world size",
            )
        if not 1 <= self.master_port <= 65535:
            raise UsageError(f"got master port {self.master_port}", expected="1 to 65535")
        if not self.master_addr:
            raise UsageError("got an empty MASTER_ADDR", expected="the address of rank 0's host")


class _Family(msgspec.Struct, frozen=True, kw_only=True):
    """One launcher's variables; the first that is set counts."""

    launcher: Launcher
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_FAMILIES = (
    _Family(
        launcher="torchrun", rank="RANK", size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",), local_size=("LOCAL_WORLD_SIZE",),
    ),
    _Family(
        launcher="slurm", rank="SLURM_PROCID", size=("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",), local_size=(),
    ),
    _Family(
        launcher="openmpi", rank="OMPI_COMM_WORLD_RANK", size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",), local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Family(
        launcher="pmix", rank="PMIX_RANK", size=("PMIX_SIZE", "PMIX_JOB_SIZE", "WORLD_SIZE"),
        local_rank=("PMIX_LOCAL_RANK", "LOCAL_RANK"), local_size=("PMIX_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    ),
    _Family(
        launcher="pmi", rank="PMI_RANK", size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
        local_size=("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
)  # fmt: skip
_SLURM = _FAMILIES[1]


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher's variables are there (right or wrong)."""
    return _find_family(os.environ if environ is None else environ) is not None


def ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """This process's rank and where to meet.

    Raises UsageError when no launcher is found or its values do not fit.
    """
    env = os.environ if environ is None else environ
    family = _find_family(env)
    if family is None:
        raise UsageError(
            "this process was not started by a launcher",
            expected="RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMIX_RANK or PMI_RANK in its environment",
            hint="start it with torchrun, srun, mpirun or `wirespeed lab run -- ...`",
        )
    rank = _integer(env, family.rank)
    world_size = _required(env, family.size, family)
    local_size = _slurm_local_size(env) if family is _SLURM else _optional(env, family.local_size)
    local_rank = _optional(env, family.local_rank)
    if local_rank is None:
        if world_size > 1:
            raise UsageError(
                f"got {family.rank}={rank} without {family.local_rank[0]}",
                expected=f"{family.local_rank[0]}, the rank among those on this host",
                hint=f"with one process per host: export {family.local_rank[0]}=0",
            )
        local_rank = 0
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        master_addr=_master_addr(env, family, world_size, local_size),
        master_port=_master_port(env),
        launcher=family.launcher,
    )


def torch_environment(ranks: Ranks) -> dict[str, str]:
    """The variables that torch.distributed reads, for a program under a launcher that says it in other words."""
    held = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
        "MASTER_ADDR": ranks.master_addr,
        "MASTER_PORT": ranks.master_port,
    }
    return {name: str(value) for name, value in held.items() if value is not None}


def _find_family(env: Mapping[str, str]) -> _Family | None:
    found = [family for family in _FAMILIES if env.get(family.rank, "") != ""]
    if len(found) > 1 and found[0] is _SLURM and not _agrees(env, found[0], found[1]):
        return found[1]
    return found[0] if found else None


def _agrees(env: Mapping[str, str], one: _Family, two: _Family) -> bool:
    ranks_agree = _integer(env, one.rank) == _integer(env, two.rank)
    sizes = _optional(env, one.size), _optional(env, two.size)
    return ranks_agree and (sizes[0] == sizes[1] or None in sizes)


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise UsageError(f"got {name}={env[name]!r}", expected="an integer") from None


def _optional(env: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((_integer(env, name) for name in names if env.get(name, "") != ""), None)


def _required(env: Mapping[str, str], names: Sequence[str], family: _Family) -> int:
    value = _optional(env, names)
    if value is None:
        raise UsageError(f"got {family.rank} without {names[0]}", expected=f"both, as {family.launcher} sets them")
    return value


def _slurm_local_size(env: Mapping[str, str]) -> int | None:
    """Tasks on this node from ``4(x2),3`` and the node's number; None where Slurm does not say."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if not text:
        return _optional(env, ("SLURM_NTASKS_PER_NODE",))
    node = _optional(env, ("SLURM_NODEID",))
    counts: list[tuple[int, int]] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if match is None:
            raise UsageError(f"got SLURM_TASKS_PER_NODE={text!r}", expected="counts such as 4(x2),3")
        counts.append((int(match[1]), 1 if match[2] is None else int(match[2])))
    if node is None:
        return counts[0][0] if len(counts) == 1 else None
    for tasks, num_nodes in counts:
        if node < num_nodes:
            return tasks
        node -= num_nodes
    raise UsageError(f"got SLURM_NODEID beyond SLURM_TASKS_PER_NODE={text!r}", expected="a node of this step")


def _master_addr(env: Mapping[str, str], family: _Family, world_size: int, local_size: int | None) -> str:
    given = env.get("MASTER_ADDR", "")
    if given:
        return given
    if family.launcher != "torchrun":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        if nodes:
            return expand_hostlist(nodes)[0]
        if world_size in (1, local_size):
            return "127.0.0.1"
    raise UsageError(
        f"got {family.rank} without MASTER_ADDR",
        expected="the address of rank 0's host",
        hint="export MASTER_ADDR (mpirun: -x MASTER_ADDR=host1)",
    )


def _master_port(env: Mapping[str, str]) -> int:
    """MASTER_PORT, else one from the Slurm job's number (two jobs on a node differ), else torch's default."""
    if env.get("MASTER_PORT", "") != "":
        return _integer(env, "MASTER_PORT")
    job = _optional(env, ("SLURM_JOB_ID", "SLURM_JOBID"))
    return DEFAULT_PORT if job is None else _PORT_BASE + job % _NUM_PORTS
