"""PCI Express: speed and width from the device up to the root, read requests, access control services, IOMMU.

Speeds come from sysfs, the rest from configuration space, of which only root sees more than the first 64 bytes. A GPU
lowers its link's speed while idle, so only the width of its link is judged. Rates are payload after 8b/10b or 128b/130b
coding, before packet headers (about 10 % more).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.inventory import HostView
from wirespeed.units import format_rate

_CODING = {2.5: 0.8, 5.0: 0.8, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 0.96}
_MELLANOX = 0x15B3
_FAST_NIC_BIT_PER_S = 25e9


@dataclass(frozen=True, kw_only=True)
class Link:
    """One PCI Express link: transfers per second and lanes, now and at most."""

    gt_per_s: float
    width: int

    @property
    def bit_per_s(self) -> float:
        """Payload bits per second in one direction."""
        return self.gt_per_s * 1e9 * _CODING.get(self.gt_per_s, 0.8) * self.width

    def __str__(self) -> str:
        return f"{self.gt_per_s:g} GT/s x{self.width}"


def link(view: HostView, bdf: str, which: str) -> Link | None:
    """The ``current`` or ``max`` link of a device; None where sysfs does not say (root complex, virtual machine)."""
    base = f"/sys/bus/pci/devices/{bdf}"
    speed = re.match(r"([\d.]+) GT/s", view.system.read_text(f"{base}/{which}_link_speed") or "")
    width = view.system.read_int(f"{base}/{which}_link_width")
    if speed is None or width is None or not 1 <= width <= 32:
        return None
    return Link(gt_per_s=float(speed[1]), width=width)


def _devices(view: HostView) -> dict[str, tuple[str, float | None]]:
    """PCI name -> (what it is called, line rate) of NICs, RDMA devices and GPUs."""
    found: dict[str, tuple[str, float | None]] = {}
    for port in view.rdma_ports:
        if port.pci is not None:
            found[port.pci] = (port.device, port.rate_bit_per_s)
    for nic in view.physical_nics:
        if nic.device is not None and re.fullmatch(r"[0-9a-f]{4,8}:.*", nic.device):
            found.setdefault(nic.device, (nic.name, nic.speed_bit_per_s))
    for gpu in view.gpus:
        found[gpu.pci] = (f"GPU {gpu.pci}", None)
    return found


def _has_none(view: HostView) -> str | None:
    return None if _devices(view) else "no PCI network device and no GPU"


def _shows_no_link(view: HostView) -> str | None:
    if view.is_virtual and not any(link(view, bdf, "current") for bdf in _devices(view)):
        return "this virtual machine is shown no PCI Express links"
    return _has_none(view)


@check("pci.links", "PCI Express speed and width of NICs and GPUs, up to the root", applies=_shows_no_link)
def links(view: HostView) -> Iterator[Outcome]:
    """A link below its maximum, on the device or on a bridge above it; and one too slow for its network port."""
    reported: set[str] = set()
    gpus = {gpu.pci for gpu in view.gpus}
    blind: list[str] = []
    for bdf, (name, rate) in _devices(view).items():
        steps = view.pci_path(bdf) or (bdf,)
        now = link(view, bdf, "current")
        if now is None:
            blind.append(name)
            continue
        yield Fact(key=f"pci.{bdf}.link", value=str(now) if bdf not in gpus else f"x{now.width}")
        for step in reversed(steps):
            if step not in reported:
                finding = _below_maximum(view, step, name, rate, is_gpu=bool(gpus & {bdf}), is_bridge=step != bdf)
                if finding is not None:
                    reported.update(steps)  # both ends of one link say the same; one report per path
                    yield finding
                    break
        else:
            if rate is not None and now.bit_per_s < rate:
                yield _too_slow_for_port(bdf, name, rate, now)
    if blind:
        yield Unknown(
            what=f"PCI Express link of {', '.join(blind)}",
            why="sysfs has no current_link_speed",
            hint="see `lspci -vv`",
        )


def _below_maximum(
    view: HostView, bdf: str, name: str, rate: float | None, *, is_gpu: bool, is_bridge: bool
) -> Finding | None:
    now, most = link(view, bdf, "current"), link(view, bdf, "max")
    if now is None or most is None:
        return None
    is_narrow, is_slow = now.width < most.width, now.gt_per_s < most.gt_per_s and not is_gpu
    # A bridge may be wider or faster than what is plugged into it: it matters only where it is below the port's rate.
    if is_bridge and (rate is None or now.bit_per_s >= rate):
        return None
    if not is_narrow and not is_slow:
        return None
    is_limiting = rate is None or now.bit_per_s < rate
    where = f"bridge {bdf} above {name}" if is_bridge else f"{name} ({bdf})"
    return Finding(
        id="pci.width-reduced" if is_narrow else "pci.speed-reduced",
        subject=name,
        severity="critical" if is_limiting and rate is not None else "warning" if is_limiting else "notice",
        title=f"The PCI Express link of {where} runs at {now}; it can do {most}.",
        evidence=(
            Evidence(
                where=f"/sys/bus/pci/devices/{bdf}/current_link_width, current_link_speed",
                seen=str(now),
                expected=str(most),
            ),
            Evidence(
                where="what it carries",
                seen=f"{format_rate(now.bit_per_s)} of payload at most",
                expected="" if rate is None else f"the port's {format_rate(rate)}",
            ),
        ),
        remedy=Remedy(
            text="reseat the card or riser, try another slot, look at the slot's width and speed in the BIOS"
        ),
        source="PCI Express base specification; Imbue and sichek health checks",
        path="gpu" if is_gpu else "any",
        limit_bit_per_s=now.bit_per_s if is_limiting else None,
        full_bit_per_s=rate if rate is not None else most.bit_per_s,
    )


def _too_slow_for_port(bdf: str, name: str, rate: float, now: Link) -> Finding:
    return Finding(
        id="pci.slot-too-slow",
        subject=name,
        severity="warning",
        title=f"The slot of {name} carries {format_rate(now.bit_per_s)}, less than its port's {format_rate(rate)}.",
        evidence=(
            Evidence(where=f"/sys/bus/pci/devices/{bdf}/current_link_speed", seen=str(now), expected=format_rate(rate)),
        ),
        remedy=Remedy(text="use a faster or wider slot"),
        source="PCI Express base specification",
        limit_bit_per_s=now.bit_per_s,
        full_bit_per_s=rate,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is read from a device's configuration space. None: it has no such capability."""

    max_read_request_bytes: int | None
    acs_source_validation: bool | None


