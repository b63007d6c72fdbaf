"""Outputs of other tools, torch's dumps and kernel logs: read as they are, wherever they stand."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.doctor.diagnose import causes_of
from wirespeed.doctor.dossier import Dossier
from wirespeed.doctor.flight_recorder import find_desync, read_trace
from wirespeed.doctor.log_prefix import Process, find_process, find_rank, find_time_s
from wirespeed.doctor.log_scan import JobFacts, scan
from wirespeed.doctor.plain_pickle import loads
from wirespeed.errors import DataError


def read_text(tmp_path: Path, text: str, name: str = "a.log") -> JobFacts:
    (tmp_path / name).write_text(text)
    return scan([tmp_path / name])


OLD_TABLE = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#   Rank  0 Pid   9107 on     beet-1 device  0 [0x1b] Tesla V100-SXM2-32GB
#   Rank  1 Pid   9108 on     beet-1 device  1 [0x1c] Tesla V100-SXM2-32GB
#   Rank  2 Pid   8801 on     beet-2 device  0 [0x1b] Tesla V100-SXM2-32GB
#   Rank  3 Pid   8802 on     beet-2 device  1 [0x1c] Tesla V100-SXM2-32GB
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
           8             2   float     sum    24.71    0.00    0.00  1e-07    24.10    0.00    0.00  0e+00
beet-1:9107:9150 [0] NCCL INFO Launch mode Parallel
   134217728      33554432   float     sum  1.2e+04   11.17   16.75  2e-07   1.3e+04   10.32   15.49  2e-07
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 8.06
"""


def test_a_table_of_old_nccl_tests_is_read_between_other_lines(tmp_path: Path) -> None:
    (table,) = read_text(tmp_path, OLD_TABLE).measurements
    assert (table.tool, table.test, table.num_ranks, table.hosts) == (
        "nccl-tests",
        "all_reduce",
        4,
        ("beet-1", "beet-2"),
    )
    assert table.bit_per_s == pytest.approx(16.75 * 8e9)
    assert table.points[-2].time_s == pytest.approx(12e-3)
    assert table.is_correct


def test_a_table_with_a_launchers_prefix_and_na_is_read(tmp_path: Path) -> None:
    text = (
        "[1,0]<stdout>:# Collective test starting: sendrecv_perf\n[1,0]<stdout>:# nThread 1 nGpus 1 minBytes 8\n"
        "[1,0]<stdout>:# Collective test starting: sendrecv_perf\n"
        "[1,0]<stdout>:   67108864      16777216     float     sum      -1   2841.1   23.62   23.62    N/A   2839.0   23.64   23.64    N/A\n"
        "[1,0]<stdout>:# Avg bus bandwidth    : 23.63\n"
    )
    (table,) = read_text(tmp_path, text).measurements
    assert table.test == "sendrecv"
    assert table.bit_per_s == pytest.approx(23.64 * 8e9)


def test_wrong_results_of_a_row_count_whatever_the_footer_says(tmp_path: Path) -> None:
    text = (
        "# nThread 1 nGpus 8 minBytes 8\n     1048576        262144     float     sum      -1    61.2   17.13   29.98      3"
        "    60.9   17.22   30.13      0\n# Out of bounds values : 0 OK\n"
    )
    (table,) = read_text(tmp_path, text).measurements
    assert table.is_correct is False


def test_json_of_nccl_tests_is_read_and_its_environment_is_not_kept(tmp_path: Path) -> None:
    document = {
        "version": 3, "args": ["./build/all_reduce_perf", "-b", "1G"], "env": ["AWS_SECRET_ACCESS_KEY=hunter2"],
        "nccl_version": "22807", "devices": [{"rank": 0, "hostname": "beet-1"}, {"rank": 1, "hostname": "beet-2"}],
        "results": [{"size": 1 << 30, "root": "-1", "out_of_place": {"time": "nan", "bus_bw": 41.5, "nwrong": "N/A"},
                     "in_place": {"time": 25000.0, "alg_bw": 42.0, "bus_bw": 42.0, "nwrong": 0}}],
        "out_of_bounds": {"count": 0, "okay": "true"}, "average_bus_bandwidth": {"bandwidth": 41.7, "okay": "true"},
    }  # fmt: skip
    facts = read_text(tmp_path, json.dumps(document), "run.json")
    (table,) = facts.measurements
    assert (table.test, table.num_ranks, table.is_correct) == ("all_reduce", 2, True)
    assert table.bit_per_s == pytest.approx(42.0 * 8e9)
    assert "hunter2" not in repr(facts)


def test_perftest_in_mb_per_second_counts_binary_megabytes(tmp_path: Path) -> None:
    text = (
        "                    Send BW Test\n Device         : mlx5_4\n Link type       : Ethernet\n"
        " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n"
        " 65536      1000             11634.20            11600.00            0.18\n"
    )
    (found,) = read_text(tmp_path, text).measurements
    assert (found.test, found.device, found.layer) == ("send_bw", "mlx5_4", "Ethernet")
    assert found.bit_per_s == pytest.approx(11600.0 * 8 * 2**20)


