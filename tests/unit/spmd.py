"""Run a command or a piece of code as several ranks on loopback, each pretending to be a host of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wirespeed.system import free_port


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run_ranks(
    arguments: Sequence[str], num_ranks: int, *, ranks_per_host: int = 1, env: Mapping[str, str] | None = None
) -> list[Ended]:
    """``python ARGUMENTS`` once per rank; all are gone when this returns."""
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(num_ranks):
            place = {
                "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank % ranks_per_host),
                "LOCAL_WORLD_SIZE": str(ranks_per_host), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "WIRESPEED_HOST": f"h{rank // ranks_per_host}", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env={**os.environ, **place, **({} if env is None else env)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [Ended(process.returncode, out, err) for process, (out, err) in zip(processes, outputs, strict=True)]