def parse_config(content: bytes) -> Config:
    """Configuration space (256 or 4096 bytes). Loops and cut lists end the walk: the rest is as if absent."""
    request = validation = None
    at, seen = (content[0x34] & 0xFC if len(content) > 0x34 else 0), set()
    while at and at not in seen and at + 0x0A <= len(content):
        seen.add(at)
        if content[at] == 0x10:  # PCI Express
            control = struct.unpack_from("<H", content, at + 8)[0]
            request = 128 << (control >> 12 & 7)
        at = content[at + 1] & 0xFC
    at, seen = 0x100, set()
    while at and at not in seen and at + 8 <= len(content):
        seen.add(at)
        header = struct.unpack_from("<I", content, at)[0]
        if header in (0, 0xFFFFFFFF):
            break
        if header & 0xFFFF == 0x000D:  # access control services
            validation = bool(struct.unpack_from("<H", content, at + 6)[0] & 1)
        at = header >> 20 & 0xFFC
    return Config(max_read_request_bytes=request, acs_source_validation=validation)


@check("pci.config", "read requests of NICs, access control on the bridges above NICs and GPUs", applies=_has_none)
def config(view: HostView) -> Iterator[Outcome]:
    """MaxReadReq below 4096 on ConnectX, and ACS source validation on bare metal."""
    if not view.is_root:
        hint = "run as root: the kernel shows others the first 64 bytes only"
        yield Unknown(
            what="PCI Express read requests and access control (ACS)", why="configuration space is cut", hint=hint
        )
        return
    bridges: list[str] = []
    for bdf, (name, rate) in _devices(view).items():
        content = view.system.read_bytes(f"/sys/bus/pci/devices/{bdf}/config")
        if content is None:
            if not view.is_virtual:
                yield Unknown(
                    what=f"configuration space of {name}", why=f"/sys/bus/pci/devices/{bdf}/config cannot be read"
                )
            continue
        request = parse_config(content).max_read_request_bytes
        is_mellanox = view.system.read_int(f"/sys/bus/pci/devices/{bdf}/vendor") == _MELLANOX
        if request is not None and request < 4096 and is_mellanox and (rate or 0) >= _FAST_NIC_BIT_PER_S:
            yield Finding(
                id="pci.read-request",
                subject=name,
                severity="notice",
                title=f"{name} reads host memory {request} bytes at a time (MaxReadReq); ConnectX wants 4096.",
                evidence=(
                    Evidence(where=f"/sys/bus/pci/devices/{bdf}/config", seen=f"MaxReadReq {request}", expected="4096"),
                ),
                remedy=Remedy(
                    text="set it in the BIOS, or with setpci until the next boot",
                    commands=(f"setpci -s {bdf} CAP_EXP+8.w=5000:7000",),
                    caution="wrong values stop the device",
                ),
                source="sichek infiniband check_items (MaxReadReq 4096)",
                path="rdma",
            )
        bridges += [step for step in view.pci_path(bdf)[:-1] if step not in bridges]
    yield from _access_control(view, bridges)


