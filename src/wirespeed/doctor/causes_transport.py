"""Why NCCL takes a slower path than it could, from its set-up lines: TCP for RDMA, no GPUDirect, a wrong interface.

A cloud machine without RDMA hardware uses TCP rightly; so a fallback is a finding only where something shows that RDMA
is there or was meant. Few channel lines prove nothing about GPUDirect: at least MIN_LINES of a NIC must lack it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from wirespeed.doctor.causes import Cause, make_cause, names
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.log_scan import JobFacts
from wirespeed.doctor.nccl_facts import NcclFacts
from wirespeed.doctor.nccl_formats import distance_name

MIN_LINES = 2
"""Channel lines without GPUDirect before it counts: one may have been cut in the log."""

VIRTUAL = ("docker", "virbr", "lo", "cni", "flannel", "veth", "br-", "cali", "kube", "podman", "lxc", "tun", "tap")
"""Interfaces that lead to no other host, but for tunnels of an overlay network."""


def is_virtual(interface: str) -> bool:
    """Whether an interface's name is one of a bridge, a container or the host itself."""
    return interface == "lo" or any(interface.startswith(name) for name in VIRTUAL if name != "lo")


def is_ipoib(interface: str) -> bool:
    """Whether the name is one that IP over InfiniBand has."""
    return interface.startswith("ib") and not interface.startswith("ibext")


def transport_causes(job: JobFacts) -> Iterator[Cause]:
    """All causes of this kind."""
    nccl = job.nccl
    yield from _virtual_interface(nccl)
    yield from _fell_back(job)
    yield from _without_gpudirect(nccl)
    yield from _hca_set(nccl)
    yield from _inside_host(nccl)
    yield from _unknown_speed(nccl)


def _values(nccl: NcclFacts, name: str) -> tuple[str, ...]:
    return tuple(nccl.settings.get(name, {}))


def shows_rdma(job: JobFacts) -> str:
    """What shows that RDMA hardware is there or was meant; empty where nothing does."""
    nccl = job.nccl
    if nccl.hcas:
        return f"{names(nccl.hcas)} has RDMA ports in use"
    named = [name for name in nccl.settings if name.startswith("NCCL_IB_") and name != "NCCL_IB_DISABLE"]
    if named:
        return f"{named[0]} is set, so RDMA was meant to be used"
    if any(is_ipoib(name) for pairs in nccl.sockets.values() for name, _ in pairs):
        return "an InfiniBand interface carries IP"
    if any(measurement.tool == "perftest" for measurement in job.measurements):
        return "perftest ran over RDMA"
    if nccl.hosts_without_verbs:
        return ""
    return ""


def _virtual_interface(nccl: NcclFacts) -> Iterator[Cause]:
    wrong: dict[str, set[str]] = defaultdict(set)
    for held in (nccl.sockets, nccl.bootstrap) if not nccl.uses_rdma else (nccl.bootstrap,):
        for host, pairs in held.items():
            # Where a proper interface comes first, NCCL spreads over all: only a sole or first virtual one misleads.
            for interface, _ in pairs[:1] if held is nccl.bootstrap else pairs:
                if is_virtual(interface):
                    wrong[interface].add(host)
    has_many = len(nccl.hosts) > 1 or any(comm.num_ranks > max(1, nccl.num_processes) for comm in nccl.comms)
    for interface, hosts in wrong.items():
        if not has_many:
            continue
        excluded = _values(nccl, "NCCL_SOCKET_IFNAME")
        why = ""
        if any(value.startswith("^") and "lo" not in value for value in excluded):
            why = f" (NCCL_SOCKET_IFNAME={excluded[0]} replaces NCCL's own list of exclusions, so lo is allowed)"
        yield make_cause(
            "nccl.wrong-interface",
            f"NCCL uses {interface} on {names(hosts)}, which leads to no other host{why}",
            nccl.lines(f"bootstrap {interface}", "sockets", "setting NCCL_SOCKET_IFNAME"),
            kind="transport",
            weight=0.92,
            severity="critical",
            subject=interface,
            path="tcp",
            fix="name the interface that joins the hosts; an exclusion must name all of them: ^docker,lo,virbr",
            commands=("ip -br addr", "export NCCL_SOCKET_IFNAME=<interface>", "export GLOO_SOCKET_IFNAME=<interface>"),
            undo=("unset NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME",),
            source="NCCL environment documentation; horovod#584",
        )


