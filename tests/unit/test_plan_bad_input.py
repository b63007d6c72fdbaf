"""Bad input to the planner: exit code 2, the line or field by name, and nothing on stdout that looks like a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wirespeed.cli.main import main

STAR = "star hosts=4 nic=100g nics=8 island=nvlink3"
HOSTS = "[[hosts]]\nname = 'a'\nrate = '1 Gbit/s'\nrack = 's'\n[[hosts]]\nname = 'b'\nrate = '1 Gbit/s'\nrack = 't'\n"
TRAIN = ("plan", "train", "--model", "resnet50", "--device", "v100", "--dtype", "fp32")
COLLECTIVE = ("plan", "collective", "all_reduce", "--bytes", "1MiB")


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("wirespeed: ")
    assert len(captured.err.splitlines()) < 6
    return captured.err


@pytest.mark.parametrize("command", [TRAIN, COLLECTIVE])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[[switches]]\nname = 's'\nparent = 't'\n[[switches]]\nname = 't'\nparent = 's'\n",
            "s -> t -> s form a cycle",
        ),
        ("[[switches]]\nname = 's'\n[[switches]]\nname = 't'\n", "not connected: switches 's', 't'"),
        (
            "[[switches]]\nname = 's'\nparent = 'spine'\n",
            "switch 's' has parent 'spine', which the fabric does not have",
        ),
        ("[[switches]]\nname = 's'\n", "host 'b' is at switch 't', which the fabric does not have"),
        ("[[uplinks]]\nrack = 's'\nrate = '0 Gbit/s'\n", "uplinks[0].rate: got rate '0 Gbit/s'"),
        ("[[uplinks]]\nrack = 's'\nrate = '-3 Gbit/s'\n", "uplinks[0].rate"),
        ("[[uplinks]]\nrack = 'u'\nrate = '1 Gbit/s'\n", "uplink of rack 'u', which holds no host"),
        ("[[hosts]]\nname = 'c'\nrate = '0 bit/s'\n", "hosts[2].rate"),
        ("[[hosts]]\nname = 'c'\nrate = 'nan Gbit/s'\n", "hosts[2].rate"),
        ("[[hosts]]\nname = 'c'\ncpus = 0\n", "hosts[2]: host 'c' has 0 cores"),
        ("[[hosts]]\nname = 'a'\n", "names host 'a' twice"),
        ("[[hosts]]\nname = 'c'\ntransport = 'x'\n", "host 'c' has transport 'x'"),
        ("[[hosts]]\nname = 'c'\nnic_count = 2\n", "`nic_count`"),
        (
            (
                "[[collectives]]\ncollective = 'all_reduce'\nbackend = 'gloo'\nnum_ranks = 2\nrate = '0 bit/s'\n"
                "points = [['1 KiB', '1 ms']]\n"
            ),
            "collectives[0].rate",
        ),
        (
            (
                "[[collectives]]\ncollective = 'all_reduce'\nbackend = 'gloo'\nnum_ranks = 2\n"
                "points = [['1 KiB', '2 ms'], ['1 MiB', '1 ms']]\n"
            ),
            "collectives[0].points: a curve is not monotone",
        ),
    ],
)
def test_a_fabric_that_is_wrong_is_refused_by_file_and_field(
    command: tuple[str, ...], text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.toml"
    path.write_text(f"schema = 1\nrtt = '20 us'\n{HOSTS}{text}")
    said = refuse(capsys, *command, "--fabric", str(path))
    assert told in said
    assert str(path) in said


def test_a_newer_fabric_is_not_half_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.toml"
    path.write_text(f"schema = 2\nshape = 'moebius'\n{HOSTS}")
    said = refuse(capsys, *TRAIN, "--fabric", str(path))
    assert "has schema 2; expected schema 1" in said
    assert "upgrade" in said


def test_a_line_of_toml_that_is_broken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.toml"
    path.write_text("schema = 1\n[[hosts]]\nname = a b\n")
    assert "line 3" in refuse(capsys, *TRAIN, "--fabric", str(path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--fabric", "star hosts=4 nic=101g"), "NIC '101g'"),
        (("--fabric", "star hosts=4 nic=100g island=nvlink9"), "island"),
        (("--fabric", "star hosts=0 nic=100g"), "hosts"),
        (("--fabric", "star hosts=4 nic=100g rate=0gbit"), "rate"),
        (("--fabric", "tree hosts=4 nic=100g oversubscription=-1"), "oversubscription"),
        (("--fabric", "ring hosts=4 nic=100g"), "'ring'"),
        (("--fabric", "star hosts=4 nics=2"), "nic"),
        (("--fabric", "star hosts=4 nic=100g colour=red"), "colour"),
        (("--fabric", STAR, "--device", "b9000"), "b9000"),
        (("--fabric", STAR, "--dtype", "fp3"), "fp3"),
        (("--fabric", STAR, "--slowdown", "0.5"), "slowdowns (0.5,)"),
        (("--fabric", STAR, "--batch", "0"), "batch of 0"),
        (("--fabric", STAR, "--fidelity", "perfect"), "perfect"),
    ],
)
def test_a_word_that_is_wrong_is_named(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refuse(capsys, "plan", "train", "--model", "gpt3-13b", *arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "gpt5"), "gpt5"),
        (("--model", "gpt3-175b", "--fabric", "star hosts=1 nic=100g"), "fit"),
        (("--model", "gpt3-13b", "--current", "tp3 pp1 dp1"), "devices on a fabric of 32"),
        (("--model", "gpt3-13b", "--current", "tp8 pp3 dp4"), "devices on a fabric of 32"),
        (("--model", "gpt3-13b", "--current", "tp8 xx2"), "xx2"),
        (("--model", "gpt3-13b", "--current", "tp32 pp1 dp1", "--batch", "64"), "32"),
        (("--model", "resnet50", "--current", "tp8 pp1 dp4"), "transformer"),
        (("--model", "resnet50", "--batch", "33"), "a batch of 33 on 32 devices"),
    ],
)
def test_a_model_or_a_layout_that_does_not_fit_is_refused(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fabric = () if "--fabric" in arguments else ("--fabric", STAR)
    assert told in refuse(capsys, "plan", "train", *arguments, *fabric)


def test_a_newer_workload_and_a_newer_scenario_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps({"schema": 99, "kind": "training_workload", "workload": {}}))
    assert "schema 99" in refuse(capsys, "plan", "train", "--workload", str(workload), "--fabric", STAR)
    scenario = tmp_path / "s.toml"
    scenario.write_text("schema = 99\nmodel = 'resnet50'\n")
    assert "schema 99" in refuse(capsys, "plan", "compare", str(scenario))
