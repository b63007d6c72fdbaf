"""Slurm's topology.conf (topology/tree): which nodes hang on which switch, and which switches on which.

It holds no rates: those come from the host kind and the uplink that the caller names, or stay unknown until measured.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.builders import HostKind
from wirespeed.fabric.imports.assemble import assemble
from wirespeed.fabric.parts import Figure, Switch
from wirespeed.fabric.topology import Fabric

Expand = Callable[[str], tuple[str, ...]]


def read_topology_conf(
    text: str,
    expand: Expand,
    *,
    kind: HostKind | None = None,
    uplink: Figure | None = None,
    source: str = "topology.conf",
) -> Fabric:
    """The fabric of a topology.conf. ``expand`` turns ``node[1-4]`` into names. Raises DataError naming the line."""
    parents: dict[str, str] = {}
    order: list[str] = []
    racks: dict[str, str] = {}
    for number, fields in _lines(text, source):
        name = fields.get("switchname")
        if name is None:
            raise DataError(
                f"{source}: line {number} has no SwitchName", expected="SwitchName=... Nodes=... or Switches=..."
            )
        try:
            nodes = expand(fields["nodes"]) if "nodes" in fields else ()
            below = expand(fields["switches"]) if "switches" in fields else ()
            named = expand(name)
        except UsageError as fault:
            raise DataError(f"{source}: line {number}: {fault.problem}", expected=fault.expected) from fault
        if len(named) != 1 or (not nodes and not below):
            raise DataError(
                f"{source}: line {number} names {len(named)} switches with nothing below",
                expected="one, with Nodes= or Switches=",
            )
        if name in order:
            raise DataError(f"{source}: line {number} describes switch {name!r} a second time")
        order.append(name)
        for node in nodes:
            if node in racks:
                raise DataError(
                    f"{source}: line {number} puts node {node!r} at {name!r}; it is at {racks[node]!r} already"
                )
            racks[node] = name
        for switch in below:
            if switch in parents:
                raise DataError(
                    f"{source}: line {number} puts switch {switch!r} below {name!r}; it is below {parents[switch]!r}",
                    expected="a tree", hint="several equal spines are one switch to this model: name them once",
                )  # fmt: skip
            parents[switch] = name
    unknown = [switch for switch in parents if switch not in order]
    if unknown:
        raise DataError(f"{source} has no line of switch {unknown[0]!r}", expected="a SwitchName line for each switch")
    switches = tuple(
        Switch(name=name, parent=parents.get(name), rate_bit_per_s=uplink if name in parents else None)
        for name in order
    )
    return assemble(racks, switches, kind=kind, name=source)


def _lines(text: str, source: str) -> list[tuple[int, dict[str, str]]]:
    found: list[tuple[int, dict[str, str]]] = []
    held = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = held + raw.partition("#")[0].rstrip()
        if line.endswith("\\"):
            held = line[:-1] + " "
            continue
        held = ""
        if not line.strip():
            continue
        fields: dict[str, str] = {}
        try:
            words = shlex.split(line)
        except ValueError as fault:
            raise DataError(f"{source}: line {number}: {fault}") from fault
        for word in words:
            key, equals, value = word.partition("=")
            if not equals:
                raise DataError(f"{source}: line {number} holds {word!r}", expected="Key=value")
            fields[key.lower()] = value
        found.append((number, fields))
    return found
