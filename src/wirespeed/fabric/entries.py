"""What a fabric.toml may hold, field by field: text with units, not yet parsed. Other fields are errors."""

from __future__ import annotations

from typing import Literal

import msgspec

from wirespeed.fabric.topology import Spread
from wirespeed.records import Collective
from wirespeed.spec.workload import Origin


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all entries."""


class FigureEntry(Entry, frozen=True, kw_only=True):
    """A number with its origin; plain text stands for a declared one."""

    value: str
    origin: Origin
    source: str = ""


class HostEntry(Entry, frozen=True, kw_only=True):
    """One [[hosts]]."""

    name: str
    rack: str = "r0"
    kind: str = "default"
    cpus: float | None = None
    machine: str = ""
    rate: str | FigureEntry | None = None
    num_nics: int = 1
    switches: list[str] = []
    num_devices: int = 1
    island: str = ""
    transport: str = ""
    price: float | None = None


class SwitchEntry(Entry, frozen=True, kw_only=True):
    """One [[switches]]."""

    name: str
    parent: str | None = None
    rate: str | FigureEntry | None = None
    num_links: int = 1


class DragonflyEntry(Entry, frozen=True, kw_only=True):
    """The [dragonfly]."""

    num_groups: int
    routers_per_group: int
    local_rate: str | FigureEntry
    global_rate: str | FigureEntry
    detour: bool = False


class ProtocolEntry(Entry, frozen=True, kw_only=True):
    """One of a transport's or an island's protocols."""

    name: str
    hop: str
    factor: float = 1.0


class TransportEntry(Entry, frozen=True, kw_only=True):
    """One [[transports]]."""

    name: str
    latency: str | FigureEntry
    protocols: list[ProtocolEntry] = []
    launch: str = "0 s"
    switch: str = "0 s"
    flow_rate: str | FigureEntry | None = None
    streams: int = 1
    window: str | None = None
    first_window: str | None = None
    buffer: str | None = None
    timeout: str = "0 s"
    collective_share: float = 1.0


class IslandEntry(Entry, frozen=True, kw_only=True):
    """One [[islands]]."""

    name: str
    kind: Literal["switch", "bus"] = "switch"
    rate: str | FigureEntry
    num_devices: int
    protocols: list[ProtocolEntry] = []
    cross_rate: str | FigureEntry | None = None


class UplinkEntry(Entry, frozen=True, kw_only=True):
    """One [[uplinks]]."""

    rack: str
    rate: str | FigureEntry


class CollectiveEntry(Entry, frozen=True, kw_only=True):
    """One [[collectives]]."""

    collective: Collective
    backend: str
    num_ranks: int
    ranks_per_host: int = 1
    dtype: str = "float32"
    beside_compute: bool = False
    rate: str | None = None
    origin: Origin = "declared"
    residual: float = 0.0
    points: list[list[str | float]]


class CodecEntry(Entry, frozen=True, kw_only=True):
    """One [[codecs]]."""

    codec: str
    stage: str
    kind: str = "default"
    num_ranks: int
    cpus: float | None = None
    origin: Origin = "declared"
    residual: float = 0.0
    points: list[list[str | float]]


class FileEntry(Entry, frozen=True, kw_only=True):
    """The whole file."""

    schema: int
    name: str = ""
    rtt: str | FigureEntry | None = None
    hosts: list[HostEntry] = []
    uplinks: list[UplinkEntry] = []
    switches: list[SwitchEntry] = []
    dragonfly: DragonflyEntry | None = None
    transports: list[TransportEntry] = []
    islands: list[IslandEntry] = []
    spread: Spread = "packets"
    currency: str = ""
    collectives: list[CollectiveEntry] = []
    codecs: list[CodecEntry] = []
