"""What to say about failures whose line names its cause: title, remedy and source by kind, as data."""

from __future__ import annotations

from typing import NamedTuple

from wirespeed.doctor.causes import Kind
from wirespeed.doctor.check import Path, Severity


class FailureText(NamedTuple):
    """Words of one kind of failure. ``{who}`` and ``{detail}`` are filled in."""

    id: str
    title: str
    fix: str
    commands: tuple[str, ...] = ()
    path: Path = "any"
    source: str = ""
    caution: str = ""
    severity: Severity = "critical"
    is_fatal: bool = True
    kind: Kind = "failure"
    """Other than "failure": the line says why a job is slow or at risk, not that it stopped."""


WORDS: dict[str, FailureText] = {
    "memlock": FailureText(
        "host.memlock", "{who} may not lock memory for RDMA: the memlock limit is too low",
        "lift the limit where the job starts: limits.conf, the service unit of the scheduler, the container",
        ("ulimit -l", "docker run --ulimit memlock=-1 ...",
         "echo '* - memlock unlimited' >> /etc/security/limits.conf"),
        "rdma", "NCCL troubleshooting guide",
    ),
    "reg_mr": FailureText(
        "gpu.peermem", "{who} cannot register GPU memory with the NIC ({detail})",
        "the peermem module is missing or of another driver version, or DMA-BUF is refused",
        ("lsmod | grep peermem", "modprobe nvidia_peermem"), "gpu", "NCCL troubleshooting guide",
    ),
    "no_interface": FailureText(
        "nccl.no-interface", "{who} found no interface for its sockets",
        "use a name or prefix that exists on every host; = asks for the exact name, ^ excludes",
        ("ip -br addr", "export NCCL_SOCKET_IFNAME=<prefix>", "unset NCCL_SOCKET_IFNAME"), "tcp", "marin#6940",
    ),
    "message_truncated": FailureText(
        "nccl.ranks-differ", "ranks disagree on the size of a message: NCCL version or settings differ between hosts",
        "make NCCL version and NCCL_* settings the same on all hosts (also /etc/nccl.conf and ~/.nccl.conf)",
        ("python -c 'import torch; print(torch.cuda.nccl.version())'",
         "env | grep NCCL_; cat /etc/nccl.conf ~/.nccl.conf"),
        "any", "nccl issues on \"message truncated\"",
    ),
    "version_mismatch": FailureText(
        "nccl.ranks-differ", "ranks run different NCCL versions",
        "make the NCCL version the same on all hosts",
        ("python -c 'import torch; print(torch.cuda.nccl.version())'",),
    ),
    "rank_count": FailureText(
        "launch.world-size", "ranks disagree on how many they are ({detail})",
        "start all ranks with the same world size; an old process of an earlier run may still listen",
    ),
    "duplicate_gpu": FailureText(
        "launch.duplicate-gpu", "two ranks use the same GPU (ranks {detail})",
        "set the device from LOCAL_RANK before the first collective, and give each rank one GPU",
        ("torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",), "gpu",
    ),
    "shared_memory": FailureText(
        "host.shm", "{who} ran out of shared memory (/dev/shm): {detail}",
        "enlarge /dev/shm: containers get 64 MB by default", ("df -h /dev/shm", "docker run --shm-size=16g ..."), "any",
        "NCCL troubleshooting guide",
    ),
    "cuda": FailureText(
        "gpu.cuda-error", "{who}: CUDA failed first ({detail}); the network errors follow from it",
        "look at the program and the GPU of that rank", ("dmesg -T | grep Xid", "CUDA_LAUNCH_BLOCKING=1"), "gpu",
    ),
    "gpu": FailureText(
        "gpu.error", "{who}: the GPU failed first; the network errors follow from it", "look at that GPU",
        ("dmesg -T | grep Xid", "nvidia-smi -q | grep -iE 'ecc|retired|xid' "), "gpu",
    ),
    "gpu_memory": FailureText(
        "job.gpu-memory", "{who} ran out of GPU memory; the network errors of the others follow from it",
        "not the network: a smaller batch, sharding or checkpointing on that rank", ("nvidia-smi",), "gpu",
    ),
    "program": FailureText(
        "job.exception", "{who}: the program failed first: {detail}",
        "not the network: mend the program; the others only lost their peer",
    ),
    "crash": FailureText(
        "job.crash", "{who} crashed ({detail}); the others only lost their peer",
        "not the network: look at that process",
        ("ulimit -c unlimited",),
    ),
    "host_memory": FailureText(
        "job.host-memory", "{who}: the host ran out of memory and the kernel killed a process",
        "not the network: fewer data-loader workers, more memory, or a higher limit of the job",
        ("dmesg -T | grep -i oom", "sacct -j <job> --format=MaxRSS,ReqMem"),
    ),
    "killed": FailureText(
        "job.killed", "{who}: {detail}, and nothing in these files says by whom",
        "look at the scheduler and the kernel log: out of memory, preemption, a time limit",
        ("dmesg -T | grep -i oom", "sacct -j <job> --format=State,ExitCode,MaxRSS"),
    ),
    "cancelled": FailureText(
        "job.cancelled", "the scheduler ended the job: {detail}", "see the scheduler's reason", ("sacct -j <job>",),
    ),
    "ofi": FailureText(
        "nccl.efa-missing", "{who}: the libfabric plugin found no EFA device ({detail})",
        "attach EFA interfaces, install the EFA driver, pass /dev/infiniband into the container, and open the security "
        "group to itself", ("fi_info -p efa", "ls /dev/infiniband"), "rdma", "nccl#527; aws-ofi-nccl#67, #64, #24",
    ),
    "acs": FailureText(
        "pci.acs", "{who}: ACS is on at a PCI switch, so GPU and NIC talk through the CPU", "turn ACS off (bare metal)",
        ("setpci -s <BDF> ECAP_ACS+0x6.w=0000",), "gpu", "NCCL troubleshooting guide",
    ),
    "bootstrap_timeout": FailureText(
        "tcp.bootstrap-timeout", "{who} waited in vain for the others at start-up",
        "some rank is not there, or cannot reach rank 0: compare interfaces and firewalls",
        ("nc -vz <master> <port>", "export NCCL_SOCKET_IFNAME=<interface>"), "tcp",
    ),
    "kernel_xid": FailureText(
        "gpu.xid", "the GPU at {who} failed: {detail}", "drain the host; reset or exchange the GPU",
        ("nvidia-smi -q -d ECC", "nvidia-bug-report.sh"), "gpu", "NVIDIA Xid documentation",
    ),
    "kernel_host_memory": FailureText(
        "job.host-memory", "the host ran out of memory and the kernel killed a process",
        "not the network: fewer data-loader workers, more memory, or a higher limit of the job", ("free -g",),
    ),
    "kernel_nic_hang": FailureText(
        "nic.hang", "the NIC {who} stopped answering its driver", "firmware and driver of the NIC; power and seating",
        ("ethtool -i <interface>",),
    ),
    "kernel_pcie_error": FailureText(
        "pci.errors", "PCIe errors at {who}", "reseat or exchange the card; look at the slot", ("lspci -vvv -s <BDF>",),
        severity="warning", is_fatal=False,
    ),
    "kernel_pcie_width": FailureText(
        "pci.width", "the NIC or GPU at {who} runs on a PCIe link below its best",
        "reseat it, or move it to a slot of full width; check the BIOS",
        ("lspci -vvv -s <BDF> | grep -E 'LnkCap|LnkSta'",),
        severity="warning", is_fatal=False,
    ),
    "kernel_conntrack": FailureText(
        "host.conntrack", "the connection table of the firewall is full: new connections are dropped",
        "raise nf_conntrack_max, or exempt the training network from tracking",
        ("sysctl net.netfilter.nf_conntrack_max net.netfilter.nf_conntrack_count",), "tcp",
    ),
    "kernel_syn_flood": FailureText(
        "tcp.listen-queue", "a listening socket cannot take connections as fast as they come (port {detail})",
        "raise net.core.somaxconn and the program's backlog", ("sysctl net.core.somaxconn",), "tcp", severity="notice",
        is_fatal=False,
    ),
    "kernel_module_hot": FailureText(
        "nic.hot", "the NIC or its module at {who} is too hot", "airflow, optics", ("mlxlink -d <device> -m",),
        severity="warning", is_fatal=False,
    ),
    "kernel_sxid": FailureText(
        "gpu.nvswitch", "an NVSwitch failed: {detail}", "drain the host; the fabric manager's log has the link",
        ("nvidia-smi nvlink -e", "journalctl -u nvidia-fabricmanager"), "gpu", "NVIDIA fabric manager user guide",
    ),
    "kernel_module": FailureText(
        "nic.module", "the cable or optic of {who} was unplugged or refused", "reseat it, then exchange it",
        ("mlxlink -d <device> -m",), "any", "kernel mlx5: port module events",
    ),
    "kernel_slot_power": FailureText(
        "pci.slot-power", "the PCIe slot gives the NIC at {who} too little power",
        "another slot, or the card's auxiliary power cable", ("lspci -vvv -s <BDF>",), "any", "leptonai/gpud",
        severity="warning", is_fatal=False,
    ),
    "kernel_lacp": FailureText(
        "nic.bond-without-partner", "the switch does not answer LACP for {who}: the bond is not one",
        "configure the switch ports as one 802.3ad group, on the right ports", ("cat /proc/net/bonding/<bond>",), "any",
        "kernel Documentation/networking/bonding.rst", severity="warning", is_fatal=False,
    ),
    "kernel_martian": FailureText(
        "route.asymmetric", "packets from {who} come in where the route back does not lead: they are dropped",
        "two interfaces in one subnet, or an asymmetric route: one interface per subnet, or rp_filter 2",
        ("ip route get <source>", "sysctl net.ipv4.conf.all.rp_filter"), "tcp", "kernel ip-sysctl.rst (log_martians)",
        severity="warning", is_fatal=False,
    ),
    "kernel_tcp_memory": FailureText(
        "tcp.memory", "TCP ran out of its memory on this host: connections stall",
        "tcp_mem counts pages: leave it to the kernel, or raise it; look for connections with full queues",
        ("sysctl net.ipv4.tcp_mem", "ss -s"), "tcp", "kernel ip-sysctl.rst (tcp_mem)", severity="warning",
        is_fatal=False,
    ),
    "kernel_arp_table": FailureText(
        "host.neighbour-table", "the table of neighbours overflows: hosts of one subnet forget each other",
        "raise net.ipv4.neigh.default.gc_thresh1 to 3 above the number of hosts",
        ("sysctl net.ipv4.neigh.default.gc_thresh3",), "tcp", "kernel ip-sysctl.rst (gc_thresh)",
    ),
    "kernel_iommu_fault": FailureText(
        "pci.iommu-fault", "the IOMMU refused a device's access to memory ({who})",
        "pass-through mode (iommu=pt) on bare metal; driver and firmware of the device",
        ("dmesg -T | grep -iE 'dmar|amd-vi'",), "any", "NCCL troubleshooting guide",
    ),
    "kernel_machine_check": FailureText(
        "host.hardware-error", "the processor or memory of this host reports errors", "drain the host; memory test",
        ("ras-mc-ctl --errors", "ipmitool sel list"), "any", "kernel: machine check", severity="warning",
        is_fatal=False,
    ),
    "kernel_host_hang": FailureText(
        "host.hang", "the kernel of this host hangs ({who}): its ranks do not answer",
        "look at what the stuck tasks wait for: often storage or a driver", ("echo w > /proc/sysrq-trigger; dmesg",),
        "any", "kernel: lockup and hung-task watchdogs",
    ),
    "kernel_storage": FailureText(
        "host.storage", "the file server {who} does not answer: reads and checkpoints wait for it",
        "not the training network: the file server, or the way to it", ("nfsstat -m", "lfs check servers"), "any",
        "nfs(5); Lustre manual", severity="warning", is_fatal=False,
    ),
    "kernel_throttled": FailureText(
        "host.throttled", "processors of this host are slowed down by heat ({who})", "airflow, dust, heat sink, BIOS",
        ("sensors", "turbostat --quiet --show Core,Bzy_MHz,CoreTmp"), "any", "kernel: thermal throttling",
        severity="warning", is_fatal=False,
    ),
    "kernel_allocation": FailureText(
        "host.memory-fragmented", "the kernel finds no large pieces of memory ({who}): drivers fail to get buffers",
        "more vm.min_free_kbytes; smaller rings", ("cat /proc/buddyinfo",), "any", "kernel: page allocator",
        severity="warning", is_fatal=False,
    ),
}  # fmt: skip
