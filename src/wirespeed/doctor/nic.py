"""Network interfaces: link, MTU, rings, queues, offloads, and which processors their interrupts go to.

Only physical interfaces are judged: what a virtual one claims of speed and offloads is made up. Drops, pauses and
errors are counters, see counters.py. Changing MTU, rings or queues resets the link: such commands are printed, never
run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.cpu_lists import parse_list, parse_mask
from wirespeed.doctor.inventory import HostView, Nic
from wirespeed.units import format_rate

FAST_BIT_PER_S = 10e9  # below, one core does it all
_RESETS = "resets the link: drain the host's jobs first"


def _no_nic(view: HostView) -> str | None:
    return None if view.physical_nics else "no physical network interface"


def _ethernets(view: HostView) -> tuple[Nic, ...]:
    return tuple(nic for nic in view.physical_nics if nic.kind != "infiniband" and nic.is_up)


def _is_fast(nic: Nic) -> bool:
    return nic.speed_bit_per_s is not None and nic.speed_bit_per_s >= FAST_BIT_PER_S


@check("nic.link", "carrier, speed and duplex of physical interfaces", applies=_no_nic)
def link(view: HostView) -> Iterator[Outcome]:
    """An interface is held against what its own port supports, and against its twins."""
    for nic in view.physical_nics:
        base = f"/sys/class/net/{nic.name}"
        if not nic.is_up:
            yield Fact(key=f"nic.{nic.name}.state", value="down")
            continue
        if nic.has_carrier is False:
            yield Finding(
                id="nic.no-carrier",
                subject=nic.name,
                severity="warning",
                title=f"{nic.name} is switched on but has no link.",
                evidence=(Evidence(where=f"{base}/carrier", seen="0", expected="1"),),
                remedy=Remedy(text="check cable, optics and the switch's port; or set it down if it is not in use"),
                source="linux/if.h IFF_RUNNING",
            )
            continue
        if nic.speed_bit_per_s is None:
            yield Unknown(
                what=f"speed of {nic.name}",
                why=f"{base}/speed does not say",
                hint="measure it: `wirespeed bench links`",
            )
        else:
            yield Fact(key=f"nic.{nic.name}.speed", value=format_rate(nic.speed_bit_per_s))
        duplex = view.system.read_text(f"{base}/duplex")
        if duplex == "half":
            yield Finding(
                id="nic.half-duplex",
                subject=nic.name,
                severity="critical",
                title=f"{nic.name} runs half duplex: sending and receiving block each other.",
                evidence=(Evidence(where=f"{base}/duplex", seen="half", expected="full"),),
                remedy=Remedy(
                    text="switch on autonegotiation at both ends",
                    commands=(f"ethtool -s {nic.name} autoneg on",),
                    caution=_RESETS,
                ),
                source="IEEE 802.3; one end fixed, the other negotiating",
            )
        yield from _below_own_port(view, nic)
    yield from _slower_twins(view)


def _below_own_port(view: HostView, nic: Nic) -> Iterator[Outcome]:
    if nic.kind == "infiniband" or nic.speed_bit_per_s is None:
        return
    said = view.command("ethtool", nic.name)
    if isinstance(said, Unknown):
        yield said
        return
    block = re.search(r"Supported link modes:(.*?)(?:\n\t[A-Z])", said.stdout, re.DOTALL)
    most = max((int(mbit) for mbit in re.findall(r"(\d+)base", block[1] if block else "")), default=None)
    if most is not None and most * 1e6 > nic.speed_bit_per_s:
        yield Finding(
            id="nic.below-own-speed",
            subject=nic.name,
            severity="warning",
            title=f"{nic.name} runs at {format_rate(nic.speed_bit_per_s)}, its port can do {format_rate(most * 1e6)}.",
            evidence=(
                Evidence(where=f"/sys/class/net/{nic.name}/speed", seen=format_rate(nic.speed_bit_per_s)),
                Evidence(where=f"`ethtool {nic.name}` supported link modes", seen=format_rate(most * 1e6)),
            ),
            remedy=Remedy(
                text="check the switch port's speed, cable and FEC; fine where the switch has no faster port"
            ),
            source="ethtool(8)",
            limit_bit_per_s=nic.speed_bit_per_s,
            full_bit_per_s=most * 1e6,
        )


def _slower_twins(view: HostView) -> Iterator[Outcome]:
    twins: dict[str, list[Nic]] = defaultdict(list)
    for nic in view.physical_nics:
        base = f"/sys/bus/pci/devices/{nic.device}"
        kind = f"{view.system.read_text(f'{base}/vendor')}:{view.system.read_text(f'{base}/device')}"
        if nic.is_up and nic.speed_bit_per_s is not None and "None" not in kind:
            twins[kind].append(nic)
    for group in twins.values():
        best = max(group, key=lambda nic: nic.speed_bit_per_s or 0.0)
        for nic in group:
            assert nic.speed_bit_per_s is not None
            assert best.speed_bit_per_s is not None
            if nic.speed_bit_per_s < best.speed_bit_per_s:
                yield Finding(
                    id="nic.slower-than-twin",
                    subject=nic.name,
                    severity="warning",
                    title=f"{nic.name} runs at {format_rate(nic.speed_bit_per_s)}, the same model {best.name} at "
                    f"{format_rate(best.speed_bit_per_s)}.",
                    evidence=(
                        Evidence(
                            where=f"/sys/class/net/{nic.name}/speed",
                            seen=format_rate(nic.speed_bit_per_s),
                            expected=format_rate(best.speed_bit_per_s),
                        ),
                    ),
                    remedy=Remedy(
                        text="swap cable or optics with the twin's: the fault stays with the part that causes it"
                    ),
                    source="same PCI device, other speed",
                    limit_bit_per_s=nic.speed_bit_per_s,
                    full_bit_per_s=best.speed_bit_per_s,
                )


@check("nic.mtu", "MTU of interfaces that belong together", applies=_no_nic)
def mtu(view: HostView) -> Iterator[Outcome]:
    """Differences on this host; between hosts they show as drift. RoCE's own arithmetic is in rdma.py."""
    groups: dict[tuple[str | None, float | None], list[Nic]] = defaultdict(list)
    for nic in _ethernets(view):
        if nic.mtu is None:
            yield view.file_unknown(f"/sys/class/net/{nic.name}/mtu", f"MTU of {nic.name}")
            continue
        yield Fact(key=f"nic.{nic.name}.mtu", value=str(nic.mtu))
        if nic.has_carrier is not False:
            groups[nic.driver, nic.speed_bit_per_s].append(nic)
    for group in groups.values():
        mtus = [nic.mtu for nic in group if nic.mtu is not None]
        usual = max(set(mtus), key=lambda value: (mtus.count(value), value))
        for nic in group:
            if nic.mtu != usual:
                yield Finding(
                    id="nic.mtu-differs",
                    subject=nic.name,
                    severity="warning",
                    title=f"{nic.name} has MTU {nic.mtu}, its like on this host {usual}.",
                    evidence=(
                        Evidence(where=f"/sys/class/net/{nic.name}/mtu", seen=str(nic.mtu), expected=str(usual)),
                    ),
                    remedy=Remedy(
                        text="one MTU along the whole path: every host, bond and switch port",
                        commands=(f"ip link set {nic.name} mtu {usual}",),
                        undo=(f"ip link set {nic.name} mtu {nic.mtu}",),
                        caution=_RESETS,
                    ),
                    source="nccl#1524 (mismatched MTU fails); RFC 1191",
                )