def _access_control(view: HostView, bridges: list[str]) -> Iterator[Outcome]:
    if view.is_virtual or not (view.gpus and view.rdma_ports):
        return
    spaces = {bdf: view.system.read_bytes(f"/sys/bus/pci/devices/{bdf}/config") for bdf in bridges}
    validating = [bdf for bdf, held in spaces.items() if held is not None and parse_config(held).acs_source_validation]
    if validating:
        yield Finding(
            id="pci.acs",
            subject=", ".join(validating[:4]) + (" ..." if len(validating) > 4 else ""),
            severity="warning",
            title="PCI bridges validate sources (ACS): traffic between GPU and NIC goes round by the root complex.",
            evidence=tuple(
                Evidence(where=f"/sys/bus/pci/devices/{bdf}/config", seen="ACSCtl SrcValid+", expected="SrcValid-")
                for bdf in validating[:4]
            ),
            remedy=Remedy(
                text="switch ACS off in the BIOS, or until the next boot with setpci; not inside virtual machines",
                commands=tuple(f"setpci -s {bdf} ECAP_ACS+0x6.w=0000" for bdf in validating),
                caution="devices behind these bridges are then not isolated from each other",
            ),
            source="NCCL user guide, troubleshooting (PCI access control services); nccl#489, #595",
            path="rdma",
        )


@check("pci.iommu", "address translation between devices and memory")
def iommu(view: HostView) -> Iterator[Outcome]:
    """Translated mode on bare metal with GPUs or RDMA; in virtual machines it is the host's matter."""
    groups = view.system.list_dir("/sys/kernel/iommu_groups")
    kinds = {view.system.read_text(f"/sys/kernel/iommu_groups/{group}/type") for group in groups[:64]}
    line = view.system.read_text("/proc/cmdline")
    if not groups:
        yield Fact(key="pci.iommu", value="off")
        return
    translated = bool(kinds & {"DMA", "DMA-FQ"}) and (
        line is None or not re.search(r"\biommu=pt\b|\biommu.passthrough=1\b", line)
    )
    if kinds == {None}:
        yield Unknown(what="IOMMU mode", why="/sys/kernel/iommu_groups/*/type cannot be read", hint="run as root")
        return
    yield Fact(key="pci.iommu", value="translated" if translated else "pass-through")
    if translated and view.is_virtual is False and (view.gpus or view.rdma_ports):
        yield Finding(
            id="pci.iommu-translated",
            subject="host",
            severity="warning",
            title="The IOMMU translates every device access: peer traffic between GPU and NIC slows down.",
            evidence=(
                Evidence(where="/sys/kernel/iommu_groups/*/type", seen="DMA or DMA-FQ", expected="identity"),
                Evidence(where="/proc/cmdline", seen="no iommu=pt"),
            ),
            remedy=Remedy(
                text="boot with iommu=pt",
                commands=("grubby --update-kernel=ALL --args=iommu=pt",),
                undo=("grubby --update-kernel=ALL --remove-args=iommu=pt",),
                caution="takes a reboot",
            ),
            source="NCCL user guide, troubleshooting (IO virtualization)",
            path="rdma",
        )


CHECKS = (links, config, iommu)
