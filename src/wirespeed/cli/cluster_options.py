"""The options of ``serve`` and ``infer`` that have Ray start the nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wirespeed.errors import UsageError

if TYPE_CHECKING:
    from wirespeed.serve.cluster import Wanted

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster", help="Have this Ray cluster (HOST:6379, auto) run the models on its hosts.", metavar="ADDRESS"
    ),
]
WorkersOption = Annotated[int, typer.Option("--cluster-workers", help="How many; 0: one per host.", min=0)]
PlacementOption = Annotated[
    str, typer.Option("--placement", help="spread: over hosts and racks; pack: under one switch.")
]
RackLabelOption = Annotated[
    str, typer.Option("--rack-label", help="The Ray label with a host's rack (`ray start --labels=rack=r1`).")
]
CpusOption = Annotated[float, typer.Option("--worker-cpus", help="CPUs that Ray sets aside for each worker.", min=0)]
GpusOption = Annotated[float, typer.Option("--worker-gpus", help="GPUs, likewise.", min=0)]


def wanted_of(
    address: str | None,
    models: Sequence[str],
    *,
    workers: int,
    placement: str,
    rack_label: str,
    cpus: float,
    gpus: float,
    repo: str | None,
) -> Wanted | None:
    """What to place, or None without ``--cluster``. Raises UsageError for what cannot be.

    A folder that is here is named by its whole path: hosts of the cluster have to have it there too.
    """
    from wirespeed.serve.cluster import Wanted

    if address is None:
        return None
    if placement not in ("spread", "pack"):
        raise UsageError(f"got --placement {placement!r}", expected="spread or pack")
    if not models:
        raise UsageError(
            "got --cluster and no models", expected="FOLDER, the same path on every host, or repo:NAME[@V] and --repo"
        )
    named = [model if model.startswith("repo:") else str(Path(model).resolve()) for model in models]
    return Wanted(
        address=address,
        command=(*named, *(("--repo", repo) if repo else ())),
        workers=workers,
        placement="pack" if placement == "pack" else "spread",
        rack_label=rack_label,
        cpus=cpus,
        gpus=gpus,
        token=os.environ.get("WIRESPEED_TOKEN") or "",
    )
