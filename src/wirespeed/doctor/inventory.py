"""What a host has: NICs, RDMA ports, GPUs, processors, and the questions that several checks ask, each asked once.

Everything comes through a ``System``, so it is as good on a recorded host. Absent and unreadable are kept apart, since
only the second can be mended by running as root. Interface and driver names follow Linux 4.18 and later.

Standard library only: this module travels to hosts that have nothing else.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from wirespeed.doctor.check import Unknown
from wirespeed.doctor.cpu_lists import parse_list
from wirespeed.doctor.watched import WatchedSystem
from wirespeed.errors import MissingCapability
from wirespeed.system import CommandResult, System

if TYPE_CHECKING:
    from wirespeed.doctor.counters import Delta

T = TypeVar("T")
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA, _AMD = 0x10DE, 0x1002
_INSTALL_HINTS = {
    "ethtool": "install the package ethtool",
    "ip": "install iproute2",
    "nvidia-smi": "it comes with the NVIDIA driver",
    "sminfo": "install infiniband-diags",
    "smpquery": "install infiniband-diags",
    "mlxlink": "install mstflint or MFT",
    "lldptool": "install lldpad; else ask the switch's owner",
}


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network interface. ``device`` is its PCI (or other bus) name; None for a virtual interface."""

    name: str
    device: str | None
    driver: str | None
    is_up: bool
    has_carrier: bool | None
    speed_bit_per_s: float | None
    """None where the interface does not say; a virtual one's claim is made up and not kept."""
    mtu: int | None
    numa_node: int | None
    kind: str
    """``ethernet``, ``infiniband``, ``loopback``, or what a virtual one is: ``veth``, ``bond``, ``bridge`` ..."""
    master: str | None
    """The bond or bridge it is part of."""
    rdma_devices: tuple[str, ...]

    @property
    def is_physical(self) -> bool:
        """Whether a device stands behind it."""
        return self.device is not None


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device. None: the file is absent or unreadable."""

    device: str
    port: int
    state: str | None
    phys_state: str | None
    rate_bit_per_s: float | None
    link_layer: str | None
    netdevs: tuple[str, ...]
    pci: str | None

    @property
    def name(self) -> str:
        """As NCCL writes it: ``mlx5_0:1``."""
        return f"{self.device}:{self.port}"

    @property
    def is_active(self) -> bool:
        """Whether it can carry traffic."""
        return self.state is not None and self.state.endswith("ACTIVE")

    @property
    def is_roce(self) -> bool:
        """Whether RDMA runs over Ethernet here."""
        return self.link_layer == "Ethernet"

    @property
    def is_efa(self) -> bool:
        """Amazon's adapter: its state files are fixed text."""
        return self.device.startswith(("efa", "rdmap"))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU on the PCI bus."""

    pci: str
    vendor: str
    numa_node: int | None


class HostView:
    """One host, seen through ``system``; answers are kept, so each file is read once.

    ``rtt_s`` is a measured round trip to the job's other hosts and ``rate_bit_per_s`` the link's rate, where the caller
    knows them. ``peers`` are addresses of those hosts, and ``address`` the one by which they know this host.
    """

    def __init__(
        self,
        system: System,
        *,
        rtt_s: float | None = None,
        rate_bit_per_s: float | None = None,
        peers: Sequence[str] = (),
        address: str | None = None,
    ) -> None:
        self.system = WatchedSystem(system)
        self.rtt_s = rtt_s
        self.rate_bit_per_s = rate_bit_per_s
        self.peers = tuple(peers)
        self.address = address
        self.delta: Delta | None = None
        """Two readings of the counters, where they were watched."""
        self._kept: dict[str, Any] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def keep(self, key: str, make: Callable[[], T]) -> T:
        """The value of ``key``, made once; threads that ask at the same time wait for it."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        notes = self.system.notes
        with lock:
            if key not in self._kept:
                before, notes.denied = notes.denied, []
                try:
                    self._kept[key] = make(), tuple(notes.denied)
                finally:
                    notes.denied = before
            value, denied = self._kept[key]
        notes.denied += denied
        return cast(T, value)

    def take_denied(self) -> tuple[str, ...]:
        """What this thread was denied since it last asked, each once."""
        notes = self.system.notes
        denied, notes.denied = tuple(dict.fromkeys(notes.denied)), []
        return denied

    # What it is

    @property
    def name(self) -> str:
        """The host's name as its kernel says it."""
        return self.system.read_text("/proc/sys/kernel/hostname") or "unknown"

    @property
    def kernel(self) -> tuple[int, int] | None:
        """Major and minor version."""
        match = re.match(r"(\d+)\.(\d+)", self.system.read_text("/proc/sys/kernel/osrelease") or "")
        return None if match is None else (int(match[1]), int(match[2]))

    @property
    def is_root(self) -> bool:
        """Whether these checks run as root."""
        match = re.search(r"^Uid:\s+\d+\s+(\d+)", self.status_file, re.MULTILINE)
        return match is not None and match[1] == "0"

    @property
    def status_file(self) -> str:
        """/proc/self/status."""
        return self.keep("status", lambda: self.system.read_text("/proc/self/status") or "")

    @property
    def is_virtual(self) -> bool | None:
        """Whether it is a virtual machine; None where the processor's flags are not there to tell (not x86)."""
        flags = re.search(r"^flags\s*:(.*)$", self.system.read_text("/proc/cpuinfo") or "", re.MULTILINE)
        return None if flags is None else " hypervisor" in flags[1]

    @property
    def container(self) -> str | None:
        """What shows that this is a container, or None."""
        return self.keep("container", self._find_container)

    def _find_container(self) -> str | None:
        for file in ("/.dockerenv", "/run/.containerenv"):
            if self.system.exists(file):
                return file
        if self.system.exists("/var/run/secrets/kubernetes.io"):
            return "/var/run/secrets/kubernetes.io"
        match = re.search(
            r"docker|kubepods|containerd|libpod|lxc", self.system.read_text("/proc/self/cgroup") or ""
        ) or re.search(r"^container=(\w+)", self.system.read_text("/run/host/container-manager") or "")
        return None if match is None else f"/proc/self/cgroup names {match[0]}"

    @property
    def num_cpus(self) -> int | None:
        """Processors that are on line."""
        ranges = self.system.read_text("/sys/devices/system/cpu/online")
        return None if ranges is None else len(parse_list(ranges))

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """NUMA nodes, from their folders."""
        names = self.system.list_dir("/sys/devices/system/node")
        return tuple(int(name[4:]) for name in names if re.fullmatch(r"node\d+", name))

    def cpus_of_node(self, node: int) -> frozenset[int]:
        """Processors of a NUMA node."""
        return frozenset(parse_list(self.system.read_text(f"/sys/devices/system/node/node{node}/cpulist") or ""))

    # What it has

    @property
    def nics(self) -> tuple[Nic, ...]:
        """All interfaces but the loopback."""
        return self.keep(
            "nics", lambda: tuple(self._nic(n) for n in self.system.list_dir("/sys/class/net") if n != "lo")
        )

    def _nic(self, name: str) -> Nic:
        base, system = f"/sys/class/net/{name}", self.system
        if not system.list_dir(base):  # bonding_masters is a file
            return Nic(
                name=name,
                device=None,
                driver=None,
                is_up=False,
                has_carrier=None,
                speed_bit_per_s=None,
                mtu=None,
                numa_node=None,
                kind="unknown",
                master=None,
                rdma_devices=(),
            )
        device = system.real_path(f"{base}/device")
        driver = system.real_path(f"{base}/device/driver")
        flags, speed = system.read_int(f"{base}/flags"), system.read_int(f"{base}/speed")
        carrier, numa = system.read_int(f"{base}/carrier"), system.read_int(f"{base}/device/numa_node")
        master = system.real_path(f"{base}/master")
        is_bond = system.exists(f"{base}/bonding")
        return Nic(
            name=name,
            device=None if device is None else device.rsplit("/", 1)[-1],
            driver=None if driver is None else driver.rsplit("/", 1)[-1],
            is_up=flags is not None and bool(flags & 1),
            has_carrier=None if carrier is None else carrier == 1,
            speed_bit_per_s=speed * 1e6 if speed is not None and speed > 0 and (device or is_bond) else None,
            mtu=system.read_int(f"{base}/mtu"),
            numa_node=None if numa is None or numa < 0 else numa,
            kind=self._nic_kind(base, device is not None),
            master=None if master is None else master.rsplit("/", 1)[-1],
            rdma_devices=system.list_dir(f"{base}/device/infiniband"),
        )

    def _nic_kind(self, base: str, is_physical: bool) -> str:
        if self.system.read_int(f"{base}/type") == 32:  # ARPHRD_INFINIBAND
            return "infiniband"
        named = re.search(r"^DEVTYPE=(\w+)$", self.system.read_text(f"{base}/uevent") or "", re.MULTILINE)
        if named is not None:
            return named[1]
        if is_physical:
            return "ethernet"
        own, peer = self.system.read_int(f"{base}/ifindex"), self.system.read_int(f"{base}/iflink")
        return "veth" if own is not None and peer is not None and own != peer else "virtual"

    @property
    def physical_nics(self) -> tuple[Nic, ...]:
        """Interfaces with a device behind them."""
        return tuple(nic for nic in self.nics if nic.is_physical)

    @property
    def rdma_ports(self) -> tuple[RdmaPort, ...]:
        """All RDMA ports."""
        return self.keep("rdma_ports", self._find_rdma_ports)

    def _find_rdma_ports(self) -> tuple[RdmaPort, ...]:
        system, found = self.system, []
        for device in system.list_dir("/sys/class/infiniband"):
            base = f"/sys/class/infiniband/{device}"
            pci = system.real_path(f"{base}/device")
            for port in filter(str.isdigit, system.list_dir(f"{base}/ports")):
                folder = f"{base}/ports/{port}"
                rate = re.match(r"([\d.]+) Gb/sec", system.read_text(f"{folder}/rate") or "")
                found.append(
                    RdmaPort(
                        device=device,
                        port=int(port),
                        state=system.read_text(f"{folder}/state"),
                        phys_state=system.read_text(f"{folder}/phys_state"),
                        rate_bit_per_s=None if rate is None else float(rate[1]) * 1e9,
                        link_layer=system.read_text(f"{folder}/link_layer"),
                        netdevs=system.list_dir(f"{base}/device/net"),
                        pci=None if pci is None else pci.rsplit("/", 1)[-1],
                    )
                )
        return tuple(found)

    @property
    def has_active_rdma(self) -> bool:
        """Whether traffic of a job can go by RDMA, so that TCP carries only set-up, storage and data."""
        return any(port.is_active for port in self.rdma_ports)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """NVIDIA and AMD GPUs: display, 3D or accelerator devices on the PCI bus, console chips left out."""
        return self.keep("gpus", self._find_gpus)

    def _find_gpus(self) -> tuple[Gpu, ...]:
        found = []
        for name in self.system.list_dir("/sys/bus/pci/devices"):
            base = f"/sys/bus/pci/devices/{name}"
            kind, vendor = self.system.read_int(f"{base}/class"), self.system.read_int(f"{base}/vendor")
            is_gpu = kind is not None and (kind >> 8) in (0x0300, 0x0302, 0x0380, 0x1200)
            if is_gpu and vendor in (_NVIDIA, _AMD):
                numa = self.system.read_int(f"{base}/numa_node")
                found.append(
                    Gpu(
                        pci=name,
                        vendor="nvidia" if vendor == _NVIDIA else "amd",
                        numa_node=None if numa is None or numa < 0 else numa,
                    )
                )
        return tuple(found)

    def pci_path(self, bdf: str) -> tuple[str, ...]:
        """PCI devices from the root port down to ``bdf`` itself; empty where the bus does not show it."""
        target = self.system.real_path(f"/sys/bus/pci/devices/{bdf}")
        return () if target is None else tuple(part for part in target.split("/") if _BDF.fullmatch(part))

    @property
    def modules(self) -> frozenset[str]:
        """Loaded kernel modules; what is built in is not among them."""
        text = self.system.read_text("/proc/modules") or ""
        return frozenset(line.split(" ", 1)[0] for line in text.splitlines())

    # What is asked of it

    def sysctl(self, key: str) -> str | None:
        """A kernel parameter with single spaces, or None where this kernel or namespace has none."""
        text = self.system.read_text(f"/proc/sys/{key.replace('.', '/')}")
        return None if text is None else " ".join(text.split())

    def sysctl_int(self, key: str) -> int | None:
        """A kernel parameter of one number."""
        text = self.sysctl(key)
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None

    def sysctl_unknown(self, key: str) -> Unknown:
        """Why a kernel parameter cannot be seen."""
        return self.file_unknown(f"/proc/sys/{key.replace('.', '/')}", key)

    def folder(self, name: str) -> tuple[str, ...] | Unknown:
        """Names in a folder, none where it is absent; an Unknown where it may not be listed."""
        names = self.system.list_dir(name)
        if not names and self.system.read(name).problem == "denied":
            return Unknown(what=name, why="may not be listed", hint="run as root")
        return names

    def file_unknown(self, name: str, what: str) -> Unknown:
        """Why a file cannot be seen, as an outcome."""
        problem = self.system.read(name).problem
        if problem == "denied":
            return Unknown(what=what, why=f"{name} may not be read", hint="run as root")
        why = "is not there" if problem == "absent" else "cannot be read"
        return Unknown(what=what, why=f"{name} {why}", hint="" if problem == "absent" else "run as root")

    def command(self, *command: str, timeout_s: float = 3.0) -> CommandResult | Unknown:
        """What a program said, asked once; an Unknown where it is missing, fails or does not end."""
        return self.keep(f"command {' '.join(command)}", lambda: self._run(command, timeout_s))

    def _run(self, command: Sequence[str], timeout_s: float) -> CommandResult | Unknown:
        shown = " ".join(command)
        try:
            done = self.system.run(command, timeout_s=timeout_s)
        except MissingCapability as fault:
            return Unknown(what=f"`{shown}`", why=fault.problem, hint=_INSTALL_HINTS.get(command[0], ""))
        if done.returncode is None:
            return Unknown(what=f"`{shown}`", why=f"did not end within {timeout_s:g} s")
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            why = lines[-1][:200] if lines else f"ended with {done.returncode}"
            is_denied = re.search(r"(?i)permitted|permission|denied|root", why) is not None
            return Unknown(what=f"`{shown}`", why=why, hint="run as root" if is_denied and not self.is_root else "")
        return done
