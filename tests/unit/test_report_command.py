"""`wirespeed report`, as a program would run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_records import make_record

from wirespeed import records
from wirespeed.cli.main import main


@pytest.fixture
def tune_json(tmp_path: Path) -> Path:
    return records.write(tmp_path / "tune.json", make_record())


def test_table_goes_to_stdout_at_a_width_that_a_pipe_keeps_whole(tune_json: Path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["report", str(tune_json)]) == 0
    captured = capsys.readouterr()
    assert "int8 reaches dense's loss in 41 % of the time" in captured.out
    assert "on wire" in captured.out  # a column that only the wide table has
    assert captured.err == ""


def test_json_is_one_document_on_stdout(tune_json: Path, capsys):
    assert main(["report", str(tune_json), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["chosen"] == "int8"
    assert [row["name"] for row in document["rows"] if row["chosen"]] == ["int8"]


def test_page_is_written_and_named_on_stderr(tune_json: Path, tmp_path: Path, capsys):
    target = tmp_path / "r.html"
    assert main(["report", str(tune_json), "-o", str(target), "--json"]) == 0
    captured = capsys.readouterr()
    assert "r.html" in captured.err
    json.loads(captured.out)
    assert target.stat().st_size > 1_000_000


def test_missing_file_is_a_usage_error_that_names_it(tmp_path: Path, capsys):
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_record_of_another_kind_is_refused(tmp_path: Path, capsys):
    path = tmp_path / "links.json"
    environment = make_record().environment
    records.write(path, records.LinksRecord(environment=environment, hosts=(), samples=(), socket_options={}))
    assert main(["report", str(path)]) == 2
    assert "kind 'links'; expected kind 'tune'" in capsys.readouterr().err
