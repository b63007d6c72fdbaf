"""Kineto traces: written as torch writes them for NCCL (no GPU here), and real ones in tests/real/test_traces_real.py."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from wirespeed.cli.traces import profile_traces
from wirespeed.errors import DataError, UsageError
from wirespeed.measure.traces import analyse, read_trace


def kernel(name, ts, dur, *, device=0, stream=7, **args):
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream, "ts": ts, "dur": dur,
        "args": {"device": device, "stream": stream, **args},
    }  # fmt: skip


def nccl(ts, dur, *, nelems=1 << 20, name="allreduce", kernel_name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", ranks=2):
    return kernel(
        kernel_name, ts, dur, stream=20,
        **{"Collective name": name, "In msg nelems": nelems, "Out msg nelems": nelems, "Group size": ranks,
           "dtype": "Float", "Process Group Name": "0"},
    )  # fmt: skip


def step(number, ts, dur):
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"ProfilerStep#{number}",
        "pid": 9,
        "tid": 9,
        "ts": ts,
        "dur": dur,
    }


def trace(events, *, rank=0, world_size=2):
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}, *events],
    }


def write(path, document):
    path.write_text(json.dumps(document))
    return path


EVENTS = [
    step(1, 0.0, 1000.0),
    step(2, 1000.0, 1000.0),
    kernel("ampere_sgemm_128x64", 0.0, 600.0),
    nccl(400.0, 500.0),  # 200 us beside the kernel, 300 us alone
    kernel("ampere_sgemm_128x64", 1000.0, 600.0),
    nccl(1400.0, 500.0),
    kernel("Memcpy HtoD", 0.0, 0.0),
]


def test_a_gpu_trace_is_split_into_compute_hidden_and_exposed_communication(tmp_path):
    (timeline,) = read_trace(write(tmp_path / "rank0.json", trace(EVENTS)))
    record = analyse([timeline], nic_bit_per_s=100e9)
    (rank,) = record.ranks
    assert (rank.rank, rank.device, rank.num_steps) == (0, "GPU 0", 2)
    assert rank.window_s == pytest.approx(2e-3)
    assert rank.step_s == pytest.approx(1e-3)
    assert rank.compute_s == pytest.approx(1.2e-3)
    assert rank.communication_s == pytest.approx(1e-3)
    assert rank.overlap_s == pytest.approx(0.4e-3)
    assert rank.exposed_s == pytest.approx(0.6e-3)
    assert rank.idle_s == pytest.approx(0.2e-3)
    # Without the exposed part a step takes 0.7 ms.
    assert record.speedup_limit == pytest.approx(1 / 0.7)
    (collective,) = record.collectives
    # 4 MiB in 500 us over 2 ranks: bus factor 1, so 8 * 2^22 / 500e-6.
    assert collective.busbw_bit_per_s == pytest.approx(67.108864e9)
    assert collective.saturation == pytest.approx(0.67108864)
    assert rank.waiting_s is None


def test_the_whole_output_of_an_all_gather_is_its_size(tmp_path):
    event = nccl(
        0.0, 100.0, name="_allgather_base", kernel_name="ncclDevKernel_AllGather_RING_LL", nelems=1000, ranks=4
    )
    event["args"]["Out msg nelems"] = 4000
    (timeline,) = read_trace(write(tmp_path / "t.json", trace([event], world_size=4)))
    assert (timeline.collectives[0].collective, timeline.collectives[0].size_bytes) == ("all_gather", 16000)


def test_what_a_rank_waits_for_the_others_is_told_apart_from_the_transfer(tmp_path):
    early = [step(1, 0.0, 1000.0), kernel("gemm", 0.0, 100.0), nccl(100.0, 900.0)]
    late = [step(1, 0.0, 1000.0), kernel("gemm", 0.0, 800.0), nccl(800.0, 200.0)]
    timelines = [
        *read_trace(write(tmp_path / "0.json", trace(early, rank=0))),
        *read_trace(write(tmp_path / "1.json", trace(late, rank=1))),
    ]
    record = analyse(timelines)
    assert [rank.waiting_s for rank in record.ranks] == [pytest.approx(700e-6), pytest.approx(0.0)]
    assert record.collectives[0].transfer_s == pytest.approx(200e-6)
    assert any(finding.startswith("rank 1 is late: rank 0 waits 700 us") for finding in record.findings)


def test_traces_of_different_steps_are_not_matched(tmp_path):
    timelines = [
        *read_trace(write(tmp_path / "0.json", trace([nccl(0.0, 10.0)], rank=0))),
        *read_trace(write(tmp_path / "1.json", trace([nccl(0.0, 10.0), nccl(20.0, 10.0)], rank=1))),
    ]
    record = analyse(timelines)
    assert [rank.waiting_s for rank in record.ranks] == [None, None]
    assert "not of the same steps" in record.notes[0]


def test_eight_ranks_of_a_host_share_its_nics(tmp_path):
    # 16 ranks on 2 hosts: one share of the ring leaves each host, 2 * (2-1)/2 = 1 of 4 MiB, over two NICs of 100 Gbit/s.
    (timeline,) = read_trace(write(tmp_path / "t.json", trace([nccl(0.0, 500.0, ranks=16)], world_size=16)))
    (collective,) = analyse([timeline], ranks_per_host=8, nic_bit_per_s=100e9, nics_per_host=2).collectives
    assert collective.nic_bit_per_s == pytest.approx(67.108864e9)
    assert collective.saturation == pytest.approx(0.33554432)
    assert collective.busbw_bit_per_s == pytest.approx(2 * 15 / 16 * 67.108864e9)


def test_a_small_collective_says_nothing_about_a_nic(tmp_path):
    (timeline,) = read_trace(write(tmp_path / "t.json", trace([nccl(0.0, 50.0, nelems=8)])))
    (collective,) = analyse([timeline], nic_bit_per_s=100e9).collectives
    assert collective.saturation is None


def test_a_compressed_trace_and_a_bare_list_of_events_read_alike(tmp_path):
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(trace(EVENTS)).encode()))
    bare = write(tmp_path / "t.json", EVENTS)
    one, two = read_trace(packed)[0], read_trace(bare)[0]
    assert one.compute.tolist() == two.compute.tolist()
    assert one.rank == 0
    assert two.rank is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not a trace of torch.profiler"),
        (b'{"a": 1}', "not a trace of torch.profiler"),
        (b'{"traceEvents": []}', "holds no events"),
        (b"\x1f\x8b\x08\x00broken", "cannot read"),
        (b"\xff\xfe\x00", "not a trace"),
    ],
)
def test_what_is_no_trace_is_an_error_that_says_so(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_trace(path)


def test_a_trace_without_collectives_says_that_nothing_was_exchanged(tmp_path):
    (timeline,) = read_trace(write(tmp_path / "t.json", trace([kernel("gemm", 0.0, 5.0)])))
    assert analyse([timeline]).findings[0].startswith("no collectives in these traces")


def test_traces_are_read_without_torch(tmp_path):
    write(tmp_path / "rank0.json", trace(EVENTS))
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['wirespeed']; from wirespeed.cli.main import main; "
        f"sys.exit(main(['profile', '--trace', {str(tmp_path / 'rank0.json')!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"][0]["num_steps"] == 2


def test_a_file_that_is_not_there_is_a_mistake_of_the_command_line():
    with pytest.raises(UsageError, match=r"no file 'nowhere\.json'"):
        profile_traces(
            ["nowhere.json"], nic_rate=None, nics_per_host=1, ranks_per_host=1, step_name=None, out=None, as_json=False
        )
