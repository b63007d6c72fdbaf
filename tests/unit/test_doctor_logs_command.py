"""`wirespeed doctor logs` and `wirespeed why`: exit codes, JSON, folders, records beside logs; and damaged logs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from log_damage import DAMAGES
from nccl_job_logs import LAUNCHERS, VERSIONS, JobLog, text_of
from wirespeed.cli.main import main
from wirespeed.doctor.diagnose import causes_of
from wirespeed.doctor.dossier import Dossier
from wirespeed.doctor.log_scan import scan

TUNED = Path(__file__).parent.parent / "data" / "steps" / "char_gpt-4x1gbit"


def healthy(tmp_path: Path, name: str = "job.log", **kind: object) -> Path:
    job = JobLog(**kind)  # type: ignore[arg-type]
    path = tmp_path / name
    path.write_text(text_of(job.lines(), job.steps(50)))
    return path


def test_a_healthy_log_ends_with_0_and_says_what_nccl_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "logs", str(healthy(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "NCCL 2.21.5, 8 processes on 2 hosts" in out
    assert "8 by InfiniBand (8 with GPUDirect), 24 by GPU to GPU" in out
    assert "nothing wrong was found" in out


def test_a_finding_ends_with_1_and_shows_line_fix_and_undo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = healthy(tmp_path, layer="Socket", settings=(("NCCL_IB_DISABLE", "1"),))
    assert main(["doctor", "logs", str(path)]) == 1
    out = capsys.readouterr().out
    assert "1. NCCL_IB_DISABLE=1 keeps NCCL on TCP" in out
    assert f"{path}:3" in out.replace("\n", "")
    assert "$ unset NCCL_IB_DISABLE" in out
    assert "undo: export NCCL_IB_DISABLE=1" in out


def test_json_is_one_document_with_facts_and_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "logs", str(healthy(tmp_path, has_gdr=False)), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["schema"]) == ("job_facts", 1)
    assert document["nccl"]["hosts"] == ["ripe-00", "ripe-01"]
    assert document["causes"][0]["finding"]["id"] == "nccl.no-gpudirect"


def test_a_folder_is_read_as_the_files_of_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = JobLog()
    for host in range(2):
        lines = [line for line in job.lines() if f"ripe-0{host}:" in line]
        (tmp_path / f"{host}.log").write_text(text_of(lines))
    assert main(["doctor", "logs", str(tmp_path)]) == 0
    assert "8 processes on 2 hosts" in capsys.readouterr().out


def test_files_that_are_not_there_or_say_nothing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "logs", str(tmp_path / "none.log")]) == 2
    assert "none.log" in capsys.readouterr().err
    (tmp_path / "empty.log").write_text("")
    assert main(["doctor", "logs", str(tmp_path / "empty.log")]) == 0
    assert "NCCL_DEBUG=INFO" in capsys.readouterr().out
    (tmp_path / "dir").mkdir()
    assert main(["doctor", "logs", str(tmp_path / "dir")]) == 2


def test_why_joins_the_step_the_transport_and_the_predicted_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = healthy(tmp_path, layer="Socket", interface="ens3", hosts=4, gpus=1)
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    for target, rate, streams in ((one, 1e9, 1), (many, 4e9, 8)):
        target.write_text(json.dumps({
            "start": {"connected": [], "test_start": {"protocol": "TCP", "num_streams": streams}}, "intervals": [],
            "end": {"sum_sent": {"bits_per_second": rate}, "sum_received": {"bits_per_second": rate}},
        }))  # fmt: skip
    files = [str(path), str(one), str(many), str(TUNED / "tune.json"), str(TUNED / "fabric.toml")]
    assert main(["why", *files, "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    first = verdict["causes"][0]
    assert (verdict["kind"], verdict["is_network"], first["finding"]["id"]) == ("verdict", True, "tcp.one-stream")
    assert first["gives"]["basis"].startswith("simulated: the wire 4 times as fast (1 Gbit/s -> 4 Gbit/s)")
    # The dense step of the record: 447 ms with 364 ms exposed; a wire four times as fast leaves about a quarter of that.
    assert first["gives"]["step_s"] < 0.5 * first["gives"]["now_s"]
    assert "exposed communication" in verdict["exposure"][0]
    assert main(["why", *files]) == 1
    assert "gives:" in capsys.readouterr().out


def test_doctor_with_a_file_gives_the_verdict_and_a_command_goes_before_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", str(healthy(tmp_path, has_gdr=False)), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "verdict"
    assert main(["doctor", "no-such-file.log"]) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drift").write_text("not a command")
    assert main(["doctor", "drift", "--help"]) == 0
    assert "side by side" in capsys.readouterr().out


def test_why_says_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(healthy(tmp_path))]) == 0
    captured = capsys.readouterr()
    assert "nothing wrong was found" in captured.out
    assert "whether the network is the bottleneck is not known" in captured.err


def test_a_damaged_record_is_a_data_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tune.json").write_text('{"kind": "tune", "schema": 1}')
    assert main(["why", str(tmp_path / "tune.json")]) == 2
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_healthy_log_gives_no_exception_and_no_cause(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    job = JobLog(
        version=source.choice(VERSIONS),
        launcher=source.choice(LAUNCHERS),
        layer=source.choice(("IB", "RoCE", "Socket")),
    )
    text = text_of(job.lines(), job.steps(60)).encode()
    for damage in source.sample(DAMAGES, source.randrange(1, 4)):
        text = damage(text, source)
    path = tmp_path / "job.log"
    path.write_bytes(text)
    causes = causes_of(Dossier(facts=scan([path])))
    # A log that was cut within the set-up cannot be told from a hang, and the cause says so.
    assert [c.id for c in causes if c.id != "nccl.init-hang" and c.finding.severity != "notice"] == []
