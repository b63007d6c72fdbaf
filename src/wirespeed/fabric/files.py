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

import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from wirespeed import units
from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Curve, Fabric, Figure, Host, Uplink
from wirespeed.records import Collective, write_bytes
from wirespeed.spec.workload import Origin

SCHEMA = 1
MAX_FABRIC_BYTES = 64 * units.MIB

_T = TypeVar("_T")


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Figure(_Entry, frozen=True, kw_only=True):
    value: str
    origin: Origin
    source: str = ""


class _Host(_Entry, frozen=True, kw_only=True):
    name: str
    rack: str = "r0"
    kind: str = "default"
    cpus: float | None = None
    rate: str | _Figure | None = None


class _Uplink(_Entry, frozen=True, kw_only=True):
    rack: str
    rate: str | _Figure


class _Collective(_Entry, frozen=True, kw_only=True):
    collective: Collective
    backend: str
    num_ranks: int
    ranks_per_host: int = 1
    dtype: str = "float32"
    beside_compute: bool = False
    origin: Origin = "declared"
    residual: float = 0.0
    points: list[list[str | float]]


class _Codec(_Entry, frozen=True, kw_only=True):
    codec: str
    stage: str
    kind: str = "default"
    num_ranks: int
    origin: Origin = "declared"
    residual: float = 0.0
    points: list[list[str | float]]


class _File(_Entry, frozen=True, kw_only=True):
    schema: int
    name: str = ""
    rtt: str | _Figure | None = None
    hosts: list[_Host] = []
    uplinks: list[_Uplink] = []
    collectives: list[_Collective] = []
    codecs: list[_Codec] = []


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
        held = msgspec.convert(document, type=_File)
    except msgspec.ValidationError as fault:
        raise DataError(f"{source} is not a fabric: {fault}", expected="the fields of a fabric.toml") from fault
    return _in_field(source, "the fabric", lambda: _fabric(held, source))


def _fabric(held: _File, source: str) -> Fabric:
    return Fabric(
        name=held.name,
        rtt_s=_in_field(source, "rtt", lambda: _figure(held.rtt, units.parse_duration)),
        hosts=tuple(
            Host(
                name=host.name,
                rack=host.rack,
                kind=host.kind,
                cpus=host.cpus,
                rate_bit_per_s=_in_field(source, f"hosts[{i}].rate", lambda h=host: _figure(h.rate, units.parse_rate)),  # type: ignore[misc]
            )
            for i, host in enumerate(held.hosts)
        ),
        uplinks=tuple(
            Uplink(
                rack=uplink.rack,
                rate_bit_per_s=_in_field(source, f"uplinks[{i}].rate", lambda u=uplink: _rate(u.rate)),  # type: ignore[misc]
            )
            for i, uplink in enumerate(held.uplinks)
        ),
        collectives=tuple(
            CollectiveCurve(
                collective=c.collective,
                backend=c.backend,
                num_ranks=c.num_ranks,
                ranks_per_host=c.ranks_per_host,
                dtype=c.dtype,
                beside_compute=c.beside_compute,
                origin=c.origin,
                curve=_in_field(source, f"collectives[{i}].points", lambda c=c: _curve(c.points, c.residual)),  # type: ignore[misc]
            )
            for i, c in enumerate(held.collectives)
        ),
        codecs=tuple(
            CodecCurve(
                codec=c.codec,
                stage=c.stage,
                kind=c.kind,
                num_ranks=c.num_ranks,
                origin=c.origin,
                curve=_in_field(source, f"codecs[{i}].points", lambda c=c: _curve(c.points, c.residual)),  # type: ignore[misc]
            )
            for i, c in enumerate(held.codecs)
        ),
    )


def _in_field(source: str, field: str, make: Callable[[], _T]) -> _T:
    try:
        return make()
    except (DataError, UsageError) as fault:
        if fault.problem.startswith(f"{source}: "):
            raise
        raise DataError(f"{source}: {field}: {fault.problem}", expected=fault.expected, hint=fault.hint) from fault


def _figure(held: str | _Figure | None, parse: Callable[[str], float]) -> Figure | None:
    if held is None:
        return None
    if isinstance(held, str):
        return Figure(value=parse(held), origin="declared")
    return Figure(value=parse(held.value), origin=held.origin, source=held.source)


