"""Read and write fabric.toml: what people declare and what was measured, in one file that both can edit.

Sizes, rates and durations are text with units; what is written is read back exactly, to the last bit. A number that a
person writes as plain text (``rate = "25 Gbit/s"``) counts as declared; measured ones carry their origin and source.
A field that is not known is an error, so that a misspelt one cannot be overlooked.

    schema = 1
    [[hosts]]
    name = "h0"
    rate = "25 Gbit/s"
    [[collectives]]
    collective = "all_reduce"
    backend = "gloo"
    num_ranks = 4
    ranks_per_host = 1
    points = [["1 KiB", "1.3 ms"], ["1 MiB", "14 ms"]]    # size, time and, optionally, CPU seconds per second
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from wirespeed import units
from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.entries import (
    CodecEntry,
    CollectiveEntry,
    DragonflyEntry,
    FigureEntry,
    FileEntry,
    HostEntry,
    IslandEntry,
    ProtocolEntry,
    SwitchEntry,
    TransportEntry,
)
from wirespeed.fabric.formatting import SCHEMA, exact_duration, exact_rate, exact_size, format_fabric, write_fabric
from wirespeed.fabric.parts import Dragonfly, Figure, Island, Protocol, Switch, Transport
from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Curve, Fabric, Host, Uplink

__all__ = [
    "MAX_FABRIC_BYTES", "SCHEMA", "exact_duration", "exact_rate", "exact_size", "format_fabric", "parse_fabric",
    "read_fabric", "write_fabric",
]  # fmt: skip

MAX_FABRIC_BYTES = 64 * units.MIB

_T = TypeVar("_T")
_E = TypeVar("_E")


def read_fabric(path: str | Path) -> Fabric:
    """Read a fabric.toml. Raises DataError naming the file and the field that is wrong."""
    source = Path(path)
    try:
        if source.stat().st_size > MAX_FABRIC_BYTES:
            raise DataError(f"{source} is over {units.format_size(MAX_FABRIC_BYTES)}", expected="a fabric.toml")
        text = source.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as fault:
        raise DataError(f"cannot read {source}: {fault}", expected="a fabric.toml") from fault
    return parse_fabric(text, source=str(source))


def parse_fabric(text: str, *, source: str = "input") -> Fabric:
    """The fabric in the text of a fabric.toml. ``source`` names the origin in errors."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise DataError(f"{source} is not TOML: {fault}") from fault
    schema = document.get("schema")
    if not isinstance(schema, int):
        raise DataError(f"{source} has no schema", expected=f"schema = {SCHEMA} at its top")
    if schema > SCHEMA:
        raise DataError(
            f"{source} has schema {schema}",
            expected=f"schema {SCHEMA}",
            hint="it was written by a newer wirespeed: upgrade to read it",
        )
    try:
        held = msgspec.convert(document, type=FileEntry)
    except msgspec.ValidationError as fault:
        raise DataError(f"{source} is not a fabric: {fault}", expected="the fields of a fabric.toml") from fault
    return _in_field(source, "the fabric", lambda: _fabric(held, source))


def _fabric(held: FileEntry, source: str) -> Fabric:
    def each(field: str, entries: list[_E], make: Callable[[_E, _Fields], _T]) -> tuple[_T, ...]:
        return tuple(
            _in_field(source, f"{field}[{i}]", lambda i=i, entry=entry: make(entry, _Fields(source, f"{field}[{i}]")))  # type: ignore[misc]
            for i, entry in enumerate(entries)
        )

    fields = _Fields(source, "")
    return Fabric(
        name=held.name,
        rtt_s=fields.read("rtt", lambda: _figure(held.rtt, units.parse_duration)),
        hosts=each("hosts", held.hosts, _host),
        uplinks=each(
            "uplinks", held.uplinks, lambda u, at: Uplink(rack=u.rack, rate_bit_per_s=at.rate("rate", u.rate))
        ),
        switches=each("switches", held.switches, _switch),
        dragonfly=None if held.dragonfly is None else _dragonfly(held.dragonfly, _Fields(source, "dragonfly")),
        transports=each("transports", held.transports, _transport),
        islands=each("islands", held.islands, _island),
        spread=held.spread,
        currency=held.currency,
        collectives=each("collectives", held.collectives, _collective),
        codecs=each("codecs", held.codecs, _codec),
    )


class _Fields:
    """Where in the file a value stands, so that what is wrong with it can be named."""

    def __init__(self, source: str, entry: str) -> None:
        self.source = source
        self.entry = entry

    def read(self, name: str, make: Callable[[], _T]) -> _T:
        return _in_field(self.source, f"{self.entry}.{name}" if self.entry else name, make)

    def rate(self, name: str, held: str | FigureEntry) -> Figure:
        figure = self.maybe_rate(name, held)
        assert figure is not None
        return figure

    def maybe_rate(self, name: str, held: str | FigureEntry | None) -> Figure | None:
        return self.read(name, lambda: _figure(held, units.parse_rate))

    def size(self, name: str, held: str | None) -> int | None:
        return None if held is None else self.read(name, lambda: units.parse_size(held))

    def duration(self, name: str, held: str) -> float:
        return self.read(name, lambda: units.parse_duration(held))


