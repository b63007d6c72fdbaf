"""Where one rank of this host should run: its device, the cores and NICs next to it, and the environment that says so.

Ranks are dealt to devices in order (local rank i to GPU i). A rank gets whole physical cores of its device's NUMA node,
shared out evenly among the ranks of that node, and only cores that this process may use: what a scheduler or a
container has set apart stays so. NCCL finds the NIC next to each GPU by itself; it is told which RDMA devices carry
training at all, the same on every rank of the host, since ranks that disagree cannot connect. What the user has set is
never overridden, and every choice is listed with its reason.

It can be wrong where devices are hidden from a container's sysfs, and where CUDA_VISIBLE_DEVICES gives each rank one
GPU: then local rank 0's view is that one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from wirespeed.errors import UsageError
from wirespeed.launch.devices import HostDevices, PciDevice, distance
from wirespeed.units import format_rate

BindMode = Literal["auto", "none"]
SLOW_SHARE = 0.5
"""An RDMA device below half the fastest one's rate is taken for storage or management and left out."""


class TrafficClass(msgspec.Struct, frozen=True, kw_only=True):
    """How training traffic is marked. ``dscp``: 0 to 63, in IP headers. ``service_level``: 0 to 15, InfiniBand's."""

    dscp: int | None = None
    service_level: int | None = None

    def __post_init__(self) -> None:
        if self.dscp is not None and not 0 <= self.dscp <= 63:
            raise UsageError(f"got DSCP {self.dscp}", expected="0 to 63, such as 26 (AF31) or 46 (EF)")
        if self.service_level is not None and not 0 <= self.service_level <= 15:
            raise UsageError(f"got service level {self.service_level}", expected="0 to 15")


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's place. ``cpus`` None: not bound. ``environment``: what to add; ``reasons``: one line per choice."""

    local_rank: int
    local_size: int
    device: str | None
    numa: int | None
    cpus: tuple[int, ...] | None
    nics: tuple[str, ...]
    hcas: tuple[str, ...]
    nearest_hca: str | None
    uses_batch: bool
    environment: dict[str, str]
    reasons: tuple[str, ...]


def bind(
    devices: HostDevices,
    *,
    local_rank: int,
    local_size: int,
    allowed_cpus: Collection[int],
    environ: Mapping[str, str],
    mode: BindMode = "auto",
    batch: bool | None = None,
    traffic: TrafficClass | None = None,
    nic: str | None = None,
) -> Binding:
    """Choose for local rank ``local_rank`` of ``local_size``. Pure: reads nothing, sets nothing.

    ``batch`` None: SCHED_BATCH where there is no GPU, since gloo then carries the collectives. ``nic``: the interface
    for TCP, where the host has several. Raises UsageError for a rank that is not there or an interface that is not.
    """
    if not 0 <= local_rank < local_size:
        raise UsageError(
            f"got local rank {local_rank} of {local_size}", expected="0 <= local rank < ranks on this host"
        )
    reasons: list[str] = []
    gpu = _device_of(devices, local_rank, environ, reasons)
    numa = _node_of(devices, gpu, local_rank, local_size)
    cpus = None
    if mode == "auto":
        cpus = _cpus_of(devices, numa, local_rank, local_size, allowed_cpus, environ, reasons)
    hcas = _training_hcas(devices, reasons)
    nearest = min(hcas, key=lambda hca: (distance(gpu, hca), hca.name)) if gpu is not None and hcas else None
    if nearest is not None and gpu is not None:
        reasons.append(f"{nearest.name} is nearest to GPU {gpu.name}: {_DISTANCES[distance(gpu, nearest)]}")
    nics = _nics_of(devices, nic, reasons)
    uses_batch = not devices.gpus if batch is None else batch
    if uses_batch:
        reasons.append(
            "SCHED_BATCH: gloo's threads contend for cores; small collectives take about a third of the time"
        )
    wanted = _environment(cpus, devices, hcas, nearest, nics, traffic, reasons)
    kept = sorted(name for name in wanted if environ.get(name, "") != "")
    reasons += [f"{name}={environ[name]} stays: it is set already" for name in kept if environ[name] != wanted[name]]
    return Binding(
        local_rank=local_rank,
        local_size=local_size,
        device=None if gpu is None else gpu.name,
        numa=numa,
        cpus=cpus,
        nics=tuple(n.name for n in nics),
        hcas=tuple(h.name for h in hcas),
        nearest_hca=None if nearest is None else nearest.name,
        uses_batch=uses_batch,
        environment={name: value for name, value in wanted.items() if name not in kept},
        reasons=tuple(reasons),
    )


_DISTANCES = ("below the same PCIe switch", "below the same host bridge", "on the same NUMA node", "on another node")


def _device_of(
    devices: HostDevices, local_rank: int, environ: Mapping[str, str], reasons: list[str]
) -> PciDevice | None:
    if not devices.gpus:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    order = list(range(len(devices.gpus)))
    if visible:
        numbers = [part.strip() for part in visible.split(",")]
        if not all(part.isdigit() and int(part) < len(order) for part in numbers):
            reasons.append(f"CUDA_VISIBLE_DEVICES={visible} does not name GPUs by their number: the device is unknown")
            return None
        order = [int(part) for part in numbers]
    # A launcher that gives each rank one GPU shows it that one only.
    place = local_rank if local_rank < len(order) else (0 if len(order) == 1 else None)
    if place is None:
        reasons.append(f"local rank {local_rank} has no GPU: {len(order)} are visible")
        return None
    return devices.gpus[order[place]]