def _rate(held: str | _Figure) -> Figure:
    figure = _figure(held, units.parse_rate)
    assert figure is not None
    return figure


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


def write_fabric(path: str | Path, fabric: Fabric) -> Path:
    """Write atomically. Raises MissingCapability where the disk is full or not writable."""
    return write_bytes(path, format_fabric(fabric).encode())


def format_fabric(fabric: Fabric) -> str:
    """The text of a fabric.toml; ``parse_fabric`` gives an equal fabric."""
    lines = [f"schema = {SCHEMA}", f"name = {_toml(fabric.name)}"]
    if fabric.rtt_s is not None:
        lines.append(f"rtt = {_figure_text(fabric.rtt_s, exact_duration)}")
    for host in fabric.hosts:
        rate = None if host.rate_bit_per_s is None else _figure_text(host.rate_bit_per_s, exact_rate)
        lines += ["", "[[hosts]]", *_pairs(name=host.name, rack=host.rack, kind=host.kind, cpus=host.cpus)]
        lines += [] if rate is None else [f"rate = {rate}"]
    for uplink in fabric.uplinks:
        lines += ["", "[[uplinks]]", *_pairs(rack=uplink.rack)]
        lines.append(f"rate = {_figure_text(uplink.rate_bit_per_s, exact_rate)}")
    for c in fabric.collectives:
        lines += ["", "[[collectives]]"]
        lines += _pairs(collective=c.collective, backend=c.backend, num_ranks=c.num_ranks)
        lines += _pairs(ranks_per_host=c.ranks_per_host, dtype=c.dtype, origin=c.origin)
        lines += ["beside_compute = true"] if c.beside_compute else []
        lines += _curve_lines(c.curve)
    for k in fabric.codecs:
        lines += ["", "[[codecs]]"]
        lines += _pairs(codec=k.codec, stage=k.stage, kind=k.kind, num_ranks=k.num_ranks, origin=k.origin)
        lines += _curve_lines(k.curve)
    return "\n".join(lines) + "\n"


def exact_rate(bit_per_s: float) -> str:
    """A rate that ``parse_rate`` reads back to the same bit."""
    return _exact(bit_per_s, (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)), "bit/s", units.parse_rate)


def exact_duration(seconds: float) -> str:
    """A duration that ``parse_duration`` reads back to the same bit."""
    return _exact(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)), "s", units.parse_duration)


def exact_size(num_bytes: int) -> str:
    """A size that ``parse_size`` reads back."""
    for unit, factor in (("GiB", units.GIB), ("MiB", units.MIB), ("KiB", units.KIB)):
        if num_bytes >= factor and num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"


def _exact(value: float, steps: Iterable[tuple[str, float]], base: str, parse: Callable[[str], float]) -> str:
    unit, factor = next((step for step in steps if value >= step[1]), (base, 1.0))
    for text in (f"{value / factor:.15g} {unit}", f"{value / factor!r} {unit}"):
        if parse(text) == value:
            return text
    return f"{value!r} {base}"


def _figure_text(figure: Figure, write: Callable[[float], str]) -> str:
    if figure.origin == "declared" and not figure.source:
        return _toml(write(figure.value))
    fields = {"value": write(figure.value), "origin": figure.origin, "source": figure.source}
    return "{ " + ", ".join(f"{name} = {_toml(value)}" for name, value in fields.items() if value) + " }"


def _curve_lines(curve: Curve) -> list[str]:
    lines = [*_pairs(residual=curve.residual), "points = ["]
    for place, (size, time_s) in enumerate(zip(curve.sizes_bytes, curve.times_s, strict=True)):
        cells = [_toml(exact_size(size)), _toml(exact_duration(time_s))]
        if curve.cpu:
            cells.append(_toml(curve.cpu[place]))
        lines.append(f"  [{', '.join(cells)}],")
    return [*lines, "]"]


def _pairs(**fields: str | float | None) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in fields.items() if value is not None]


def _toml(value: str | float) -> str:
    """A TOML string or number. JSON's strings are TOML's, but for DEL, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
