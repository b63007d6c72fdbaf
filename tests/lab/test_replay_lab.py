"""The command, in a lab: predictions beside measurements, and bytes at the interface."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from wirespeed.cli.main import app

pytestmark = [pytest.mark.lab, pytest.mark.torch]


@pytest.mark.slow
def test_a_replay_predicts_and_measures_dense_and_int8(tmp_path):
    out = tmp_path / "replay.json"
    result = CliRunner().invoke(
        app,
        ["bench", "replay", "-m", "resnet50", "-n", "2", "-r", "2gbit", "--scale", "10", "--compute", "400ms",
         "-s", "int8/4MiB", "--steps", "4", "--rounds", "1", "--out", str(out), "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    held = json.loads(result.stdout)
    assert held == json.loads(out.read_text())
    dense, int8 = held["arms"]
    assert (dense["name"], int8["name"]) == ("dense", "int8/4MiB")
    # Dense sends 102 MB, headers come on top; int8 a quarter of it and a scale per 1024 elements.
    assert dense["wire_bytes_per_step"] == pytest.approx(102.2e6 * 1.05, rel=0.05)
    assert int8["wire_bytes_per_step"] < 0.3 * dense["wire_bytes_per_step"]
    # 102 MB at 2 Gbit/s are 0.41 s and more: dense is exposed, a quarter of it need not be.
    assert dense["exposed_s"] > int8["exposed_s"]
    for arm in held["arms"]:
        assert abs(arm["prediction_error"]) < 0.3
    assert held["goodput_bit_per_s"] == pytest.approx(2e9, rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1gbit"], "neither or both of --model and --workload"),
        (["-m", "resnet50"], "neither --rate nor --exposed, and no launcher"),
        (["-m", "resnet50", "-r", "1gbit", "--exposed", "35%"], "--rate and --exposed"),
        (["-m", "resnet50", "-r", "1gbit", "-n", "1"], "--hosts 1"),
        (["-m", "nothing", "-r", "1gbit"], "bert-base, bert-large"),
        (["-m", "resnet50", "-r", "1gbit", "--scale", "0.1"], "--scale 0.1"),
    ],
)
def test_what_cannot_be_replayed_is_told_at_once(arguments, message):
    from wirespeed.errors import UsageError

    result = CliRunner().invoke(app, ["bench", "replay", *arguments])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)
