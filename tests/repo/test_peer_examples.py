"""The systemd unit and the DaemonSet of the peer: they parse, and name only options that the commands have."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from wirespeed.cli.main import main

FOLDER = Path(__file__).parents[2] / "examples" / "peer"


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    main(["repo", command, "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))


def test_the_daemon_set_starts_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "daemonset.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["DaemonSet", "Deployment", "Service"]
    for document in documents[:2]:
        (container,) = document["spec"]["template"]["spec"]["containers"]
        program, repo, command, *given = container["args"]
        assert (program, repo) == ("wirespeed", "repo")
        assert {argument.partition("=")[0] for argument in given} <= options_of(command, capsys)
        assert (
            document["spec"]["selector"]["matchLabels"].items()
            <= document["spec"]["template"]["metadata"]["labels"].items()
        )
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        names = {port["name"] for port in container["ports"]}
        assert container.get("readinessProbe", {}).get("tcpSocket", {}).get("port", "peer") in {*names, "peer"}


def test_the_unit_starts_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / "wirespeed-peer.service")
    words = unit["Service"]["ExecStart"].split()
    assert words[1:4] == ["wirespeed", "repo", "peer"]
    assert {word for word in words if word.startswith("--")} <= options_of("peer", capsys)
    assert unit["Service"]["User"] != "root"
    if shutil.which("systemd-analyze") is not None:
        done = subprocess.run(
            ["systemd-analyze", "verify", str(FOLDER / "wirespeed-peer.service")],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert not [line for line in done.stderr.splitlines() if "wirespeed-peer" in line and "Unknown" in line]
