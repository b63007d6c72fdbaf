"""RDMA: devices and ports, user-space verbs, locked memory. What only RoCE has is in roce.py.

Amazon's EFA writes fixed text into its state files: they are not taken as evidence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.inventory import HostView, RdmaPort
from wirespeed.units import format_rate, format_size

_VERBS_FOLDERS = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/local/lib",
)
_MELLANOX = 0x15B3
_ENOUGH_LOCKED_BYTES = 64 * 1024**3


def no_rdma(view: HostView) -> str | None:
    """Why RDMA checks do not apply, or None."""
    return None if view.rdma_ports else "no RDMA device"


def _cards(view: HostView) -> list[str]:
    """PCI devices of class InfiniBand (0x0207), or Ethernet (0x0200) by NVIDIA: those that should be RDMA devices."""
    found = []
    for name in view.system.list_dir("/sys/bus/pci/devices"):
        base = f"/sys/bus/pci/devices/{name}"
        kind, vendor = view.system.read_int(f"{base}/class"), view.system.read_int(f"{base}/vendor")
        if kind is not None and (kind >> 8 == 0x0207 or (kind >> 8 == 0x0200 and vendor == _MELLANOX)):
            found.append(name)
    return found


@check("rdma.stack", "modules, devices in /dev, user-space verbs")
def stack(view: HostView) -> Iterator[Outcome]:
    """Cards without a driver, and a container that does not get at the devices."""
    cards = _cards(view)
    if cards and not view.rdma_ports:
        loaded = sorted(view.modules & {"mlx5_core", "mlx5_ib", "ib_core", "ib_uverbs"})
        yield Finding(
            id="rdma.no-device",
            subject=", ".join(cards[:4]),
            severity="critical",
            title=f"{len(cards)} RDMA cards are on the bus, but the kernel shows no RDMA device.",
            evidence=(
                Evidence(
                    where="/sys/bus/pci/devices",
                    seen=f"{len(cards)} cards",
                    expected="as many in /sys/class/infiniband",
                ),
                Evidence(
                    where="/proc/modules", seen=", ".join(loaded) or "none of mlx5_core, mlx5_ib, ib_core, ib_uverbs"
                ),
            ),
            remedy=Remedy(
                text="load the driver; in a container pass the devices in",
                commands=("modprobe mlx5_ib ib_uverbs",),
                undo=("modprobe -r mlx5_ib",),
            ),
            source="NCCL user guide, troubleshooting (networking)",
            path="rdma",
        )
    if not view.rdma_ports:
        return
    yield Fact(key="rdma.devices", value=str(len({port.device for port in view.rdma_ports})))
    nodes = view.folder("/dev/infiniband")
    where = "in this container" if view.container else "on this host"
    if isinstance(nodes, Unknown):
        yield nodes
    elif not any(name.startswith("uverbs") for name in nodes):
        yield Finding(
            id="rdma.no-dev-infiniband",
            subject="/dev/infiniband",
            severity="critical",
            title=f"There is no /dev/infiniband/uverbs* {where}: NCCL falls back to TCP sockets without an error.",
            evidence=(
                Evidence(where="/dev/infiniband", seen="no uverbs device", expected="one for each RDMA device"),
                Evidence(
                    where="/sys/class/infiniband", seen=", ".join(sorted({port.device for port in view.rdma_ports}))
                ),
            ),
            remedy=Remedy(
                text="pass the devices in: docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1; "
                "Kubernetes: the RDMA device plugin. Pin NCCL_NET=IB, so that a fallback fails loudly"
                if view.container
                else "load ib_uverbs",
                commands=() if view.container else ("modprobe ib_uverbs",),
            ),
            source="sglang PR #1427, AReaL#639: 4 to 5 times slower",
            path="rdma",
        )
    folders = [view.folder(folder) for folder in _VERBS_FOLDERS]
    hidden = [folder for folder in folders if isinstance(folder, Unknown)]
    has_library = any(
        name.startswith("libibverbs.so") for folder in folders if not isinstance(folder, Unknown) for name in folder
    )
    if not has_library and hidden:
        yield hidden[0]
    elif not has_library:
        yield Finding(
            id="rdma.no-libibverbs",
            subject="libibverbs",
            severity="critical",
            title=f"libibverbs is not installed {where}: NCCL cannot use RDMA and falls back to TCP sockets.",
            evidence=(
                Evidence(where="/usr/lib*, /usr/lib/*-linux-gnu", seen="no libibverbs.so", expected="libibverbs.so.1"),
            ),
            remedy=Remedy(
                text="install the user-space verbs in the image",
                commands=("apt-get install -y libibverbs1 ibverbs-providers", "dnf install -y rdma-core"),
            ),
            source="sglang PR #1427, AReaL#639, nvidia-container-toolkit#1877",
            path="rdma",
        )


@check("rdma.ports", "state, rate and firmware of RDMA ports", applies=no_rdma)
def ports(view: HostView) -> Iterator[Outcome]:
    """A port is judged against its state machine and its twins; a port that was never cabled is only a fact."""
    judged = [port for port in view.rdma_ports if not port.is_efa]
    rates = Counter(port.rate_bit_per_s for port in judged if port.is_active and port.rate_bit_per_s is not None)
    usual = max(rates, key=lambda rate: (rates[rate], rate), default=None)
    for port in view.rdma_ports:
        base = f"/sys/class/infiniband/{port.device}"
        firmware = view.system.read_text(f"{base}/fw_ver")
        if firmware is not None:
            yield Fact(key=f"rdma.{port.device}.firmware", value=firmware)
        if port.is_efa:
            yield Unknown(
                what=f"link of {port.name}", why="EFA writes fixed text into its state files", hint="`fi_info -p efa`"
            )
            continue
        if port.state is None:
            yield view.file_unknown(f"{base}/ports/{port.port}/state", f"state of {port.name}")
            continue
        yield Fact(key=f"rdma.{port.name}.state", value=port.state)
        if port.rate_bit_per_s is not None:
            yield Fact(key=f"rdma.{port.name}.rate", value=format_rate(port.rate_bit_per_s))
        if not port.is_active:
            yield from _inactive(view, port)
        elif usual is not None and port.rate_bit_per_s is not None and port.rate_bit_per_s < usual and rates[usual] > 1:
            yield Finding(
                id="rdma.slower-than-twin",
                subject=port.name,
                severity="warning",
                title=f"{port.name} runs at {format_rate(port.rate_bit_per_s)}, the others at {format_rate(usual)}.",
                evidence=(
                    Evidence(
                        where=f"{base}/ports/{port.port}/rate",
                        seen=format_rate(port.rate_bit_per_s),
                        expected=format_rate(usual),
                    ),
                ),
                remedy=Remedy(text="swap cable and port with a good one: the fault follows the part that causes it"),
                source="leptonai/gpud, azurehpc-health-checks: one rate for all ports",
                path="rdma",
                limit_bit_per_s=port.rate_bit_per_s,
                full_bit_per_s=usual,
            )


def _inactive(view: HostView, port: RdmaPort) -> Iterator[Outcome]:
    base = f"/sys/class/infiniband/{port.device}/ports/{port.port}"
    phys = port.phys_state or "unknown"
    seen = (
        Evidence(where=f"{base}/state", seen=port.state or "unknown", expected="4: ACTIVE"),
        Evidence(where=f"{base}/phys_state", seen=phys, expected="5: LinkUp"),
    )
    if "INIT" in (port.state or "") and not port.is_roce:
        manager = view.system.read_text(f"{base}/sm_lid")
        yield Finding(
            id="rdma.no-subnet-manager",
            subject=port.name,
            severity="critical",
            path="rdma",
            title=f"{port.name} has a link but no subnet manager has set it up.",
            evidence=(
                *seen,
                Evidence(where=f"{base}/sm_lid", seen=manager or "unknown", expected="a lid other than 0"),
            ),
            remedy=Remedy(
                text="start a subnet manager on the switch or one host", commands=("systemctl start opensm", "sminfo")
            ),
            source="InfiniBand architecture specification, port states; opensm(8)",
        )
    elif "Disabled" in phys or ("Polling" not in phys and "LinkUp" not in phys and "Link" not in phys):
        # Never cabled, or switched off by someone: common for the second port of a card.
        yield Fact(key=f"rdma.{port.name}.phys", value=phys)
    else:
        yield Finding(
            id="rdma.port-down",
            subject=port.name,
            severity="critical",
            path="rdma",
            title=f"{port.name} is not active ({port.state or 'unknown'}, {phys}).",
            evidence=seen,
            remedy=Remedy(
                text="check cable, optics and the switch port; swap with a good one. A port that shall stay "
                "unused: "
                "switch it off, so that it is not reported",
                commands=(f"mlxlink -d {port.device} -p {port.port}", f"ibportstate -C {port.device} -D 0 {port.port}"),
            ),
            source="leptonai/gpud, azurehpc-health-checks NHC2004",
        )


@check("rdma.memlock", "locked memory that verbs may use", applies=no_rdma)
def memlock(view: HostView) -> Iterator[Outcome]:
    """The limit of this process: a service or a batch job may have another."""
    match = re.search(r"^Max locked memory\s+(\S+)", view.system.read_text("/proc/self/limits") or "", re.MULTILINE)
    if match is None:
        yield view.file_unknown("/proc/self/limits", "the limit of locked memory")
        return
    yield Fact(key="rdma.memlock", value=match[1])
    if match[1] != "unlimited" and int(match[1]) < _ENOUGH_LOCKED_BYTES:
        is_tiny = int(match[1]) < 1024**3
        yield Finding(
            id="rdma.memlock",
            subject="memlock",
            severity="critical" if is_tiny else "warning",
            title=f"Only {format_size(int(match[1]))} of memory may be locked: registering buffers for RDMA fails.",
            evidence=(Evidence(where="/proc/self/limits Max locked memory", seen=match[1], expected="unlimited"),),
            remedy=Remedy(
                text="container: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK and "
                "LimitMEMLOCK=infinity in "
                "slurmd.service; login: /etc/security/limits.d",
                commands=("sh -c 'echo \"* - memlock unlimited\" > /etc/security/limits.d/90-memlock.conf'",),
                undo=("rm /etc/security/limits.d/90-memlock.conf",),
            ),
            source="NCCL user guide, troubleshooting (InfiniBand: memlock)",
            path="rdma",
        )


CHECKS = (stack, ports, memlock)
