"""What hangs where in this host: NUMA nodes and their cores, GPUs, NICs and RDMA devices, from sysfs.

Distances follow the PCI tree: two devices below one switch are near, below one host bridge farther, on one NUMA node
farther still. A host that does not tell a device's NUMA node (virtual machines, one socket) has it unknown, never node
0. GPUs are in the order of their bus addresses, which is what CUDA_DEVICE_ORDER=PCI_BUS_ID counts; CUDA's own default
puts the fastest first and can differ where a host mixes models.
"""

from __future__ import annotations

import os
import re

import msgspec

from wirespeed.errors import DataError
from wirespeed.system import System

_GPU_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
_GPU_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
"""VGA, 3D controller, other display controller, processing accelerator."""
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
SAME_SWITCH, SAME_BRIDGE, SAME_NODE, FAR = 0, 1, 2, 3


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node and its logical CPUs."""

    number: int
    cpus: tuple[int, ...]


class PciDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, NIC or RDMA device. ``path``: PCI addresses from the host bridge to the device; empty if virtual."""

    name: str
    kind: str
    path: tuple[str, ...]
    numa: int | None
    is_up: bool = True
    rate_bit_per_s: float | None = None


class HostDevices(msgspec.Struct, frozen=True, kw_only=True):
    """What is there. ``cores``: logical CPUs by physical core, in order."""

    nodes: tuple[NumaNode, ...]
    cores: tuple[tuple[int, ...], ...]
    gpus: tuple[PciDevice, ...]
    nics: tuple[PciDevice, ...]
    hcas: tuple[PciDevice, ...]


def read_devices(system: System | None = None) -> HostDevices:
    """What this host (or a recorded tree of one) has."""
    system = System() if system is None else system
    return HostDevices(
        nodes=_nodes(system), cores=_cores(system), gpus=_gpus(system), nics=_nics(system), hcas=_hcas(system)
    )


def distance(one: PciDevice, other: PciDevice) -> int:
    """How far two devices are apart: below one switch, one host bridge, one NUMA node, or far (or unknown)."""
    if one.path and other.path and one.path[0] == other.path[0]:
        # Path: bridge, root port, (switch ports ...), device. What both pass below the bridge is a switch they share.
        return SAME_SWITCH if len(one.path) > 2 and one.path[1:2] == other.path[1:2] else SAME_BRIDGE
    if one.numa is not None and one.numa == other.numa:
        return SAME_NODE
    return FAR


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Numbers of the kernel's list format: ``0-3,8,10-11``. Raises DataError where it is none."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if part.strip() == "":
            continue
        if match is None:
            raise DataError(f"got the CPU list {text!r}", expected="numbers and ranges such as 0-3,8")
        first = int(match[1])
        numbers += range(first, (first if match[2] is None else int(match[2])) + 1)
    return tuple(sorted(set(numbers)))


def _nodes(system: System) -> tuple[NumaNode, ...]:
    made = []
    for entry in system.list_dir("/sys/devices/system/node"):
        match = re.fullmatch(r"node(\d+)", entry)
        text = system.read_text(f"/sys/devices/system/node/{entry}/cpulist")
        if match is not None and text is not None:
            made.append(NumaNode(number=int(match[1]), cpus=parse_cpulist(text)))
    return tuple(sorted(made, key=lambda node: node.number))


def _cores(system: System) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}
    for entry in sorted(system.list_dir("/sys/devices/system/cpu"), key=lambda name: (len(name), name)):
        match = re.fullmatch(r"cpu(\d+)", entry)
        if match is None:
            continue
        text = system.read_text(f"/sys/devices/system/cpu/{entry}/topology/thread_siblings_list")
        found.setdefault((int(match[1]),) if text is None else parse_cpulist(text))
    return tuple(found)


def _gpus(system: System) -> tuple[PciDevice, ...]:
    made = []
    for address in system.list_dir("/sys/bus/pci/devices"):
        base = f"/sys/bus/pci/devices/{address}"
        vendor, device_class = system.read_int(f"{base}/vendor"), system.read_int(f"{base}/class")
        if vendor not in _GPU_VENDORS or device_class is None or device_class >> 8 not in _GPU_CLASSES:
            continue
        # An Intel display controller is the desktop's; its accelerators are 3D controllers.
        if vendor == 0x8086 and device_class >> 8 == 0x0300:
            continue
        made.append(
            PciDevice(name=address, kind=_GPU_VENDORS[vendor], path=_pci_path(system, base), numa=_numa(system, base))
        )
    return tuple(sorted(made, key=lambda gpu: gpu.name))


def _nics(system: System) -> tuple[PciDevice, ...]:
    made = []
    for name in system.list_dir("/sys/class/net"):
        base = f"/sys/class/net/{name}"
        if not system.path(f"{base}/device").exists():
            continue  # loopback, bridges, tunnels
        speed = system.read_int(f"{base}/speed")
        made.append(
            PciDevice(
                name=name,
                kind="nic",
                path=_pci_path(system, f"{base}/device"),
                numa=_numa(system, f"{base}/device"),
                is_up=system.read_text(f"{base}/operstate") in ("up", "unknown"),
                rate_bit_per_s=None if speed is None or speed <= 0 else speed * 1e6,
            )
        )
    return tuple(made)


def _hcas(system: System) -> tuple[PciDevice, ...]:
    made = []
    for name in system.list_dir("/sys/class/infiniband"):
        base = f"/sys/class/infiniband/{name}"
        ports = system.list_dir(f"{base}/ports")
        states = [system.read_text(f"{base}/ports/{port}/state") or "" for port in ports]
        rates = [system.read_text(f"{base}/ports/{port}/rate") or "" for port in ports]
        numbers = [float(match[1]) for rate in rates if (match := re.match(r"\s*([\d.]+) Gb/sec", rate))]
        made.append(
            PciDevice(
                name=name,
                kind="hca",
                path=_pci_path(system, f"{base}/device"),
                numa=_numa(system, f"{base}/device"),
                is_up=any("ACTIVE" in state for state in states),
                rate_bit_per_s=max(numbers) * 1e9 if numbers else None,
            )
        )
    return tuple(made)


def _numa(system: System, base: str) -> int | None:
    number = system.read_int(f"{base}/numa_node")
    return None if number is None or number < 0 else number


def _pci_path(system: System, base: str) -> tuple[str, ...]:
    """PCI addresses on the way from the host bridge to the device, from where sysfs's link leads."""
    place = system.path(base)
    if not place.exists():
        return ()
    parts = os.path.realpath(place).split("/")
    bridge = next(
        (index for index, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)), None
    )
    if bridge is None:
        return ()
    return (parts[bridge], *(part for part in parts[bridge + 1 :] if _PCI_ADDRESS.fullmatch(part)))
