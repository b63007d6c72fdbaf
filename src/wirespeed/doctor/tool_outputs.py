"""Outputs of tools that people paste beside a log: ibstat, ibv_devinfo, lspci -vvv, ethtool, nvidia-smi topo, ss -ti.

Each is a snapshot of one host, which the text seldom names. What is said is only what such an output shows by itself: a
port that is down, a link below its own maximum, GPUs without a near NIC. Counters since boot are no finding: only what
grows under load counts.
"""

from __future__ import annotations

import re
from collections import Counter

from wirespeed.doctor.check import Evidence, Finding, Path, Remedy, Severity
from wirespeed.doctor.log_lines import shown
from wirespeed.units import format_percent, format_rate

STARTS = (
    b"hca_id:",
    b"LnkSta:",
    b"Settings for ",
    b"Physical state:",
    b"rwnd_limited:",
    b"sndbuf_limited:",
    b"Legend:",
)
"""A file that holds one of these may hold such an output."""
MAX_FOUND = 200
LIMITED_PERCENT = 10.0

_CA = re.compile(rb"^CA '([\w.\-]+)'|^\s*hca_id:\s*([\w.\-]+)", re.MULTILINE)
_STATE = re.compile(rb"^\s*(?:State: (\w+)|state:\s+PORT_(\w+))")
_PHYSICAL = re.compile(rb"Physical state: (\w+)")
_RATE = re.compile(rb"^\s*Rate: (\d+)\s*$")
_LAYER = re.compile(rb"[Ll]ink[ _]layer:\s*(\w+)")
_MTU = re.compile(rb"(max|active)_mtu:\s+(\d+)")
_PCI = re.compile(rb"^([0-9a-f]{2,4}:[0-9a-f]{2}(?::[0-9a-f]{2})?\.\d) ([^:]+): (.*)")
_LINK = re.compile(rb"LnkSta:\s+Speed ([\d.]+)GT/s( \(downgraded\))?, Width x(\d+)( \(downgraded\))?")
_CAPACITY = re.compile(rb"LnkCap:.*?Speed ([\d.]+)GT/s, Width x(\d+)")
_ACS = re.compile(rb"ACSCtl:\s+SrcValid\+")
_SETTINGS = re.compile(rb"^Settings for ([\w.\-]+):")
_SPEED = re.compile(rb"^\s*Speed: (\d+)Mb/s")
_DUPLEX = re.compile(rb"^\s*Duplex: (\w+)")
_MODES = re.compile(rb"(\d+)base\w+/Full")
_CARRIER = re.compile(rb"^\s*Link detected: (yes|no)")
_LIMITED = re.compile(rb"(rwnd|sndbuf)_limited:\d+ms\(([\d.]+)%\)")
_TOPO = re.compile(rb"^(GPU\d+)\s+(.*)$")
_TOPO_HEAD = re.compile(rb"^\s*(?:\x1b\[\d+m)?\s*(GPU0\s+.*)$")
_FAR = frozenset((b"SYS", b"NODE", b"PHB"))
_NEAR = frozenset((b"PIX", b"PXB"))
_GPU_CLASS = b"3D controller"
_CLASSES = (b"Ethernet controller", b"Infiniband controller", b"InfiniBand controller", _GPU_CLASS)