def _fell_back(job: JobFacts) -> Iterator[Cause]:
    nccl = job.nccl
    if not nccl.uses_sockets:
        return
    socket_hosts = {v.host for v in nccl.vias if v.via.kind == "NET" and "Socket" in v.via.network}
    socket_hosts |= {host for name, hosts in nccl.networks.items() if "Socket" in name for host in hosts}
    evidence = nccl.lines("network Socket", "via NET", "sockets")
    off = [value for value in _values(nccl, "NCCL_IB_DISABLE") if value.strip() not in ("0", "")]
    forced = [value for value in _values(nccl, "NCCL_NET") if value.lower() in ("socket", "tcp")]
    common: dict[str, Any] = {"kind": "transport", "subject": "transport", "path": "rdma"}
    if off or forced:
        name = "NCCL_IB_DISABLE" if off else "NCCL_NET"
        value = off[0] if off else forced[0]
        yield make_cause(
            "nccl.rdma-disabled",
            f"{name}={value} keeps NCCL on TCP",
            (*nccl.lines(f"setting {name}"), *evidence),
            weight=0.97,
            severity="critical",
            fix=f"unset {name}; where it was set to hide an RDMA failure, mend that instead (4 to 5 times slower so)",
            commands=(f"unset {name}", "export NCCL_NET=IB   # then a fallback fails loudly"),
            undo=(f"export {name}={value}",),
            source="sglang PR #1427",
            **common,
        )
    elif nccl.hosts_without_verbs:
        yield make_cause(
            "nccl.verbs-missing",
            f"libibverbs is not installed in the image or host of {names(nccl.hosts_without_verbs)}, so NCCL uses TCP",
            (*nccl.lines("no verbs"), *nccl.lines("no ib"), *evidence),
            weight=0.95,
            severity="critical",
            fix="install the user-space verbs in the image, and pass the devices in",
            commands=(
                "apt-get install -y libibverbs1 ibverbs-providers rdma-core",
                "docker run --device=/dev/infiniband --ulimit memlock=-1 --cap-add=IPC_LOCK ...",
                "export NCCL_NET=IB   # then a fallback fails loudly",
            ),
            source="sglang PR #1427; AReaL#639; nvidia-container-toolkit#1877",
            alternatives="on a machine without RDMA hardware TCP is right: ls /sys/class/infiniband tells",
            **common,
        )
    elif any(is_ipoib(name) for pairs in nccl.sockets.values() for name, _ in pairs):
        yield make_cause(
            "nccl.ipoib",
            f"{names(socket_hosts)} sends TCP over InfiniBand (IPoIB) instead of using verbs",
            (*nccl.lines("sockets"), *evidence),
            weight=0.9,
            severity="critical",
            fix="make NCCL use NET/IB: verbs in the image, /dev/infiniband passed in, NCCL_IB_DISABLE not set",
            commands=("ls /dev/infiniband /sys/class/infiniband", "export NCCL_NET=IB"),
            source="nccl#952",
            **common,
        )
    elif nccl.uses_rdma or (nccl.hcas and socket_hosts):
        yield make_cause(
            "nccl.mixed-transport",
            f"{names(socket_hosts)} uses TCP while {names(nccl.hcas)} uses RDMA",
            evidence,
            weight=0.9,
            severity="critical",
            fix="make all hosts alike: verbs, devices and NCCL_IB_HCA on the odd ones",
            commands=("ls /dev/infiniband /sys/class/infiniband", "ibv_devinfo | grep -E 'hca_id|state'"),
            **common,
        )
    elif shows := shows_rdma(job):
        filters = _values(nccl, "NCCL_IB_HCA")
        yield make_cause(
            "nccl.no-rdma-device",
            f"NCCL found no usable RDMA port on {names(nccl.hosts_without_ib or socket_hosts)} and uses TCP, "
            f"though {shows}" + (f"; NCCL_IB_HCA={filters[0]} may name none that exists" if filters else ""),
            (*nccl.lines("no ib", "setting NCCL_IB_HCA"), *evidence),
            weight=0.85,
            severity="critical",
            fix="check that the devices reach the container and that a port is ACTIVE under a name NCCL_IB_HCA allows",
            commands=("ls /dev/infiniband", "ibv_devinfo | grep -E 'hca_id|state|link_layer'", "export NCCL_NET=IB"),
            source="AReaL#639; nccl#941",
            **common,
        )