def test_perftest_json_is_read_though_older_builds_write_it_wrongly(tmp_path: Path) -> None:
    path = tmp_path / "write_bw.json"
    path.write_text(
        '{\n"test_info": {\n"test": "RDMA_Write BW",\n"Device": "mlx5_3",\n"Link_type": "IB",\n},\n"results": {\n'
        '"MsgSize": 65536,\n"n_iterations": 5000,\n"BW_peak": 392.40,\n"BW_average": 391.90,\n"MsgRate": 0.747\n}\n'
    )
    (measurement,) = scan([path]).measurements
    assert (measurement.tool, measurement.device, measurement.layer) == ("perftest", "mlx5_3", "IB")
    assert measurement.bit_per_s == 391.9e9


def test_iterations_that_vary_are_noted_and_found(tmp_path: Path) -> None:
    results = [
        {"size": size, "out_of_place": {"time": 100.0, "bus_bw": 40.0},
         "out_of_place_per_iter": {"avg": 100.0, "max": 260.0, "cv_pct": 21.0}}
        for size in (1 << 20, 1 << 24, 1 << 28)
    ]  # fmt: skip
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"version": 3, "nccl_version": "2.27", "results": results, "args": ["all_reduce_perf"]}))
    facts = scan([path])
    assert len(facts.measurements[0].notes) == 3
    (cause,) = causes_of(Dossier(facts=facts))
    assert (cause.id, "2.6 times the mean" in cause.finding.title) == ("measure.unsteady", True)


def test_perftest_latency_has_no_rate(tmp_path: Path) -> None:
    text = (
        "                    RDMA_Write Latency Test\n"
        " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]\n"
        " 2       1000          1.02           4.11         1.06               1.07           0.05\n"
    )
    (found,) = read_text(tmp_path, text).measurements
    assert found.bit_per_s is None
    assert found.points[0].time_s == pytest.approx(1.06e-6)


def test_text_of_iperf3_gives_the_receivers_sum(tmp_path: Path) -> None:
    text = (
        "[  5]   0.00-10.00  sec  5.51 GBytes  4.73 Gbits/sec    0             sender\n"
        "[  5]   0.00-10.04  sec  5.51 GBytes  4.71 Gbits/sec                  receiver\n"
        "[  7]   0.00-10.00  sec  5.40 GBytes  4.64 Gbits/sec    9             sender\n"
        "[  7]   0.00-10.04  sec  5.40 GBytes  4.62 Gbits/sec                  receiver\n"
        "[SUM]   0.00-10.00  sec  10.9 GBytes  9.37 Gbits/sec    9             sender\n"
        "[SUM]   0.00-10.04  sec  10.9 GBytes  9.33 Gbits/sec                  receiver\n\niperf Done.\n"
    )
    (found,) = read_text(tmp_path, text).measurements
    assert (found.bit_per_s, found.streams, found.retransmits) == (pytest.approx(9.33e9), 2, 9)


@pytest.mark.parametrize(
    ("head", "process"),
    [
        (b"beet-1:9107:9150 [3] ", Process("beet-1", 9107, 3)),
        (b"[2026-03-07 10:20:31] beet-1:9107:9150 [0] transport/net_ib/p2p.cc:123 (f) ", Process("beet-1", 9107, 0)),
        (b"2026-03-07T10:20:31.1Z stdout F pod-0.svc:60:140 [-1] ", Process("pod-0.svc", 60, -1)),
        (b"[1,26]<stdout>:beet-1:9107:9150 [2] ", Process("beet-1", 9107, 2)),
        (b":9107:9150 [2] ", Process("", 9107, 2)),
        (b"2026-03-07T10:20:31 no process ", None),
    ],
)
def test_the_process_is_found_behind_any_launchers_prefix(head: bytes, process: Process | None) -> None:
    assert find_process(head) == process


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (b"[rank17]:[E1129 ...", 17), (b"[1,26]<stderr>:x", 26), (b" 5: text", 5),
        (b"[PG ID 0 PG GUID 0(default_pg) Rank 3] x", 3), (b"[Rank 0] Watchdog", 0), (b"nothing", None),
    ],
)  # fmt: skip
def test_the_rank_is_found_behind_any_prefix(line: bytes, rank: int | None) -> None:
    assert find_rank(line) == rank


def test_times_of_all_formats_compare() -> None:
    # 7 March is day 66 of a leap year counted from 0: 31 + 29 + 6. Only the order matters, so all years count as one.
    expected = (66 * 24 + 10) * 3600 + 20 * 60 + 31.5
    texts = (
        b"2026-03-07 10:20:31,500 x",
        b"[rank1]:[E0307 10:20:31.500000 a.cpp:1]",
        b"Mar  7 10:20:31.5 host kernel:",
    )
    assert [find_time_s(text) for text in texts] == [expected] * 3
    assert find_time_s(b"2026-13-47 10:20:31") is None


