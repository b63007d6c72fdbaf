"""One-line fabrics: ``fat-tree hosts=64 nic=400g-ib oversubscription=2``, so that a question costs one line.

A shape, then ``key=value`` pairs in any order. Every number comes from a preset (declared or assumed, with its source)
or from the line itself (declared). Nothing in it was measured, and predictions from it say so.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import msgspec

from wirespeed import units
from wirespeed.errors import UsageError
from wirespeed.fabric import builders, presets
from wirespeed.fabric.builders import HostKind, Hosts
from wirespeed.fabric.files import read_fabric
from wirespeed.fabric.imports.inside import Inside
from wirespeed.fabric.parts import Figure, Island, Transport
from wirespeed.fabric.topology import Fabric

SHAPES = ("star", "tree", "fat-tree", "leaf-spine", "rail", "dragonfly")
MAX_HOSTS = 1_000_000
EXAMPLE = '"fat-tree hosts=64 nic=400g-ib oversubscription=2"'

_HOST_KEYS = {
    "hosts": "number of hosts",
    "nic": "preset of the NIC, such as 100g or 400g-ib; mixed hosts: 8x400g-ib+56x100g",
    "nics": "NICs per host (1)",
    "devices": "devices (GPUs) per host (1, or those of the island)",
    "island": "what joins a host's devices: nvlink4, pcie3, ... or none",
    "rate": "goodput of a NIC, in place of the preset's",
    "latency": "one way, of a small message, in place of the preset's",
    "streams": "TCP streams per pair of ranks (1)",
    "window": "most bytes that a TCP stream keeps under way",
    "buffer": "bytes that a switch port holds before it drops (incast)",
    "price": "of a host's network parts, in place of the preset's",
    "spread": "how parallel links share: packets or flows",
    "name": "what to call it",
}
_SHAPE_KEYS: dict[str, dict[str, str]] = {
    "star": {},
    "tree": {"rack": "hosts per rack (16)", "oversubscription": "of the rack's uplink (1)"},
    "leaf-spine": {
        "rack": "hosts per leaf (16)",
        "spines": "number of spines (4)",
        "oversubscription": "of the leaf's uplinks (1)",
    },
    "fat-tree": {
        "k": "ports per switch (the smallest that holds the hosts)",
        "oversubscription": "of the edge's uplinks (1)",
        "core_oversubscription": "of the pods' uplinks (1)",
    },
    "rail": {"group": "hosts per rail group (32)", "oversubscription": "of the rail's uplink (1)"},
    "dragonfly": {
        "router": "hosts per router (4)",
        "routers": "routers per group (8)",
        "global": "links to other groups per router (as many as hosts)",
        "routing": "minimal or detour (minimal)",
    },
}


def load_fabric(text_or_path: str | Path) -> Fabric:
    """A fabric from a fabric.toml or from one line. Raises UsageError or DataError, saying what is wrong.

    What names an existing file, or ends in .toml, is a file; what begins with a shape is a line.
    """
    text = str(text_or_path)
    is_line = text.split(maxsplit=1)[:1] != [] and text.split(maxsplit=1)[0] in SHAPES
    if text.endswith(".toml") or _is_file(text) or (isinstance(text_or_path, Path) and not is_line):
        return read_fabric(text)
    return parse_words(text)


def parse_words(text: str, *, inside: Inside | None = None) -> Fabric:
    """The fabric that one line describes. Raises UsageError naming the word that is wrong.

    ``inside``: what a file told of the hosts' devices and NICs; words of the line outrank it.
    """
    try:
        words = shlex.split(text)
    except ValueError as fault:
        raise UsageError(f"got the fabric {text!r}: {fault}", expected=f"a line such as {EXAMPLE}") from fault
    if not words or words[0] not in SHAPES:
        first = words[0] if words else ""
        close = get_close_matches(first, SHAPES, n=1)
        raise UsageError(
            f"got the fabric {text!r}, which begins with {first!r}",
            expected=f"the path of a fabric.toml, or a shape: {', '.join(SHAPES)}",
            hint=f"did you mean {close[0]}?" if close else f"for example {EXAMPLE}",
        )
    shape, given = words[0], _Given(words[0], words[1:])
    hosts = _hosts(given, text, inside)
    match shape:
        case "star":
            fabric = builders.star(hosts)
        case "tree":
            fabric = builders.tree(
                hosts, per_rack=given.count("rack", 16), oversubscription=given.ratio("oversubscription")
            )
        case "leaf-spine":
            fabric = builders.leaf_spine(
                hosts,
                per_rack=given.count("rack", 16),
                num_spines=given.count("spines", 4),
                oversubscription=given.ratio("oversubscription"),
            )
        case "fat-tree":
            fabric = builders.fat_tree(
                hosts,
                ports=given.count("k", None),
                oversubscription=given.ratio("oversubscription"),
                core_oversubscription=given.ratio("core_oversubscription"),
            )
        case "rail":
            fabric = builders.rail(
                hosts, per_group=given.count("group", 32), oversubscription=given.ratio("oversubscription")
            )
        case _:
            per_router = given.count("router", 4)
            fabric = builders.dragonfly(
                hosts,
                per_router=per_router,
                routers_per_group=given.count("routers", 8),
                global_per_router=given.count("global", per_router),
                detour=given.choice("routing", ("minimal", "detour")) == "detour",
            )
    return fabric


def describe_keys() -> str:
    """All keys, one per line, for --help and error messages."""
    lines = [f"  {key:22} {about}" for key, about in _HOST_KEYS.items()]
    for shape, keys in _SHAPE_KEYS.items():
        lines += [f"  {key:22} {about}  [{shape}]" for key, about in keys.items()]
    return "\n".join(lines)


class _Given:
    """The pairs of a line; each is asked for once, by the kind of its value."""

    def __init__(self, shape: str, words: list[str]) -> None:
        self.shape = shape
        known = {**_HOST_KEYS, **_SHAPE_KEYS[shape]}
        self.values: dict[str, str] = {}
        for word in words:
            key, equals, value = word.partition("=")
            key = key.replace("-", "_")
            if not equals or not value:
                raise UsageError(f"got {word!r} in a {shape} fabric", expected="key=value", hint=f"such as {EXAMPLE}")
            if key not in known:
                close = get_close_matches(key, known, n=1)
                raise UsageError(
                    f"got the unknown key {key!r} of a {shape} fabric",
                    expected=", ".join(known),
                    hint=f"did you mean {close[0]}?" if close else None,
                )
            if key in self.values:
                raise UsageError(f"got {key} twice", expected="each key once")
            self.values[key] = value

    def text(self, key: str, default: str) -> str:
        return self.values.get(key, default)

    def parsed(self, key: str, parse: Callable[[str], float]) -> float | None:
        if key not in self.values:
            return None
        try:
            return parse(self.values[key])
        except UsageError as fault:
            raise UsageError(f"{key}: {fault.problem}", expected=fault.expected, hint=fault.hint) from fault

    def count(self, key: str, default: int | None) -> int:
        if key not in self.values:
            return default  # type: ignore[return-value]  # None only where the caller allows it
        value = self.values[key]
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"got {key}={value}", expected="a whole number of 1 or more")
        return int(value)

    def ratio(self, key: str) -> float:
        value = self.values.get(key, "1").removesuffix(":1")
        try:
            ratio = float(value)
        except ValueError:
            ratio = -1.0
        if not 1 <= ratio < float("inf"):
            raise UsageError(
                f"got {key}={self.values[key]}", expected="1 or more, such as 2 or 4:1",
                hint="2 means that the uplink carries half of what the hosts below it can send",
            )  # fmt: skip
        return ratio

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.values.get(key, choices[0])
        if value not in choices:
            raise UsageError(f"got {key}={value}", expected=" or ".join(choices))
        return value


def parse_host(text: str, *, inside: Inside | None = None) -> HostKind:
    """One kind of host from the words of a line that are about hosts: ``nic=400g-ib nics=8 island=nvlink4``."""
    given = _Given("star", [*shlex.split(text), "hosts=1"])
    return _hosts(given, text, inside).kinds[0][1]


def _hosts(given: _Given, text: str, inside: Inside | None = None) -> Hosts:
    if "nic" not in given.values and "rate" not in given.values:
        raise UsageError(
            "got a fabric without a NIC", expected="nic=... or rate=...", hint=f"NICs: {', '.join(presets.NICS)}"
        )
    mixed = _mixed(given.text("nic", ""))
    wanted = given.count("hosts", None)
    if len(mixed) == 1 and mixed[0][0] is None:
        if wanted is None:
            raise UsageError("got a fabric without hosts", expected="hosts=...", hint=f"such as {EXAMPLE}")
        counts = [wanted]
    else:
        counts = [count for count, _ in mixed if count is not None]
        if len(counts) != len(mixed):
            raise UsageError(f"got nic={given.text('nic', '')}", expected="a count for each, such as 8x400g-ib+56x100g")
        if wanted is not None and wanted != sum(counts):
            raise UsageError(f"got hosts={wanted} and NICs for {sum(counts)} hosts", expected="the same number")
    if sum(counts) > MAX_HOSTS:
        raise UsageError(f"got {sum(counts)} hosts", expected=f"at most {MAX_HOSTS}")
    island = _island(given, inside)
    kinds = [_kind(given, name, island, inside, is_mixed=len(mixed) > 1) for _, name in mixed]
    return Hosts(
        kinds=tuple(zip(counts, kinds, strict=True)),
        name=given.text("name", text),
        spread="flows" if given.choice("spread", ("packets", "flows")) == "flows" else "packets",
        currency=presets.CURRENCY if any(kind.price is not None for kind in kinds) else "",
    )


def _mixed(nics: str) -> list[tuple[int | None, str]]:
    found: list[tuple[int | None, str]] = []
    for part in nics.split("+"):
        count, times, name = part.partition("x")
        found.append((int(count), name) if times and count.isdecimal() else (None, part))
    return found


def _island(given: _Given, inside: Inside | None) -> Island | None:
    if inside is not None and "island" not in given.values:
        return inside.island
    name = given.text("island", "none")
    if name == "none":
        return None
    held = presets.island(name)
    devices = given.count("devices", held.num_devices)
    return msgspec.structs.replace(held, num_devices=devices) if devices < held.num_devices else held


def _kind(given: _Given, nic: str, island: Island | None, inside: Inside | None, *, is_mixed: bool) -> HostKind:
    num_nics = given.count("nics", 1 if inside is None else inside.num_nics)
    own = 1 if island is None else island.num_devices
    devices = given.count("devices", own if inside is None else inside.num_devices)
    rate = given.parsed("rate", units.parse_rate)
    latency_s = given.parsed("latency", units.parse_duration)
    price = given.parsed("price", _number)
    preset = None if not nic else presets.nic(nic)
    if preset is None:
        if latency_s is None:
            raise UsageError("got rate=... without nic=...", expected="latency=... as well, such as latency=20us")
        transport = Transport(name="declared", latency_s=Figure(value=latency_s, origin="declared"))
    else:
        transport = preset.transport
        if latency_s is not None:
            changed = Figure(value=latency_s, origin="declared")
            transport = msgspec.structs.replace(transport, latency_s=changed, protocols=())
    changes: dict[str, int] = {}
    if "streams" in given.values:
        changes["streams"] = given.count("streams", 1)
    for key, field in (("window", "window_bytes"), ("buffer", "buffer_bytes")):
        value = given.parsed(key, units.parse_size)
        if value is not None:
            changes[field] = int(value)
    if changes and transport.protocols:
        raise UsageError(
            f"got {', '.join(changes)} with {nic}", expected="TCP, such as nic=100g", hint="RDMA has no such setting"
        )
    transport = msgspec.structs.replace(transport, **changes)
    declared = None if rate is None else Figure(value=rate, origin="declared")
    held_rate = declared if declared is not None or preset is None else preset.rate
    assert held_rate is not None
    if price is None and preset is not None:
        price = preset.price * num_nics
    return HostKind(
        rate=held_rate,
        num_nics=num_nics,
        num_devices=devices,
        island=island,
        transport=transport,
        price=price,
        kind=(preset.name if preset is not None and is_mixed else "default"),
    )


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"got {text!r}", expected="a number of 0 or more")
    return value


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False
