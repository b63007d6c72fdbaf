"""Write a fabric as the text of a fabric.toml: what is written is read back exactly, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from wirespeed import units
from wirespeed.fabric.parts import Dragonfly, Island, Protocol, Switch, Transport
from wirespeed.fabric.topology import Curve, Fabric, Figure, Host
from wirespeed.records import write_bytes

SCHEMA = 1


def write_fabric(path: str | Path, fabric: Fabric) -> Path:
    """Write atomically. Raises MissingCapability where the disk is full or not writable."""
    return write_bytes(path, format_fabric(fabric).encode())


def format_fabric(fabric: Fabric) -> str:
    """The text of a fabric.toml; ``parse_fabric`` gives an equal fabric."""
    lines = [f"schema = {SCHEMA}", f"name = {_toml(fabric.name)}"]
    if fabric.rtt_s is not None:
        lines.append(f"rtt = {_figure_text(fabric.rtt_s, exact_duration)}")
    lines += [] if fabric.spread == "packets" else _pairs(spread=fabric.spread)
    lines += _pairs(currency=fabric.currency) if fabric.currency else []
    for host in fabric.hosts:
        lines += ["", "[[hosts]]", *_host_lines(host)]
    for switch in fabric.switches:
        lines += ["", "[[switches]]", *_switch_lines(switch)]
    if fabric.dragonfly is not None:
        lines += ["", "[dragonfly]", *_dragonfly_lines(fabric.dragonfly)]
    for transport in fabric.transports:
        lines += ["", "[[transports]]", *_transport_lines(transport)]
    for island in fabric.islands:
        lines += ["", "[[islands]]", *_island_lines(island)]
    for uplink in fabric.uplinks:
        lines += ["", "[[uplinks]]", *_pairs(rack=uplink.rack)]
        lines.append(f"rate = {_figure_text(uplink.rate_bit_per_s, exact_rate)}")
    for c in fabric.collectives:
        lines += ["", "[[collectives]]"]
        lines += _pairs(collective=c.collective, backend=c.backend, num_ranks=c.num_ranks)
        lines += _pairs(ranks_per_host=c.ranks_per_host, dtype=c.dtype, origin=c.origin)
        lines += ["beside_compute = true"] if c.beside_compute else []
        lines += [] if c.rate_bit_per_s is None else _pairs(rate=exact_rate(c.rate_bit_per_s))
        lines += _curve_lines(c.curve)
    for k in fabric.codecs:
        lines += ["", "[[codecs]]"]
        lines += _pairs(codec=k.codec, stage=k.stage, kind=k.kind, num_ranks=k.num_ranks, cpus=k.cpus, origin=k.origin)
        lines += _curve_lines(k.curve)
    return "\n".join(lines) + "\n"


def _host_lines(host: Host) -> list[str]:
    lines = _pairs(name=host.name, rack=host.rack, kind=host.kind, cpus=host.cpus, machine=host.machine or None)
    lines += _rate_lines("rate", host.rate_bit_per_s)
    lines += _pairs(num_nics=None if host.num_nics == 1 else host.num_nics)
    if host.switches:
        lines.append(f"switches = [{', '.join(map(_toml, host.switches))}]")
    lines += _pairs(num_devices=None if host.num_devices == 1 else host.num_devices)
    return lines + _pairs(island=host.island or None, transport=host.transport or None, price=host.price)


def _switch_lines(switch: Switch) -> list[str]:
    lines = _pairs(name=switch.name, parent=switch.parent)
    return lines + _rate_lines("rate", switch.rate_bit_per_s) + _pairs(num_links=switch.num_links)


def _dragonfly_lines(shape: Dragonfly) -> list[str]:
    return [
        *_pairs(num_groups=shape.num_groups, routers_per_group=shape.routers_per_group),
        *_rate_lines("local_rate", shape.local_bit_per_s),
        *_rate_lines("global_rate", shape.global_bit_per_s),
        f"detour = {'true' if shape.detour else 'false'}",
    ]


def _transport_lines(held: Transport) -> list[str]:
    lines = [*_pairs(name=held.name), f"latency = {_figure_text(held.latency_s, exact_duration)}"]
    for name, seconds in (("launch", held.launch_s), ("switch", held.switch_s), ("timeout", held.timeout_s)):
        lines += _pairs(**{name: exact_duration(seconds)}) if seconds else []
    lines += _rate_lines("flow_rate", held.flow_bit_per_s)
    lines += _pairs(streams=None if held.streams == 1 else held.streams)
    sizes = (("window", held.window_bytes), ("first_window", held.first_window_bytes), ("buffer", held.buffer_bytes))
    for name, size in sizes:
        lines += _pairs(**{name: None if size is None else exact_size(size)})
    lines += _pairs(collective_share=None if held.collective_share == 1 else held.collective_share)
    return lines + _protocol_lines(held.protocols)


def _island_lines(held: Island) -> list[str]:
    lines = _pairs(name=held.name, kind=held.kind, num_devices=held.num_devices)
    lines += _rate_lines("rate", held.rate_bit_per_s) + _rate_lines("cross_rate", held.cross_bit_per_s)
    return lines + _protocol_lines(held.protocols)


def _protocol_lines(protocols: Sequence[Protocol]) -> list[str]:
    if not protocols:
        return []
    entries = [
        f"  {{ name = {_toml(p.name)}, hop = {_toml(exact_duration(p.hop_s))}, factor = {p.factor!r} }},"
        for p in protocols
    ]
    return ["protocols = [", *entries, "]"]


def _rate_lines(name: str, figure: Figure | None) -> list[str]:
    return [] if figure is None else [f"{name} = {_figure_text(figure, exact_rate)}"]


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
