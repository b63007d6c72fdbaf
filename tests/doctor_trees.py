"""Hosts as recordings, written for these tests: own names, documentation addresses, formats as the kernel prints them.

``TREES`` maps a name to a function that makes the recording. Each is a healthy host of its kind with one thing changed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wirespeed.doctor.recorded import RecordedSystem

DATA = Path(__file__).parent / "data" / "doctor"
MELLANOX, NVIDIA, INTEL, VIRTIO = 0x15B3, 0x10DE, 0x8086, 0x1AF4
HEALTHY_SYSCTLS = {
    "net.ipv4.tcp_rmem": "4096\t131072\t33554432",
    "net.ipv4.tcp_wmem": "4096\t16384\t33554432",
    "net.ipv4.tcp_mem": "3085980\t4114641\t6171960",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_notsent_lowat": "4294967295",
    "net.ipv4.ip_local_port_range": "32768\t60999",
    "net.ipv4.ip_local_reserved_ports": "",
    "net.ipv4.tcp_fastopen": "1",
    "net.ipv4.tcp_congestion_control": "cubic",
    "net.ipv4.tcp_ecn": "2",
    "net.ipv4.tcp_window_scaling": "1",
    "net.ipv4.tcp_sack": "1",
    "net.ipv4.tcp_timestamps": "1",
    "net.ipv4.tcp_moderate_rcvbuf": "1",
    "net.ipv4.tcp_tw_reuse": "2",
    "net.ipv4.tcp_fin_timeout": "60",
    "net.ipv4.tcp_max_tw_buckets": "262144",
    "net.ipv4.tcp_adv_win_scale": "1",
    "net.ipv4.ip_forward": "0",
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.all.arp_ignore": "0",
    "net.ipv4.conf.all.arp_announce": "0",
    "net.core.somaxconn": "4096",
    "net.core.rmem_max": "212992",
    "net.core.wmem_max": "212992",
    "net.core.default_qdisc": "fq_codel",
}
SUPPORTED = """Settings for {name}:
\tSupported ports: [ FIBRE ]
\tSupported link modes:   1000baseKX/Full
\t                        10000baseKR/Full
\t                        {most}baseCR/Full
\tSupported pause frame use: Symmetric
\tSpeed: {now}Mb/s
"""
RINGS = "Ring parameters for {name}:\nPre-set maximums:\nRX:\t\t8192\nRX Mini:\tn/a\nTX:\t\t8192\nCurrent hardware settings:\nRX:\t\t8192\nRX Mini:\tn/a\nTX:\t\t8192\n"
CHANNELS = "Channel parameters for {name}:\nPre-set maximums:\nRX:\t\tn/a\nTX:\t\tn/a\nOther:\t\tn/a\nCombined:\t63\nCurrent hardware settings:\nRX:\t\tn/a\nTX:\t\tn/a\nOther:\t\tn/a\nCombined:\t{queues}\n"
FEATURES = "Features for {name}:\nrx-checksumming: on\ntx-checksumming: on\nscatter-gather: on\ntcp-segmentation-offload: on\ngeneric-segmentation-offload: on\ngeneric-receive-offload: {gro}\nlarge-receive-offload: off [fixed]\n"
SMINFO = "sminfo: sm lid 1 sm guid 0x2c90300000001, activity count 48211 priority 14 state 3 SMINFO_MASTER\n"
MLXLINK = (
    "\nOperational Info\n----------------\nState                              : Active\n"
    "Physical state                     : LinkUp\nEnabled Link Speed                 : 0x00000080 (NDR)\n"
    "Troubleshooting Info\n--------------------\nStatus Opcode                      : 0\n"
    "Recommendation                     : No issue was observed\n\nModule Info\n-----------\n"
    "Vendor Serial Number               : MT0000X00001\nTemperature [C]                    : 52 [-5..75]\n\n"
    "Physical Counters and BER Info\n------------------------------\nLink Down Counter                  : 0\n"
)
MLNX_QOS = (
    "DCBX mode: OS controlled\nPriority trust state: dscp\ndscp2prio mapping:\n"
    + "".join(f"\tprio:{p} dscp:{','.join(f'{d:02d}' for d in range(8 * p + 7, 8 * p - 1, -1))},\n" for p in range(8))
    + "PFC configuration:\n\tpriority    0   1   2   3   4   5   6   7\n\tenabled     0   0   0   1   0   0   0   0\n"
)
LLDP_PFC = "Priority-based Flow Control TLV\n\tWilling: no\n\tMACsec Bypass Capable: no\n\tPFC capable traffic classes: 8\n\tPFC enabled: 3\n"
ROUTES = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def config_space(*, read_request: int = 4096, is_validating: bool | None = None) -> str:
    """Hex of a configuration space: a PCI Express capability at 0x60, and access control services where asked for."""
    held = bytearray(4096)
    held[0x34] = 0x60
    held[0x60] = 0x10
    struct.pack_into("<H", held, 0x68, (read_request // 128).bit_length() - 1 << 12)
    if is_validating is not None:
        struct.pack_into("<IHH", held, 0x100, 0x0001_000D, 0x5F, int(is_validating))
    return held.hex()


class Tree:
    """A recording in the making."""

    def __init__(
        self,
        name: str,
        *,
        cpus: int = 64,
        nodes: int = 2,
        is_virtual: bool = False,
        is_root: bool = True,
        kernel: str = "5.15.0-1053",
    ) -> None:
        self.files: dict[str, str] = {
            "/proc/sys/kernel/hostname": f"{name}\n",
            "/proc/sys/kernel/osrelease": f"{kernel}\n",
            "/proc/self/status": f"Name:\tpython3\nUid:\t{0 if is_root else 1000}\t{0 if is_root else 1000}\t0\t0\n",
            "/proc/cpuinfo": f"model name\t: Example CPU\nflags\t\t: fpu vme{' hypervisor' if is_virtual else ''} lm\n",
            "/proc/meminfo": "MemTotal:       1056763904 kB\n",
            "/proc/uptime": "864000.00 1000.00\n",
            "/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro iommu=pt\n",
            "/proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nmlx5_ib 400000 0 - Live 0x0\nib_uverbs 160000 1 - Live 0x0\n",
            "/proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units     \nMax locked memory         unlimited            unlimited            bytes     \n",
            "/proc/self/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n",
            "/proc/net/route": ROUTES,
            "/proc/net/tcp": "  sl  local_address rem_address   st\n   0: 0100007F:0016 00000000:0000 0A 00000000:00000000\n",
            "/proc/net/ip_tables_names": "",
            "/sys/devices/system/cpu/online": f"0-{cpus - 1}\n",
        }
        for node in range(nodes):
            size = cpus // nodes
            self.files[f"/sys/devices/system/node/node{node}/cpulist"] = f"{node * size}-{(node + 1) * size - 1}\n"
        for cpu in range(0 if is_virtual else cpus):
            self.files[f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"] = "performance\n"
        if not is_virtual:
            self.files["/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"] = "acpi-cpufreq\n"
        for key, value in HEALTHY_SYSCTLS.items():
            self.files[f"/proc/sys/{key.replace('.', '/')}"] = f"{value}\n"
        self.problems: dict[str, str] = {}
        self.binaries: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.exists: dict[str, bool] = {"/run/systemd/timesync/synchronized": True}
        self.commands: dict[str, dict[str, Any]] = {"dmesg": {"stdout": "[    1.000000] Linux version 5.15\n"}}
        self.environ: dict[str, str] = {}
        self.tcp_diagnostics: dict[str, str] = {"2": "", "10": ""}

    def pci(
        self, path: str, *, kind: int, vendor: int, device: int = 0x1021, speed: str = "32.0 GT/s PCIe", width: int = 16,
        max_speed: str = "32.0 GT/s PCIe", max_width: int = 16, node: int = 0, config: str | None = None,
    ) -> str:  # fmt: skip
        """One device; ``path`` below /sys/devices. Gives its PCI name."""
        bdf = path.rsplit("/", 1)[-1]
        base = f"/sys/bus/pci/devices/{bdf}"
        self.links[base] = f"/sys/devices/{path}"
        texts = {
            "class": f"{kind << 8:#08x}", "vendor": f"{vendor:#06x}", "device": f"{device:#06x}", "numa_node": str(node),
            "current_link_speed": speed, "max_link_speed": max_speed, "current_link_width": str(width), "max_link_width": str(max_width),
        }  # fmt: skip
        self.files.update({f"{base}/{name}": f"{text}\n" for name, text in texts.items()})
        self.binaries[f"{base}/config"] = config_space() if config is None else config
        return bdf

    def nic(
        self, name: str, bdf: str, *, driver: str = "mlx5_core", speed: int = 25000, most: int | None = None, mtu: int = 9000, node: int = 0,
        is_up: bool = True, queues: int = 32, gro: str = "on", kind: int = 1, cpus: str | None = None,
    ) -> None:  # fmt: skip
        """A network interface on a device, with what ethtool says of it."""
        base = f"/sys/class/net/{name}"
        texts = {
            "flags": "0x1003" if is_up else "0x1002", "carrier": "1", "speed": str(speed), "duplex": "full", "mtu": str(mtu), "type": str(kind),
            "uevent": f"INTERFACE={name}", "ifindex": "2", "iflink": "2", "device/numa_node": str(node),
        }  # fmt: skip
        self.files.update({f"{base}/{key}": f"{text}\n" for key, text in texts.items()})
        self.links[f"{base}/device"] = self.links.get(f"/sys/bus/pci/devices/{bdf}", f"/sys/devices/{bdf}")
        self.links[f"{base}/device/driver"] = f"/sys/bus/pci/drivers/{driver}"
        first = 100 + sum(1 for path in self.files if "/msi_irqs/" in path)
        for irq in range(first, first + queues):
            self.files[f"/sys/bus/pci/devices/{bdf}/msi_irqs/{irq}"] = "msix\n"
            local = self.files.get(f"/sys/devices/system/node/node{node}/cpulist", "0-1")
            self.files[f"/proc/irq/{irq}/effective_affinity_list"] = local if cpus is None else cpus
        if kind == 1:
            self.say(
                "ethtool", name, stdout=SUPPORTED.format(name=name, most=speed if most is None else most, now=speed)
            )
            self.say("ethtool", "-g", name, stdout=RINGS.format(name=name))
            self.say("ethtool", "-l", name, stdout=CHANNELS.format(name=name, queues=queues))
            self.say("ethtool", "-k", name, stdout=FEATURES.format(name=name, gro=gro))

    def rdma(
        self, device: str, bdf: str, *, rate: str = "400 Gb/sec (4X NDR)", layer: str = "InfiniBand", netdev: str | None = None,
        state: str = "4: ACTIVE", phys: str = "5: LinkUp", sm_lid: str = "0x1",
    ) -> None:  # fmt: skip
        """An RDMA device with one port."""
        base = f"/sys/class/infiniband/{device}"
        self.links[f"{base}/device"] = self.links[f"/sys/bus/pci/devices/{bdf}"]
        texts = {"state": state, "phys_state": phys, "rate": rate, "link_layer": layer, "sm_lid": sm_lid}
        self.files.update({f"{base}/ports/1/{key}": f"{text}\n" for key, text in texts.items()})
        self.files[f"{base}/fw_ver"] = "28.39.3004\n"
        number = len([name for name in self.files if name.startswith("/dev/infiniband/uverbs")])
        self.files[f"/dev/infiniband/uverbs{number}"] = ""
        if netdev is not None:
            self.files[f"{base}/device/net/{netdev}/mtu"] = "\n"
            self.files[f"/sys/class/net/{netdev}/device/infiniband/{device}/node_type"] = "1: CA\n"
        if layer == "Ethernet":
            for index, (gid, kind) in enumerate(
                (
                    ("fe80:0000:0000:0000:0a00:20ff:fe00:0001", "IB/RoCE v1"),
                    ("0000:0000:0000:0000:0000:ffff:c000:0205", "RoCE v2"),
                )
            ):
                self.files[f"{base}/ports/1/gids/{index}"] = f"{gid}\n"
                self.files[f"{base}/ports/1/gid_attrs/types/{index}"] = f"{kind}\n"

    def say(self, *command: str, stdout: str = "", stderr: str = "", returncode: int = 0) -> None:
        """What a command answers."""
        self.commands[" ".join(command)] = {"stdout": stdout, "stderr": stderr, "returncode": returncode}

    def has_verbs(self) -> None:
        """The user-space library."""
        self.files["/usr/lib/x86_64-linux-gnu/libibverbs.so.1"] = ""

    def held(self) -> dict[str, Any]:
        """The recording."""
        return {
            "kind": "recorded_host", "schema": 1, "files": self.files, "problems": self.problems, "binaries": self.binaries,
            "links": self.links, "exists": self.exists, "commands": self.commands, "environ": self.environ, "tcp_diagnostics": self.tcp_diagnostics,
        }  # fmt: skip


def h100(
    *, width: int = 16, is_open: bool = True, has_peermem: bool = True, nic_node: int | None = None, acs: bool = False
) -> Tree:
    """Eight H100 with eight NDR ports, each pair behind one switch; a 25 Gbit/s management port."""
    tree = Tree("node07", cpus=96)
    tree.has_verbs()
    bridge = config_space(is_validating=acs)
    for index in range(8):
        node, bus = index // 4, 0x10 + 0x10 * index
        root = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0"
        up = f"{root}/0000:{bus + 1:02x}:00.0"
        for step in (root, up, f"{up}/0000:{bus + 2:02x}:00.0", f"{up}/0000:{bus + 2:02x}:01.0"):
            tree.pci(step, kind=0x0604, vendor=0x1000, node=node, config=bridge)
        tree.pci(
            f"{up}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0",
            kind=0x0302,
            vendor=NVIDIA,
            device=0x2330,
            speed="2.5 GT/s PCIe",
            node=node,
        )
        is_moved = nic_node is not None and index == 5
        path = f"{up}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0"
        if is_moved:
            path = f"pci0000:08/0000:08:01.0/0000:{bus + 4:02x}:00.0"
            tree.pci("pci0000:08/0000:08:01.0", kind=0x0604, vendor=0x1000, node=nic_node or 0, config=bridge)
        bdf = tree.pci(
            path,
            kind=0x0207,
            vendor=MELLANOX,
            width=width if index == 3 else 16,
            node=(nic_node or 0) if is_moved else node,
        )
        tree.rdma(f"mlx5_{index}", bdf, netdev=f"ib{index}")
        tree.say("mlxlink", "-d", f"mlx5_{index}", "-p", "1", "-m", "-c", stdout=MLXLINK)
        tree.say("sminfo", "-C", f"mlx5_{index}", "-P", "1", stdout=SMINFO)
        tree.nic(f"ib{index}", bdf, speed=400000, mtu=4092, node=node, kind=32, queues=4)
    bdf = tree.pci("pci0000:00/0000:00:1c.0/0000:04:00.0", kind=0x0200, vendor=INTEL, device=0x159B, speed="16.0 GT/s PCIe",
                   max_speed="16.0 GT/s PCIe", width=8, max_width=8)  # fmt: skip
    tree.nic("eno1", bdf, driver="ice", mtu=9000)
    tree.files["/proc/net/route"] = ROUTES + "eno1\t00020000\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    kind = "NVIDIA UNIX Open Kernel Module for x86_64" if is_open else "NVIDIA UNIX x86_64 Kernel Module"
    tree.files["/proc/driver/nvidia/version"] = f"NVRM version: {kind}  550.90.07  Release Build\nGCC version: 12\n"
    if not has_peermem:
        tree.files["/proc/modules"] = tree.files["/proc/modules"].replace("nvidia_peermem", "nvidia_uvm")
    tree.files["/sys/kernel/iommu_groups/0/type"] = "identity\n"
    tree.say("nft", "list", "ruleset")
    return tree


def roce(*, mtu: int = 9000, is_crossed: bool = False) -> Tree:
    """Two A100 with two RoCE ports of 200 Gbit/s, one of each per NUMA node; crossed: both ports on node 0."""
    tree = Tree("gpu-r2-11", cpus=64)
    tree.has_verbs()
    for index in range(2):
        root = f"pci0000:{0x20 + 0x20 * index:02x}/0000:{0x20 + 0x20 * index:02x}:01.0"
        bus = 0x21 + 0x20 * index
        tree.pci(root, kind=0x0604, vendor=INTEL, node=index, speed="16.0 GT/s PCIe", max_speed="16.0 GT/s PCIe")
        up = f"{root}/0000:{bus:02x}:00.0"
        tree.pci(up, kind=0x0604, vendor=0x1000, node=index, speed="16.0 GT/s PCIe", max_speed="16.0 GT/s PCIe")
        for slot, (kind, vendor) in enumerate(((0x0302, NVIDIA), (0x0200, MELLANOX))):
            down = f"{up}/0000:{bus + 1:02x}:0{slot}.0"
            tree.pci(down, kind=0x0604, vendor=0x1000, node=index, speed="16.0 GT/s PCIe", max_speed="16.0 GT/s PCIe")
            is_moved = is_crossed and slot == 1 and index == 1
            place = f"pci0000:20/0000:20:0{index + 2}.0" if is_moved else down
            if is_moved:
                tree.pci(place, kind=0x0604, vendor=INTEL, node=0, speed="16.0 GT/s PCIe", max_speed="16.0 GT/s PCIe")
            bdf = tree.pci(f"{place}/0000:{bus + 2 + slot:02x}:00.0", kind=kind, vendor=vendor, node=0 if is_moved else index,
                           speed="16.0 GT/s PCIe", max_speed="16.0 GT/s PCIe")  # fmt: skip
        tree.nic(f"ens{index + 1}np0", bdf, speed=200000, mtu=mtu, node=0 if is_crossed and index == 1 else index)
        tree.rdma(
            f"mlx5_{index}",
            bdf,
            rate="200 Gb/sec (4X HDR)",
            layer="Ethernet",
            netdev=f"ens{index + 1}np0",
            sm_lid="0x0",
        )
        tree.files[f"/sys/class/infiniband/mlx5_{index}/tc/1/traffic_class"] = "Global tclass=106\n"
        tree.say("mlxlink", "-d", f"mlx5_{index}", "-p", "1", "-m", "-c", stdout=MLXLINK)
        tree.say("mlnx_qos", "-i", f"ens{index + 1}np0", stdout=MLNX_QOS)
        tree.say("lldptool", "-t", "-n", "-i", f"ens{index + 1}np0", "-V", "PFC", stdout=LLDP_PFC)
        tree.say("dcb", "-j", "pfc", "show", "dev", f"ens{index + 1}np0",
                 stdout='{"ifname":"x","pfc-cap":8,"macsec-bypass":false,"prio-pfc":[false,false,false,true,false,false,false,false]}')  # fmt: skip
        net = ("000200C0", "006433C6")[index]  # 192.0.2.0, 198.51.100.0
        tree.files["/proc/net/route"] += f"ens{index + 1}np0\t{net}\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    tree.files["/proc/driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Release\n"
    tree.say("nft", "list", "ruleset")
    return tree


def container() -> Tree:
    """A container on an H100 host: the fabric shows in /sys, but neither the devices nor the library are inside."""
    tree = h100()
    tree.exists["/.dockerenv"] = True
    tree.files = {
        name: text
        for name, text in tree.files.items()
        if not name.startswith("/dev/infiniband") and "libibverbs" not in name
    }
    tree.files["/proc/self/limits"] = tree.files["/proc/self/limits"].replace(
        "unlimited            unlimited", "65536                65536    "
    )
    tree.files["/proc/self/mounts"] = "shm /dev/shm tmpfs rw,nosuid,nodev,noexec,relatime,size=65536k 0 0\n"
    for name in list(tree.commands):
        if name.startswith(("ethtool", "nft", "mlxlink", "sminfo")):
            del tree.commands[name]
    tree.commands["dmesg"] = {"returncode": 1, "stderr": "dmesg: read kernel buffer failed: Operation not permitted\n"}
    return tree


def cloud_vm() -> Tree:
    """A plain virtual machine: 8 processors, virtio, kernel defaults, not root."""
    tree = Tree("vm-3", cpus=8, nodes=1, is_virtual=True, is_root=False, kernel="6.1.0-18-cloud-amd64")
    tree.nic("ens4", "virtio1", driver="virtio_net", speed=-1, mtu=1460, queues=0)
    tree.files = {name: text for name, text in tree.files.items() if "ens4" not in name or "speed" not in name}
    for key, value in {"net.ipv4.tcp_rmem": "4096 131072 6291456", "net.ipv4.tcp_wmem": "4096 16384 4194304",
                       "net.ipv4.tcp_slow_start_after_idle": "1"}.items():  # fmt: skip
        tree.files[f"/proc/sys/{key.replace('.', '/')}"] = value
    for name in list(tree.commands):
        if name.startswith("ethtool"):
            del tree.commands[name]
    tree.commands["dmesg"] = {"returncode": 1, "stderr": "dmesg: read kernel buffer failed: Operation not permitted\n"}
    tree.files["/proc/modules"] = "virtio_net 65536 0 - Live 0x0\n"
    tree.files["/proc/cmdline"] = "BOOT_IMAGE=/vmlinuz ro\n"
    tree.files["/proc/self/limits"] = tree.files["/proc/self/limits"].replace(
        "unlimited            unlimited", "8388608              8388608  "
    )
    return tree


TREES: dict[str, Callable[[], Tree]] = {
    "h100_ib": h100,
    "roce_mtu_1500": lambda: roce(mtu=1500),
    "roce_mtu_4096": lambda: roce(mtu=4096),
    "roce_healthy": roce,
    "ib_without_gpudirect": lambda: h100(is_open=False, has_peermem=False),
    "pcie_x8": lambda: h100(width=8),
    "cross_numa_nic": lambda: roce(is_crossed=True),
    "nic_in_wrong_slot": lambda: h100(nic_node=0),
    "ib_with_acs": lambda: h100(acs=True),
    "container_without_verbs": container,
    "cloud_vm": cloud_vm,
}


def system_of(tree: Tree) -> RecordedSystem:
    """The recording, as it would be read from a file."""
    return RecordedSystem(json.loads(json.dumps(tree.held())))
