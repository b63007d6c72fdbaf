"""A fabric from what an import found: which host is at which switch, and how the switches hang together."""

from __future__ import annotations

from collections.abc import Mapping

from wirespeed.errors import DataError
from wirespeed.fabric.builders import HostKind
from wirespeed.fabric.parts import Switch
from wirespeed.fabric.topology import Fabric, Host


def assemble(
    racks: Mapping[str, str],
    switches: tuple[Switch, ...],
    *,
    kind: HostKind | None,
    name: str,
    devices: Mapping[str, int] | None = None,
) -> Fabric:
    """Hosts (name to switch) of one kind below switches; without a kind their rates stay unknown.

    Raises DataError, from the fabric's own checks, for cycles and for parts that nothing joins.
    """
    if not racks:
        raise DataError(f"{name} holds no hosts", expected="at least one")
    counts = {} if devices is None else devices
    plain = [Host(name=host, rack=rack, num_devices=counts.get(host, 1)) for host, rack in racks.items()]
    if kind is None:
        return Fabric(name=name, hosts=tuple(plain), switches=switches)
    return Fabric(
        name=name,
        hosts=tuple(kind.host(h.name, h.rack, num_devices=counts.get(h.name, kind.num_devices)) for h in plain),
        switches=switches,
        transports=() if kind.transport is None else (kind.transport,),
        islands=() if kind.island is None else (kind.island,),
    )
