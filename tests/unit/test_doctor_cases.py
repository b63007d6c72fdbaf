"""Published cases, retold: own hosts and addresses, distractors in each, and the cause that has to come first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from nccl_job_logs import JobLog, text_of
from wirespeed.doctor.causes import Cause
from wirespeed.doctor.diagnose import causes_of, diagnose
from wirespeed.doctor.dossier import Dossier, Exposure, read_dossier
from wirespeed.doctor.log_scan import scan

BENIGN = [
    "ripe-00:4100:4300 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
    "ripe-00:4100:4300 [0] NCCL INFO cudaDriverVersion 12040",
    "ripe-01:4101:4301 [1] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eno1.",
    "UserWarning: torch.nn.utils.clip_grad_norm_ is slow on this device",
    "ripe-01:4101:4301 [1] NCCL INFO socketPollConnect: connect to 192.0.2.10<41001> returned Connection refused, retrying (1/34)",
    "ERROR: could not find wandb API key, running offline",
]
"""Lines that look like trouble and are none."""


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lines: Callable[[], list[str]]
    first: str
    others: dict[str, str] = dataclasses.field(default_factory=dict)


def nccl_tests(
    busbw: float, *, hosts: tuple[str, ...] = ("ripe-00", "ripe-01"), gpus: int = 4, size: int = 1 << 30
) -> str:
    """A table of all_reduce_perf."""
    ranks = [
        f"#  Rank {r:>2} Group  0 Pid  {4100 + r} on {hosts[r // gpus]:>10} device  {r % gpus} [0000:{(r % gpus + 1) * 26:02x}:00] NVIDIA H100 80GB HBM3"
        for r in range(gpus * len(hosts))
    ]
    n = gpus * len(hosts)
    rows = []
    for size_bytes in (size // 4, size // 2, size):
        rate = busbw * (1 - size / size_bytes * 0.01)
        algbw = rate * n / (2 * (n - 1))
        time_us = size_bytes / algbw / 1e3
        cells = f"{time_us:>8.1f} {algbw:>7.2f} {rate:>7.2f} {0:>6}"
        rows.append(f"{size_bytes:>12} {size_bytes // 4:>13} {'float':>9} {'sum':>7} {-1:>7}  {cells}  {cells}")
    return "\n".join([
        f"# nThread 1 nGpus 1 minBytes {size // 4} maxBytes {size} step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validate: 1 graph: 0",
        "#", "# Using devices", *ranks, "#",
        "#                                                              out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
        *rows, "# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {busbw:.4f}", "#",
    ])  # fmt: skip


def perftest(gbit: float, *, device: str = "mlx5_0", layer: str = "IB", cuda: bool = False) -> str:
    """Output of ib_write_bw."""
    return "\n".join([
        "initializing CUDA" if cuda else "", "-" * 87, "                    RDMA_Write BW Test",
        f" Dual-port       : OFF\t\tDevice         : {device}", " Number of qps   : 1\t\tTransport type : IB",
        f" Link type       : {layer}", "-" * 87,
        " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]",
        f" 65536      5000             {gbit + 0.4:.2f}             {gbit:.2f}               0.747", "-" * 87,
    ])  # fmt: skip


def iperf(rate_gbit: float, streams: int) -> str:
    """Output of iperf3 -J, as much of it as matters."""
    rate = rate_gbit * 1e9
    return (
        '{"start":{"connected":[{"local_host":"192.0.2.10","remote_host":"192.0.2.11"}],"test_start":{"protocol":"TCP",'
        f'"num_streams":{streams}}}}},"intervals":[],"end":{{"sum_sent":{{"bits_per_second":{rate},"bytes":{rate * 10 / 8},"retransmits":12}},'
        f'"sum_received":{{"bits_per_second":{rate}}}}}}}'
    )


def causes_for(tmp_path: Path, files: dict[str, str]) -> tuple[Cause, ...]:
    paths = []
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        paths.append(tmp_path / name)
    return causes_of(Dossier(facts=scan(paths)))


def _verbs_missing() -> list[str]:
    job = JobLog(version="2.19.3", layer="Socket", launcher="kubernetes")
    return [
        *job.lines()[:3],
        job.info(0, "Failed to open libibverbs.so[.1]"),
        job.info(4, "Failed to open libibverbs.so[.1]"),
        job.info(0, "NET/IB : No device found."),
        *job.lines()[3:],
        *job.steps(30),
    ]


def _gid_early() -> list[str]:
    job = JobLog(version="2.17.1", layer="RoCE")
    return [
        *job.lines(),
        *job.warn(0, "NET/IB : Got completion from peer 192.0.2.11<43911> with error 12, opcode 0, len 0, vendor err 129 (Send) localGid fe80::1234:5678 remoteGidsfe80::1234:9abc"),
        *job.warn(4, "NET/IB : Got completion with error 5, opcode 0, len 0, vendor err 249"),
        *job.warn(5, "Net : Connection closed by remote peer ripe-00<43911>"),
        *job.warn(3, "Call to ibv_create_cq took 2 ms"),
    ]  # fmt: skip


def _modify_qp_timeout() -> list[str]:
    job = JobLog(version="2.27.3", layer="RoCE", settings=(("NCCL_IB_GID_INDEX", "1"),))
    return [
        *job.lines(),
        *job.warn(2, "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_2:1, curr state INIT, next state RTR, local GID index 1, local GID fe80::a288, remote GID fe80::b311"),
        *job.warn(1, "socketProgress: Connection closed by remote peer ripe-01<43911>"),
    ]  # fmt: skip


def _cross_rail() -> list[str]:
    job = JobLog(version="2.28.7", layer="RoCE")
    return [
        *job.lines(),
        *job.warn(2, "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_2:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:198.51.100.10, remote GID ::ffff:203.0.113.11"),
        *job.warn(1, "socketProgress: Connection closed by remote peer ripe-01<43911>"),
    ]  # fmt: skip


def _no_gdr() -> list[str]:
    return [*JobLog(version="2.18.3", has_gdr=False, settings=(("NCCL_IB_HCA", "mlx5"),)).lines(), *JobLog().steps(50)]


def _mtu() -> list[str]:
    job = JobLog(version="2.21.5", layer="RoCE")
    return [
        *job.lines(),
        *job.warn(5, "NET/IB : mlx5_1:1 Got async fatal event: local access violation work queue error", clock="10:20:30"),
        *job.warn(1, "NET/IB : Got completion from peer 192.0.2.11<33001> with status=5 opcode=0 len=0 vendor err 244 (Send) localGid ::ffff:198.51.100.10 remoteGids::ffff:198.51.100.11"),
        *job.warn(2, "socketProgress: Connection closed by remote peer ripe-01<33001>"),
    ]  # fmt: skip


def _flap() -> list[str]:
    job = JobLog(version="2.23.4")
    return [
        *job.lines(), *job.steps(300),
        *job.warn(6, "NET/IB: mlx5_2:1 async fatal event: port error"),
        *job.warn(1, "NET/IB: Got completion from peer 192.0.2.11<33001> with status=12 opcode=0 len=0 vendor err 129 (Send) localGid fe80::1 remoteGidsfe80::2 hca mlx5_2"),
        "[rank1]:[E307 10:31:00.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=4194304, NumelOut=4194304, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    ]  # fmt: skip


def _flap_in_kernel_log() -> list[str]:
    job = JobLog(version="2.28.7")
    return [
        *job.lines(), *job.steps(300),
        *job.warn(1, "NET/IB: Got completion from peer 192.0.2.11<33001> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=1 vendor_err=129 req_type=Send hca mlx5_2"),
        "Mar  7 10:19:58 ripe-01 systemd-networkd[811]: ib2: Lost carrier",
        "Mar  7 10:20:02 ripe-01 systemd-networkd[811]: ib2: Gained carrier",
        "Mar  7 10:21:40 ripe-01 systemd-networkd[811]: ib2: Lost carrier",
    ]  # fmt: skip


def _firewall() -> list[str]:
    job = JobLog(version="2.14.3", layer="Socket", interface="ens3")
    return [
        *job.lines()[:9],
        *job.warn(4, "Net : Connect to 192.0.2.10<45117> failed : No route to host", at="include/socket.h:409"),
        *job.warn(0, "Net : Connection closed by remote peer ripe-01<45118>"),
    ]


def _retry_count() -> list[str]:
    job = JobLog(version="2.22.3", hosts=3, settings=(("NCCL_IB_RETRY_CNT", "10"), ("NCCL_DEBUG", "INFO")))
    return [*job.lines(), *job.steps(20)]


def _cross_numa() -> list[str]:
    job = JobLog(version="2.21.5", has_gdr=False, shows_net=False)
    far = [
        job.info(r, f"GPU Direct RDMA Disabled for GPU {r % 4 + 1}a000 / HCA {r % 4} (distance 7 > 4)")
        for r in range(8)
    ]
    return [*job.lines(), *far, *job.steps(20)]


def _no_interface() -> list[str]:
    job = JobLog(version="2.25.1", settings=(("NCCL_SOCKET_IFNAME", "=ens9f0"),))
    return [
        job.lines()[0],
        job.info(5, "NCCL_SOCKET_IFNAME set by environment to =ens9f0"),
        *job.warn(5, "Bootstrap : no socket interface found", at="bootstrap.cc:45"),
        *job.warn(0, "socketProgress: Connection closed by remote peer ripe-01<45118>"),
    ]


def _topo_file() -> list[str]:
    job = JobLog(version="2.19.3", settings=(("NCCL_TOPO_FILE", "/opt/vm/ndv4-topo.xml"), ("NCCL_DEBUG", "INFO")))
    return [*job.lines(), *job.steps(10)]


def _mixed_vendors() -> list[str]:
    job = JobLog(version="2.21.5", layer="RoCE", hosts=2)
    lines = [
        line.replace("[1]mlx5_1:1", "[1]bnxt_re1:1") if "NET/IB : Using" in line and "ripe-01" in line else line
        for line in job.lines()
    ]
    return [*lines, *job.warn(0, "NET/IB : Got completion from peer 192.0.2.11<1> with status=12 opcode=0 len=0 vendor err 129 (Send) localGid ::ffff:198.51.100.10 remoteGids::ffff:198.51.100.11")]  # fmt: skip


def _loopback_chosen() -> list[str]:
    job = JobLog(version="2.11.4", layer="Socket", interface="lo", settings=(("NCCL_SOCKET_IFNAME", "^docker0"),))
    return [line.replace("192.0.2.10", "127.0.0.1").replace("192.0.2.11", "127.0.0.1") for line in job.lines()]


def _docker_bridge() -> list[str]:
    job = JobLog(version="2.20.5", layer="Socket", interface="docker0")
    return [
        *job.lines(),
        *job.warn(3, "socketStartConnect: Connect to 172.17.0.1<41000> failed : Software caused connection abort"),
    ]


def _ipoib() -> list[str]:
    return JobLog(version="2.8.4", layer="Socket", interface="ib0").lines()


def _ib_disabled() -> list[str]:
    job = JobLog(version="2.18.3", layer="Socket", settings=(("NCCL_IB_DISABLE", "1"), ("NCCL_SOCKET_IFNAME", "eno")))
    return [*job.lines(), *job.steps(10)]


def _memlock() -> list[str]:
    job = JobLog(version="2.16.5")
    return [
        *job.lines()[:20],
        *job.warn(1, "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"),
        *job.warn(4, "Net : Connection closed by remote peer ripe-00<41000>"),
    ]


def _acs() -> list[str]:
    job = JobLog(version="2.21.5")
    return [
        *job.lines(),
        *job.warn(
            1,
            "NET/IB : Got completion from peer 192.0.2.11<1> with status=4 opcode=0 len=0 vendor err 81 (Send) localGid fe80::1 remoteGidsfe80::2",
        ),
        *job.warn(5, "NET/IB : Got completion from peer 192.0.2.10<1> with status=5 opcode=0 len=0 vendor err 249"),
    ]


def _versions() -> list[str]:
    job = JobLog(version="2.17.1", layer="Socket")
    return [
        *job.lines(),
        "[1,4]<stdout>:NCCL version 2.14.3+cuda11.7",
        *job.warn(0, "NET/Socket : message truncated : receiving 1048576 bytes instead of 524288"),
        *job.warn(5, "Net : Connection closed by remote peer ripe-00<41000>"),
    ]


def _oom_first() -> list[str]:
    job = JobLog(version="2.27.3", launcher="plain")
    return [
        *job.lines(), *job.steps(40),
        "[rank6]: Traceback (most recent call last):",
        '[rank6]:   File "/opt/job/train.py", line 88, in <module>',
        "[rank6]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79.1 GiB",
        *job.warn(1, "NET/IB: Got completion from peer 192.0.2.11<1> with status=12 opcode=0 len=0 vendor err 129 (Send) localGid fe80::1 remoteGidsfe80::2 hca mlx5_1"),
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/opt/job/train.py", line 91, in <module>',
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error",
    ]  # fmt: skip


def _laggard() -> list[str]:
    job = JobLog(version="2.21.5")
    return [
        *job.lines(), *job.steps(100),
        *[
            f"[rank{r}]:[E307 10:4{r}:00.1 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Timeout at NCCL work: 900, last enqueued NCCL work: {899 if r == 5 else 902}, last completed NCCL work: 898."
            for r in range(8)
        ],
        "[rank0]:[E307 10:31:00.1 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=900, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    ]  # fmt: skip


def _late_peer() -> list[str]:
    job = JobLog(version="2.28.7")
    return [
        "2026-03-07T08:00:00Z job starts", *job.lines(), *job.steps(400),
        *job.warn(1, "NET/IB: Got completion from peer 192.0.2.11<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=1 vendor_err=129 req_type=Send hca mlx5_1", clock="13:20:00"),
        *job.warn(2, "socketProgress: Connection closed by remote peer ripe-01<1>", clock="13:20:01"),
    ]  # fmt: skip


def _efa() -> list[str]:
    job = JobLog(version="2.20.5", layer="Socket", interface="ens5")
    return [
        job.lines()[0],
        *job.warn(0, "NET/OFI Could not find any optimal provider", at="nccl_net_ofi.c:112"),
        *job.lines()[1:],
    ]


def _xid() -> list[str]:
    job = JobLog(version="2.21.5")
    return [
        *job.lines(), *job.steps(200),
        *job.warn(1, "NET/IB : Got completion from peer 192.0.2.11<1> with status=12 opcode=0 len=0 vendor err 129 (Send) localGid fe80::1 remoteGidsfe80::2"),
        "Mar  7 10:19:00 ripe-01 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=4101, name=python, GPU has fallen off the bus.",
        "Mar  7 10:19:02 ripe-01 kernel: NVRM: Xid (PCI:0000:3b:00): 45, pid=4101, Ch 00000008",
    ]  # fmt: skip


def _shm() -> list[str]:
    job = JobLog(version="2.19.3")
    return [*job.lines()[:6], *job.warn(2, "Error: failed to extend /dev/shm/nccl-aXq1 to 9637892 bytes", at="misc/shmutils.cc:72"), *job.warn(4, "socketProgress: Connection closed by remote peer ripe-00<1>")]  # fmt: skip


def _init_hang() -> list[str]:
    job = JobLog(version="2.21.5", layer="Socket", interface="eno1")
    return [
        line
        for line in job.lines()
        if not ("rank 6 " in line or ("Init COMPLETE" in line)) and "ripe-01:4102:" not in line
    ]


def _partial_gdr() -> list[str]:
    lines = JobLog(version="2.22.3", gpus=4, hosts=4).lines()
    return [line.replace("NET/IB/3/GDRDMA", "NET/IB/3") if "ripe-02" in line else line for line in lines]


def _only_closed() -> list[str]:
    job = JobLog(version="2.21.5", layer="Socket", interface="eno1")
    return [*job.lines(), *job.steps(100), *job.warn(0, "socketProgress: Connection closed by remote peer ripe-01<1>")]


CASES = [
    Case("verbs missing in the image (sglang 1427)", _verbs_missing, "nccl.verbs-missing"),
    Case("GID link-local, error 12 at start (nccl 426)", _gid_early, "rdma.gid-index"),
    Case("modify_qp times out, GID index fixed (nccl 769)", _modify_qp_timeout, "rdma.gid-index"),
    Case("modify_qp times out across rails", _cross_rail, "rdma.cross-rail"),
    Case("InfiniBand without GPUDirect (nccl 489)", _no_gdr, "nccl.no-gpudirect"),
    Case("MTU differs since 2.20 (nccl 1524)", _mtu, "rdma.mtu-mismatch"),
    Case("port error (nccl 905)", _flap, "nic.link-flap"),
    Case("link flaps, seen in the kernel's log only", _flap_in_kernel_log, "nic.link-flap"),
    Case("no route to host (nccl 1105)", _firewall, "tcp.blocked"),
    Case("retry count out of range (nccl 1453)", _retry_count, "setting.ib-retry-cnt"),
    Case("GPU and NIC on different sockets (nccl-tests 347)", _cross_numa, "nccl.gpu-nic-distance"),
    Case("interface that does not exist (marin 6940)", _no_interface, "nccl.no-interface"),
    Case("stale topology file (azurehpc 142)", _topo_file, "setting.topo-file"),
    Case("mixed vendors (nccl 1526)", _mixed_vendors, "nccl.mixed-hcas"),
    Case("lo chosen (horovod 584)", _loopback_chosen, "nccl.wrong-interface"),
    Case("docker bridge chosen", _docker_bridge, "nccl.wrong-interface"),
    Case("IPoIB instead of verbs (nccl 952)", _ipoib, "nccl.ipoib"),
    Case("IB disabled by a leftover", _ib_disabled, "nccl.rdma-disabled"),
    Case("memlock", _memlock, "host.memlock"),
    Case("ACS (nccl 595)", _acs, "rdma.local-protection"),
    Case("NCCL versions differ", _versions, "nccl.ranks-differ"),
    Case("one rank out of GPU memory", _oom_first, "job.gpu-memory"),
    Case("one rank did not arrive", _laggard, "job.desync"),
    Case("peer lost after hours (nccl 1405)", _late_peer, "rdma.peer-lost"),
    Case("no EFA provider (aws-ofi-nccl 67)", _efa, "nccl.efa-missing"),
    Case("GPU fell off the bus", _xid, "gpu.xid"),
    Case("/dev/shm too small", _shm, "host.shm"),
    Case("a rank never starts", _init_hang, "nccl.init-hang"),
    Case("GPUDirect on some NICs only (nccl 392)", _partial_gdr, "nccl.partial-gpudirect"),
    Case("only the follow-up is there (nccl 1232)", _only_closed, "job.peer-gone"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_cause_of_a_published_case_is_right(tmp_path: Path, case: Case) -> None:
    causes = causes_for(tmp_path, {"job.log": text_of(BENIGN, case.lines(), BENIGN[:4])})
    assert [cause.id for cause in causes][:1] == [case.first], [(c.id, c.finding.title) for c in causes]
    assert causes[0].finding.evidence
    assert causes[0].finding.remedy is not None


def test_lossy_roce_is_named_by_its_bandwidth(tmp_path: Path) -> None:
    job = JobLog(version="2.21.5", layer="RoCE")
    causes = causes_for(tmp_path, {"job.log": text_of(BENIGN, job.lines()) + nccl_tests(0.42)})
    assert causes[0].id == "rdma.lossy-roce"


def test_one_tcp_stream_is_named_where_many_carry_more(tmp_path: Path) -> None:
    job = JobLog(version="2.12.12", layer="Socket", interface="ens3")
    files = {
        "job.log": text_of(BENIGN, job.lines()) + nccl_tests(2.4),
        "one.json": iperf(19.8, 1),
        "many.json": iperf(93.1, 8),
    }
    causes = causes_for(tmp_path, files)
    assert causes[0].id == "tcp.one-stream"
    assert causes[0].finding.full_bit_per_s == pytest.approx(93.1e9)


def test_perftest_fine_and_nccl_not_points_between_gpu_and_nic(tmp_path: Path) -> None:
    job = JobLog(version="2.26.2", gpus=1, channels=2)
    causes = causes_for(
        tmp_path, {"job.log": text_of(BENIGN, job.lines()) + nccl_tests(13.0, gpus=1), "bw.txt": perftest(392.0)}
    )
    assert causes[0].id == "nccl.link-fine-nccl-not"


def test_a_slow_nic_among_equals_is_named(tmp_path: Path) -> None:
    files = {f"bw{i}.txt": perftest(196.0 if i == 3 else 391.0 + i / 10, device=f"mlx5_{i}") for i in range(6)}
    causes = causes_for(tmp_path, files)
    assert [c.id for c in causes] == ["nic.slow-device"]
    assert causes[0].finding.subject == "mlx5_3"


def test_gpu_memory_slower_than_host_memory_points_to_the_pcie_path(tmp_path: Path) -> None:
    causes = causes_for(tmp_path, {"host.txt": perftest(391.0), "gpu.txt": perftest(98.0, cuda=True)})
    assert causes[0].id == "gpu.slow-gpudirect"


def test_a_third_host_that_halves_everything_sends_to_the_link_matrix(tmp_path: Path) -> None:
    files = {"two.txt": nccl_tests(29.0), "three.txt": nccl_tests(5.0, hosts=("ripe-00", "ripe-01", "ripe-02"))}
    causes = causes_for(tmp_path, files)
    assert causes[0].id == "fabric.added-hosts-slow"
    assert "ripe-02" in causes[0].finding.title
    assert "cannot be told apart" in causes[0].alternatives


def test_wrong_results_come_before_any_speed(tmp_path: Path) -> None:
    table = nccl_tests(180.0).replace("# Out of bounds values : 0 OK", "# Out of bounds values : 3 FAILED")
    causes = causes_for(tmp_path, {"a.txt": table})
    assert causes[0].id == "measure.wrong-results"


@pytest.mark.parametrize("layer", ["IB", "RoCE", "Socket"])
@pytest.mark.parametrize("version", ["2.4.8", "2.10.3", "2.17.1", "2.21.5", "2.24.3", "2.27.3", "2.30.1"])
def test_a_healthy_job_has_no_finding(tmp_path: Path, layer: str, version: str) -> None:
    job = JobLog(version=version, layer=layer)
    causes = causes_for(tmp_path, {"job.log": text_of(BENIGN, job.lines(), job.steps(200))})
    assert causes == ()


def test_small_exposed_communication_ends_the_question(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(text_of(_no_gdr()))
    dossier = read_dossier([tmp_path / "job.log"])
    small = dataclasses.asdict(Exposed(0.412, 0.009))
    verdict = diagnose(structs_replace(dossier, exposure=Exposure(source="tune.json (dense)", **small)))
    assert verdict.headline.startswith("the network is not your bottleneck: 2.18 %")
    assert verdict.is_network is False
    assert not verdict.has_findings
    assert verdict.causes[0].id == "nccl.no-gpudirect"


@dataclasses.dataclass
class Exposed:
    step_s: float
    exposed_s: float


def structs_replace(dossier: Dossier, **changes: object) -> Dossier:
    import msgspec

    return msgspec.structs.replace(dossier, **changes)


def test_a_failed_job_is_told_from_a_slow_one(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(text_of(_flap()))
    verdict = diagnose(read_dossier([tmp_path / "job.log"]))
    assert verdict.headline == "the job failed: the link of mlx5_2 on ripe-01 went down while the job ran"
    assert verdict.is_network is True
