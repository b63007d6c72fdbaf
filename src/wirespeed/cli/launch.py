"""`wirespeed launch`: run one rank's program next to its device: cores, NICs, scheduling class, traffic class."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from wirespeed.cli.render import make_table, print_json, say, show
from wirespeed.errors import UsageError


def launch_program(
    command: Annotated[list[str] | None, typer.Argument(help="The program and its arguments, after --.")] = None,
    *,
    bind: Annotated[bool, typer.Option("--bind/--no-bind", help="Bind to the cores next to the rank's device.")] = True,
    batch: Annotated[
        bool | None,
        typer.Option("--batch/--no-batch", help="Scheduling class SCHED_BATCH; default where the host has no GPU."),
    ] = None,
    nic: Annotated[str | None, typer.Option("--nic", help="Interface for TCP, where several are up.")] = None,
    dscp: Annotated[
        int | None, typer.Option("--dscp", help="Mark the traffic: 0 to 63, such as 26; RoCE and TCP.")
    ] = None,
    service_level: Annotated[
        int | None, typer.Option("--service-level", "--sl", help="InfiniBand service level, 0 to 15.")
    ] = None,
    show_only: Annotated[bool, typer.Option("--show", help="Show the choices, and run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --show: one JSON document.")] = False,
) -> int:
    """Run a rank's program bound to its device's cores and NICs; put it between the launcher and the program.

    Reads rank and place from torchrun, srun, mpirun or PMIx, and sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT where they are missing, so that under srun a plain Python program is enough. What is set already stays.
    With --dscp it stays above the program and marks its TCP sockets; else the program takes its place.

    Examples:

      torchrun --nproc-per-node 8 --no-python wirespeed launch -- python train.py

      srun --ntasks-per-node 8 wirespeed launch --dscp 26 -- python train.py

      wirespeed launch --show
    """
    from wirespeed import launch
    from wirespeed.launch.binding import TrafficClass
    from wirespeed.launch.binding import bind as choose
    from wirespeed.launch.devices import read_devices
    from wirespeed.launch.start import start

    if not command and not show_only:
        raise UsageError("got no program", expected="one after --", hint="wirespeed launch -- python train.py")
    environ = dict(os.environ)
    local_rank, local_size, is_known = 0, 1, True
    if launch.is_launched():
        ranks = launch.ranks()
        local_rank, is_known = ranks.local_rank, ranks.local_world_size is not None
        local_size = local_rank + 1 if ranks.local_world_size is None else ranks.local_world_size
        environ = {**launch.torch_environment(ranks), **environ}
    chosen = choose(
        read_devices(),
        local_rank=local_rank,
        local_size=local_size,
        allowed_cpus=os.sched_getaffinity(0),
        environ=environ,
        mode="auto" if bind and is_known else "none",
        batch=batch,
        traffic=TrafficClass(dscp=dscp, service_level=service_level),
        nic=nic,
    )
    notes = list(chosen.reasons)
    if bind and not is_known:
        notes.append("not bound: the launcher does not say how many ranks this host has")
    if show_only:
        if as_json:
            print_json(chosen)
            return 0
        cpus = "not bound" if chosen.cpus is None else _ranges(chosen.cpus)
        rows = [
            ["local rank", f"{chosen.local_rank} of {chosen.local_size}"],
            ["device", chosen.device or "none"],
            ["NUMA node", "unknown" if chosen.numa is None else str(chosen.numa)],
            ["cores", cpus],
            ["RDMA devices", ", ".join(chosen.hcas) or "none"],
            ["nearest", chosen.nearest_hca or "-"],
            ["interface for TCP", ", ".join(chosen.nics) or "not chosen"],
            *([name, value] for name, value in sorted(chosen.environment.items())),
        ]
        show(make_table(["", "choice<"], rows))
        for note in notes:
            show(note)
        return 0
    if local_rank == 0:
        for note in notes:
            say(f"wirespeed launch: {note}")
    assert command
    return start(command, chosen, environ, dscp=dscp, on_problem=lambda text: say(f"wirespeed launch: {text}"))


def _ranges(numbers: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
