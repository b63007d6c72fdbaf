"""NCCL's set-up and failure lines, in the formats of every version from 2.4 to 2.30."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from nccl_job_logs import LAUNCHERS, VERSIONS, JobLog, text_of
from wirespeed.doctor.log_scan import JobFacts, scan
from wirespeed.doctor.nccl_failures import parse_failure
from wirespeed.doctor.nccl_formats import CHANNEL, Via, distance_name, parse_hcas, parse_via


def facts_of(tmp_path: Path, *parts: list[str]) -> JobFacts:
    path = tmp_path / "job.log"
    path.write_text(text_of(*parts))
    return scan([path])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_transport_hosts_and_channels_are_read_in_every_version_and_launcher(
    tmp_path: Path, version: str, launcher: str
) -> None:
    job = JobLog(version=version, launcher=launcher)
    nccl = facts_of(tmp_path, job.lines()).nccl
    assert nccl.version == version
    assert nccl.hosts == ("ripe-00", "ripe-01")
    assert nccl.num_processes == 8
    assert nccl.num_channels == 4
    # 4 channels x 2 places where the ring passes from host to host; 4 x 6 within the hosts.
    assert (nccl.num_via("NET", has_gdr=True), nccl.num_via("NET", has_gdr=False), nccl.num_via("P2P")) == (8, 0, 24)
    assert nccl.uses_rdma
    assert not nccl.uses_sockets
    assert [hca.name for hca in nccl.hcas["ripe-01"]] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert nccl.bootstrap["ripe-00"] == (("eno1", "192.0.2.10"),)
    assert [(comm.num_ranks, sorted(comm.completed)) for comm in nccl.comms] == [(8, list(range(8)))]
    assert not nccl.comms[0].is_hung


@pytest.mark.parametrize("version", VERSIONS)
def test_sockets_are_read_in_every_version(tmp_path: Path, version: str) -> None:
    nccl = facts_of(tmp_path, JobLog(version=version, layer="Socket").lines()).nccl
    assert nccl.uses_sockets
    assert not nccl.uses_rdma
    assert nccl.sockets["ripe-00"] == (("eno1", "192.0.2.10"),)
    assert nccl.num_via("NET", network="Socket") == 8


@pytest.mark.parametrize("version", VERSIONS)
def test_missing_gpudirect_is_read_in_every_version(tmp_path: Path, version: str) -> None:
    nccl = facts_of(tmp_path, JobLog(version=version, has_gdr=False).lines()).nccl
    assert (nccl.num_via("NET", has_gdr=True), nccl.num_via("NET", has_gdr=False)) == (0, 8)
    assert nccl.gdr_hcas
    assert not any(held.is_enabled for held in nccl.gdr_hcas)
    if JobLog(version=version).key >= (2, 24):
        assert (nccl.num_gdr_on, nccl.num_gdr_off) == (0, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"NET/IB/3(5)/GDRDMA", Via("NET", "IB", 3, True, 5)),
        (b"NET/IB/0/GDRDMA(PCI)", Via("NET", "IB", 0, True, None, "(PCI)")),
        (b"NET/IB/2/Shared", Via("NET", "IB", 2, False, None, "/Shared")),
        (b"NET/AWS Libfabric/1/GDRDMA", Via("NET", "AWS Libfabric", 1, True)),
        (b"NET/Socket/0", Via("NET", "Socket", 0)),
        (b"COLLNET/SHARP/0", Via("COLLNET", "SHARP", 0)),
        (b"P2P/IPC/read", Via("P2P", detail="IPC/read")),
        (b"P2P/indirect/3[3]", Via("P2P", detail="indirect/3[3]")),
        (b"SHM/direct/direct", Via("SHM", detail="direct/direct")),
        (b"direct shared memory", Via("SHM")),
        (b"NET/IB/0/GDRDMAripe-01:41:43 [1] ", Via("NET", "IB", 0, True)),
        (b"N", Via("unknown")),
        (b"", Via("unknown")),
    ],
)
def test_the_path_of_a_channel_is_read(text: bytes, expected: Via) -> None:
    assert parse_via(text) == expected


@pytest.mark.parametrize(
    "line",
    [
        b"Ring 00 : 3 -> 6 [send] via NET/IB/0/GDRDMA",
        b"Channel 00 : 0[7000] -> 1[a000] [send] via NET/IB/0",
        b"Channel 07/0 : 12[4] -> 13[5] via P2P/CUMEM",
    ],
)
def test_channel_lines_of_all_ages_match(line: bytes) -> None:
    assert CHANNEL.search(line) is not None


def test_hcas_keep_rail_and_layer() -> None:
    found = parse_hcas(b"[0]mlx5_0:1/IB/SHARP [1]mlx5_1:1:2/RoCE [2]mlx5_2:1::3/RoCE [3]mlx5_bond_0:1:1:3/RoCE [RO]")
    assert [(h.number, h.name, h.layer, h.rail) for h in found] == [
        (0, "mlx5_0", "IB", ""),
        (1, "mlx5_1", "RoCE", "2"),
        (2, "mlx5_2", "RoCE", ""),
        (3, "mlx5_bond_0", "RoCE", "1"),
    ]
    assert [h.family for h in found] == ["mlx5", "mlx5", "mlx5", "mlx5"]


@pytest.mark.parametrize(
    ("code", "version", "name"),
    [
        (4, "2.4.8", "SYS"), (3, "2.4.8", "NODE"), (5, "2.7.8", "SYS"), (4, "2.9.9", "PHB"), (6, "2.10.3", "SYS"),
        (5, "2.12.12", "PXN"), (7, "2.25.1", "SYS"), (8, "2.26.2", "SYS"), (9, "2.27.3", "SYS"), (6, "2.28.7", "P2C"),
        (8, "2.30.1", "PHB"), (99, "2.30.1", None), (4, None, None),
    ],
)  # fmt: skip
def test_distance_codes_mean_what_they_mean_in_their_version(code: int, version: str | None, name: str | None) -> None:
    assert distance_name(code, version) == name


COMPLETIONS = [
    b"NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
    b"NET/IB : Got completion from peer 192.0.2.11<41234> with error 12, opcode 1, len 0, vendor err 129",
    (
        b"NET/IB : Got completion from peer 192.0.2.11<41234> with error 12, opcode 1, len 0, vendor err 129 (Send) "
        b"localGid fe80::1 remoteGidsfe80::2"
    ),
    (
        b"NET/IB : Got completion from peer 192.0.2.11<41234> with status=12 opcode=0 len=0 vendor err 129 (Recv) "
        b"localGid ::ffff:198.51.100.10 remoteGids::ffff:198.51.100.11"
    ),
    (
        b"NET/IB: Got completion from peer 192.0.2.11<41234> with status=12 opcode=0 len=0 vendor err 129 (Recv) "
        b"localGid ::ffff:198.51.100.10 remoteGids::ffff:198.51.100.11 hca mlx5_0"
    ),
    (
        b"NET/IB: Got completion from peer 192.0.2.11<41234> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) "
        b"reqSize=1024 vendor_err=129 req_type=Send hca mlx5_0"
    ),
    (
        b"NET/IB: Got completion from peer 192.0.2.11<41234> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) "
        b"vendor_err=129 hca mlx5_0"
    ),
]


@pytest.mark.parametrize("text", COMPLETIONS)
def test_a_completion_error_is_read_in_every_format(text: bytes) -> None:
    words = parse_failure(text)
    assert words is not None
    assert (words.kind, words.code, words.is_primary) == ("completion", 12, True)
    assert "vendor error 129" in words.detail
    if b"hca" in text:
        assert words.device == "mlx5_0"
    if b"fe80" in text:
        assert "local GID fe80::1" in words.detail


@pytest.mark.parametrize(
    ("text", "kind", "is_primary", "part"),
    [
        (b"NET/IB: Got completion from peer 192.0.2.1<5> with status=5 opcode=0 len=0 vendor err 244", "completion",
         False, "flushed"),
        (b"Call to ibv_modify_qp failed with error Invalid argument", "modify_qp", True, "Invalid argument"),
        ((b"Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next state RTR, "
         b"local GID index 3, local GID ::ffff:198.51.100.10, remote GID ::ffff:198.51.100.11"), "modify_qp", True,
         "local GID index 3"),
        (b"NET/IB : Got async event : port error", "async_event", True, "port error"),
        (b"NET/IB : mlx5_0:1 Got async event : port error", "async_event", True, "port error"),
        (b"NET/IB: mlx5_2:1 async fatal event on QP (0x7f00): local access violation work queue error", "async_event",
         True, "local access violation"),
        (b"NET/IB: mlx5_2:1 Got non-fatal async event: GID table change(18)", "async_event", False, "GID table"),
        (b"Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "memlock", True, ""),
        (b"Call to ibv_reg_mr failed with error Bad address", "reg_mr", True, "Bad address"),
        (b"Net : Connection closed by remote peer 192.0.2.11<41233>", "closed", False, ""),
        (b"socketProgress: Connection closed by remote peer ripe-01<41233>", "closed", False, ""),
        (b"socketProgressOpt: Call to recv from 192.0.2.11<41233> failed : Connection reset by peer", "closed", False, ""),
        (b"Net : Connect to 192.0.2.11<41233> failed : No route to host", "connect", True, "No route to host"),
        (b"socketStartConnect: Connect to 192.0.2.11<41233> failed : Software caused connection abort", "connect", True,
         "Software caused"),
        (b"socketPollConnect: connect to 192.0.2.11<41233> returned Connection refused, retrying (3/34)", "retry",
         False, "refused"),
        (b"socketPollConnect: connect to 192.0.2.11<41233> returned Connection refused, retrying (34/34)", "connect",
         True, "refused"),
        (b"NET/Socket : message truncated : receiving 1048576 bytes instead of 524288", "message_truncated", True, ""),
        (b"Bootstrap : no socket interface found", "no_interface", True, ""),
        (b"Cuda failure 'out of memory'", "cuda", True, "out of memory"),
        (b"Cuda failure 719 'unspecified launch failure'", "cuda", True, "launch"),
        (b"Error: failed to extend /dev/shm/nccl-YbzLRk to 9637892 bytes", "shared_memory", True, "/dev/shm"),
        (b"Duplicate GPU detected : rank 0 and rank 4 both on CUDA device 1a000", "duplicate_gpu", True, "0 4"),
        (b"transport/net.cc:321 -> 6", "unhandled", False, ""),
        (b"NET/OFI Could not find any optimal provider", "ofi", True, ""),
    ],
)  # fmt: skip
def test_failures_are_told_apart_and_secondary_ones_marked(text: bytes, kind: str, is_primary: bool, part: str) -> None:
    words = parse_failure(text)
    assert words is not None
    assert (words.kind, words.is_primary) == (kind, is_primary)
    assert part in words.detail


def test_lines_that_run_into_each_other_are_both_read(tmp_path: Path) -> None:
    glued = (
        "ripe-00:41:43 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA"
        "ripe-01:51:53 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [send] via NET/IB/1/GDRDMA"
    )
    nccl = facts_of(tmp_path, [glued]).nccl
    assert nccl.hosts == ("ripe-00", "ripe-01")
    assert {(v.host, v.via.device, v.via.has_gdr) for v in nccl.vias} == {("ripe-00", 0, True), ("ripe-01", 1, True)}


def test_settings_are_kept_by_value_and_host(tmp_path: Path) -> None:
    job = JobLog(settings=(("NCCL_IB_DISABLE", "1"), ("NCCL_SOCKET_IFNAME", "eno1")))
    nccl = facts_of(tmp_path, job.lines()).nccl
    assert nccl.settings["NCCL_IB_DISABLE"] == {"1": ("ripe-00", "ripe-01")}


def test_an_init_that_some_ranks_never_end_is_hung(tmp_path: Path) -> None:
    lines = [line for line in JobLog().lines() if not ("rank 5 " in line and "Init COMPLETE" in line)]
    (comm,) = facts_of(tmp_path, lines).nccl.comms
    assert comm.is_hung
    assert comm.started - comm.completed == {5}


def test_compressed_coloured_and_cut_files_are_read(tmp_path: Path) -> None:
    text = text_of(["\x1b[32m" + line + "\x1b[0m" for line in JobLog().lines()]).encode()
    whole = tmp_path / "a.log.gz"
    whole.write_bytes(gzip.compress(text))
    cut = tmp_path / "b.log.gz"
    cut.write_bytes(gzip.compress(text * 50)[:-100])
    assert scan([whole]).nccl.num_via("NET") == 8
    facts = scan([cut])
    assert facts.nccl.num_via("P2P") > 24
    assert any("ends early" in note for note in facts.notes)


def test_failures_of_several_files_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    job = JobLog(version="2.28.7")
    late = job.warn(
        1, "NET/IB: Got completion from peer 192.0.2.10<1> with status=12 opcode=0 vendor err 129", clock="10:22:00"
    )
    early = job.warn(6, "NET/IB: mlx5_2:1 async fatal event: port error", clock="10:21:00")
    (tmp_path / "a.log").write_text(text_of(late))
    (tmp_path / "b.log").write_text(text_of(early))
    facts = scan([tmp_path / "a.log", tmp_path / "b.log"])
    assert [f.kind for f in facts.failures] == ["async_event", "completion"]
    assert facts.failures[0].where == f"{tmp_path}/b.log:2"
