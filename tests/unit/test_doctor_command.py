"""`wirespeed doctor host`: exit codes, outputs, suppressions, many hosts, Slurm, and its first seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import msgspec
import pytest

from doctor_trees import TREES, h100, roce, system_of
from wirespeed import records
from wirespeed.cli.main import main
from wirespeed.doctor import health
from wirespeed.doctor.drift import NOT_SEEN, drift
from wirespeed.doctor.examine import examine
from wirespeed.doctor.prometheus import textfile
from wirespeed.doctor.reports import HostReport, host_report
from wirespeed.doctor.suppressions import read_suppressions, suppress
from wirespeed.errors import DataError
from wirespeed.measure.environment import capture
from wirespeed.system import System

FAKE = f"{sys.executable} {Path(__file__).parents[1] / 'fake_ssh.py'}"
TODAY = date(2027, 1, 15)


def report_of(tree: str, *, name: str | None = None) -> HostReport:
    return host_report(examine(system_of(TREES[tree]())), capture(), name=name)


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, str]:
    paths = {}
    for name in ("h100_ib", "pcie_x8", "container_without_verbs"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(TREES[name]().held()))
        paths[name] = str(path)
    return paths


def test_exit_code_1_on_findings_and_0_without(recorded: dict[str, str], capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "host", "--from", recorded["h100_ib"]]) == 0
    assert "node07: no findings" in capsys.readouterr().out
    assert main(["doctor", "host", "--from", recorded["pcie_x8"]]) == 1
    out = capsys.readouterr().out
    assert "CRITICAL  The PCI Express link of mlx5_3" in out
    assert "[pci.width-reduced]" in out
    assert main(["doctor", "host", "--from", recorded["pcie_x8"], "--only", "tcp"]) == 0


def test_json_is_one_record_that_can_be_read_again(
    recorded: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main(["doctor", "host", "--from", recorded["container_without_verbs"], "--json"]) == 1
    path = tmp_path / "report.json"
    path.write_text(capsys.readouterr().out)
    report = records.read(path, HostReport)
    assert [f.severity for f in report.findings] == ["critical"] * 4
    assert report.findings[0].host == "node07"
    assert report.unknowns


def test_counters_are_watched_around_a_command_whose_output_stays_out_of_the_json(
    capfd: pytest.CaptureFixture[str],
):
    command = f"{sys.executable} -c 'import time; print(\"ran\"); time.sleep(0.05); raise SystemExit(3)'"
    main(["doctor", "host", "--around", command, "--only", "counters", "--json"])
    captured = capfd.readouterr()
    report = json.loads(captured.out)
    assert 0.05 <= report["during_s"] < 30
    assert "ran" in captured.err
    assert "ended with 3" in captured.err
    assert main(["doctor", "host", "--around", "true", "--during", "1s"]) == 2
    assert main(["doctor", "host", "--around", "/no/such/program", "--only", "counters"]) == 2


def test_level_decides_what_counts(tmp_path: Path):
    tree = h100()
    tree.files["/proc/sys/net/ipv4/tcp_tw_reuse"] = "1"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(tree.held()))
    assert main(["doctor", "host", "--from", str(path)]) == 0
    assert main(["doctor", "host", "--from", str(path), "--level", "notice"]) == 1
    assert main(["doctor", "host", "--from", str(path), "--level", "bad"]) == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--apply", "--rollback"],
        ["--dry-run"],
        ["--drain"],
        ["--hosts", "n1", "--apply"],
        ["--only", "nothing"],
        ["--during", "0s"],
        ["--hosts", "-oProxyCommand=x"],
        ["--from", "/nonexistent"],
        ["--peers", "no-such-host.invalid"],
    ],
)
def test_combinations_that_make_no_sense_are_usage_errors(options: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "host", *options]) == 2
    assert "wirespeed: got" in capsys.readouterr().err.replace("cannot read", "got")


def test_a_recording_gives_the_findings_of_the_host_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "host.json"
    main(["doctor", "host", "--record", str(path), "--json"])
    here = json.loads(capsys.readouterr().out)
    main(["doctor", "host", "--from", str(path), "--json"])
    again = json.loads(capsys.readouterr().out)

    def said(report: dict) -> list:
        return [(c["name"], c["status"], c["findings"]) for c in report["checks"]]

    assert said(again) == said(here)


def test_a_recording_keeps_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WIRESPEED_TOKEN", "tell-nobody-42")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    path = tmp_path / "host.json"
    main(["doctor", "host", "--record", str(path), "--json"])
    text = path.read_text()
    assert "tell-nobody-42" not in text
    assert '"NCCL_ALGO": "Ring"' in text


def suppressions(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(text)
    return path


GOOD = '[[suppress]]\nfinding = "pci.*"\nsubject = "mlx5_*"\nhosts = "node[01-09]"\nreason = "a riser is on order"\nexpires = {day}\n'


def test_a_suppressed_finding_does_not_count_but_is_kept_with_its_reason(
    tmp_path: Path, recorded: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    path = suppressions(tmp_path, GOOD.format(day="2999-12-31"))
    assert main(["doctor", "host", "--from", recorded["pcie_x8"], "--suppressions", str(path)]) == 0
    assert "suppressed until 2999-12-31: pci.width-reduced mlx5_3 (a riser is on order)" in capsys.readouterr().out


def test_an_expired_suppression_suppresses_nothing_and_is_reported(tmp_path: Path):
    told = read_suppressions(suppressions(tmp_path, GOOD.format(day="2027-01-14")))
    report = suppress(report_of("pcie_x8"), told, today=TODAY)
    assert [f.id for f in report.findings] == ["pci.width-reduced", "host.suppression-expired"]
    assert suppress(report_of("pcie_x8"), told, today=date(2027, 1, 14)).findings == ()  # its last day


def test_a_suppression_for_other_hosts_or_subjects_does_not_fit(tmp_path: Path):
    for change in (("node[01-09]", "node[10-19]"), ("mlx5_*", "eth*"), ("pci.*", "rdma.*")):
        told = read_suppressions(suppressions(tmp_path, GOOD.format(day="2999-01-01").replace(*change)))
        assert len(suppress(report_of("pcie_x8"), told, today=TODAY).findings) == 1


@pytest.mark.parametrize(
    "text",
    [
        '[[suppress]]\nfinding = "a"\nexpires = 2027-01-01\n',
        '[[suppress]]\nfinding = "a"\nreason = " "\nexpires = 2027-01-01\n',
        '[[suppress]]\nfinding = "a"\nreason = "r"\n',
        '[[suppress]]\nfinding = "*"\nreason = "r"\nexpires = 2027-01-01\n',
        '[[suppress]]\nfinding = "a"\nreason = "r"\nexpires = 2027-01-01\nhosst = "n1"\n',
        '[[suppress]]\nfinding = "a"\nreason = "r"\nexpires = 2027-01-01\nhosts = "n[1"\n',
        "not toml",
    ],
)
def test_a_suppression_needs_an_id_a_reason_and_a_day(tmp_path: Path, text: str):
    with pytest.raises(DataError, match=r"s\.toml is wrong"):
        read_suppressions(suppressions(tmp_path, text))


def test_the_prometheus_file_names_every_finding_once_and_escapes(tmp_path: Path, recorded: dict[str, str]):
    report = report_of("pcie_x8", name='n"1\\')
    told = read_suppressions(
        suppressions(tmp_path, GOOD.format(day="2999-01-01").replace('hosts = "node[01-09]"\n', ""))
    )
    lines = textfile([report, suppress(report_of("pcie_x8", name="n2"), told, today=TODAY)]).splitlines()
    assert 'wirespeed_doctor_findings{host="n\\"1\\\\",severity="critical"} 1' in lines
    assert (
        'wirespeed_doctor_finding{host="n2",id="pci.width-reduced",subject="mlx5_3",severity="critical",suppressed="1"} 1'
        in lines
    )
    assert 'wirespeed_doctor_findings{host="n2",severity="critical"} 0' in lines
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    path = tmp_path / "doctor.prom"
    main(["doctor", "host", "--from", recorded["h100_ib"], "--prometheus", str(path)])
    assert path.read_text().startswith("# HELP wirespeed_doctor_findings")


def named(name: str, tree: object) -> HostReport:
    return host_report(examine(system_of(tree)), capture(), name=name)  # type: ignore[arg-type]


def test_drift_names_the_few_that_differ_from_the_many():
    reports = [named(f"gpu{i:02d}", roce()) for i in range(1, 8)]
    odd = roce(mtu=4200)
    odd.files["/proc/sys/net/ipv4/tcp_congestion_control"] = "bbr"
    reports.append(named("gpu08", odd))
    held = {d.key: d for d in drift(reports)}
    assert set(held) == {"nic.ens1np0.mtu", "nic.ens2np0.mtu", "net.ipv4.tcp_congestion_control"}
    mtu = held["nic.ens1np0.mtu"]
    assert (mtu.usual, mtu.num_differing, mtu.severity, mtu.hosts_of["4200"]) == ("9000", 1, "warning", ("gpu08",))


def test_of_two_hosts_neither_is_called_usual_and_what_one_does_not_show_is_a_notice():
    other = roce(mtu=4200)
    del other.files["/proc/meminfo"]
    held = {d.key: d for d in drift([named("a", roce()), named("b", other)])}
    assert held["nic.ens1np0.mtu"].usual is None
    assert held["host.memory"].severity == "notice"
    assert NOT_SEEN in held["host.memory"].hosts_of
    assert drift([named("a", roce())]) == ()


def test_many_hosts_over_ssh_one_of_them_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FAKE_SSH_FOLDER", str(tmp_path))
    code = main(["doctor", "host", "--hosts", "n[1-3],gone4", "--ssh", FAKE, "--only", "host.identity", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 4
    assert ([h["host"] for h in report["hosts"]], [f["host"] for f in report["failures"]]) == (
        ["n1", "n2", "n3"],
        ["gone4"],
    )
    assert report["drift"] == []
    assert main(["doctor", "host", "--hosts", "n[1-3]", "--ssh", FAKE, "--only", "host.identity"]) == 0
    assert "3 hosts: no findings" in capsys.readouterr().out


def test_reports_from_files_are_put_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, tree in (("a", roce()), ("b", roce()), ("c", roce(mtu=1500))):
        records.write(tmp_path / f"{name}.json", named(name, tree))
    files = [str(tmp_path / f"{name}.json") for name in "abc"]
    assert main(["doctor", "drift", *files]) == 1
    out = capsys.readouterr().out
    assert "1 of 3 differ" in out
    assert main(["doctor", "drift", *files[:2]]) == 0
    assert main(["doctor", "drift", files[0]]) == 2


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol that keeps one node's state in a file and writes down what it was told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "state").write_text("IDLE")
    (folder / "scontrol").write_text(
        f'#!/bin/sh\ncase "$1" in\nshow) [ "$3" = node07 ] || {{ echo "Node $3 not found" >&2; exit 1; }}; '
        f'echo "NodeName=$3 State=$(cat {tmp_path}/state) ThreadsPerCore=1";;\n'
        f'update) echo "$@" >> {tmp_path}/told;;\nesac\n'
    )
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def test_a_critical_finding_drains_the_node_with_a_reason_and_nothing_else_does(slurm: Path):
    assert health.drain(System(), report_of("pcie_x8")).startswith(
        "drained node07: wirespeed: pci.width-reduced mlx5_3"
    )
    assert "NodeName=node07 State=DRAIN Reason=wirespeed: pci.width-reduced mlx5_3:" in (slurm / "told").read_text()
    assert health.drain(System(), report_of("roce_mtu_1500")) == "nothing is critical: the node stays as it is"
    assert len((slurm / "told").read_text().splitlines()) == 1


def test_a_node_that_is_drained_already_keeps_its_reason(slurm: Path):
    (slurm / "state").write_text("IDLE+DRAIN")
    assert health.drain(System(), report_of("pcie_x8")) == "node07 is IDLE+DRAIN already and stays so"
    assert not (slurm / "told").exists()


def test_the_health_check_prints_one_line(recorded: dict[str, str], capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "host", "--from", recorded["h100_ib"], "--health-check"]) == 0
    assert capsys.readouterr().out == "ok\n"
    assert main(["doctor", "host", "--from", recorded["container_without_verbs"], "--health-check"]) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "(+3 more)" in out
    assert len(out) < 210


def test_every_kind_of_report_survives_its_json():
    report = report_of("container_without_verbs")
    assert records.from_json(records.to_json(report), HostReport) == report
    assert msgspec.json.decode(records.to_json(report))["kind"] == "host_report"


def test_help_and_checks_start_without_heavy_packages():
    code = (
        "import sys; from wirespeed.cli.main import main; main(['doctor', 'host', '--only', 'host.identity', '--json']); "
        "heavy = {'torch', 'numba', 'numpy', 'scipy', 'plotly', 'pyroute2'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_reference_page_lists_every_check_as_it_is():
    from wirespeed.doctor.examine import CHECKS

    page = (Path(__file__).parents[2] / "docs/reference/doctor-checks.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(f"| `{check.name}` | {check.about} |" for check in CHECKS)
    assert len({check.name for check in CHECKS}) == len(CHECKS)