@check("nic.rings", "ring sizes and queues", applies=_no_nic)
def rings(view: HostView) -> Iterator[Outcome]:
    """Sizes are facts; one queue on a fast interface is a finding. Whether a ring is too small, drops tell."""
    for nic in _ethernets(view):
        said = view.command("ethtool", "-g", nic.name)
        if isinstance(said, Unknown):
            if "not supported" not in said.why.lower():
                yield said
        else:
            most, now = _two_blocks(said.stdout)
            if "RX" in now:
                yield Fact(key=f"nic.{nic.name}.rx-ring", value=f"{now['RX']} of {most.get('RX', 'unknown')}")
        said = view.command("ethtool", "-l", nic.name)
        if isinstance(said, Unknown):
            if "not supported" not in said.why.lower():
                yield said
            continue
        most, now = _two_blocks(said.stdout)
        queues, can = (max(held.get("Combined", 0), held.get("RX", 0)) for held in (now, most))
        yield Fact(key=f"nic.{nic.name}.queues", value=f"{queues} of {can}")
        num_cpus = view.num_cpus
        wanted = can if num_cpus is None else min(can, num_cpus)
        if _is_fast(nic) and queues == 1 and wanted > 1:
            yield Finding(
                id="nic.one-queue",
                subject=nic.name,
                severity="warning",
                title=f"{nic.name} receives on one queue: one processor handles every packet.",
                evidence=(Evidence(where=f"`ethtool -l {nic.name}`", seen="1 queue", expected=f"up to {wanted}"),),
                remedy=Remedy(
                    text="use more queues",
                    commands=(f"ethtool -L {nic.name} combined {min(wanted, 16)}",),
                    undo=(f"ethtool -L {nic.name} combined 1",),
                    caution=_RESETS,
                ),
                source="kernel Documentation/networking/scaling.rst",
                path="tcp",
            )


