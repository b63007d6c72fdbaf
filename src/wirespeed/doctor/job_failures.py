"""What launchers, gloo, UCX, MPI and the system say when a job dies or cannot start: one row per kind of line.

A row has a trigger (a word without digits that every such line holds, so that a block is searched at memory speed),
the pattern, and what to say. Distractors look alike: a client of a web service that cannot resolve a name, a rendezvous
that retries. Patterns therefore name the program that speaks, and warnings of a healthy start are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from wirespeed.doctor.failure_words import FailureText


class Said(NamedTuple):
    """What one line says."""

    kind: str
    detail: str = ""
    is_primary: bool = True
    host: str = ""
    rank: int | None = None
    code: int | None = None
    device: str = ""
    peer: str = ""


class JobRule(NamedTuple):
    """``trigger`` is in every line that ``pattern`` finds. ``read`` None: the first group is the detail."""

    kind: str
    trigger: bytes
    pattern: re.Pattern[bytes]
    is_primary: bool = True
    read: Callable[[re.Match[bytes]], Said | None] | None = None


def _text(data: bytes | None, limit: int = 120) -> str:
    return "" if data is None else data.decode("utf-8", errors="replace").strip()[:limit]


_SIGNALS = {b"9": "killed", b"11": "crash", b"7": "shared_memory", b"4": "crash", b"8": "crash"}
_SIGNAL_WORDS = {
    "killed": "a process was killed (SIGKILL)", "crash": "segmentation fault or the like",
    "shared_memory": "bus error (often /dev/shm is full)",
}  # fmt: skip


def said_signal(number: bytes, *, host: str = "", rank: int | None = None) -> Said | None:
    """What a signal that ended a process means; None for those that launchers send to the rest."""
    kind = _SIGNALS.get(number)
    return None if kind is None else Said(kind, _SIGNAL_WORDS[kind], host=host, rank=rank)


def _mpirun(found: re.Match[bytes]) -> Said | None:
    return said_signal(found[3], host=_text(found[2]), rank=int(found[1]))


def _srun(found: re.Match[bytes]) -> Said | None:
    host, tasks, words = _text(found[1]), _text(found[2]), found[3]
    rank = int(tasks) if tasks.isdigit() else None
    detail = f"task {tasks}: {_text(words)}"
    if words == b"Killed":
        return Said("killed", detail, host=host, rank=rank)
    if words.lower() == b"out of memory":
        return Said("host_memory", detail, host=host, rank=rank)
    if words in (b"Segmentation fault", b"Illegal instruction", b"Floating point exception"):
        return Said("crash", detail, host=host, rank=rank)
    if words == b"Bus error":
        return Said("shared_memory", detail, host=host, rank=rank)
    return None


def _ucx(found: re.Match[bytes]) -> Said:
    words = found[1].lower()
    code = 12 if words.startswith(b"transport") else 13 if words.startswith(b"receiver") else 4
    return Said("completion", f"{_text(found[1])} (UCX)", code=code, device=_text(found[2]))


def _perftest(found: re.Match[bytes]) -> Said:
    code = int(found[1])
    return Said("completion", f"perftest: status {code}, syndrome {_text(found[2])}", is_primary=code != 5, code=code)


def _gloo_connect(found: re.Match[bytes]) -> Said:
    peer, why = _text(found[2]), _text(found[1]) or "timed out"
    if peer.startswith("127."):
        return Said("gloo_loopback", peer, peer=peer)
    return Said("connect", why, peer=peer)


def _shared_or_disk(found: re.Match[bytes]) -> Said:
    is_shared = b"shm" in found.string or b"hared memory" in found.string or b"/torch_" in found.string
    return Said("shared_memory" if is_shared else "disk_full", "no space left on device")


_NOT_OURS = re.compile(rb"https?://|HTTPS?Connection|urllib|wandb|huggingface|mlflow|sentry|\bpip\b|requests\.", re.I)


def _name(found: re.Match[bytes]) -> Said | None:
    if _NOT_OURS.search(found.string) is not None:
        return None  # a web service that is not reached does not stop ranks
    return Said("name_unresolved", _text(found[1] or found[2] or found[3]))


def _joined(found: re.Match[bytes]) -> Said:
    numbers = [int(group) for group in found.groups() if group is not None]
    return Said("rank_missing", f"{min(numbers)} of {max(numbers)} joined")


_R = re.compile
RULES: tuple[JobRule, ...] = (
    JobRule("port_in_use", b"EADDRINUSE", _R(rb"(port: \d{1,5}).*EADDRINUSE|EADDRINUSE")),
    JobRule("port_in_use", b"ddress already in use",
            _R(rb"(?:server socket .*|RuntimeError: |c10d.*)([Aa]ddress already in use)")),
    JobRule(
        "master_unreachable", b"while trying to connect to",
        _R(rb"client socket has timed out after .{1,20} while trying to connect to \(?\[?"
           rb"([\w.:\-]+?[\],: ]+\d{1,5})\b"),
    ),
    JobRule("master_unreachable", b"RendezvousConnectionError", _R(rb"RendezvousConnectionError: (.{1,120})")),
    JobRule("rendezvous_timeout", b"RendezvousTimeoutError", _R(rb"RendezvousTimeoutError")),
    JobRule(
        "rank_missing", b"waiting for clients",
        _R(rb"Timed out after \d+ seconds waiting for clients\. (\d{1,7})/(\d{1,7}) clients joined"), read=_joined,
    ),
    JobRule(
        "rank_missing", b"imed out initializing process group",
        _R(rb"world_size=(\d{1,7}), (?:worker_count|num_workers_joined)=(\d{1,7})"), read=_joined,
    ),
    JobRule(
        "store", b"retrieving ncclUniqueId",
        _R(rb"retrieving ncclUniqueId from \[?(?:rank )?(\d{1,7})\]?.*got error: (?:[^\n]{0,120})"), is_primary=False,
    ),
    JobRule("store", b"on SocketImpl", _R(rb"(?:recvValue|sendBytes|recvVector|waitForInput)\w* failed on SocketImpl\("
                                          rb"[^)\n]*remote=\[?([\w.:\-]+?)\]?:\d+\)"),
            read=lambda m: Said("store", "the store's connection broke", is_primary=False, peer=_text(m[1]))),
    JobRule("unexplained", b"NCCL error in",
            _R(rb"NCCL error in[^\n]*?, (unhandled \w+ error|internal error|invalid usage|"
               rb"remote process exited or there was a network error)"), is_primary=False),
    JobRule("collective_mismatch", b"mismatch between collectives",
            _R(rb"mismatch between collectives.{0,20}?\. ?(.*)")),
    JobRule("barrier_missed", b"to pass monitoredBarrier",
            _R(rb"[Rr]anks? ([\d, ]+?) failed to pass monitoredBarrier")),
    JobRule("stuck", b"eartbeat monitor timed out", _R(rb"[Hh]eartbeat monitor timed out"), is_primary=False),
    JobRule("stuck", b"watchdog got stuck", _R(rb"watchdog got stuck for (\d+ \w+)"), is_primary=False),
    JobRule("name_unresolved", b"gai error", _R(rb"addresses of \(([\w.\-]+), \d+\) cannot be retrieved|()()gai error"),
            read=_name),
    JobRule("name_unresolved", b"gaierror", _R(rb"()()gaierror: \[Errno -\d+\] ([^\n]{0,80})"), read=_name),
    JobRule("name_unresolved", b"ould not resolve hostname", _R(rb"[Cc]ould not resolve hostname ([\w.\-]+)()()"),
            read=_name),
    JobRule("ssh", b"ssh: connect to host", _R(rb"ssh: connect to host (\S+ port \d+: .{1,60})")),
    JobRule("ssh", b"ost key verification failed", _R(rb"(Host key verification failed)")),
    JobRule("ssh", b"ermission denied (publickey", _R(rb"(Permission denied \(publickey[^)]*\))")),
    JobRule(
        "killed", b"mpirun noticed that process",
        _R(rb"process rank (\d{1,7}) with PID \d+ on node (\S+) exited on signal (\d{1,3})"), read=_mpirun,
    ),
    JobRule("killed", b"srun: error:",
            _R(rb"srun: error: (\S+): tasks? ([\d,\-]+): ([A-Z][A-Za-z ]+?)(?: \(core dumped\))?\s*$"), read=_srun),
    JobRule("node_lost", b"lost communication with a remote daemon", _R(rb"lost communication with a remote daemon")),
    JobRule("node_lost", b"TE daemon has unexpectedly", _R(rb"[OP]RTE daemon has unexpectedly failed")),
    JobRule("node_lost", b"DUE TO NODE FAIL", _R(rb"(?:ON (\S+) )?CANCELLED.*DUE TO NODE FAIL")),
    JobRule("node_lost", b"ode failure on", _R(rb"[Nn]ode failure on (\S+)")),
    JobRule("node_lost", b"missed too many heartbeats",
            _R(rb"[Tt]he node with node id:? \w* ?(?:and address: (\S+) )?.*missed too many heartbeats")),
    JobRule("node_lost", b"odeNotReady", _R(rb"NodeNotReady\s+(\S*)")),
    JobRule("host_memory", b"OOMKilled", _R(rb"OOMKilled")),
    JobRule("cancelled", b"The node was low on resource", _R(rb"(The node was low on resource: [\w\-]+)")),
    JobRule("open_files", b"oo many open files", _R(rb"[Tt]oo many open files")),
    JobRule("disk_full", b"No space left on device", _R(rb"No space left on device"), read=_shared_or_disk),
    JobRule("completion", b"UCX  ERROR",
            _R(rb"UCX +ERROR +(Transport retry count exceeded|Receiver-not-ready retry count exceeded|"
               rb"Local protection\w*)(?: on ([\w.\-]+))?"), read=_ucx),
    JobRule("completion", b"Failed status", _R(rb"Failed status (\d{1,3}): wr_id \d+ syndrom (\S+)"), read=_perftest),
    JobRule("modify_qp", b"Failed to modify QP", _R(rb"Failed to modify QP \d* ?to (RT[RS])")),
    JobRule("connect", b"ouldn't connect to", _R(rb"Couldn't connect to ([\w.\-]+:\d+)")),
    JobRule("connect", b"unable to connect to server",
            _R(rb"iperf3: error - unable to connect to server[^:]*: ([^\n]{1,80})")),
    JobRule("connect", b"btl_tcp_endpoint", _R(rb"connect\(\) to ([\d.]+):\d+ failed: ([^\n(]{1,60})"),
            read=lambda m: Said("connect", _text(m[2]), peer=_text(m[1]))),
    JobRule("connect", b"onnectFullMesh", _R(rb"onnectFullMesh failed with.*?(?:SO_ERROR: ([^,\n]+), )?"
                                             rb"remote=\[?([\d.a-f:]+?)[\]:]"), read=_gloo_connect),
    JobRule("gloo_interface", b"nable to find address for", _R(rb"Unable to find address for:? ?([\w.\-]+)")),
    JobRule("gloo_hostname", b"nable to resolve hostname to a",
            _R(rb"Unable to resolve hostname to a \(?local\)? address")),
    JobRule("memlock_warning", b"RLIMIT_MEMLOCK is", _R(rb"RLIMIT_MEMLOCK is (\d+ bytes)")),
    JobRule("verbs_provider", b"no userspace device-specific driver",
            _R(rb"no userspace device-specific driver found for (\S+)")),
    JobRule("library", b"undefined symbol", _R(rb"undefined symbol: (nccl\w+)")),
    JobRule("library", b"libnccl.so", _R(rb"(libnccl\.so[.\d]*): cannot open shared object file")),
    JobRule("driver", b"driver version is insufficient", _R(rb"(driver version is insufficient[^\n]{0,60})")),
    JobRule("no_gpu", b"no CUDA-capable device", _R(rb"(no CUDA-capable device is detected)")),
    JobRule("device_ordinal", b"invalid device ordinal", _R(rb"invalid device ordinal")),
    JobRule("fabric_manager", b"system not yet initialized", _R(rb"system not yet initialized")),
    JobRule("gpu", b"GPU is lost", _R(rb"(GPU is lost[^\n]{0,60})")),
)  # fmt: skip
"""In this order: the first row whose pattern is found in a line speaks for it."""

TRIGGERS: tuple[bytes, ...] = tuple(dict.fromkeys(rule.trigger for rule in RULES))


def read_line(line: bytes) -> Said | None:
    """What a line says of the kinds above; None where it is none of them, or harmless."""
    for rule in RULES:
        if rule.trigger not in line:
            continue
        found = rule.pattern.search(line)
        if found is None:
            continue
        if rule.read is not None:
            return rule.read(found)
        groups = [group for group in found.groups() if group is not None]
        return Said(rule.kind, _text(groups[0] if groups else found[0]), is_primary=rule.is_primary)
    return None


WORDS: dict[str, FailureText] = {
    "port_in_use": FailureText(
        "launch.port-in-use", "{who} cannot listen on the rendezvous port: it is taken already ({detail})",
        "an old process of an earlier run still listens, or another job shares the host: end it, or take another port",
        ("ss -ltnp 'sport = :29500'", "torchrun --rdzv-endpoint <host>:<another port> ..."), "tcp",
        "torch.distributed: TCPStore",
    ),
    "master_unreachable": FailureText(
        "launch.master-unreachable", "{who} could not reach the master ({detail}) in time",
        "rank 0 is not up, its name or port is not the one it listens on, or a firewall is between",
        ("getent hosts <master>", "nc -vz <master> <port>", "ss -ltnp   # on the master"), "tcp",
        "torch.distributed: TCPStore",
    ),
    "rendezvous_timeout": FailureText(
        "launch.rendezvous-timeout", "{who}: not enough hosts came to the rendezvous in time",
        "compare --nnodes with the hosts that started, and the same --rdzv-id and endpoint on all of them",
        ("torchrun --nnodes <n> --rdzv-id <same> --rdzv-endpoint <same> ...",), "tcp", "torchrun (elastic rendezvous)",
    ),
    "rank_missing": FailureText(
        "launch.rank-missing", "{who} waited at the start for ranks that never came ({detail})",
        "a rank died before it joined, or was started with another world size or port: its own log says why",
        ("wirespeed doctor logs <logs of all ranks>",), "any", "torch.distributed: TCPStore",
    ),
    "collective_mismatch": FailureText(
        "job.desync", "{who}: ranks call different collectives at the same time ({detail})",
        "not the network: ranks take different branches on rank or data", ("TORCH_DISTRIBUTED_DEBUG=DETAIL",), "any",
        "torch.distributed debug checks",
    ),
    "barrier_missed": FailureText(
        "job.desync", "rank {detail} did not arrive at a barrier that the others wait in",
        "the network waits for the program here: look at that rank", ("py-spy dump --pid <pid of the rank>",), "any",
        "torch.distributed.monitored_barrier",
    ),
    "name_unresolved": FailureText(
        "launch.name-not-resolved", "{who} cannot resolve the name of a peer ({detail})",
        "the same names in DNS or /etc/hosts on every host and in every container", ("getent hosts <name>",), "tcp",
        "getaddrinfo(3)",
    ),
    "ssh": FailureText(
        "launch.ssh", "the launcher cannot start ranks over ssh: {detail}",
        "keys and known hosts for a login without a password between the hosts, and sshd reachable",
        ("ssh -o BatchMode=yes <host> true",), "tcp", "ssh(1)",
    ),
    "node_lost": FailureText(
        "job.node-lost", "a host went away while the job ran ({detail})",
        "look at that host: power, kernel, its management network; the scheduler's log has the time",
        ("sinfo -R; scontrol show node <host>", "journalctl -b -1 -k   # on that host"), "any", "scheduler or launcher",
    ),
    "open_files": FailureText(
        "host.open-files", "{who} ran out of file descriptors (too many open files)",
        "raise the limit of open files where the job starts; many ranks and data loaders need thousands",
        ("ulimit -n", "ulimit -n 65536   # before the job, or LimitNOFILE= in the service"), "any", "getrlimit(2)",
    ),
    "disk_full": FailureText(
        "host.disk-full", "{who}: a disk is full ({detail})", "not the network: free space, or write elsewhere",
        ("df -h", "du -xsh /tmp"), "any", "write(2)",
    ),
    "gloo_loopback": FailureText(
        "gloo.wrong-interface", "gloo was told to connect to {detail}, an address of the host itself",
        "the host's own name resolves to a loopback address (often 127.0.1.1 in /etc/hosts): name the interface",
        ("getent hosts $(hostname)", "export GLOO_SOCKET_IFNAME=<interface>"), "tcp", "gloo: address of the hostname",
    ),
    "gloo_interface": FailureText(
        "gloo.no-interface", "{who}: gloo finds no address on interface {detail}",
        "GLOO_SOCKET_IFNAME must name an interface that exists and has an address on every host",
        ("ip -br addr", "export GLOO_SOCKET_IFNAME=<interface>"), "tcp", "torch.distributed: gloo",
    ),
    "gloo_hostname": FailureText(
        "gloo.wrong-interface", "{who}: gloo cannot turn the host's name into one of its addresses",
        "name the interface, or mend the host's entry in /etc/hosts",
        ("getent hosts $(hostname)", "export GLOO_SOCKET_IFNAME=<interface>"), "tcp", "torch.distributed: gloo",
    ),
    "memlock_warning": FailureText(
        "host.memlock", "{who} may lock only {detail} of memory: RDMA registrations will fail or stay small",
        "lift the limit where the job starts: limits.conf, the service unit of the scheduler, the container",
        ("ulimit -l", "docker run --ulimit memlock=-1 ..."), "rdma", "libibverbs", kind="setting",
    ),
    "verbs_provider": FailureText(
        "nccl.verbs-missing", "the verbs library has no driver for the NIC ({detail}), so RDMA cannot be used",
        "install the provider of the NIC in the image: ibverbs-providers, or rdma-core",
        ("apt-get install -y ibverbs-providers", "ibv_devinfo", "export NCCL_NET=IB   # then a fallback fails loudly"),
        "rdma", "libibverbs", kind="transport",
    ),
    "library": FailureText(
        "launch.library-mismatch", "{who} loads another NCCL library than it was built for ({detail})",
        "one NCCL only: unset LD_LIBRARY_PATH and LD_PRELOAD entries of others, or install the one that torch names",
        ("python -c 'import torch; print(torch.cuda.nccl.version())'", "ldd <libtorch_cuda.so> | grep nccl"), "any",
        "ld.so(8)",
    ),
    "driver": FailureText(
        "gpu.driver-too-old", "{who}: the GPU driver is older than the CUDA of this program ({detail})",
        "a newer driver, or a build for the driver's CUDA", ("nvidia-smi | head -4",), "gpu",
        "CUDA compatibility guide",
    ),
    "no_gpu": FailureText(
        "gpu.no-device", "{who} sees no GPU ({detail})",
        "devices passed into the container, CUDA_VISIBLE_DEVICES, the driver's modules",
        ("nvidia-smi -L", "echo $CUDA_VISIBLE_DEVICES", "docker run --gpus all ..."), "gpu", "CUDA runtime",
    ),
    "device_ordinal": FailureText(
        "launch.device-ordinal", "{who} asks for a GPU that is not there (invalid device ordinal)",
        "more ranks per host than visible GPUs: compare LOCAL_RANK, --nproc-per-node and CUDA_VISIBLE_DEVICES",
        ("nvidia-smi -L", "echo $CUDA_VISIBLE_DEVICES"), "gpu", "CUDA runtime",
    ),
    "fabric_manager": FailureText(
        "gpu.fabric-manager", "{who}: the NVSwitch system is not initialised: the fabric manager does not run",
        "start nvidia-fabricmanager in the driver's own version",
        ("systemctl status nvidia-fabricmanager", "nvidia-smi -q | grep -A2 Fabric"), "gpu",
        "NVIDIA fabric manager user guide",
    ),
    "nvls": FailureText(
        "gpu.nvls", "{who}: NVLink SHARP multicast could not be set up ({detail})",
        "fabric manager and NVSwitches of one version; memory left for it. Without it: NCCL_NVLS_ENABLE=0",
        ("systemctl status nvidia-fabricmanager", "export NCCL_NVLS_ENABLE=0   # a test"), "gpu",
        "NCCL transport/nvls.cc",
    ),
    "network_not_found": FailureText(
        "nccl.network-not-found", "{who}: NCCL was told to use network {detail}, which is not there",
        "the plugin in LD_LIBRARY_PATH, verbs in the image, devices in the container; NCCL_NET names it as NCCL does",
        ("env | grep NCCL_NET", "ls /dev/infiniband /sys/class/infiniband", "ldconfig -p | grep -E 'nccl-net|ibverbs'"),
        "rdma", "NCCL environment documentation",
    ),
    "device_not_open": FailureText(
        "rdma.device-not-open", "{who} cannot open the RDMA device {detail}",
        "rights on /dev/infiniband/uverbs*, the container's device list, a driver that is being reset",
        ("ls -l /dev/infiniband", "docker run --device=/dev/infiniband ..."), "rdma", "ibv_open_device(3)",
    ),
    "p2p_disabled": FailureText(
        "nccl.no-p2p", "GPUs of {who} could talk directly and may not (P2P is disabled): {detail}",
        "ACS and IOMMU forbid it on bare metal; consumer GPUs have none",
        ("nvidia-smi topo -p2p r", "lspci -vvv | grep -i ACSCtl"), "gpu", "NCCL", severity="warning", kind="transport",
    ),
    "iommu_warning": FailureText(
        "pci.iommu", "{who}: the kernel was not started with iommu=pt: devices' memory is translated",
        "on bare metal add iommu=pt to the kernel's command line",
        ("cat /proc/cmdline",), "gpu", "NCCL's own warning", "takes a reboot", "warning", kind="setting",
    ),
    "numa_warning": FailureText(
        "host.numa-balancing", "{who}: automatic NUMA balancing is on, which makes times vary",
        "switch it off while training", ("sysctl -w kernel.numa_balancing=0",), "any", "NCCL's own warning",
        severity="notice", kind="setting",
    ),
    "tcp_lost": FailureText(
        "tcp.peer-lost", "{who} lost its peer while the job ran: {detail}",
        "the peer's host or the way there died; a filter that forgets connections does this after an idle time",
        ("ping <peer>", "dmesg -T | grep -i link   # on the peer"), "tcp", "tcp(7): ETIMEDOUT after retransmissions",
    ),
    "efa": FailureText(
        "rdma.peer-lost", "{who}: the EFA peer does not answer ({detail})",
        "look at the peer first: dead process or host; then the security group and the placement",
        ("fi_info -p efa", "cat /sys/class/infiniband/*/ports/1/hw_counters/unresponsive_remote_events"), "rdma",
        "aws-ofi-nccl",
    ),
}  # fmt: skip
