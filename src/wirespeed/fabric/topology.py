"""Fabric: what the network is, as data. Hosts in racks, their NICs, uplinks, and the curves measured on them.

Every number is a ``Figure``: measured, declared or assumed, with its source, and stays so. Switches form one tree
(several equal spines count as one switch with parallel links) or a dragonfly; without any switch declared, every rack
hangs on one spine, by its uplink where it has one and without a limit where not. The nouns of a host's inside and of
how messages travel (islands, transports) are in ``parts``.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from wirespeed.errors import DataError
from wirespeed.fabric.parts import Dragonfly, Figure, Island, Switch, Transport, check_rate
from wirespeed.records import Collective
from wirespeed.spec.workload import Origin

__all__ = [
    "SPINE", "CodecCurve", "CollectiveCurve", "Curve", "Dragonfly", "Fabric", "Figure", "Host", "Island", "Spread",
    "Switch", "Transport", "Uplink", "check_tree",
]  # fmt: skip

Spread = Literal["packets", "flows"]
SPINE = "spine"
"""The switch above all racks where none is declared."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine. ``kind`` groups hosts with equal devices; codec curves are kept per kind.

    Device d sends through NIC ``d * num_nics // num_devices``. ``switches`` names the switch of each NIC (rails); empty
    means that all NICs are at ``rack``.
    """

    name: str
    rack: str = "r0"
    kind: str = "default"
    rate_bit_per_s: Figure | None = None
    """Goodput of one NIC per direction."""
    cpus: float | None = None
    """Cores it can count on: fewer than its own count where hosts share a machine (a lab)."""
    machine: str = ""
    """Hosts that name the same machine share its cores, the sum of their ``cpus``; empty: it is its own."""
    num_nics: int = 1
    switches: tuple[str, ...] = ()
    num_devices: int = 1
    island: str = ""
    """Which of the fabric's islands joins its devices; empty: they share memory at no stated cost."""
    transport: str = ""
    """Which of the fabric's transports its NICs speak; empty: the fabric's first, or none stated."""
    price: float | None = None
    """Of its NICs, cables and share of switch ports, in the fabric's currency; None is unknown."""

    def __post_init__(self) -> None:
        if self.num_nics < 1 or self.num_devices < 1:
            raise DataError(
                f"host {self.name!r} has {self.num_nics} NICs and {self.num_devices} devices",
                expected="at least one of each",
            )
        if self.cpus is not None and not 0 < self.cpus < math.inf:
            raise DataError(f"host {self.name!r} has {self.cpus:g} cores", expected="a number above zero, or none")
        if self.switches and len(self.switches) != self.num_nics:
            raise DataError(
                f"host {self.name!r} has {self.num_nics} NICs and names {len(self.switches)} switches for them",
                expected="one switch per NIC, or none",
            )


class Uplink(msgspec.Struct, frozen=True, kw_only=True):
    """What joins a rack to the spine, per direction."""

    rack: str
    rate_bit_per_s: Figure


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds against bytes, interpolated in log-log; monotone. ``cpu`` is CPU seconds per second of the collective."""

    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    residual: float
    """Largest relative distance between the measured medians and this curve."""
    cpu: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sizes_bytes) != len(self.times_s) or not self.sizes_bytes:
            raise DataError("a curve needs as many times as sizes, and at least one")
        if list(self.sizes_bytes) != sorted(set(self.sizes_bytes)) or list(self.times_s) != sorted(self.times_s):
            raise DataError("a curve is not monotone", expected="sizes rising and times never falling")
        if self.sizes_bytes[0] < 1 or self.times_s[0] <= 0:
            raise DataError("a curve holds a size or a time that is not positive")
        if not all(map(math.isfinite, self.times_s)):
            raise DataError("a curve holds a time that is not finite")
        if self.cpu and len(self.cpu) != len(self.times_s):
            raise DataError("a curve needs as many CPU shares as times, or none")


class CollectiveCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A collective's curve for one backend and layout of ranks."""

    collective: Collective
    backend: str
    num_ranks: int
    ranks_per_host: int
    curve: Curve
    origin: Origin = "measured"
    dtype: str = "float32"
    """Of the elements summed; without meaning for collectives that only move bytes."""
    beside_compute: bool = False
    """Measured while every rank computed, as it does in backward; else alone."""
    rate_bit_per_s: float | None = None
    """Goodput of the NICs it was measured on, all in one rack, where those are not this fabric's own."""

    def __post_init__(self) -> None:
        if self.rate_bit_per_s is not None:
            check_rate(self.rate_bit_per_s)


class CodecCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One local stage of a codec: seconds against the bytes of the fp32 bucket, for messages of ``num_ranks``.

    ``codec`` is ``Strategy.name`` without its bucket size (``int8``, ``topk@1%``).
    """

    codec: str
    stage: str
    kind: str
    num_ranks: int
    curve: Curve
    origin: Origin = "measured"
    cpus: float | None = None
    """Cores that each of the ranks had which ran the stage at the same time; None: not told."""


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The whole network of one job.

    ``spread`` says how a switch's parallel links share: ``packets`` evenly (adaptive routing, spraying), ``flows`` one
    link per flow by a hash (ECMP), so that flows can collide.
    """

    schema: int = 1
    name: str = ""
    hosts: tuple[Host, ...]
    uplinks: tuple[Uplink, ...] = ()
    switches: tuple[Switch, ...] = ()
    dragonfly: Dragonfly | None = None
    transports: tuple[Transport, ...] = ()
    islands: tuple[Island, ...] = ()
    spread: Spread = "packets"
    currency: str = ""
    rtt_s: Figure | None = None
    collectives: tuple[CollectiveCurve, ...] = ()
    codecs: tuple[CodecCurve, ...] = ()

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names:
            raise DataError("the fabric has no hosts", expected="at least one [[hosts]] entry")
        if len(set(names)) != len(names):
            raise DataError(f"the fabric names host {_twice(names)!r} twice", expected="unique host names")
        for host in self.hosts:
            if host.rate_bit_per_s is not None:
                check_rate(host.rate_bit_per_s.value)
        racks = {host.rack for host in self.hosts}
        for uplink in self.uplinks:
            if uplink.rack not in racks:
                raise DataError(f"the fabric has an uplink of rack {uplink.rack!r}, which holds no host")
            check_rate(uplink.rate_bit_per_s.value)
        if len({uplink.rack for uplink in self.uplinks}) != len(self.uplinks) and (self.switches or self.dragonfly):
            raise DataError(f"the fabric has two uplinks of rack {_twice([u.rack for u in self.uplinks])!r}")
        self._check_parts()
        self._check_switches()

    def _check_parts(self) -> None:
        for what, entries in (("transport", self.transports), ("island", self.islands)):
            held = [entry.name for entry in entries]
            if len(set(held)) != len(held):
                raise DataError(f"the fabric names {what} {_twice(held)!r} twice", expected=f"unique {what} names")
            for wanted in {getattr(host, what) for host in self.hosts} - {"", *held}:
                host = next(host for host in self.hosts if getattr(host, what) == wanted)
                raise DataError(
                    f"host {host.name!r} has {what} {wanted!r}, which the fabric does not describe",
                    expected=f"one of {', '.join(map(repr, held))}" if held else f"a [[{what}s]] entry of that name",
                )

    def _check_switches(self) -> None:
        if self.dragonfly is not None:
            if self.switches or self.uplinks:
                raise DataError("the fabric is a dragonfly and has switches or uplinks as well", expected="one of them")
            self.dragonfly.check_racks({host.rack for host in self.hosts})
            return
        if not self.switches:
            return
        if self.uplinks:
            raise DataError("the fabric has both [[uplinks]] and [[switches]]", expected="one of them")
        check_tree(self.switches)
        held = {switch.name for switch in self.switches}
        for host in self.hosts:
            for name in host.switches or (host.rack,):
                if name not in held:
                    raise DataError(
                        f"host {host.name!r} is at switch {name!r}, which the fabric does not have",
                        expected="a [[switches]] entry of that name",
                    )


def check_tree(switches: tuple[Switch, ...]) -> None:
    """Raise DataError, naming the switch, unless the switches form one tree."""
    parents = {switch.name: switch.parent for switch in switches}
    if len(parents) != len(switches):
        raise DataError(f"the fabric names switch {_twice([s.name for s in switches])!r} twice")
    known: set[str] = set()
    for start in parents:
        path: list[str] = []
        at: str | None = start
        while at is not None and at not in known:
            if at in path:
                raise DataError(
                    f"the switches {' -> '.join([*path[path.index(at) :], at])} form a cycle",
                    expected="a tree: each switch below one other, up to one root",
                    hint="describe several equal spines as one switch, with num_links on what hangs below it",
                )
            path.append(at)
            parent = parents[at]
            if parent is not None and parent not in parents:
                raise DataError(f"switch {at!r} has parent {parent!r}, which the fabric does not have")
            at = parent
        known.update(path)
    roots = [name for name, parent in parents.items() if parent is None]
    if len(roots) > 1:
        raise DataError(
            f"the fabric is not connected: switches {', '.join(map(repr, roots[:4]))} have nothing above them",
            expected="one root",
            hint="name their common spine as parent, or predict each part by itself",
        )


def _twice(names: list[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""