def _without_gpudirect(nccl: NcclFacts) -> Iterator[Cause]:
    with_gdr, without = (
        nccl.num_via("NET", network="IB", has_gdr=True),
        nccl.num_via("NET", network="IB", has_gdr=False),
    )
    disabled = [held for held in nccl.gdr_hcas if not held.is_enabled]
    far = [held for held in nccl.gdr_gpus if not held.is_enabled]
    evidence = nccl.lines("gdr hca Disabled", "gdr gpu Disabled", "gdr summary 0", "via NET")
    levels = _values(nccl, "NCCL_NET_GDR_LEVEL")
    lacks_all = (
        nccl.uses_rdma and with_gdr == 0 and (without >= MIN_LINES or (nccl.num_gdr_off and not nccl.num_gdr_on))
    )
    if lacks_all and levels and levels[0].upper() in ("LOC", "0", "-1"):
        yield make_cause(
            "nccl.gdr-level",
            f"NCCL_NET_GDR_LEVEL={levels[0]} turns GPUDirect RDMA off",
            (*nccl.lines("setting NCCL_NET_GDR_LEVEL"), *evidence),
            kind="transport",
            weight=0.95,
            path="gpu",
            fix="unset it: the default follows the topology",
            commands=("unset NCCL_NET_GDR_LEVEL",),
            undo=(f"export NCCL_NET_GDR_LEVEL={levels[0]}",),
        )
    elif far and (lacks_all or without >= MIN_LINES) and not disabled:
        codes = {distance_name(held.distance, nccl.version) or f"code {held.distance}" for held in far if held.distance}
        crosses = "SYS" in codes
        gpus = sorted({f"GPU {held.gpu} - HCA {held.hca}" for held in far})
        yield make_cause(
            "nccl.gpu-nic-distance",
            f"GPU and NIC are too far apart for GPUDirect ({', '.join(sorted(codes))}): {names(gpus, limit=3)}"
            + ("; the traffic crosses the CPU interconnect" if crosses else ""),
            evidence,
            kind="transport",
            weight=0.88,
            path="gpu",
            subject="gpu-nic",
            fix="give each GPU the NIC of its own PCIe switch or NUMA node; in a VM pass the topology with "
            "NCCL_TOPO_FILE",
            commands=("nvidia-smi topo -m", "export NCCL_TOPO_DUMP_FILE=/tmp/topo.xml"),
            source="NCCL graph/paths.cc; nccl-tests#347, #350 (#347 unconfirmed)",
            alternatives="raising NCCL_NET_GDR_LEVEL is a test only: across sockets it can be slower than the "
            "host's memory",
        )
    elif lacks_all:
        no_module = any("module" in held.reason for held in disabled)
        yield make_cause(
            "nccl.no-gpudirect",
            f"RDMA without GPUDirect on {names(held.host for held in nccl.vias if held.via.kind == 'NET')}: every byte "
            "takes a detour through the host's memory"
            + ("; neither nvidia_peermem nor DMA-BUF is there" if no_module and not nccl.dmabuf_hosts else ""),
            evidence,
            kind="transport",
            weight=0.9 if disabled or nccl.num_gdr_off else 0.8,
            path="gpu",
            subject="gpudirect",
            fix="load nvidia_peermem, or use the open kernel driver with DMA-BUF; on bare metal turn ACS off",
            commands=("modprobe nvidia_peermem", "lspci -vvv | grep -i ACSCtl   # SrcValid+ is bad on bare metal"),
            undo=("modprobe -r nvidia_peermem",),
            source="nccl#489, #595, #1412; NCCL troubleshooting guide",
            alternatives="GeForce cards have no GPUDirect RDMA: then this is as good as it gets",
        )
    elif with_gdr and without >= MIN_LINES:
        yield from _partial_gpudirect(nccl, evidence)


def _partial_gpudirect(nccl: NcclFacts, evidence: tuple[Evidence, ...]) -> Iterator[Cause]:
    on: dict[tuple[str, int | None], int] = defaultdict(int)
    off: dict[tuple[str, int | None], int] = defaultdict(int)
    for held in nccl.vias:
        if held.via.kind == "NET" and held.via.network.startswith("IB"):
            (on if held.via.has_gdr else off)[held.host, held.via.device] += held.count
    dark = [key for key, count in off.items() if count >= MIN_LINES and not on.get(key)]
    if not dark:
        return
    ports = {host: {hca.number: hca.name for hca in hcas} for host, hcas in nccl.hcas.items()}
    labels = [f"{host} {ports.get(host, {}).get(device or 0, f'HCA {device}')}" for host, device in dark]
    yield make_cause(
        "nccl.partial-gpudirect",
        f"GPUDirect is off on some NICs only: {names(labels)}",
        evidence,
        kind="transport",
        weight=0.85,
        path="gpu",
        subject="gpudirect",
        fix="compare these NICs with their neighbours: PCIe position, ACS, IOMMU, nvidia_peermem loaded on that host",
        commands=("nvidia-smi topo -m", "lsmod | grep peermem"),
        source="nccl#392; nv_peer_memory#56",
    )


