"""RDMA: devices and ports, user-space verbs, RoCE's MTU and addresses, locked memory, GPUDirect's ingredients.

RoCE's payload MTU is derived from the interface's MTU by the kernel's own arithmetic (rdma/ib_addr.h), since sysfs does
not show the active one. Amazon's EFA writes fixed text into its state files: they are not taken as evidence.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Setting, Unknown, check
from wirespeed.doctor.inventory import HostView, RdmaPort
from wirespeed.units import format_rate, format_size

ROCE_HEADER_BYTES = 96  # GRH 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4
_MTUS = (256, 512, 1024, 2048, 4096)
_VERBS_FOLDERS = ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib", "/lib64",
                  "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/local/lib")  # fmt: skip
_MELLANOX, _BROADCOM, _INTEL = 0x15B3, 0x14E4, 0x8086
_ENOUGH_LOCKED_BYTES = 64 * 1024**3


def roce_mtu(netdev_mtu: int) -> int | None:
    """Payload bytes per RoCE packet on an interface of that MTU; None below the smallest."""
    return max((mtu for mtu in _MTUS if mtu <= netdev_mtu - ROCE_HEADER_BYTES), default=None)


def _no_rdma(view: HostView) -> str | None:
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
                Evidence(where="/sys/bus/pci/devices", seen=f"{len(cards)} cards", expected="as many in /sys/class/infiniband"),
                Evidence(where="/proc/modules", seen=", ".join(loaded) or "none of mlx5_core, mlx5_ib, ib_core, ib_uverbs"),
            ),
            remedy=Remedy(
                text="load the driver; in a container pass the devices in", commands=("modprobe mlx5_ib ib_uverbs",),
                undo=("modprobe -r mlx5_ib",),
            ),
            source="NCCL user guide, troubleshooting (networking)",
            path="rdma",
        )  # fmt: skip
    if not view.rdma_ports:
        return
    yield Fact(key="rdma.devices", value=str(len({port.device for port in view.rdma_ports})))
    verbs = [name for name in view.system.list_dir("/dev/infiniband") if name.startswith("uverbs")]
    where = "in this container" if view.container else "on this host"
    if not verbs:
        yield Finding(
            id="rdma.no-dev-infiniband",
            subject="/dev/infiniband",
            severity="critical",
            title=f"There is no /dev/infiniband/uverbs* {where}: NCCL falls back to TCP sockets without an error.",
            evidence=(
                Evidence(where="/dev/infiniband", seen="no uverbs device", expected="one for each RDMA device"),
                Evidence(where="/sys/class/infiniband", seen=", ".join(sorted({port.device for port in view.rdma_ports}))),
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
    if not any(
        name.startswith("libibverbs.so") for folder in _VERBS_FOLDERS for name in view.system.list_dir(folder)
    ):
        yield Finding(
            id="rdma.no-libibverbs",
            subject="libibverbs",
            severity="critical",
            title=f"libibverbs is not installed {where}: NCCL cannot use RDMA and falls back to TCP sockets.",
            evidence=(Evidence(where="/usr/lib*, /usr/lib/*-linux-gnu", seen="no libibverbs.so", expected="libibverbs.so.1"),),
            remedy=Remedy(
                text="install the user-space verbs in the image",
                commands=("apt-get install -y libibverbs1 ibverbs-providers", "dnf install -y rdma-core"),
            ),
            source="sglang PR #1427, AReaL#639, nvidia-container-toolkit#1877",
            path="rdma",
        )


@check("rdma.ports", "state, rate and firmware of RDMA ports", applies=_no_rdma)
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
            yield Unknown(what=f"link of {port.name}", why="EFA writes fixed text into its state files", hint="`fi_info -p efa`")
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
                    Evidence(where=f"{base}/ports/{port.port}/rate", seen=format_rate(port.rate_bit_per_s), expected=format_rate(usual)),
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
            id="rdma.no-subnet-manager", subject=port.name, severity="critical", path="rdma",
            title=f"{port.name} has a link but no subnet manager has set it up.",
            evidence=(*seen, Evidence(where=f"{base}/sm_lid", seen=manager or "unknown", expected="a lid other than 0")),
            remedy=Remedy(text="start a subnet manager on the switch or one host", commands=("systemctl start opensm", "sminfo")),
            source="InfiniBand architecture specification, port states; opensm(8)",
        )  # fmt: skip
    elif "Disabled" in phys or ("Polling" not in phys and "LinkUp" not in phys and "Link" not in phys):
        # Never cabled, or switched off by someone: common for the second port of a card.
        yield Fact(key=f"rdma.{port.name}.phys", value=phys)
    else:
        yield Finding(
            id="rdma.port-down", subject=port.name, severity="critical", path="rdma",
            title=f"{port.name} is not active ({port.state or 'unknown'}, {phys}).", evidence=seen,
            remedy=Remedy(text="check cable, optics and the switch port; swap with a good one. A port that shall stay unused: "
                               "switch it off, so that it is not reported",
                          commands=(f"mlxlink -d {port.device} -p {port.port}", f"ibportstate -C {port.device} -D 0 {port.port}")),
            source="leptonai/gpud, azurehpc-health-checks NHC2004",
        )  # fmt: skip


@check("rdma.roce", "RoCE: MTU, addresses, priorities", applies=_no_rdma)
def roce(view: HostView) -> Iterator[Outcome]:
    """MTU by the kernel's arithmetic; GIDs; whether a priority is lossless."""
    for port in view.rdma_ports:
        if port.is_roce and port.is_active and not port.is_efa:
            yield from _roce_mtu(view, port)
            yield from _gids(view, port)
            yield from _priorities(view, port)


