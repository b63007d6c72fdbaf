"""The matrix that `nvidia-smi topo -m` prints: how each GPU and NIC of a host reaches each other one.

NV# is a number of NVLinks; PIX, PXB, PHB, NODE and SYS are ever longer ways over PCIe. The matrix does not tell the
generation of the links: it is guessed from their number per GPU (6: V100, 12: A100, 18: H100) and marked so.
"""

from __future__ import annotations

import re

import msgspec

from wirespeed.errors import DataError
from wirespeed.fabric.imports.inside import Inside, nvlink_island, pcie_island
from wirespeed.fabric.parts import Figure

_GENERATION_BY_LINKS = {6: 70, 12: 80, 18: 90}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NAME = re.compile(r"GPU\d+|NIC\d+|mlx\d+_\d+|bnxt_re\d+|irdma\d+")


def read_nvidia_smi(text: str, *, source: str = "nvidia-smi topo -m") -> Inside:
    """The inside of the host. Raises DataError, naming the line, where the text is no such matrix."""
    lines = [_COLOURS.sub("", line) for line in text.splitlines()]
    top = next((i for i, line in enumerate(lines) if len(_NAME.findall(line)) and not _NAME.match(line.strip())), None)
    if top is None:
        top = next((i for i, line in enumerate(lines) if len(_NAME.findall(line)) > 1), None)
    if top is None:
        raise DataError(f"{source} has no line of GPU0 GPU1 ...", expected="what `nvidia-smi topo -m` prints")
    names = _NAME.findall(lines[top])
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines[top + 1 :], start=top + 2):
        words = line.split()
        if not words or not _NAME.fullmatch(words[0]):
            continue
        if len(words) <= len(names):
            raise DataError(f"{source}: line {number} has {len(words) - 1} columns", expected=f"{len(names)} or more")
        rows[words[0]] = words[1 : len(names) + 1]
    gpus = [name for name in names if name.startswith("GPU")]
    missing = [name for name in gpus if name not in rows]
    if missing or not gpus:
        raise DataError(f"{source} has no row of {missing[0] if missing else 'any GPU'}", expected="one row per GPU")
    links = {gpu: dict(zip(names, rows[gpu], strict=True)) for gpu in gpus}
    num_nics = max(1, len([name for name in names if not name.startswith("GPU")]))
    if len(gpus) == 1:
        return Inside(num_devices=1, num_nics=num_nics, island=None)
    islands = _islands(gpus, links)
    if len(islands[0]) == 1:
        island = pcie_island(4, len(gpus), source=source)
        return Inside(num_devices=len(gpus), num_nics=num_nics, island=island,
                      notes=("no NVLink between the GPUs: they share PCIe, taken to be generation 4",))  # fmt: skip
    per_gpu = min(_links_of(links[gpu], gpu, gpus) for gpu in gpus)
    sm = _GENERATION_BY_LINKS.get(per_gpu, 80)
    held = nvlink_island(per_gpu, sm, len(islands[0]), source=source)
    rate = Figure(value=held.rate_bit_per_s.value, origin="assumed", source=f"{source}; generation by number of links")
    notes = [f"NVLink generation guessed from {per_gpu} links per GPU: {held.name}"]
    cross = None
    if len(islands) > 1:
        cross = pcie_island(4, len(gpus), source=source).rate_bit_per_s
        notes.append(f"{len(islands)} islands of {len(islands[0])} GPUs, joined by PCIe")
    island = msgspec.structs.replace(held, rate_bit_per_s=rate, cross_bit_per_s=cross)
    return Inside(num_devices=len(gpus), num_nics=num_nics, island=island, notes=tuple(notes))


def _count(word: str) -> int:
    return int(word[2:]) if re.fullmatch(r"NV\d+", word) else 0


def _links_of(row: dict[str, str], gpu: str, gpus: list[str]) -> int:
    """NVLinks of one GPU. Behind NVSwitches every pair shows all of them; else the pairs' add up."""
    counts = [_count(row[other]) for other in gpus if other != gpu]
    return counts[0] if len(set(counts)) == 1 and len(counts) > 1 and counts[0] >= 6 else sum(counts)


def _islands(gpus: list[str], links: dict[str, dict[str, str]]) -> list[list[str]]:
    """GPUs that reach each other over NVLink, largest group first."""
    left, found = list(gpus), []
    while left:
        group, edge = {left[0]}, [left[0]]
        while edge:
            at = edge.pop()
            new = [gpu for gpu in left if gpu not in group and _count(links[at][gpu])]
            group.update(new)
            edge += new
        found.append([gpu for gpu in left if gpu in group])
        left = [gpu for gpu in left if gpu not in group]
    return sorted(found, key=len, reverse=True)