def _hca_set(nccl: NcclFacts) -> Iterator[Cause]:
    families = {hca.family for hcas in nccl.hcas.values() for hca in hcas}
    if len(families) > 1:
        yield make_cause(
            "nccl.mixed-hcas",
            f"NCCL uses RDMA ports of different makes together: {', '.join(sorted(families))}",
            nccl.lines("hcas"),
            kind="transport",
            weight=0.7,
            subject="hcas",
            fix="keep to one make with NCCL_IB_HCA, and to a GID index that is right for it",
            commands=(f"export NCCL_IB_HCA={sorted(families)[0]}",),
            undo=("unset NCCL_IB_HCA",),
            source="nccl#1526",
        )
    layers = {hca.layer for hcas in nccl.hcas.values() for hca in hcas}
    if len(layers) > 1 and len(families) == 1:
        yield make_cause(
            "nccl.mixed-layers",
            "NCCL uses InfiniBand and Ethernet (RoCE) ports together: a management or storage port may be among them",
            nccl.lines("hcas"),
            kind="transport",
            weight=0.65,
            subject="hcas",
            fix="name the ports of the training network in NCCL_IB_HCA (= for exact names)",
            commands=("ibv_devinfo | grep -E 'hca_id|link_layer|active_mtu'", "export NCCL_IB_HCA==mlx5_0,mlx5_1"),
            undo=("unset NCCL_IB_HCA",),
        )
    counts = {host: len(hcas) for host, hcas in nccl.hcas.items()}
    if len(set(counts.values())) > 1:
        most = max(counts.values())
        few = [host for host, count in counts.items() if count < most]
        yield make_cause(
            "nccl.hca-count",
            f"{names(few)} uses {min(counts.values())} RDMA ports where the others use {most}",
            (line for host in few for line in nccl.lines(f"hcas {host}")),
            kind="transport",
            weight=0.75,
            severity="critical",
            subject="hcas",
            host=few[0] if len(few) == 1 else "",
            fix="find the missing port: down, not passed into the container, or left out by NCCL_IB_HCA",
            commands=("ibv_devinfo | grep -E 'hca_id|state'",),
        )


def _inside_host(nccl: NcclFacts) -> Iterator[Cause]:
    if nccl.num_via("SHM") >= MIN_LINES and not nccl.num_via("P2P"):
        off = _values(nccl, "NCCL_P2P_DISABLE") or _values(nccl, "NCCL_P2P_LEVEL")
        yield make_cause(
            "nccl.no-p2p",
            "GPUs of one host exchange through shared memory, not directly"
            + (f" (NCCL_P2P_* is set to {off[0]})" if off else ""),
            (*nccl.lines("setting NCCL_P2P_DISABLE", "setting NCCL_P2P_LEVEL"), *nccl.lines("via SHM")),
            kind="transport",
            weight=0.9 if off else 0.55,
            severity="warning" if off else "notice",
            path="gpu",
            subject="p2p",
            fix="unset NCCL_P2P_DISABLE; check ACS and IOMMU, which forbid P2P on bare metal",
            commands=("nvidia-smi topo -p2p r", "unset NCCL_P2P_DISABLE"),
            alternatives="GPUs on different sockets, or without P2P at all, rightly use shared memory",
        )


def _unknown_speed(nccl: NcclFacts) -> Iterator[Cause]:
    names_held = [name for name in nccl.interfaces_without_speed if not is_virtual(name)]
    if names_held and nccl.uses_sockets:
        yield make_cause(
            "nccl.speed-unknown",
            f"NCCL cannot read the speed of {names(names_held)} and plans for 10 Gbit/s",
            nccl.lines("no speed"),
            kind="setting",
            weight=0.4,
            severity="notice",
            path="tcp",
            subject=names_held[0],
            fix="in a virtual machine this is usual; NCCL_NSOCKS_PERTHREAD and NCCL_SOCKET_NTHREADS make up for it "
            "above "
            "10 Gbit/s",
        )