def _roce_mtu(view: HostView, port: RdmaPort) -> Iterator[Outcome]:
    for netdev in port.netdevs:
        mtu = view.system.read_int(f"/sys/class/net/{netdev}/mtu")
        if mtu is None:
            yield view.file_unknown(f"/sys/class/net/{netdev}/mtu", f"MTU of {netdev}")
            continue
        active = roce_mtu(mtu)
        yield Fact(key=f"rdma.{port.name}.roce-mtu", value="none" if active is None else str(active))
        if active == 4096:
            continue
        almost = " (4096 on the interface is a common mistake: headers take 96 bytes)" if 4096 <= mtu < 4192 else ""
        yield Finding(
            id="rdma.roce-mtu",
            subject=netdev,
            severity="warning",
            title=f"RoCE on {port.name} sends packets of {active or 'no'} bytes instead of 4096: {netdev} has MTU {mtu}{almost}.",
            evidence=(
                Evidence(where=f"/sys/class/net/{netdev}/mtu", seen=str(mtu), expected="4200 or 9000 on every host and switch port"),
                Evidence(where=f"{mtu} - {ROCE_HEADER_BYTES} bytes of headers", seen=f"payload {active}", expected="4096"),
            ),
            remedy=Remedy(
                text="raise the MTU on all hosts and switch ports, the same everywhere: unequal ones fail with NCCL 2.20 and later",
                commands=(f"ip link set {netdev} mtu 4200",),
                undo=(f"ip link set {netdev} mtu {mtu}",),
                caution="resets the link; the switch must allow it first",
            ),
            source="kernel include/rdma/ib_addr.h (iboe_get_mtu); NVIDIA recommends 4200; nccl#1524",
            path="rdma",
        )


def _gids(view: HostView, port: RdmaPort) -> Iterator[Outcome]:
    base = f"/sys/class/infiniband/{port.device}/ports/{port.port}"
    routable, any_seen = [], False
    for index in sorted((int(name) for name in view.system.list_dir(f"{base}/gids") if name.isdigit()))[:32]:
        gid = view.system.read_text(f"{base}/gids/{index}")
        kind = view.system.read_text(f"{base}/gid_attrs/types/{index}")  # an empty index answers EINVAL
        if gid is None or kind is None or set(gid) <= {"0", ":"}:
            continue
        any_seen = True
        address = ipaddress.ip_address(gid)
        if "v2" in kind and not address.is_link_local:
            routable.append(index)
    if routable:
        yield Fact(key=f"rdma.{port.name}.gid-index", value=str(routable[0]))
    elif any_seen:
        yield Finding(
            id="rdma.no-routable-gid",
            subject=port.name,
            severity="critical",
            title=f"{port.name} has no RoCE v2 address that can be routed: connections end in time-outs.",
            evidence=(Evidence(where=f"{base}/gids", seen="link-local or RoCE v1 only", expected="RoCE v2 with an IP address"),),
            remedy=Remedy(text=f"give {', '.join(port.netdevs) or 'its interface'} an IP address; leave NCCL_IB_GID_INDEX unset"),
            source="nccl#426, #769",
            path="rdma",
        )
    else:
        yield Unknown(what=f"GIDs of {port.name}", why=f"{base}/gids shows none", hint="`show_gids`, or run on the host itself")


