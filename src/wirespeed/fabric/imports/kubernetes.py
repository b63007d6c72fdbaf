"""Kubernetes node labels (`kubectl get nodes -o json`): switches as cluster operators and clouds label them.

Levels are looked for from the switch next to the node upwards: NVIDIA's topograph, AWS, Google Cloud, then zones. A
label's value names a switch only together with those above it, so equal rack numbers in two zones stay apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from wirespeed.errors import DataError
from wirespeed.fabric.builders import HostKind
from wirespeed.fabric.imports.assemble import assemble
from wirespeed.fabric.parts import Figure, Switch
from wirespeed.fabric.topology import Fabric

KNOWN_LEVELS: tuple[tuple[str, ...], ...] = (
    ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine", "network.topology.nvidia.com/core"),
    ("topology.k8s.aws/network-node-layer-3", "topology.k8s.aws/network-node-layer-2",
     "topology.k8s.aws/network-node-layer-1"),
    ("cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block"),
    ("topology.kubernetes.io/rack", "topology.kubernetes.io/zone"),
    ("topology.kubernetes.io/zone",),
)  # fmt: skip
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
ROOT = "network"


class _Metadata(msgspec.Struct):
    name: str
    labels: dict[str, str] = {}


class _Status(msgspec.Struct):
    allocatable: dict[str, str] = {}


class _Node(msgspec.Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


class _List(msgspec.Struct):
    items: list[_Node]


def read_nodes(
    text: str | bytes,
    *,
    levels: Sequence[str] = (),
    kind: HostKind | None = None,
    uplink: Figure | None = None,
    source: str = "kubectl get nodes",
) -> Fabric:
    """The fabric of the nodes. ``levels``: label keys from the node's own switch upwards; empty finds a known set.

    Raises DataError, naming the node, where one lacks a label.
    """
    try:
        nodes = msgspec.json.decode(text, type=_List).items
    except msgspec.MsgspecError as fault:
        raise DataError(f"{source} is no list of nodes: {fault}", expected="`kubectl get nodes -o json`") from fault
    if not nodes:
        raise DataError(f"{source} holds no nodes", expected="at least one")
    keys = tuple(levels) or _known_levels(nodes, source)
    racks: dict[str, str] = {}
    devices: dict[str, int] = {}
    parents: dict[str, str | None] = {ROOT: None}
    for node in nodes:
        missing = [key for key in keys if key not in node.metadata.labels]
        if missing:
            raise DataError(
                f"{source}: node {node.metadata.name!r} lacks the label {missing[0]!r}",
                expected="every level on every node", hint="leave the node out, or name other levels",
            )  # fmt: skip
        at = ROOT
        for key in reversed(keys):
            value = node.metadata.labels[key]
            name = value if at == ROOT else f"{at}/{value}"
            parents[name] = at
            at = name
        racks[node.metadata.name] = at
        devices[node.metadata.name] = _num_gpus(node)
    switches = tuple(
        Switch(name=name, parent=parent, rate_bit_per_s=None if parent is None else uplink)
        for name, parent in parents.items()
    )
    return assemble(racks, switches, kind=kind, name=source, devices={n: d for n, d in devices.items() if d})


def _known_levels(nodes: Sequence[_Node], source: str) -> tuple[str, ...]:
    for keys in KNOWN_LEVELS:
        if all(key in node.metadata.labels for node in nodes for key in keys):
            return keys
    # A set of which only the lower levels are there still tells racks.
    for keys in KNOWN_LEVELS:
        held = tuple(key for key in keys if all(key in node.metadata.labels for node in nodes))
        if held:
            return held
    raise DataError(
        f"{source}: the nodes share no label that tells their place in the network",
        expected="one of " + ", ".join(dict.fromkeys(key for keys in KNOWN_LEVELS for key in keys)),
        hint="name your own with --level KEY, from the node's switch upwards",
    )


def _num_gpus(node: _Node) -> int:
    for resource in GPU_RESOURCES:
        count = node.status.allocatable.get(resource, "")
        if count.isdecimal() and int(count) > 0:
            return int(count)
    return 0
