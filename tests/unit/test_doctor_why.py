"""`wirespeed why` on traces, reports of many hosts and measured fabrics: what comes first, and what it gives."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path

import msgspec
import pytest

from doctor_trees import TREES, system_of
from job_traces import kineto, nsight
from nccl_job_logs import JobLog, text_of
from wirespeed import records
from wirespeed.cli.main import main
from wirespeed.doctor.diagnose import diagnose
from wirespeed.doctor.dossier import is_trace, read_dossier
from wirespeed.doctor.drift import drift
from wirespeed.doctor.examine import Question, examine
from wirespeed.doctor.hops import Hop, PathReport
from wirespeed.doctor.inquiry import report_of
from wirespeed.doctor.reports import ClusterReport, HostReport, host_report
from wirespeed.measure.environment import capture
from wirespeed.records import CollectiveSample, CollectivesRecord, LinkSample, LinksRecord

TUNED = Path(__file__).parent.parent / "data" / "steps" / "char_gpt-4x1gbit"


def test_a_trace_whose_communication_hides_ends_the_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 980 us of compute cover all but 20 of 400 us of communication: 2 % of a step of 1 ms.
    trace = kineto(tmp_path / "rank0.json", compute_us=980.0, nccl_us=400.0, begins_us=600.0)
    log = tmp_path / "job.log"
    log.write_text(text_of(JobLog(has_gdr=False).lines()))
    assert main(["why", str(trace), str(log)]) == 0
    out = capsys.readouterr().out
    assert "the network is not your bottleneck: 2 % of the step is exposed communication" in out
    assert "GPUDirect" in out


def test_an_exposed_trace_puts_exposure_before_transport_and_bounds_the_gain(tmp_path: Path) -> None:
    trace = kineto(tmp_path / "rank0.json.gz.tmp")
    packed = tmp_path / "rank0.json.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    log = tmp_path / "job.log"
    log.write_text(text_of(JobLog(has_gdr=False).lines()))
    verdict = diagnose(read_dossier([packed, log]))
    assert verdict.is_network is True
    assert verdict.exposure[0].startswith("step 1 ms, of which 400 us exposed communication (40 %: worth work)")
    first = verdict.causes[0]
    assert first.id == "nccl.no-gpudirect"
    assert first.gives is not None
    assert (first.gives.now_s, first.gives.step_s) == (pytest.approx(1e-3), pytest.approx(0.6e-3))
    assert first.gives.basis.startswith("a bound")


def test_an_export_of_nsight_systems_is_a_trace_too(tmp_path: Path) -> None:
    dossier = read_dossier([nsight(tmp_path / "job.sqlite", compute_us=900, nccl_us=100)])
    assert dossier.exposure is not None
    assert dossier.exposure.share == pytest.approx(0.1)


def test_a_report_of_nsight_systems_says_how_to_export_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.nsys-rep").write_bytes(b"\x01nsys")
    assert main(["why", str(tmp_path / "job.nsys-rep")]) == 2
    assert "nsys export --type sqlite" in capsys.readouterr().err


def test_a_database_that_is_no_trace_is_left_out_beside_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(tmp_path / "other.sqlite") as connection:
        connection.execute("CREATE TABLE runs (id INTEGER)")
    connection.close()
    (tmp_path / "job.log").write_text(text_of(JobLog(has_gdr=False).lines()))
    assert main(["why", str(tmp_path / "other.sqlite")]) == 2
    capsys.readouterr()
    assert main(["why", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "GPUDirect" in captured.out
    assert "left out:" in captured.err


def test_a_rank_that_comes_late_is_the_cause_and_the_network_is_not(tmp_path: Path) -> None:
    # Rank 1 computes 900 us and joins last; the others wait 300 us of their 400 for it.
    traces = [
        kineto(tmp_path / f"rank{rank}.json", rank=rank, num_ranks=3, host=f"node-{'abc'[rank]}",
               compute_us=900.0 if rank == 1 else 600.0, nccl_us=100.0 if rank == 1 else 400.0)
        for rank in range(3)
    ]  # fmt: skip
    log = tmp_path / "job.log"
    log.write_text(text_of(JobLog(has_gdr=False).lines()))
    verdict = diagnose(read_dossier([*traces, log]))
    assert [cause.id for cause in verdict.causes[:2]] == ["job.late-rank", "nccl.no-gpudirect"]
    assert verdict.headline.startswith("rank 1 on node-b comes late to collectives")
    assert verdict.is_network is False
    gives = verdict.causes[0].gives
    assert gives is not None
    assert gives.step_s == pytest.approx(0.7e-3)
    # Of the 400 us exposed 300 are waiting, which GPUDirect does not take away.
    other = verdict.causes[1].gives
    assert other is not None
    assert other.step_s == pytest.approx(0.9e-3)


def test_many_small_collectives_are_said_to_cost_latency(tmp_path: Path) -> None:
    trace = kineto(tmp_path / "rank0.json", count=40, num_elements=1024)
    verdict = diagnose(read_dossier([trace]))
    assert verdict.causes[0].id == "job.small-messages"
    assert "80 all_reduce of 4 KiB" in verdict.causes[0].finding.title


def nccl_tests_table(busbw: float) -> str:
    size = 4 << 20
    return (
        "# nThread 1 nGpus 1\n#  Rank  0 Group  0 Pid  1 on node-a device  0 [0000:1b:00] GPU\n"
        "#  Rank  1 Group  0 Pid  2 on node-b device  0 [0000:1b:00] GPU\n"
        "# Collective test starting: all_reduce_perf\n"
        f"  {size}  {size // 4}  float  sum  -1  100.0  {busbw}  {busbw}  0  100.0  {busbw}  {busbw}  0\n"
        f"# Avg bus bandwidth    : {busbw}\n"
    )


def test_a_job_slower_than_the_benchmark_is_told_from_a_slow_fabric(tmp_path: Path) -> None:
    # 4 MiB on 2 ranks in 400 us: a bus bandwidth of 10.5 GB/s, where nccl-tests reached 40.
    trace = kineto(tmp_path / "rank0.json")
    (tmp_path / "nccl-tests.txt").write_text(nccl_tests_table(40.0))
    verdict = diagnose(read_dossier([trace, tmp_path / "nccl-tests.txt"]))
    assert verdict.causes[0].id == "job.slower-than-benchmark"
    (tmp_path / "nccl-tests.txt").write_text(nccl_tests_table(12.0))
    verdict = diagnose(read_dossier([trace, tmp_path / "nccl-tests.txt"]))
    assert "job.slower-than-benchmark" not in {cause.id for cause in verdict.causes}


def hosts_of(*trees: str) -> tuple[HostReport, ...]:
    return tuple(
        host_report(examine(system_of(TREES[tree]())), capture(), name=f"node{number:02d}")
        for number, tree in enumerate(trees, start=1)
    )


def test_a_report_of_many_hosts_names_the_odd_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = hosts_of("h100_ib", "h100_ib", "pcie_x8", "h100_ib")
    cluster = ClusterReport(environment=capture(), hosts=reports, drift=drift(reports))
    path = records.write(tmp_path / "cluster.json", cluster)
    trace = kineto(tmp_path / "rank0.json")
    assert main(["why", str(path), str(trace), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    first = verdict["causes"][0]
    assert (first["finding"]["id"], first["kind"]) == ("pci.width-reduced", "capability")
    assert first["finding"]["title"].startswith("node03: ")
    assert first["gives"]["basis"].startswith("at most: all of the exposed time shrinks by")
    assert any(cause["finding"]["id"].startswith("drift.pci") for cause in verdict["causes"])


def test_findings_that_touch_tcp_only_do_not_explain_a_job_over_rdma(tmp_path: Path) -> None:
    question = Question(rate_bit_per_s=25e9, rtt_s=2e-3)
    report = host_report(examine(system_of(TREES["cloud_vm"]()), question), capture())
    log = tmp_path / "job.log"
    log.write_text(text_of(JobLog().lines()))
    verdict = diagnose(read_dossier([records.write(tmp_path / "host.json", report), log]))
    tcp = [cause for cause in verdict.causes if cause.finding.path == "tcp"]
    assert tcp
    assert {cause.finding.severity for cause in tcp} == {"notice"}


def links(slow: str = "") -> LinksRecord:
    names = [f"n{i}" for i in range(4)]
    rate = {name: 0.5e9 if name == slow else 1e9 for name in names}
    return LinksRecord(
        environment=capture(), hosts=tuple(names), socket_options={},
        samples=tuple(
            LinkSample(source=a, target=b, streams=1, num_bytes=10**6, bit_per_s=(min(rate[a], rate[b]),) * 5)
            for a in names for b in names if a != b
        ),
    )  # fmt: skip


def test_a_measured_fabric_gives_its_slow_host_with_a_simulated_gain(tmp_path: Path) -> None:
    report = records.write(tmp_path / "fabric.json", report_of(links("n2")))
    files = [report, TUNED / "tune.json", TUNED / "fabric.toml"]
    verdict = diagnose(read_dossier(files))
    first = verdict.causes[0]
    assert (first.id, first.finding.subject) == ("link.slow-host", "n2")
    assert first.gives is not None
    assert first.gives.basis.startswith("simulated: the wire 2 times as fast")
    assert first.gives.step_s < first.gives.now_s


def test_where_nothing_is_wrong_the_better_strategy_is_named_with_its_step(tmp_path: Path) -> None:
    verdict = diagnose(read_dossier([TUNED / "tune.json", TUNED / "fabric.toml"]))
    assert verdict.is_network is True
    (cause,) = verdict.causes
    assert (cause.id, cause.finding.severity) == ("job.send-less", "notice")
    assert cause.gives is not None
    # The record's own comparison: dense 447 ms, half precision about 270.
    assert cause.gives.step_s < 0.8 * cause.gives.now_s
    assert "send less" in verdict.headline


def test_collectives_and_paths_are_shown_and_judged(tmp_path: Path) -> None:
    sample = CollectiveSample(collective="all_reduce", size_bytes=10**6, times_s=(0.012,), cpu_s=0.001, is_correct=True)
    record = CollectivesRecord(
        environment=capture(), backend="gloo", num_ranks=4, ranks_per_host=1, cpus_per_rank=1.0, samples=(sample,)
    )
    hops = [
        Hop(distance=1, addresses=("192.0.2.1",), num_sent=100, rtts_s=(1e-3,) * 100, is_target=False),
        Hop(distance=2, addresses=("192.0.2.9",), num_sent=100, rtts_s=(1e-3,) * 90, is_target=True),
    ]
    path = PathReport(environment=capture(), target="node-b", address="192.0.2.9", hops=tuple(hops))
    files = [records.write(tmp_path / "collectives.json", record), records.write(tmp_path / "path.json", path)]
    verdict = diagnose(read_dossier(files))
    # 2 x 3/4 x 1 MB in 12 ms: 1 Gbit/s of bus bandwidth.
    assert verdict.capability == ("all_reduce of 4 ranks: 1 Gbit/s at 976.6 KiB (gloo)",)
    (cause,) = verdict.causes
    assert (cause.id, cause.finding.title) == (
        "tcp.path-loss", "10 % of the probes to node-b are lost, from hop 2 on",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("a.json", b'{"schemaVersion": 1, "deviceProperties": [', True),
        ("a.json", b'  {"traceEvents": [', True),
        ("a.sqlite", b"SQLite format 3\x00rest", True),
        ("a.nsys-rep", b"anything", True),
        ("a.json", b'{"kind": "tune"}', False),
        ("a.log", b'node NCCL INFO "traceEvents"', False),
    ],
)
def test_traces_are_told_by_their_beginning(name: str, head: bytes, expected: bool) -> None:
    assert is_trace(name, head) is expected


def test_pages_and_textfiles_are_written_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.log"
    log.write_text(text_of(JobLog(has_gdr=False, host_name="<b>evil</b>").lines()))
    trace = kineto(tmp_path / "rank0.json")
    page, textfile = tmp_path / "why.html", tmp_path / "train7.prom"
    assert main(["why", str(log), str(trace), "--html", str(page), "--prometheus", str(textfile), "--json"]) == 1
    json.loads(capsys.readouterr().out)
    text = page.read_text()
    assert "<script" not in text
    assert "<b>evil</b>" not in text
    assert "RDMA without GPUDirect" in text
    assert "modprobe nvidia_peermem" in text
    samples = textfile.read_text()
    assert 'wirespeed_verdict_is_network{job="train7"} 1' in samples
    assert 'id="nccl.no-gpudirect"' in samples
    assert main(["doctor", "logs", str(log), "--html", str(page)]) == 1
    links_file = records.write(tmp_path / "links.json", links("n2"))
    options = ["--html", str(page), "--prometheus", str(textfile)]
    assert main(["doctor", "fabric", str(links_file), *options]) == 1
    assert "host n2 is slow both ways" in page.read_text()
    assert 'wirespeed_fabric_side_ratio{host="n2",side="sends"} 0.5' in textfile.read_text()


def test_the_page_of_a_host_and_of_many_hosts_shows_findings_and_what_is_not_known(tmp_path: Path) -> None:
    from wirespeed.report.doctor_page import page_of

    reports = hosts_of("h100_ib", "container_without_verbs", "pcie_x8")
    page = page_of(reports[1])
    assert "There is no /dev/infiniband" in page or "libibverbs" in page
    cluster = ClusterReport(environment=capture(), hosts=reports, drift=drift(reports))
    page = page_of(cluster)
    assert "3 hosts" in page or "node02" in page
    assert "Drift" in page
    assert msgspec.json.decode(records.to_json(cluster))["kind"] == "cluster_report"
    assert page == page_of(cluster)
