"""The topology XML that NCCL writes (NCCL_TOPO_DUMP_FILE): GPUs with their NVLinks, PCIe, NICs with a speed in Mbit/s.

Virtual machines and containers often show NCCL a flat PCIe tree; then so does this. All of a GPU's NVLinks are taken to
lead to a switch that joins all GPUs.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from wirespeed.errors import DataError
from wirespeed.fabric.imports.inside import Inside, nvlink_island, pcie_island

GPU_CLASS = "0x03"
_PCIE_GENERATIONS = ((32.0, 5), (16.0, 4), (0.0, 3))


def read_nccl_xml(text: str, *, source: str = "NCCL topology XML") -> Inside:
    """The inside of the host. Raises DataError for what is no such file, or one without GPUs."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise DataError(f"{source} declares entities", expected="XML as NCCL_TOPO_DUMP_FILE writes it, without any")
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - entities, which could grow without bound, are refused above
    except ElementTree.ParseError as fault:
        raise DataError(f"{source} is not XML: {fault}", expected="a file of NCCL_TOPO_DUMP_FILE") from fault
    if root.tag != "system":
        raise DataError(f"{source} begins with <{root.tag}>", expected="<system>, as NCCL_TOPO_DUMP_FILE writes it")
    gpus = list(root.iter("gpu"))
    if not gpus:
        raise DataError(f"{source} holds no <gpu>", expected="at least one")
    nets = [net for net in root.iter("net") if _number(net, "speed", source) > 0]
    links = [sum(int(_number(link, "count", source)) for link in gpu.iter("nvlink")) for gpu in gpus]
    notes: list[str] = []
    if len(set(links)) > 1:
        notes.append(f"GPUs differ in their number of NVLinks ({sorted(set(links))}); the smallest is taken")
    if min(links) > 0:
        sm = int(min(_number(gpu, "sm", source) for gpu in gpus))
        island = nvlink_island(min(links), sm, len(gpus), source=source)
    else:
        speeds = [_pcie_speed(pci) for pci in root.iter("pci") if (pci.get("class") or "").startswith(GPU_CLASS)]
        generation = next(g for least, g in _PCIE_GENERATIONS if min(speeds, default=0.0) >= least)
        island = pcie_island(generation, len(gpus), source=source)
        notes.append("no NVLink between all GPUs: they share PCIe")
    rates = [_number(net, "speed", source) * 1e6 for net in nets]
    if len(set(rates)) > 1:
        notes.append("NICs differ in speed; only the fastest are counted")
    fastest = max(rates, default=0.0)
    return Inside(
        num_devices=len(gpus),
        num_nics=max(1, rates.count(fastest)),
        island=island if len(gpus) > 1 else None,
        nic_line_bit_per_s=fastest or None,
        notes=tuple(notes),
    )


def _number(element: ElementTree.Element, name: str, source: str) -> float:
    text = element.get(name)
    try:
        value = float("" if text is None else text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise DataError(f"{source}: <{element.tag}> has {name}={text!r}", expected="a number of 0 or more")
    return value


def _pcie_speed(pci: ElementTree.Element) -> float:
    found = re.match(r"\s*(\d+(?:\.\d+)?)", pci.get("link_speed") or "")
    return float(found.group(1)) if found else 0.0
