"""The packed file, and many hosts over ssh: one file, standard library only, nothing left behind."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from wirespeed.cli.main import main
from wirespeed.doctor.examine import Question
from wirespeed.doctor.packed import MARK, MIN_PYTHON, argument, pack
from wirespeed.doctor.remote import examine_hosts, script, ssh_command
from wirespeed.doctor.reports import examination_from_json
from wirespeed.errors import DataError
from wirespeed.system import System

FAKE = [sys.executable, str(Path(__file__).parents[1] / "fake_ssh.py")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_SSH_FOLDER", str(tmp_path))
    return tmp_path


def test_the_packed_file_runs_alone_on_the_standard_library(tmp_path: Path):
    path = tmp_path / "doctor.pyz"
    path.write_bytes(pack())
    # -I -S: no site-packages, no environment, no folder of ours
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(path), argument(Question(only=("tcp", "host")))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    examination = examination_from_json(line[len(MARK) :], source="here")
    assert {c.name.split(".")[0] for c in examination.checks} == {"tcp", "host"}
    assert not [u for c in examination.checks for u in c.unknowns if "check itself failed" in u.why]


def test_the_packed_file_is_small_and_the_same_each_time():
    assert pack() == pack()
    assert len(pack()) < 128 * 1024


def test_packed_sources_have_no_syntax_above_the_oldest_python_and_import_only_each_other_and_the_library():
    with zipfile.ZipFile(io.BytesIO(pack())) as archive:
        names = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in archive.namelist()}
        for name in archive.namelist():
            tree = ast.parse(archive.read(name), feature_version=MIN_PYTHON)
            for node in ast.walk(tree):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                for module in modules:
                    assert module in names or module.split(".")[0] in sys.stdlib_module_names, (
                        f"{name} imports {module}"
                    )


def test_on_an_old_python_dataclasses_without_kw_only_serve_as_well(tmp_path: Path):
    """The shim of the packed file, with this Python saying that it is 3.9 and its dataclass refusing what 3.9 does not know."""
    path = tmp_path / "doctor.pyz"
    path.write_bytes(pack())
    code = (
        "import sys, dataclasses, runpy\n"
        "real = dataclasses.dataclass\n"
        "def old(cls=None, *, init=True, repr=True, eq=True, order=False, unsafe_hash=False, frozen=False):\n"
        "    return real(cls, init=init, repr=repr, eq=eq, order=order, unsafe_hash=unsafe_hash, frozen=frozen)\n"
        "dataclasses.dataclass = old\n"
        "sys.version_info = (3, 9, 18)\n"
        f'sys.argv = [{str(path)!r}, \'{{"only": ["tcp"]}}\']\n'
        f"runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert MARK in done.stdout


def test_a_wrong_question_ends_with_a_message_and_no_traceback(tmp_path: Path):
    path = tmp_path / "doctor.pyz"
    path.write_bytes(pack())
    done = subprocess.run(
        [sys.executable, "-I", str(path), '{"only": ["nothing"]}'],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("wirespeed: got check 'nothing'")


def test_hosts_answer_and_keep_nothing(folder: Path):
    hosts = ["n1", "n2", "gone3", "n4"]
    ended: list[str] = []
    answers, failures = examine_hosts(
        hosts, Question(only=("host.identity",)), system=System(), ssh=FAKE, on_end=ended.append
    )
    assert list(answers) == ["n1", "n2", "n4"]
    assert [(f.host, f.why) for f in failures] == [
        ("gone3", "gone3 cannot be reached: ssh: Could not resolve hostname gone3: Name or service not known")
    ]
    assert sorted(ended) == sorted(hosts)
    assert [c.name for c in answers["n1"].checks] == ["host.identity"]
    for host in answers:
        assert list((folder / host).iterdir()) == []


def test_a_host_without_python_says_so_and_keeps_nothing(folder: Path):
    (folder / "nopython").mkdir()
    for tool in ("sh", "mktemp", "cat", "rm"):
        os.symlink(shutil.which(tool) or tool, folder / "nopython" / tool)
    # The search also tries absolute paths, of which this machine has one; so they are taken out of the script.
    text = script(argument(Question())).replace("/usr/bin/python3", "/none/python3")
    done = System().run(
        [*FAKE, "-T", "--", "nopython", f"sh -c '{text.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'"],
        stdin=pack(),
    )
    assert done.returncode == 72
    assert {path.name for path in (folder / "nopython").iterdir()} == {"sh", "mktemp", "cat", "rm"}


def test_a_host_that_does_not_answer_in_time_is_a_failure_and_the_others_are_not_held_up(tmp_path: Path):
    slow = tmp_path / "ssh"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    answers, failures = examine_hosts(["n1"], Question(), system=System(), ssh=[str(slow)], timeout_s=0.3)
    assert answers == {}
    assert failures[0].why.startswith("n1 did not answer within 0.3 s")


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1, 2", '{"host": 3}', '{"host":"x","is_root":true,"during_s":null,"checks":[{"name":1}]}', "[" * 5000],
)
def test_what_another_host_sends_is_checked(text: str):
    with pytest.raises(DataError, match="n7 sent a report that is not understood"):
        examination_from_json(text, source="n7")


def test_a_finding_of_another_host_that_breaks_the_rules_is_refused():
    bad = {"host": "x", "is_root": True, "during_s": None, "checks": [{"name": "a", "about": "b", "status": "found", "duration_s": 0.1,
           "findings": [{"id": "x", "subject": "s", "severity": "critical", "title": "t", "evidence": []}]}]}  # fmt: skip
    with pytest.raises(DataError):
        examination_from_json(json.dumps(bad), source="n7")


def test_the_ssh_command_never_asks_and_takes_no_host_for_an_option():
    command = ssh_command("-oProxyCommand=x", ["ssh", "-J", "bastion"], "true")
    assert command[:3] == ["ssh", "-J", "bastion"]
    assert "BatchMode=yes" in command
    assert command[command.index("--") + 1] == "-oProxyCommand=x"
    assert "sudo -n" in script("{}", use_sudo=True)
    assert "sudo" not in script("{}")


FAKE_SSH = """#!/bin/sh
[ "$1" = -V ] && exit 0
for last; do :; done
cd "{elsewhere}" || exit 255
exec env -i PATH="{bin}:/usr/bin:/bin" TMPDIR="{elsewhere}" HOME="{elsewhere}" sh -c "$last"
"""


def test_the_ssh_on_the_path_runs_it_elsewhere_without_site_packages_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bin_, elsewhere = tmp_path / "bin", tmp_path / "elsewhere"
    bin_.mkdir()
    elsewhere.mkdir()
    scripts = {
        "ssh": FAKE_SSH.format(bin=bin_, elsewhere=elsewhere),
        "python3": f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n',
    }
    for name, text in scripts.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    code = main(["doctor", "host", "--hosts", "127.0.0.[1-2]", "--only", "host", "--only", "tcp.advice", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code in (0, 1)
    assert [host["host"] for host in report["hosts"]] == ["127.0.0.1", "127.0.0.2"]
    assert report["failures"] == []
    assert {check["name"].split(".")[0] for check in report["hosts"][0]["checks"]} == {"host", "tcp"}
    assert list(elsewhere.iterdir()) == []
