"""GPUs and the way from them to the network: distance to the nearest NIC, and the ingredients of GPUDirect RDMA.

Distances are those of the PCI tree in sysfs, named as nvidia-smi does: PIX or PXB (one switch), PHB (one root complex),
NODE (one NUMA node), SYS (across nodes). A virtual machine's tree is the hypervisor's invention: then nothing is said.
Whether NCCL really uses GPUDirect only its log tells (`wirespeed doctor logs`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.inventory import Gpu, HostView, RdmaPort

RANKING = ("PIX", "PXB", "PHB", "NODE", "SYS")


def _no_gpu(view: HostView) -> str | None:
    return None if view.gpus else "no GPU"


def _no_pair(view: HostView) -> str | None:
    if not view.gpus:
        return "no GPU"
    if not any(port.pci is not None for port in view.rdma_ports):
        return "no RDMA device"
    return "a virtual machine's PCI tree is made up" if view.is_virtual else None


def distance(view: HostView, one: str, other: str) -> str | None:
    """How two PCI devices are joined; None where the tree does not show it."""
    paths = [view.pci_path(bdf) for bdf in (one, other)]
    roots = [view.system.real_path(f"/sys/bus/pci/devices/{bdf}") for bdf in (one, other)]
    if not all(paths) or roots[0] is None or roots[1] is None:
        return None
    shared = sum(1 for a, b in zip(*paths) if a == b)  # noqa: B905 - strict= is younger than Python 3.9
    if shared:
        hops = len(paths[0]) + len(paths[1]) - 2 * shared
        return "PIX" if hops <= 4 else "PXB"
    complexes = [re.search(r"/pci[0-9a-f]+:[0-9a-f]+", root) for root in (roots[0], roots[1])]
    if complexes[0] is not None and complexes[1] is not None and complexes[0][0] == complexes[1][0]:
        return "PHB"
    nodes = [view.system.read_int(f"/sys/bus/pci/devices/{bdf}/numa_node") for bdf in (one, other)]
    if None in nodes or -1 in nodes:
        return None
    return "NODE" if nodes[0] == nodes[1] else "SYS"


def _nearest(view: HostView, gpu: Gpu, ports: list[RdmaPort]) -> tuple[str, list[RdmaPort]] | None:
    known = [(distance(view, gpu.pci, port.pci), port) for port in ports if port.pci is not None]
    best = min((RANKING.index(d) for d, _ in known if d is not None), default=None)
    return None if best is None else (RANKING[best], [port for d, port in known if d == RANKING[best]])


@check("gpu.nic-distance", "distance from each GPU to its nearest RDMA device", applies=_no_pair)
def nic_distance(view: HostView) -> Iterator[Outcome]:
    """A GPU whose best NIC is across NUMA nodes, and a NIC that several GPUs share while another idles."""
    # A port that is down is still where it is: rdma.ports reports it, and no GPU is called far for that.
    ports = [port for port in view.rdma_ports if port.is_active or "Disabled" not in (port.phys_state or "")]
    if not ports:
        yield Unknown(what="distance from GPU to NIC", why="every RDMA port is switched off")
        return
    used: Counter[str] = Counter()
    unseen: list[str] = []
    far: dict[str, list[tuple[Gpu, RdmaPort]]] = {}
    for gpu in view.gpus:
        nearest = _nearest(view, gpu, ports)
        if nearest is None:
            unseen.append(gpu.pci)
            continue
        code, choices = nearest
        yield Fact(key=f"gpu.{gpu.pci}.nearest", value=f"{code} {choices[0].device}")
        if code not in ("PIX", "PXB"):
            far.setdefault(code, []).append((gpu, choices[0]))
        elif len({port.device for port in choices}) == 1:
            used[choices[0].device] += 1
    for code, pairs in far.items():
        yield _far(code, pairs)
    idle = {port.device for port in ports} - set(used)
    shared = [device for device, count in used.items() if count > 1]
    if shared and idle and len(ports) >= len(view.gpus):
        yield Finding(
            id="gpu.nic-shared",
            subject=", ".join(shared),
            severity="warning",
            title=f"{', '.join(shared)} serves several GPUs while {', '.join(sorted(idle))} is nobody's nearest.",
            evidence=tuple(
                Evidence(where=f"PCI tree of {device}", seen=f"nearest to {used[device]} GPUs", expected="1")
                for device in shared
            ),
            remedy=Remedy(
                text="check the slots against the board's manual; inside a VM give NCCL the true tree with "
                "NCCL_TOPO_FILE"
            ),
            source="nccl-tests#347, #350",
            path="rdma",
        )
    if unseen:
        yield Unknown(what=f"distance of GPU {', '.join(unseen)}", why="the PCI tree or numa_node does not show it")


def _far(code: str, pairs: list[tuple[Gpu, RdmaPort]]) -> Finding:
    names = ", ".join(gpu.pci for gpu, _ in pairs[:8])
    where = {"SYS": "on another NUMA node", "NODE": "below another root complex"}.get(code, "not below its PCI switch")
    return Finding(
        id="gpu.nic-across-numa" if code == "SYS" else "gpu.nic-far",
        subject=f"GPU {names}",
        severity="warning",
        title=f"The nearest RDMA device of GPU {names} is {where} ({code}): too far for NCCL to use GPUDirect.",
        evidence=tuple(
            Evidence(
                where=f"PCI tree of GPU {gpu.pci} (node {gpu.numa_node}) and {port.device} ({port.pci})",
                seen=code,
                expected="PIX or PXB",
            )
            for gpu, port in pairs[:8]
        ),
        remedy=Remedy(
            text="put the card below the GPU's PCI switch or at least into a slot of its node, or give the rank a GPU "
            "near the NIC. NCCL_NET_GDR_LEVEL=PHB or SYS only as an experiment: across sockets GPUDirect can be slower "
            "than copies through host memory"
        ),
        source="NCCL uses GPUDirect up to PXB by default; nccl-tests#347, #350",
        path="rdma",
    )


@check("gpu.direct", "ingredients of GPUDirect RDMA: nvidia_peermem, or DMA-BUF with the open driver", applies=_no_gpu)
def direct(view: HostView) -> Iterator[Outcome]:
    """Neither of the two ways: RDMA traffic is copied through host memory."""
    if not view.has_active_rdma:
        return
    if not any(gpu.vendor == "nvidia" for gpu in view.gpus):
        yield Unknown(what="GPUDirect of AMD GPUs", why="not looked at yet", hint="`rocminfo`, amdgpu's peer memory")
        return
    version = view.system.read_text("/proc/driver/nvidia/version")
    if version is None:
        yield Unknown(
            what="GPUDirect RDMA", why="/proc/driver/nvidia/version is not there: no driver, or hidden by the container"
        )
        return
    number = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", version)
    yield Fact(key="gpu.driver", value="unknown" if number is None else number[1])
    has_peermem = bool(view.modules & {"nvidia_peermem", "nv_peer_mem"})
    is_open, kernel = "Open Kernel Module" in version, view.kernel
    can_dmabuf = is_open and kernel is not None and kernel >= (5, 12)
    yield Fact(key="gpu.direct", value="peermem" if has_peermem else "dma-buf" if can_dmabuf else "none")
    if has_peermem or can_dmabuf:
        return
    if view.system.read_text("/proc/modules") is None:
        yield Unknown(what="GPUDirect RDMA", why="/proc/modules cannot be read")
        return
    yield Finding(
        id="gpu.no-gpudirect",
        subject="host",
        severity="critical",
        title="GPUs and NICs cannot exchange data directly: every byte is copied through host memory.",
        evidence=(
            Evidence(
                where="/proc/modules",
                seen="no nvidia_peermem",
                expected="nvidia_peermem, or the open driver with DMA-BUF",
            ),
            Evidence(
                where="/proc/driver/nvidia/version",
                seen="proprietary module: no DMA-BUF"
                if not is_open
                else f"open module on kernel {kernel}: DMA-BUF from 5.12",
            ),
        ),
        remedy=Remedy(
            text="load nvidia_peermem, and at every boot",
            commands=("modprobe nvidia_peermem",),
            undo=("modprobe -r nvidia_peermem",),
        ),
        source="NCCL user guide, troubleshooting (GPU direct); nccl#489, #1412",
        path="rdma",
    )


CHECKS = (nic_distance, direct)