def _priorities(view: HostView, port: RdmaPort) -> Iterator[Outcome]:
    for netdev in port.netdevs:
        said = view.command("dcb", "-j", "pfc", "show", "dev", netdev)
        if isinstance(said, Unknown):
            said = view.command("mlnx_qos", "-i", netdev)
        if isinstance(said, Unknown):
            hint = "install iproute2's dcb, or mlnx_qos"
            yield Unknown(what=f"lossless priorities (PFC) of {netdev}", why=said.why, hint=said.hint or hint)
            continue
        enabled = _lossless(said.stdout)
        if enabled is None:
            yield Unknown(what=f"lossless priorities (PFC) of {netdev}", why="the answer has another form")
            continue
        yield Fact(key=f"rdma.{port.name}.pfc", value=",".join(map(str, enabled)) or "none")
        marks = {p: view.system.read_text(f"/sys/class/net/{netdev}/ecn/roce_np/enable/{p}") for p in range(8)}
        has_ecn = any(mark == "1" for mark in marks.values())
        if not enabled and not has_ecn:
            yield Finding(
                id="rdma.roce-lossy",
                subject=netdev,
                severity="warning",
                title=f"RoCE on {netdev} has no lossless priority and no congestion marking: a full switch buffer means lost packets.",
                evidence=(
                    Evidence(where=f"PFC of {netdev}", seen="off for all priorities", expected="on for the priority of training"),
                    Evidence(where=f"/sys/class/net/{netdev}/ecn/roce_np/enable", seen="not enabled" if any(marks.values()) else "unknown"),
                ),
                remedy=Remedy(
                    text="choose one priority with the switch's owner; set PFC and ECN there and here, and NCCL_IB_TC to its DSCP x 4",
                    commands=(f"mlnx_qos -i {netdev} --pfc 0,0,0,1,0,0,0,0 --trust dscp",),
                    undo=(f"mlnx_qos -i {netdev} --pfc 0,0,0,0,0,0,0,0",),
                    caution="both ends must agree",
                ),
                source="nccl#378, #306 (not always confirmed as the cause): confirm with `--during 10s` under load",
                path="rdma",
            )


def _lossless(text: str) -> tuple[int, ...] | None:
    """Priorities with PFC, of ``dcb -j pfc show`` or ``mlnx_qos``; None where it is neither."""
    row = re.search(r"^\s*enabled\s+((?:[01]\s+){7}[01])", text, re.MULTILINE)
    if row is not None:
        return tuple(priority for priority, bit in enumerate(row[1].split()) if bit == "1")
    block = re.search(r'"prio-pfc"\s*:\s*(\{[^}]*\}|\[[^\]]*\])', text) or re.search(r"prio-pfc ((?:\d:\w+ ?)+)", text)
    if block is None:
        return None
    if block[1].startswith("["):
        return tuple(i for i, bit in enumerate(re.findall(r"true|false|on|off", block[1])) if bit in ("true", "on"))
    return tuple(int(p) for p in re.findall(r'"?(\d)"?\s*:\s*(?:true|"?on"?)', block[1]))


@check("rdma.memlock", "locked memory that verbs may use", applies=_no_rdma)
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
                text="container: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK and LimitMEMLOCK=infinity in "
                "slurmd.service; login: /etc/security/limits.d",
                commands=("sh -c 'echo \"* - memlock unlimited\" > /etc/security/limits.d/90-memlock.conf'",),
                undo=("rm /etc/security/limits.d/90-memlock.conf",),
            ),
            source="NCCL user guide, troubleshooting (InfiniBand: memlock)",
            path="rdma",
        )


@check("rdma.rails", "several NICs in one subnet", applies=_no_rdma)
def rails(view: HostView) -> Iterator[Outcome]:
    """RoCE rails that share a subnet need arp_ignore=1 and arp_announce=2, or answers name the wrong NIC."""
    nets: dict[str, list[str]] = {}
    for port in view.rdma_ports:
        if port.is_roce and port.is_active:
            for netdev in port.netdevs:
                for net in _subnets(view).get(netdev, ()):
                    nets.setdefault(net, []).append(netdev)
    for net, netdevs in nets.items():
        if len(netdevs) < 2:
            continue
        for key, wanted in (("arp_ignore", 1), ("arp_announce", 2)):
            full = f"net.ipv4.conf.all.{key}"
            value = view.sysctl_int(full)
            if value is not None and value < wanted:
                yield Finding(
                    id="rdma.rails-arp",
                    subject=full,
                    severity="warning",
                    title=f"{', '.join(netdevs)} are in one subnet ({net}), and any of them answers for the others' addresses.",
                    evidence=(Evidence(where=f"/proc/sys/net/ipv4/conf/all/{key}", seen=str(value), expected=str(wanted)),),
                    remedy=Remedy(text=f"set {full} to {wanted}", settings=(Setting(key=full, value=str(wanted)),)),
                    source="kernel Documentation/networking/ip-sysctl.rst (arp_ignore, arp_announce)",
                    path="rdma",
                )


def _subnets(view: HostView) -> dict[str, tuple[str, ...]]:
    """Interface -> subnets that are on link, from the routing table."""
    found: dict[str, list[str]] = {}
    for line in (view.system.read_text("/proc/net/route") or "").splitlines()[1:]:
        cells = line.split()
        if len(cells) >= 8 and cells[2] == "00000000" and cells[7] not in ("00000000", "FFFFFFFF"):
            address, mask = (int.from_bytes(bytes.fromhex(cells[i]), "little") for i in (1, 7))
            found.setdefault(cells[0], []).append(f"{ipaddress.ip_address(address)}/{bin(mask).count('1')}")
    return {name: tuple(nets) for name, nets in found.items()}


CHECKS = (stack, ports, roce, memlock, rails)