def _host(held: HostEntry, at: _Fields) -> Host:
    return Host(
        name=held.name,
        rack=held.rack,
        kind=held.kind,
        cpus=held.cpus,
        machine=held.machine,
        rate_bit_per_s=at.maybe_rate("rate", held.rate),
        num_nics=held.num_nics,
        switches=tuple(held.switches),
        num_devices=held.num_devices,
        island=held.island,
        transport=held.transport,
        price=held.price,
    )


def _switch(held: SwitchEntry, at: _Fields) -> Switch:
    return Switch(
        name=held.name,
        parent=held.parent,
        rate_bit_per_s=at.maybe_rate("rate", held.rate),
        num_links=held.num_links,
    )


def _dragonfly(held: DragonflyEntry, at: _Fields) -> Dragonfly:
    return at.read(
        "shape",
        lambda: Dragonfly(
            num_groups=held.num_groups,
            routers_per_group=held.routers_per_group,
            local_bit_per_s=at.rate("local_rate", held.local_rate),
            global_bit_per_s=at.rate("global_rate", held.global_rate),
            detour=held.detour,
        ),
    )


def _transport(held: TransportEntry, at: _Fields) -> Transport:
    latency = at.read("latency", lambda: _figure(held.latency, units.parse_duration))
    assert latency is not None
    return Transport(
        name=held.name,
        latency_s=latency,
        protocols=_protocols(held.protocols, at),
        launch_s=at.duration("launch", held.launch),
        switch_s=at.duration("switch", held.switch),
        flow_bit_per_s=at.maybe_rate("flow_rate", held.flow_rate),
        streams=held.streams,
        window_bytes=at.size("window", held.window),
        first_window_bytes=at.size("first_window", held.first_window),
        buffer_bytes=at.size("buffer", held.buffer),
        timeout_s=at.duration("timeout", held.timeout),
        collective_share=held.collective_share,
    )


def _island(held: IslandEntry, at: _Fields) -> Island:
    return Island(
        name=held.name,
        kind=held.kind,
        rate_bit_per_s=at.rate("rate", held.rate),
        num_devices=held.num_devices,
        protocols=_protocols(held.protocols, at),
        cross_bit_per_s=at.maybe_rate("cross_rate", held.cross_rate),
    )


def _protocols(held: list[ProtocolEntry], at: _Fields) -> tuple[Protocol, ...]:
    return tuple(
        Protocol(name=p.name, hop_s=at.duration(f"protocols[{i}].hop", p.hop), factor=p.factor)
        for i, p in enumerate(held)
    )


def _collective(held: CollectiveEntry, at: _Fields) -> CollectiveCurve:
    return CollectiveCurve(
        collective=held.collective,
        backend=held.backend,
        num_ranks=held.num_ranks,
        ranks_per_host=held.ranks_per_host,
        dtype=held.dtype,
        beside_compute=held.beside_compute,
        rate_bit_per_s=None if held.rate is None else at.rate("rate", held.rate).value,
        origin=held.origin,
        curve=at.read("points", lambda: _curve(held.points, held.residual)),
    )


def _codec(held: CodecEntry, at: _Fields) -> CodecCurve:
    return CodecCurve(
        codec=held.codec,
        stage=held.stage,
        kind=held.kind,
        num_ranks=held.num_ranks,
        cpus=held.cpus,
        origin=held.origin,
        curve=at.read("points", lambda: _curve(held.points, held.residual)),
    )


def _in_field(source: str, field: str, make: Callable[[], _T]) -> _T:
    try:
        return make()
    except (DataError, UsageError) as fault:
        if fault.problem.startswith(f"{source}: "):
            raise
        raise DataError(f"{source}: {field}: {fault.problem}", expected=fault.expected, hint=fault.hint) from fault


def _figure(held: str | FigureEntry | None, parse: Callable[[str], float]) -> Figure | None:
    if held is None:
        return None
    if isinstance(held, str):
        return Figure(value=parse(held), origin="declared")
    return Figure(value=parse(held.value), origin=held.origin, source=held.source)


def _curve(points: list[list[str | float]], residual: float) -> Curve:
    sizes, times, cpu = [], [], []
    for point in points:
        if len(point) not in (2, 3) or not isinstance(point[0], str) or not isinstance(point[1], str):
            raise DataError(
                f"got the point {point}", expected='a size, a time and perhaps a CPU share: ["1 KiB", "1 ms"]'
            )
        sizes.append(units.parse_size(point[0]))
        times.append(units.parse_duration(point[1]))
        if len(point) == 3:
            if not isinstance(point[2], float | int) or not 0 <= point[2] < float("inf"):
                raise DataError(f"got the CPU share {point[2]!r}", expected="a number of 0 or more")
            cpu.append(float(point[2]))
    if len(cpu) not in (0, len(points)):
        raise DataError("only some points have a CPU share", expected="all of them or none")
    return Curve(sizes_bytes=tuple(sizes), times_s=tuple(times), cpu=tuple(cpu), residual=residual)
