"""Kinds of trouble that no published case of the reference has: launchers, gloo, UCX, kernels, tools; each with
lines beside it that look like trouble and are none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nccl_job_logs import JobLog, text_of
from wirespeed.doctor.causes import Cause
from wirespeed.doctor.diagnose import causes_of, diagnose
from wirespeed.doctor.dossier import read_dossier

DISTRACTORS = [
    "[W307 10:00:02.100000000 socket.cpp:752] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - Cannot assign requested address).",
    "wandb: WARNING Temporary failure in name resolution: https://api.example.org, retrying in the background",
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub.example.org', port=443): Max retries exceeded",
    "UserWarning: The given NumPy array is not writable; there may be errors later",
    "[W307 10:00:03.2 ProcessGroupNCCL.cpp:1250] Warning: NCCL_BLOCKING_WAIT is deprecated (function operator())",
    "W0307 10:00:01.000000 140211 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "E0307 10:00:04.0 tensorboard: Could not bind to port 6006: Address already in use, going on without it",
    "WARNING: There was an error in the optional telemetry module, continuing without",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    lines: tuple[str, ...]
    first: str
    kind: str = "failure"
    starts_job: bool = True


KINDS = {
    "port taken": Kind((
        "[rank0]: Traceback (most recent call last):",
        "[rank0]: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ), "launch.port-in-use"),
    "master not there": Kind((
        "[rank3]: torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (node-a, 29500).",
    ), "launch.master-unreachable"),
    "not enough hosts": Kind((
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    ), "launch.rendezvous-timeout"),
    "a rank never joined": Kind((
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 31/32 clients joined.",
    ), "launch.rank-missing"),
    "a rank never joined, old torch": Kind((
        "RuntimeError: Timed out initializing process group in store based barrier on rank: 3, for key: store_based_barrier_key:1 (world_size=16, num_workers_joined=15, timeout=0:30:00)",
    ), "launch.rank-missing"),
    "name unknown": Kind((
        "[W307 10:00:02.1 socket.cpp:697] [c10d] The IPv4 network addresses of (node-z, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
    ), "launch.name-not-resolved"),
    "ssh refused": Kind(("node-b: Permission denied (publickey,gssapi-keyex).",), "launch.ssh"),
    "ssh unreachable": Kind(("ssh: connect to host node-c port 22: No route to host",), "launch.ssh"),
    "collectives differ": Kind((
        "[rank2]: RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=9, OpType=ALLREDUCE), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=9, OpType=BROADCAST).",
    ), "job.desync"),
    "barrier missed": Kind((
        "[rank0]: RuntimeError: [Rank 0]: Ranks 5, 7 failed to pass monitoredBarrier in 60000 ms",
    ), "job.desync"),
    "host lost under Slurm": Kind((
        "slurmstepd: error: *** STEP 991.0 ON node-b CANCELLED AT 2026-03-07T10:20:30 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        "node-a:4100:4300 [0] NCCL WARN socketProgress: Connection closed by remote peer node-b<41000>",
    ), "job.node-lost"),
    "host lost under MPI": Kind((
        "ORTE has lost communication with a remote daemon.",
    ), "job.node-lost"),
    "killed under MPI": Kind((
        "mpirun noticed that process rank 5 with PID 0 on node node-b exited on signal 9 (Killed).",
    ), "job.killed"),
    "out of memory under Slurm": Kind(("srun: error: node-b: task 12: Out Of Memory",), "job.host-memory"),
    "out of memory under Kubernetes": Kind(("  Last State: Terminated  Reason: OOMKilled  Exit Code: 137",), "job.host-memory"),
    "crash under torchrun": Kind((
        "E0307 10:20:30.000000 4711 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -11) local_rank: 2 (pid: 4713) of binary: python",
    ), "job.crash"),
    "too many files": Kind((
        "OSError: [Errno 24] Too many open files: '/data/shard-0001.tar'",
    ), "host.open-files"),
    "disk full": Kind((
        "OSError: [Errno 28] No space left on device: '/scratch/checkpoint-100/model.pt'",
    ), "host.disk-full"),
    "shared memory full": Kind((
        "RuntimeError: unable to write to file </torch_4711_88>: No space left on device (28)",
    ), "host.shm"),
    "UCX loses its peer": Kind((
        "[1709806830.123456] [node-a:4100 :0] ib_mlx5_log.c:179 UCX  ERROR Transport retry count exceeded on mlx5_2:1/RoCE (synd 0x15 vend 0x81 hw_synd 0/0)",
    ), "rdma.peer-lost"),
    "perftest loses its peer": Kind((
        " Completion with error at client",
        " Failed status 12: wr_id 0 syndrom 0x81",
    ), "rdma.peer-lost"),
    "MPI goes over a bridge": Kind((
        "[node-a][[9137,1],0][btl_tcp_endpoint.c:626:mca_btl_tcp_endpoint_recv_connect_ack] connect() to 172.17.0.1:1026 failed: Connection refused (111)",
    ), "nccl.wrong-interface"),
    "gloo told loopback": Kind((
        "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:41093",
    ), "gloo.wrong-interface"),
    "gloo interface wrong": Kind(("RuntimeError: [enforce fail] Unable to find address for: eth9",), "gloo.no-interface"),
    "other NCCL library": Kind((
        "ImportError: /opt/venv/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
    ), "launch.library-mismatch"),
    "driver too old": Kind((
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    ), "gpu.driver-too-old"),
    "one rank too many": Kind((
        "[rank8]: RuntimeError: CUDA error: invalid device ordinal",
    ), "launch.device-ordinal"),
    "fabric manager": Kind((
        "RuntimeError: CUDA error: system not yet initialized",
    ), "gpu.fabric-manager"),
    "fabric manager, said by NCCL": Kind(tuple(
        JobLog(version="2.21.5").warn(2, "Cuda failure 802 'system not yet initialized'", at="init.cc:1717")
    ), "gpu.fabric-manager"),
    "NVLS": Kind(tuple(JobLog(version="2.23.4").warn(
        1, "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 1610612736 : CUDA error 2 'out of memory'.",
        at="transport/nvls.cc:254",
    )), "gpu.nvls"),
    "network not there": Kind(tuple(
        JobLog(version="2.21.5").warn(0, "Error: network IB not found.", at="net.cc:519")
    ), "nccl.network-not-found"),
    "no right to the device": Kind(tuple(
        JobLog(version="2.18.3").warn(0, "NET/IB : Unable to open device mlx5_0", at="transport/net_ib.cc:199")
    ), "rdma.device-not-open"),
    "peer's host dies over TCP": Kind(tuple(
        JobLog(version="2.21.5").warn(
            1, "socketProgressOpt: Call to recv from 192.0.2.11<43911> failed : Connection timed out", at="misc/socket.cc:49"
        )
    ), "tcp.peer-lost"),
    "EFA peer lost": Kind(tuple(JobLog(version="2.21.5").warn(
        0, "NET/OFI Request 0x7f completed with error. RC: 113. Error: 4123 (Unresponsive receiver (connect failed)). Completed length: 0",
        at="nccl_net_ofi_rdma.c:744",
    )), "rdma.peer-lost"),
    "no provider for the NIC": Kind((
        "libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs0",
    ), "nccl.verbs-missing", kind="transport"),
    "memlock warning": Kind((
        "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.",
        "    This will severely limit memory registrations.",
    ), "host.memlock", kind="setting"),
    "P2P switched off by the platform": Kind(tuple(JobLog(version="2.17.1").warn(
        0, "P2P is disabled between connected GPUs 0 and 1. You can repress this message with NCCL_IGNORE_DISABLED_P2P=1.",
        at="graph/paths.cc:308",
    )), "nccl.no-p2p", kind="transport"),
    "kernel without iommu=pt": Kind(tuple(JobLog(version="2.21.5").warn(
        0, "Missing \"iommu=pt\" from kernel command line which can lead to system instablity or hang!", at="init.cc:90",
    )), "pci.iommu", kind="setting"),
    "an error without a log": Kind((
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: /opt/pytorch/ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5",
    ), "nccl.error-unexplained"),
    "the store's host is gone": Kind((
        "[rank3]:[W307 10:20:30.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=69, addr=[node-d]:40000, remote=[node-a]:29500): failed to recv, got 0 bytes",
    ), "job.peer-gone"),
    "NVSwitch": Kind((
        *JobLog().warn(1, "Cuda failure 'unspecified launch failure'"),
        "Mar  7 10:19:00 node-b kernel: nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 23 LTSSM Fault Up",
    ), "gpu.nvswitch"),
    "cable pulled": Kind((
        "[ 8211.000001] mlx5_core 0000:3b:00.0: Port module event: module 0, Cable unplugged",
        *JobLog().warn(1, "NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129"),
    ), "nic.module"),
    "bond without partner": Kind((
        "[   31.000001] bond0: Warning: No 802.3ad response from the link partner for any adapters in the bond",
    ), "nic.bond-without-partner", kind="capability"),
    "packets dropped as martians": Kind((
        "[ 500.000001] IPv4: martian source 192.0.2.10 from 192.0.2.11, on dev eth1",
    ), "route.asymmetric", kind="capability"),
    "TCP memory": Kind((
        "[ 500.000001] TCP: out of memory -- consider tuning tcp_mem",
    ), "tcp.memory", kind="capability"),
    "table of neighbours": Kind((
        "[ 500.000001] neighbour: arp_cache: neighbor table overflow!",
    ), "host.neighbour-table", kind="capability"),
    "IOMMU fault": Kind((
        "[ 500.000001] DMAR: DRHD: handling fault status reg 3",
        *JobLog().warn(1, "NET/IB : Got completion with error 4, opcode 0, len 0, vendor err 81"),
    ), "pci.iommu-fault"),
    "file server": Kind((
        "[ 500.000001] nfs: server filer-1 not responding, still trying",
    ), "host.storage", kind="capability"),
    "heat": Kind((
        "[ 500.000001] CPU12: Package temperature above threshold, cpu clock throttled (total events = 4)",
    ), "host.throttled", kind="capability"),
    "slot power": Kind((
        "[ 5.000001] mlx5_core 0000:3b:00.0: mlx5_pcie_event:296:(pid 271): Detected insufficient power on the PCIe slot (27W).",
    ), "pci.slot-power", kind="capability"),
    "killed in a memory cgroup": Kind((
        *JobLog().warn(1, "socketProgress: Connection closed by remote peer node-b<41000>"),
        "[ 8211.000001] Memory cgroup out of memory: Killed process 4713 (python) total-vm:91000000kB",
    ), "job.host-memory"),
}  # fmt: skip


def causes_for(tmp_path: Path, kind: Kind) -> tuple[Cause, ...]:
    job = JobLog(version="2.21.5", launcher="plain", interface="eno1")
    set_up = job.lines() if kind.starts_job else []
    path = tmp_path / "job.log"
    path.write_text(text_of(DISTRACTORS, set_up, job.steps(150), list(kind.lines), job.steps(3)))
    return causes_of(read_dossier([path]))


@pytest.mark.parametrize("name", KINDS)
def test_the_first_cause_is_the_one_that_the_line_names(tmp_path: Path, name: str) -> None:
    causes = causes_for(tmp_path, KINDS[name])
    assert [cause.id for cause in causes][:1] == [KINDS[name].first]
    assert causes[0].kind == KINDS[name].kind
    assert causes[0].finding.remedy is not None


def test_lines_that_only_look_like_trouble_are_none(tmp_path: Path) -> None:
    assert causes_for(tmp_path, Kind((), "")) == ()


def test_a_warning_that_no_rule_knows_is_shown_and_concludes_nothing(tmp_path: Path) -> None:
    lines = tuple(JobLog().warn(2, "the flux capacitor of lane 3 is cold", at="misc/flux.cc:88"))
    (cause,) = causes_for(tmp_path, Kind(lines, ""))
    assert (cause.id, cause.finding.severity) == ("nccl.unknown-warning", "notice")
    assert "flux capacitor" in cause.finding.evidence[0].seen


def test_a_first_program_error_outranks_what_the_launcher_then_does(tmp_path: Path) -> None:
    lines = (
        "[rank6]: Traceback (most recent call last):",
        '[rank6]:   File "/opt/job/train.py", line 31, in <module>',
        "[rank6]: ValueError: could not convert string to float: 'n/a'",
        "srun: error: node-b: task 6: Exited with exit code 1",
        "slurmstepd: error: *** STEP 991.0 ON node-a CANCELLED AT 2026-03-07T10:20:30 ***",
        "srun: error: node-a: tasks 0-3: Killed",
    )
    causes = causes_for(tmp_path, Kind(lines, ""))
    assert causes[0].id == "job.exception"
    assert "could not convert" in causes[0].finding.title


def test_a_warning_that_names_a_slow_path_does_not_say_that_the_job_failed(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    job = JobLog(layer="Socket")
    path.write_text(text_of(list(KINDS["no provider for the NIC"].lines), job.lines(), job.steps(20)))
    verdict = diagnose(read_dossier([path]))
    assert not verdict.headline.startswith("the job failed")
    assert verdict.causes[0].id == "nccl.verbs-missing"


LSPCI = """\
0000:3b:00.0 Ethernet controller: Mellanox Technologies MT2910 Family [ConnectX-7]
\tCapabilities: [60] Express (v2) Endpoint, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 32GT/s, Width x8 (downgraded)
0000:5e:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16
"""
IBSTAT = "".join(
    f"CA 'mlx5_{n}'\n\tCA type: MT4129\n\tPort 1:\n\t\tState: {state}\n\t\tPhysical state: LinkUp\n\t\tRate: {rate}\n"
    "\t\tSM lid: 1\n\t\tLink layer: InfiniBand\n"
    for n, (state, rate) in enumerate([("Active", 400), ("Active", 400), ("Active", 200), ("Initializing", 400)])
)
TOPO = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tPIX\tSYS\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tSYS\t X

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""
ETHTOOL = """\
Settings for ens1f0np0:
\tSupported link modes:   10000baseT/Full
\t                        25000baseCR/Full
\t                        100000baseCR4/Full
\tSupported pause frame use: Symmetric
\tAdvertised link modes:  100000baseCR4/Full
\tLink partner advertised link modes:  400000baseCR8/Full
\tSpeed: 25000Mb/s
\tDuplex: Full
\tLink detected: yes
"""
DEVINFO = """\
hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LSPCI, [("pci.width-reduced", "0000:3b:00.0")]),
        (IBSTAT, [("rdma.no-subnet-manager", "mlx5_3"), ("rdma.slower-than-twin", "mlx5_2")]),
        (TOPO, [("gpu.nic-far", "GPU1")]),
        (ETHTOOL, [("nic.below-own-speed", "ens1f0np0")]),
        (DEVINFO, [("rdma.roce-mtu", "mlx5_0")]),
        ("\t cubic rtt:0.06/0.01 busy:9000ms rwnd_limited:4500ms(50.0%) sndbuf_limited:1ms(0.0%)\n",
         [("tcp.window-limited", "connection")]),
    ],
)  # fmt: skip
def test_outputs_of_tools_are_read_beside_a_log(tmp_path: Path, text: str, found: list[tuple[str, str]]) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    facts = read_dossier([path]).facts
    assert [(finding.id, finding.subject) for finding in facts.tools] == found


def test_a_port_slower_than_its_twins_is_read_from_nccls_own_list(tmp_path: Path) -> None:
    job = JobLog(version="2.21.5")
    ports = [
        job.info(4 * host, f"NET/IB: [{n}] mlx5_{n}:uverbs{n}:1/IB provider=Mlx5 speed={100000 if (host, n) == (1, 2) else 400000} context=0x55 pciPath=/sys/devices/pci0000:15 ar=1")
        for host in range(2) for n in range(4)
    ]  # fmt: skip
    path = tmp_path / "job.log"
    path.write_text(text_of(job.lines(), ports))
    (cause,) = causes_of(read_dossier([path]))
    assert (cause.id, cause.finding.subject, cause.finding.host) == ("rdma.slower-than-twin", "mlx5_2", "ripe-01")
    assert (cause.finding.limit_bit_per_s, cause.finding.full_bit_per_s) == (100e9, 400e9)
