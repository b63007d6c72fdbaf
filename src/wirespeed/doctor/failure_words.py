"""What to say about failures whose line names its cause: title, remedy and source by kind, as data."""

from __future__ import annotations

from typing import NamedTuple

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
}  # fmt: skip