def _two_blocks(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """What ``ethtool -g`` and ``-l`` print: the maxima, then the current values."""
    most, _, now = text.partition("Current hardware settings:")
    found = [dict(re.findall(r"^(RX|TX|Combined):\s+(\d+)", block, re.MULTILINE)) for block in (most, now)]
    return {name: int(value) for name, value in found[0].items()}, {name: int(v) for name, v in found[1].items()}


_OFFLOADS = {
    "tcp-segmentation-offload": "tso",
    "generic-segmentation-offload": "gso",
    "generic-receive-offload": "gro",
    "rx-checksumming": "rx",
    "scatter-gather": "sg",
}


@check("nic.offloads", "segmentation and receive offloads", applies=_no_nic)
def offloads(view: HostView) -> Iterator[Outcome]:
    """Off on a fast interface costs CPU per packet; fixed ones are the driver's word."""
    for nic in _ethernets(view):
        said = view.command("ethtool", "-k", nic.name)
        if isinstance(said, Unknown):
            yield said
            continue
        off = [name for name in _OFFLOADS if re.search(rf"^{name}: off\s*$", said.stdout, re.MULTILINE)]
        yield Fact(key=f"nic.{nic.name}.offloads-off", value=", ".join(off) or "none")
        if off and _is_fast(nic):
            short = [_OFFLOADS[name] for name in off]
            yield Finding(
                id="nic.offload-off",
                subject=nic.name,
                severity="warning",
                title=f"{', '.join(off)} of {nic.name} switched off: every packet costs processor time.",
                evidence=(Evidence(where=f"`ethtool -k {nic.name}`", seen=f"{', '.join(off)}: off", expected="on"),),
                remedy=Remedy(
                    text="switch them on",
                    commands=(f"ethtool -K {nic.name} {' '.join(f'{name} on' for name in short)}",),
                    undo=(f"ethtool -K {nic.name} {' '.join(f'{name} off' for name in short)}",),
                    caution="may reset the link with some drivers",
                ),
                source="kernel Documentation/networking/segmentation-offloads.rst",
                path="tcp",
            )
        if (
            re.search(r"^large-receive-offload: on", said.stdout, re.MULTILINE)
            and view.sysctl("net.ipv4.ip_forward") == "1"
        ):
            yield Finding(
                id="nic.lro-while-forwarding",
                subject=nic.name,
                severity="notice",
                title=f"{nic.name} merges received packets (LRO) on a host that forwards: merged packets cannot be "
                "forwarded whole.",
                evidence=(
                    Evidence(where=f"`ethtool -k {nic.name}`", seen="large-receive-offload: on", expected="off"),
                ),
                remedy=Remedy(
                    text="use GRO instead",
                    commands=(f"ethtool -K {nic.name} lro off",),
                    undo=(f"ethtool -K {nic.name} lro on",),
                ),
                source="kernel Documentation/networking/segmentation-offloads.rst",
                path="tcp",
            )


@check("nic.interrupts", "processors that handle an interface's interrupts", applies=_no_nic)
def interrupts(view: HostView) -> Iterator[Outcome]:
    """All interrupts of several queues on one processor, or on another NUMA node than the interface's."""
    for nic in _ethernets(view):
        irqs = view.system.list_dir(f"/sys/bus/pci/devices/{nic.device}/msi_irqs")
        if not irqs:
            yield from _steering(view, nic)
            continue
        cpus_of: dict[str, tuple[int, ...]] = {}
        for irq in irqs:
            text = view.system.read_text(f"/proc/irq/{irq}/effective_affinity_list") or view.system.read_text(
                f"/proc/irq/{irq}/smp_affinity_list"
            )
            if text:
                cpus_of[irq] = parse_list(text)
        if not cpus_of:
            yield Unknown(
                what=f"interrupt affinity of {nic.name}", why=f"/proc/irq/{irqs[0]} may not be read", hint="run as root"
            )
            continue
        used = {cpu for cpus in cpus_of.values() for cpu in cpus}
        if len(cpus_of) >= 4 and len(used) == 1 and (view.num_cpus or 0) > 1 and _is_fast(nic):
            yield Finding(
                id="nic.interrupts-on-one-cpu",
                subject=nic.name,
                severity="warning",
                title=f"All {len(cpus_of)} interrupts of {nic.name} go to processor {min(used)}.",
                evidence=(
                    Evidence(
                        where="/proc/irq/*/effective_affinity_list",
                        seen=str(min(used)),
                        expected="spread over its node",
                    ),
                ),
                remedy=Remedy(
                    text="start irqbalance, or the driver's set_irq_affinity script",
                    commands=("systemctl start irqbalance",),
                ),
                source="kernel Documentation/networking/scaling.rst",
                path="tcp",
            )
        local = frozenset() if nic.numa_node is None else view.cpus_of_node(nic.numa_node)
        if local and len(view.numa_nodes) > 1 and not used & local and _is_fast(nic):
            yield Finding(
                id="nic.interrupts-on-far-node",
                subject=nic.name,
                severity="warning",
                title=f"{nic.name} sits at NUMA node {nic.numa_node}, all its interrupts are handled on another.",
                evidence=(
                    Evidence(where=f"/sys/class/net/{nic.name}/device/numa_node", seen=str(nic.numa_node)),
                    Evidence(where="/proc/irq/*/effective_affinity_list", seen=_ranges(used), expected=_ranges(local)),
                ),
                remedy=Remedy(
                    text="move them to its own node",
                    commands=(f"set_irq_affinity_bynode.sh {nic.numa_node} {nic.name}",),
                ),
                source="kernel Documentation/networking/scaling.rst",
                path="tcp",
            )


def _steering(view: HostView, nic: Nic) -> Iterator[Outcome]:
    """A NIC without own interrupt vectors (virtio, old ones) and with one queue: packets can be spread by software."""
    folder = f"/sys/class/net/{nic.name}/queues"
    receiving = [name for name in view.system.list_dir(folder) if name.startswith("rx-")]
    if len(receiving) != 1 or (view.num_cpus or 1) < 4 or not _is_fast(nic):
        return
    mask = view.system.read_text(f"{folder}/rx-0/rps_cpus")
    if mask is not None and not parse_mask(mask):
        yield Finding(
            id="nic.no-packet-steering",
            subject=nic.name,
            severity="notice",
            title=f"{nic.name} has one receive queue and no packet steering: one processor handles every packet.",
            evidence=(Evidence(where=f"{folder}/rx-0/rps_cpus", seen=mask, expected="a mask of several processors"),),
            remedy=Remedy(
                text="spread packets in software",
                commands=(f"sh -c 'echo {(1 << min(view.num_cpus or 1, 32)) - 1:x} > {folder}/rx-0/rps_cpus'",),
                undo=(f"sh -c 'echo {mask} > {folder}/rx-0/rps_cpus'",),
            ),
            source="kernel Documentation/networking/scaling.rst (RPS)",
            path="tcp",
        )


def _ranges(cpus: frozenset[int] | set[int]) -> str:
    """``0-3,8`` from a set of numbers."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


CHECKS = (link, mtu, rings, offloads, interrupts)