class ToolReader:
    """Takes all lines of a text, gives findings."""

    def __init__(self, source: str) -> None:
        self.found: list[Finding] = []
        self.progress = 0
        self._source = source
        self._rates: Counter[int] = Counter()
        self._ports: list[tuple[str, int, int, bytes]] = []
        self._clear()
        self._columns: list[bytes] = []

    def _clear(self) -> None:
        self._device = ""
        self._state = ""
        self._physical = ""
        self._max_mtu = 0
        self._pci = ("", b"")
        self._capacity: tuple[float, int] | None = None
        self._interface = ""
        self._is_supported = False
        self._best_mbit = 0
        self._mbit = 0

    def take(self, number: int, line: bytes) -> None:
        """One line of any kind."""
        if (found := _CA.search(line)) is not None:
            self._clear()
            self._device = (found[1] or found[2]).decode(errors="replace")
            self.progress += 1
        elif self._device and self._take_port(number, line):
            self.progress += 1
        elif (found := _PCI.search(line)) is not None:
            self._clear()
            self._pci = (found[1].decode(errors="replace"), found[2])
            self.progress += 1
        elif self._pci[0] and self._take_pci(number, line):
            self.progress += 1
        elif (found := _SETTINGS.search(line)) is not None:
            self._clear()
            self._interface = found[1].decode(errors="replace")
            self.progress += 1
        elif self._interface and self._take_ethtool(number, line):
            self.progress += 1
        elif b"_limited:" in line:
            self._take_socket(number, line)
        elif (found := _TOPO_HEAD.search(line)) is not None and (b"Affinity" in line or b"NIC" in line):
            self._columns = found[1].replace(b"\x1b[0m", b"").split()
        elif self._columns and (found := _TOPO.search(line)) is not None:
            self._take_topology(number, line, found)

    def _take_port(self, number: int, line: bytes) -> bool:
        if (found := _STATE.search(line)) is not None:
            self._state = (found[1] or found[2]).decode(errors="replace")
            if found[2] is not None:
                self._judge_port(number, line)
        elif (found := _PHYSICAL.search(line)) is not None:
            self._physical = found[1].decode(errors="replace")
            self._judge_port(number, line)
        elif (found := _RATE.search(line)) is not None:
            if self._state.lower() == "active" and int(found[1]) > 0 and len(self._ports) < MAX_FOUND:
                self._ports.append((self._device, int(found[1]), number, line))
        elif (found := _MTU.search(line)) is not None:
            self._take_mtu(number, line, found)
        else:
            return _LAYER.search(line) is not None
        return True

    def _judge_port(self, number: int, line: bytes) -> None:
        state, physical = self._state.lower(), self._physical.lower()
        if state in ("initializing", "init"):
            self._say(
                "rdma.no-subnet-manager", self._device, "critical", number, line,
                f"{self._device} has a link but no subnet manager has set it up", "start a subnet manager",
                ("systemctl start opensm", "sminfo"), "opensm(8)", "rdma",
            )  # fmt: skip
        elif state == "down" and physical in ("polling", "linkup", "linkerrorrecovery", ""):
            self._say(
                "rdma.port-down", self._device, "warning", number, line,
                f"the RDMA port of {self._device} is down ({self._physical or 'state ' + self._state})",
                "check cable, optic and the switch port; a port that shall stay unused is no fault",
                (f"mlxlink -d {self._device}",), "leptonai/gpud, azurehpc-health-checks NHC2004", "rdma",
            )  # fmt: skip

    def _take_mtu(self, number: int, line: bytes, found: re.Match[bytes]) -> None:
        if found[1] == b"max":
            self._max_mtu = int(found[2])
        elif self._state.lower() == "active" and int(found[2]) < self._max_mtu:
            self._say(
                "rdma.roce-mtu", self._device, "warning", number, line,
                f"{self._device} sends RDMA packets of {int(found[2])} bytes where {self._max_mtu} are possible",
                "RoCE: MTU 4200 or 9000 on interface and switch (headers take 96 bytes); the same on every host",
                ("ip link set <interface> mtu 4200",), "kernel include/rdma/ib_addr.h", "rdma",
            )  # fmt: skip

    def _take_pci(self, number: int, line: bytes) -> bool:
        name, kind = self._pci
        if (found := _CAPACITY.search(line)) is not None:
            self._capacity = (float(found[1]), int(found[2]))
        elif (found := _LINK.search(line)) is not None:
            speed, width = float(found[1]), int(found[3])
            is_low = bool(found[2] or found[4])
            if self._capacity is not None:
                # GPUs lower their speed when idle, so that only their width counts.
                is_low = width < self._capacity[1] or (speed < self._capacity[0] and kind != _GPU_CLASS)
            if is_low and kind in _CLASSES:
                most = "" if self._capacity is None else f" instead of {self._capacity[0]:g} GT/s x{self._capacity[1]}"
                self._say(
                    "pci.width-reduced", name, "critical", number, line,
                    f"the PCI Express link of {kind.decode(errors='replace')} {name} runs at {speed:g} GT/s x{width}"
                    + most, "reseat the card or riser, try another slot, look at the BIOS",
                    (f"lspci -vvv -s {name} | grep -E 'LnkCap|LnkSta'",), "PCI Express base specification", "any",
                )  # fmt: skip
        elif _ACS.search(line) is not None:
            self._say(
                "pci.acs", name, "warning", number, line,
                f"access control (ACS) is on at PCI bridge {name}: GPU and NIC talk through the CPU",
                "on bare metal turn it off; in a virtual machine it must stay",
                (f"setpci -s {name} ECAP_ACS+0x6.w=0000",), "NCCL troubleshooting guide", "gpu",
            )  # fmt: skip
        else:
            return False
        return True

    def _take_ethtool(self, number: int, line: bytes) -> bool:
        if (found := _SPEED.search(line)) is not None:
            self._mbit = int(found[1])
            if self._best_mbit and self._mbit < self._best_mbit:
                self._say(
                    "nic.below-own-speed", self._interface, "warning", number, line,
                    f"{self._interface} runs at {format_rate(self._mbit * 1e6)}, its port can do "
                    f"{format_rate(self._best_mbit * 1e6)}", "cable, optic, autonegotiation, the switch port's speed",
                    (f"ethtool {self._interface}",), "ethtool(8)", "any", limit=self._mbit * 1e6,
                    full=self._best_mbit * 1e6,
                )  # fmt: skip
        elif (found := _DUPLEX.search(line)) is not None:
            if found[1] == b"Half":
                self._say(
                    "nic.half-duplex", self._interface, "critical", number, line,
                    f"{self._interface} is in half duplex", "autonegotiation on both ends",
                    (f"ethtool -s {self._interface} autoneg on",), "IEEE 802.3", "any",
                )  # fmt: skip
        elif b" link modes:" in line or (self._is_supported and _MODES.search(line) is not None):
            if b" link modes:" in line:
                self._is_supported = b"Supported link modes:" in line
            if self._is_supported:
                self._best_mbit = max([self._best_mbit, *(int(mode) for mode in _MODES.findall(line))])
        elif (found := _CARRIER.search(line)) is not None:
            if found[1] == b"no":
                self._say(
                    "nic.no-carrier", self._interface, "warning", number, line, f"{self._interface} has no link",
                    "cable and switch port, where the interface is meant to be used",
                    (f"ip link show {self._interface}",), "ethtool(8)", "any",
                )  # fmt: skip
        else:
            return False
        return True

    def _take_socket(self, number: int, line: bytes) -> None:
        for kind, percent in _LIMITED.findall(line):
            self.progress += 1
            if float(percent) > LIMITED_PERCENT:
                end = "the receiver's window" if kind == b"rwnd" else "its send buffer"
                key = "net.ipv4.tcp_rmem" if kind == b"rwnd" else "net.ipv4.tcp_wmem"
                self._say(
                    "tcp.window-limited", "connection", "warning", number, line,
                    f"a TCP connection waited for {end} during {format_percent(float(percent) / 100)} of its busy time",
                    f"raise the last number of {key}, or stop the program from fixing its buffers", (),
                    "linux/tcp.h; above 10 %: own rule", "tcp",
                )  # fmt: skip

    def _take_topology(self, number: int, line: bytes, found: re.Match[bytes]) -> None:
        self.progress += 1
        cells = found[2].split()
        links = [cell for name, cell in zip(self._columns, cells, strict=False) if name.startswith((b"NIC", b"mlx5"))]
        if links and not any(link in _NEAR for link in links) and all(link in _FAR for link in links):
            best = next((kind for kind in (b"PHB", b"NODE", b"SYS") if kind in links), b"SYS")
            is_far = best in (b"SYS", b"NODE")
            self._say(
                "gpu.nic-far", found[1].decode(errors="replace"), "warning" if is_far else "notice", number, line,
                f"{found[1].decode(errors='replace')} has no NIC near it: the best is {best.decode()}"
                + (", across the processor's interconnect" if is_far else ", through the processor"),
                "slot, NPS or sub-NUMA setting; in a virtual machine pass the topology (NCCL_TOPO_FILE)",
                ("nvidia-smi topo -m",), "nccl-tests#347, #350", "gpu",
            )  # fmt: skip

    def _say(  # noqa: PLR0917 - one private maker of findings
        self,
        identifier: str,
        subject: str,
        severity: Severity,
        number: int,
        line: bytes,
        title: str,
        fix: str,
        commands: tuple[str, ...],
        source: str,
        path: Path,
        limit: float | None = None,
        full: float | None = None,
    ) -> None:
        if len(self.found) >= MAX_FOUND:
            return
        self.found.append(
            Finding(
                id=identifier,
                subject=subject or "host",
                severity=severity,
                title=title,
                evidence=(Evidence(where=f"{self._source}:{number}", seen=shown(line)),),
                remedy=Remedy(text=fix, commands=commands),
                source=source,
                path=path,
                limit_bit_per_s=limit,
                full_bit_per_s=full,
            )
        )

    def close(self) -> None:
        """The text has ended: ports are held against each other."""
        rates = Counter(rate for _, rate, _, _ in self._ports)
        if len(self._ports) > 1:
            usual = max(rates, key=lambda rate: (rates[rate], rate))
            for device, rate, number, line in self._ports:
                if rate < usual:
                    self._say(
                        "rdma.slower-than-twin", device, "warning", number, line,
                        f"{device} runs at {rate} Gbit/s, the others at {usual} Gbit/s",
                        "swap cable and port with a good one: the fault follows the part that causes it",
                        (f"mlxlink -d {device}",), "leptonai/gpud, azurehpc-health-checks", "rdma", limit=rate * 1e9,
                        full=usual * 1e9,
                    )  # fmt: skip
        self._ports = []
