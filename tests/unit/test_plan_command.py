"""`wirespeed plan` as it is typed."""

from __future__ import annotations

import json

import msgspec
import pytest
from plan_cases import gigabit_fabric, gigabit_workload

from wirespeed.cli.main import main
from wirespeed.plan import write_workload

files = pytest.importorskip("wirespeed.fabric.files")


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    workload = write_workload(tmp_path / "workload.json", gigabit_workload())
    fabric = tmp_path / "fabric.toml"
    files.write_fabric(fabric, gigabit_fabric())
    return ["--workload", str(workload), "--fabric", str(fabric)]


def test_train_prints_one_json_document(arguments, capsys):
    assert main(["plan", "train", *arguments, "--fidelity", "compressed", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    steps_s = [p["step_s"] for p in out["predictions"]]
    assert steps_s == sorted(steps_s)
    assert out["chosen"] in [p["name"] for p in out["predictions"]]
    assert {p["strategy"]["codec"] for p in out["predictions"]} == {"dense", "half", "int8"}


def test_train_shows_the_best_of_each_codec_and_marks_the_choice(arguments, capsys):
    assert main(["plan", "train", *arguments]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert sum("exact" in row for row in rows) == 1
    assert [row for row in rows if row.startswith("*")]
    assert rows[-1].startswith("use half")


def test_train_takes_strategies_and_keeps_dense_to_compare_with(arguments, capsys):
    assert main(["plan", "train", *arguments, "-s", "half/4MiB", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert {p["name"] for p in out["predictions"]} == {"dense", "half/4MiB"}


def test_what_was_not_predicted_is_named_on_stderr(tmp_path, arguments, capsys):
    files.write_fabric(tmp_path / "fabric.toml", gigabit_fabric(codecs=()))
    assert main(["plan", "train", *arguments]) == 0
    assert "not predicted: half" in capsys.readouterr().err


def test_explain_names_the_binding_resource_and_advises(arguments, capsys):
    assert main(["plan", "explain", *arguments, "--strategy", "dense"]) == 0
    out = capsys.readouterr().out
    assert "bandwidth binds" in out
    assert "use half" in out


def test_explain_prints_one_json_document(arguments, capsys):
    assert main(["plan", "explain", *arguments, "-s", "int8/4MiB", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["name"] == "int8/4MiB"
    assert "a codec twice as fast" in [one["change"] for one in out["what_ifs"]]


def test_an_assumed_workload_is_said_to_be_one(tmp_path, arguments, capsys):
    assumed = msgspec.structs.replace(gigabit_workload(), origin="assumed")
    write_workload(tmp_path / "workload.json", assumed)
    assert main(["plan", "train", *arguments]) == 0
    assert "assumed, not measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [["--fidelity", "best"], ["--strategy", "zip"], ["--workload", "/nonexistent/workload.json"]]
)
def test_wrong_arguments_are_usage_errors(arguments, wrong, capsys):
    assert main(["plan", "train", *arguments, *wrong]) == 2
    assert capsys.readouterr().err


def test_help_gives_examples(capsys):
    assert main(["plan", "train", "--help"]) == 0
    assert "--fidelity lossy" in capsys.readouterr().out