def _node_of(devices: HostDevices, gpu: PciDevice | None, local_rank: int, local_size: int) -> int | None:
    if gpu is not None:
        return gpu.numa
    nodes = [node.number for node in devices.nodes if node.cpus]
    # Without a device, ranks are spread over the nodes in blocks.
    return nodes[local_rank * len(nodes) // local_size] if len(nodes) > 1 else (nodes[0] if nodes else None)


def _cpus_of(  # noqa: PLR0917
    devices: HostDevices,
    numa: int | None,
    local_rank: int,
    local_size: int,
    allowed: Collection[int],
    environ: Mapping[str, str],
    reasons: list[str],
) -> tuple[int, ...] | None:
    """Whole cores of the node, shared out among the ranks there; None where there are fewer cores than ranks."""
    node = next((held.cpus for held in devices.nodes if held.number == numa), None)
    if node is None:
        node = tuple(sorted({cpu for core in devices.cores for cpu in core} or set(allowed)))
        sharing = list(range(local_size))
    else:
        sharing = [rank for rank in range(local_size) if _node_of_rank(devices, rank, local_size, environ) == numa]
    usable = [tuple(cpu for cpu in core if cpu in node and cpu in allowed) for core in devices.cores]
    cores = [core for core in usable if core] or [(cpu,) for cpu in node if cpu in allowed]
    if not cores:
        reasons.append(
            f"not bound: none of the cores of NUMA node {numa} may be used by this process"
            if numa is not None
            else "not bound: no core is known"
        )
        return None
    if len(cores) < len(sharing):
        reasons.append(f"not bound: {len(sharing)} ranks share {len(cores)} cores")
        return None
    place = sharing.index(local_rank) if local_rank in sharing else 0
    first, last = (len(cores) * index // len(sharing) for index in (place, place + 1))
    chosen = cores[first:last]
    where = "" if numa is None else f" of NUMA node {numa}"
    reasons.append(f"{len(chosen)} of {len(cores)} cores{where}, which {len(sharing)} of this host's ranks share")
    return tuple(sorted(cpu for core in chosen for cpu in core))


def _node_of_rank(devices: HostDevices, rank: int, local_size: int, environ: Mapping[str, str]) -> int | None:
    return _node_of(devices, _device_of(devices, rank, environ, []), rank, local_size)


def _training_hcas(devices: HostDevices, reasons: list[str]) -> list[PciDevice]:
    """RDMA devices that are up and as fast as the fastest: those that carry training."""
    up = [hca for hca in devices.hcas if hca.is_up]
    down = [hca.name for hca in devices.hcas if not hca.is_up]
    if down:
        reasons.append(f"{', '.join(down)}: no port is active, left out")
    fastest = max((hca.rate_bit_per_s for hca in up if hca.rate_bit_per_s is not None), default=None)
    if fastest is None:
        return up
    chosen = [hca for hca in up if hca.rate_bit_per_s is None or hca.rate_bit_per_s >= SLOW_SHARE * fastest]
    slow = [hca.name for hca in up if hca not in chosen]
    if slow:
        reasons.append(f"{', '.join(slow)}: far below the {format_rate(fastest)} of the others, left out")
    return chosen


def _nics_of(devices: HostDevices, nic: str | None, reasons: list[str]) -> list[PciDevice]:
    """The interface for TCP: the one that was named, or the only one that is up. Several are the user's choice."""
    if nic is not None:
        named = [held for held in devices.nics if held.name == nic]
        if not named:
            raise UsageError(
                f"no network interface {nic!r}",
                expected=f"one of {', '.join(held.name for held in devices.nics) or 'none: the host has no NIC'}",
            )
        return named
    up = [held for held in devices.nics if held.is_up]
    if len(up) > 1:
        names = ", ".join(held.name for held in up)
        reasons.append(f"several interfaces are up ({names}): name the one for TCP with --nic, all ranks the same")
    return up if len(up) == 1 else []


def _environment(  # noqa: PLR0917
    cpus: Sequence[int] | None,
    devices: HostDevices,
    hcas: Sequence[PciDevice],
    nearest: PciDevice | None,
    nics: Sequence[PciDevice],
    traffic: TrafficClass | None,
    reasons: list[str],
) -> dict[str, str]:
    wanted: dict[str, str] = {}
    if devices.gpus:
        wanted["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if cpus is not None:
        threads = sum(1 for core in devices.cores if set(core) & set(cpus)) or len(cpus)
        wanted["OMP_NUM_THREADS"] = str(threads)
    if hcas:
        # "=": these names exactly, or mlx5_1 would stand for mlx5_10 too.
        wanted["NCCL_IB_HCA"] = "=" + ",".join(hca.name for hca in hcas)
    if nearest is not None:
        wanted["UCX_NET_DEVICES"] = f"{nearest.name}:1"
    for held in nics[:1]:
        wanted["GLOO_SOCKET_IFNAME"] = held.name
        wanted["NCCL_SOCKET_IFNAME"] = f"={held.name}"
    if traffic is not None and traffic.dscp is not None:
        # NCCL_IB_TC is the whole byte of the header: DSCP in its upper six bits.
        wanted["NCCL_IB_TC"] = str(traffic.dscp << 2)
        reasons.append(
            f"DSCP {traffic.dscp}: RoCE by NCCL_IB_TC={traffic.dscp << 2}, TCP sockets marked as they appear"
        )
    if traffic is not None and traffic.service_level is not None:
        wanted["NCCL_IB_SL"] = str(traffic.service_level)
        reasons.append(f"InfiniBand service level {traffic.service_level} by NCCL_IB_SL")
    return wanted


def apply(binding: Binding) -> None:
    """Set affinity and scheduling class of this process; both go over to what it starts. Raises OSError."""
    if binding.cpus is not None:
        os.sched_setaffinity(0, binding.cpus)
    if binding.uses_batch:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
