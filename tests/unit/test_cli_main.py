"""The command itself: quick to start, and every error becomes a message and a documented exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wirespeed
from wirespeed import errors
from wirespeed.cli import main as cli

HEAVY = ("torch", "numba", "plotly", "pyroute2", "scipy")


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", code) if code is not None else ("-m", "wirespeed", *arguments))]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_version_is_printed_by_the_module_too():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"wirespeed {wirespeed.__version__}\n")


def test_help_starts_without_heavy_modules():
    code = (
        "import sys\n"
        "from wirespeed.cli.main import main\n"
        "main(['--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = run(code=code)
    assert "Find, predict and remove the network bottleneck" in done.stdout
    assert done.stderr == "[]\n"


def test_every_command_has_help_that_shows_how_it_is_used():
    names = [command.name for command in cli.app.registered_commands]
    assert "report" in names
    for name in names:
        done = run(name, "--help")
        assert done.returncode == 0, name
        assert f"wirespeed {name}" in done.stdout


@pytest.mark.parametrize("arguments", [["nonsense"], ["report"], ["report", "--nonsense"]])
def test_usage_errors_of_the_command_line_end_with_2(arguments: list[str], capsys):
    assert cli.main(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [
        (errors.WorkloadFailure("the script hung"), 1),
        (errors.UsageError("got -1"), 2),
        (errors.MissingCapability("no user namespaces"), 3),
        (errors.PeerFailure("host01 is gone"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_error_of_a_command_becomes_a_message_and_its_exit_code(fault, exit_code: int, capsys, monkeypatch):
    def fail(**_: object) -> None:
        raise fault

    monkeypatch.setattr(cli, "app", fail)
    assert cli.main(["x"]) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("wirespeed: ")
    assert "Traceback" not in captured.err


def test_bug_shows_its_traceback_and_ends_with_70(capsys, monkeypatch):
    def fail(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    assert cli.main(["x"]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_reader_that_goes_away_is_no_bug():
    # `head -0` closes the pipe before anything is written; the table is written after it.
    code = "import sys\nfrom wirespeed.cli.main import main\nsys.stdin.read()\nsys.exit(main(['--help']))\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
