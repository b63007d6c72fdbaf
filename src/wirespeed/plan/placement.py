"""Rank order as other programs take it: a Slurm host file, a torchrun rank map, Kubernetes affinity.

The order follows racks: neighbouring ranks share a host, neighbouring hosts a rack, neighbouring racks a switch, so
that a ring crosses each uplink once per direction. ``order_gain`` predicts what that is worth here.
"""

from __future__ import annotations

import json

import msgspec
import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric.placement import Placement, place
from wirespeed.fabric.timing import prepare
from wirespeed.fabric.topology import Fabric


class OrderGain(msgspec.Struct, frozen=True, kw_only=True):
    """One ring all-reduce of ``size_bytes``: hosts rack by rack, as listed, and shuffled (the mean of some seeds)."""

    size_bytes: int
    racks_s: float
    listed_s: float
    shuffled_s: float
    binding_listed: str
    binding_shuffled: str


def order_gain(fabric: Fabric, size_bytes: int, *, num_shuffles: int = 3) -> OrderGain:
    """What the order of hosts is worth. ``size_bytes``: of the gradient that is reduced."""
    if size_bytes < 1 or num_shuffles < 1:
        raise UsageError(f"got {size_bytes} bytes and {num_shuffles} shuffles", expected="1 or more of both")

    def run(placement: Placement) -> tuple[float, str]:
        cost = prepare(fabric, "all_reduce", placement, algorithm="ring").cost(size_bytes)
        return cost.seconds, cost.binding

    listed_s, listed = run(place(fabric, order="listed"))
    shuffles = [run(place(fabric, order="shuffled", seed=seed)) for seed in range(num_shuffles)]
    return OrderGain(
        size_bytes=size_bytes,
        racks_s=run(place(fabric))[0],
        listed_s=listed_s,
        shuffled_s=float(np.mean([seconds for seconds, _ in shuffles])),
        binding_listed=listed,
        binding_shuffled=shuffles[0][1],
    )


def slurm_hostfile(fabric: Fabric, placement: Placement) -> str:
    """One host name per rank, for ``SLURM_HOSTFILE`` with ``srun --distribution=arbitrary``."""
    return "".join(f"{fabric.hosts[index].name}\n" for index in placement.host.tolist())


def rank_map(fabric: Fabric, placement: Placement) -> str:
    """JSON: per host, its node rank for ``torchrun --node-rank`` and the global ranks that it runs."""
    held: dict[int, list[int]] = {}
    for rank, index in enumerate(placement.host.tolist()):
        held.setdefault(index, []).append(rank)
    hosts = [
        {"host": fabric.hosts[index].name, "node_rank": node_rank, "ranks": ranks, "rack": fabric.hosts[index].rack}
        for node_rank, (index, ranks) in enumerate(held.items())
    ]
    document = {
        "nnodes": len(hosts),
        "nproc_per_node": max(len(one["ranks"]) for one in hosts),  # type: ignore[arg-type]
        "master": hosts[0]["host"],
        "hosts": hosts,
    }
    return json.dumps(document, indent=1) + "\n"


def kubernetes_affinity(
    fabric: Fabric, placement: Placement, *, rack_label: str = "topology.kubernetes.io/rack"
) -> str:
    """YAML for a pod template: all pods of the job in the racks used, neighbours preferred in one rack.

    Nodes must carry ``rack_label`` with the fabric's rack names, and pods the label ``job: wirespeed``.
    """
    racks = list(dict.fromkeys(fabric.hosts[index].rack for index in placement.host.tolist()))
    values = "".join(f"          - {json.dumps(rack)}\n" for rack in racks)
    return (
        "affinity:\n"
        "  nodeAffinity:\n"
        "    requiredDuringSchedulingIgnoredDuringExecution:\n"
        "      nodeSelectorTerms:\n"
        "      - matchExpressions:\n"
        f"        - key: {rack_label}\n"
        "          operator: In\n"
        "          values:\n"
        f"{values}"
        "  podAffinity:\n"
        "    preferredDuringSchedulingIgnoredDuringExecution:\n"
        "    - weight: 100\n"
        "      podAffinityTerm:\n"
        f"        topologyKey: {rack_label}\n"
        "        labelSelector:\n"
        "          matchLabels:\n"
        "            job: wirespeed\n"
    )