def trace(rank: int, calls: list[tuple[int, str, str]], tmp_path: Path, *, world: int = 4) -> Path:
    document = {
        "version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
        "pg_status": {"0": {"last_enqueued_collective": calls[-1][0]}},
        "entries": [
            {"process_group": ("0", "default_pg"), "collective_seq_id": seq, "p2p_seq_id": 0, "is_p2p": False,
             "profiling_name": name, "state": state, "input_sizes": [[1024]], "input_dtypes": ["Float"]}
            for seq, name, state in calls
        ],
    }  # fmt: skip
    path = tmp_path / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(document, protocol=2))
    return path


def test_the_rank_that_did_not_arrive_is_found_in_pickled_dumps(tmp_path: Path) -> None:
    done = [(n, "nccl:all_reduce", "completed") for n in range(1, 5)]
    paths = [trace(r, [*done, (5, "nccl:all_reduce", "scheduled")] if r != 2 else done, tmp_path) for r in range(4)]
    desync = scan(paths).desync
    assert desync is not None
    assert (desync.kind, desync.ranks, desync.sequence) == ("not_arrived", (2,), 5)


def test_a_rank_that_calls_another_collective_is_found(tmp_path: Path) -> None:
    paths = [trace(r, [(1, "nccl:all_reduce" if r else "nccl:broadcast", "started")], tmp_path) for r in range(4)]
    desync = scan(paths).desync
    assert desync is not None
    assert (desync.kind, desync.ranks) == ("type", (0,))
    assert desync.detail == "nccl:broadcast where the others have nccl:all_reduce"


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    paths = [trace(r, [(7, "nccl:all_reduce", "started")], tmp_path) for r in (0, 1, 2)]
    desync = scan(paths).desync
    assert desync is not None
    assert (desync.kind, desync.ranks) == ("missing_dump", (3,))


def test_dumps_that_agree_have_no_desync(tmp_path: Path) -> None:
    paths = [trace(r, [(7, "nccl:all_reduce", "completed")], tmp_path) for r in range(4)]
    assert find_desync([read_trace(path.read_bytes(), str(path)) for path in paths]) is None


@pytest.mark.torch
def test_a_real_dump_of_torch_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import subprocess
    import sys

    code = (
        "import sys, torch, torch.distributed as dist, torch._C._distributed_c10d as c\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(3): dist.all_reduce(torch.ones(10))\n"
        "open(sys.argv[1], 'wb').write(c._dump_fr_trace())\ndist.destroy_process_group()\n"
    )
    path = tmp_path / "trace_rank_0"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(path)], env={"PATH": "/usr/bin", "TORCH_FR_BUFFER_SIZE": "100"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if result.returncode != 0 or not path.exists():
        pytest.skip(f"this torch has no flight recorder for gloo: {result.stderr[-200:]}")
    held = read_trace(path.read_bytes(), str(path))
    assert held.rank == 0
    assert [(e.sequence, e.name) for e in held.entries] == [(n, "gloo:all_reduce") for n in (1, 2, 3)]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("run",))


def test_a_pickle_that_would_run_code_is_refused_unrun(capsys: pytest.CaptureFixture[str]) -> None:
    for protocol in range(5):
        with pytest.raises(DataError, match="would run code"):
            loads(pickle.dumps({"entries": [Evil()]}, protocol=protocol))
    assert capsys.readouterr().out == ""


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)  # fmt: skip


@given(PLAIN, st.integers(3, 5))
def test_plain_data_comes_back_as_pickle_gives_it(value: object, protocol: int) -> None:
    # Protocol 2 writes bytes through a function.
    assert loads(pickle.dumps(value, protocol=protocol)) == value


@given(st.binary(max_size=300))
def test_rubbish_as_a_pickle_is_a_data_error_or_plain(content: bytes) -> None:
    with contextlib.suppress(DataError):
        loads(b"\x80\x02" + content)


KERNEL = """\
[    2.104417] mlx5_core 0000:3b:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:3a:00.0 (capable of 252.048 Gb/s with 16.0 GT/s PCIe x16 link)
[    4.000001] mlx5_core 0000:3b:00.0 ens3f0: Link up
[90211.330018] mlx5_core 0000:3b:00.0 ens3f0: Link down
[90214.100000] mlx5_core 0000:3b:00.0 ens3f0: Link up
[90311.330018] mlx5_core 0000:3b:00.0 ens3f0: Link down
[91000.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=812, GPU has fallen off the bus.
[91000.500000] Out of memory: Killed process 4411 (python) total-vm:812kB
"""


def test_a_kernel_log_gives_its_events_and_not_the_start_of_a_link(tmp_path: Path) -> None:
    events = {(e.kind, e.device): e for e in read_text(tmp_path, KERNEL).kernel}
    assert events["carrier", "ens3f0"].count == 2
    assert events["xid", "PCI:0000:3b:00"].code == 79
    assert ("host_memory", "4411") in events
    assert events["pcie_width", "0000:3b:00.0"].detail.startswith("63.008")
    assert len(events) == 4


@given(st.binary(max_size=4000))
def test_any_bytes_are_read_without_an_exception(content: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(b"[1,0]<stdout>:a:1:2 [0] NCCL INFO " + content)
        file.flush()
        scan([file.name])
