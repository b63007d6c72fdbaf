"""Fabric: what the network is, as data. Hosts in racks, their NICs, uplinks, and the curves measured on them.

Every number is a ``Figure``: measured, declared or assumed, with its source, and stays so.
"""

from __future__ import annotations

import math

import msgspec

from wirespeed.errors import DataError
from wirespeed.records import Collective
from wirespeed.spec.workload import Origin


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A number and where it comes from."""

    value: float
    origin: Origin
    source: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise DataError(f"the fabric holds a figure of {self.value}", expected="a finite number")


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine. ``kind`` groups hosts with equal devices; codec curves are kept per kind."""

    name: str
    rack: str = "r0"
    kind: str = "default"
    rate_bit_per_s: Figure | None = None
    """Goodput of its NIC per direction."""
    cpus: float | None = None
    """Cores it can count on: fewer than its own count where hosts share a machine (a lab)."""


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


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The whole network of one job."""

    schema: int = 1
    name: str = ""
    hosts: tuple[Host, ...]
    uplinks: tuple[Uplink, ...] = ()
    rtt_s: Figure | None = None
    collectives: tuple[CollectiveCurve, ...] = ()
    codecs: tuple[CodecCurve, ...] = ()

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not names:
            raise DataError("the fabric has no hosts", expected="at least one [[hosts]] entry")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"the fabric names host {twice!r} twice", expected="unique host names")
        racks = {host.rack for host in self.hosts}
        for uplink in self.uplinks:
            if uplink.rack not in racks:
                raise DataError(f"the fabric has an uplink of rack {uplink.rack!r}, which holds no host")
        for figure in [h.rate_bit_per_s for h in self.hosts] + [u.rate_bit_per_s for u in self.uplinks]:
            if figure is not None and figure.value <= 0:
                raise DataError(f"the fabric holds a rate of {figure.value:g} bit/s", expected="a rate above zero")
