"""Where a run takes place: in a lab, on loopback, or as one rank of a job under torchrun, srun or mpirun.

A place starts one process per rank with the SPMD variables, watches the ranks' heartbeats, ends all when one fails or
none makes progress, and brings home the files that the ranks left in the run's folder.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from wirespeed.system import free_port
from wirespeed.tune.children import run_children
from wirespeed.tune.watch import RunEnd, Tails, Watch

if TYPE_CHECKING:
    from wirespeed.lab import Lab

LOG = "log.txt"


class Place(Protocol):
    """One way to run a command on all ranks."""

    num_ranks: int
    ranks_per_host: int
    description: str
    hosts: tuple[str, ...]
    declared_bit_per_s: float | None
    cpus_per_rank: float | None
    is_shaped: bool

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, watch: Watch | None, timeout_s: float
    ) -> RunEnd:
        """Run to the end, or until the watch or ``timeout_s`` gives it up.

        ``folder`` holds what the ranks read and takes what they write, and the log of their output.
        """
        ...

    def close(self, exit_code: int = 0) -> None:
        """Take down what the place made. ``exit_code``: what this program ends with."""
        ...


class LabPlace:
    """A virtual cluster of network namespaces."""

    is_shaped = True

    def __init__(self, lab: Lab, *, ranks_per_host: int = 1, order: Sequence[str] | None = None) -> None:
        self._lab = lab
        self.ranks_per_host = ranks_per_host
        self.hosts = tuple(host.name for host in lab.hosts) if order is None else tuple(order)
        self.num_ranks = len(self.hosts) * ranks_per_host
        self.declared_bit_per_s: float | None = lab.spec.rate_bit_per_s
        self.description = f"lab of {len(self.hosts)} hosts"
        self.cpus_per_rank: float | None = len(os.sched_getaffinity(0)) / self.num_ranks

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, watch: Watch | None, timeout_s: float
    ) -> RunEnd:
        """See ``Place``. The lab ends the other ranks when one fails."""
        tails = Tails(folder / LOG, range(self.num_ranks))
        try:
            result = self._lab.run(
                command,
                ranks_per_host=self.ranks_per_host,
                env={"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"), **env},
                on_line=tails.add,
                should_stop=None if watch is None else watch.check,
                timeout_s=timeout_s,
                order=self.hosts,
            )
        finally:
            lines = tails.close()
        return RunEnd(
            returncode=4 if result.timed_out else result.returncode,
            failed_rank=result.failed_rank,
            reason=result.reason,
            is_stalled=result.timed_out,
            is_peer_failure=result.reason is not None and _names_a_fault(result.reason),
            tail=lines,
            log_problem=tails.problem,
        )

    def close(self, exit_code: int = 0) -> None:
        """Take the lab down."""
        self._lab.down()


class LoopbackPlace:
    """Processes of this machine over loopback: no shaping, for machines where no namespace can be had."""

    is_shaped = False
    declared_bit_per_s: float | None = None

    def __init__(self, num_ranks: int, *, why: str) -> None:
        self.num_ranks = num_ranks
        self.ranks_per_host = num_ranks
        self.hosts: tuple[str, ...] = (socket.gethostname(),)
        self.description = f"loopback, unshaped ({why})"
        self.cpus_per_rank: float | None = len(os.sched_getaffinity(0)) / num_ranks

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, watch: Watch | None, timeout_s: float
    ) -> RunEnd:
        """See ``Place``."""
        port = free_port()
        shared = {
            **env,
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        return run_children(
            command,
            [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.num_ranks)],
            tails=Tails(folder / LOG, range(self.num_ranks)),
            first_rank=0,
            watch=watch,
            timeout_s=timeout_s,
        )

    def close(self, exit_code: int = 0) -> None:
        """Nothing to take down."""


def worker_command(module: str, *arguments: str) -> list[str]:
    """The command line of one of our own workers.

    With -P the current folder is not searched for modules: a file there must not shadow one that the worker imports.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def _names_a_fault(reason: str) -> bool:
    """Whether the lab ended its reason with the faults of its links (see ``lab.run``)."""
    return " is down" in reason or " is cut off from " in reason
