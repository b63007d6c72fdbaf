"""Crashes: whatever ends a lab's programs, nothing stays for long, and nothing blocks the next lab."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab_tools import processes_of, python, wait_until

from wirespeed.errors import DataError, MissingCapability, PeerFailure, UsageError
from wirespeed.lab import Lab, LabSpec, remove_stale, stale_labs
from wirespeed.lab.cluster import Lab as ClusterLab

SPEC = LabSpec(hosts=2, rate_bit_per_s=1e9)

# A program that makes a lab and runs ranks, each with a child in another session; prints when they are up.
OWNER = """
import sys
from wirespeed.lab import Lab, LabSpec
with Lab(LabSpec(hosts=2, rate_bit_per_s=1e9)) as lab:
    lab.run(["sh", "-c", "setsid sleep 600 & echo up; exec sleep 600"])
"""
# The same on a lab that is up.
GUEST = """
import sys
from wirespeed.lab import Lab
with Lab.attach(sys.argv[1]) as lab:
    lab.run(["sh", "-c", "setsid sleep 600 & echo up; exec sleep 600"])
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program and wait until its two ranks have said that they are up."""
    program = subprocess.Popen(python(code, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    lines = sorted(program.stdout.readline() for _ in range(2))
    assert lines == ["[0] up\n", "[1] up\n"], lines
    return program


def finish(program: subprocess.Popen[str]) -> int:
    program.communicate(timeout=60)
    return program.returncode


def test_kill_9_of_the_program_ends_its_lab_and_all_ranks(state_dir: Path) -> None:
    program = start(OWNER)
    wait_until(lambda: len(processes_of(state_dir)) == 5, "a keeper, two ranks and their children")
    program.kill()
    finish(program)
    wait_until(lambda: not processes_of(state_dir), "keeper and ranks have ended")
    assert stale_labs() == ()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_sigterm_of_the_program_ends_its_lab(state_dir: Path, number: signal.Signals) -> None:
    program = start(OWNER)
    program.send_signal(number)
    assert finish(program) == -number
    wait_until(lambda: not processes_of(state_dir), "keeper and ranks have ended")


def test_kill_9_of_a_run_ends_its_ranks_and_leaves_the_lab_usable(state_dir: Path) -> None:
    lab = Lab(SPEC, keep=True)
    lab.up()
    try:
        program = start(GUEST, lab.name)
        program.kill()
        finish(program)
        wait_until(lambda: len(processes_of(state_dir)) == 1, "only the keeper is left")
        assert lab.run(["true"]).returncode == 0
    finally:
        lab.down()


def test_kill_9_of_the_keeper_during_a_run_is_a_peer_failure_and_ends_the_ranks(state_dir: Path) -> None:
    with Lab(SPEC) as lab:
        pid = lab.status().keeper_pid
        with pytest.raises(PeerFailure, match="ended during the run"):
            lab.run(
                ["sh", "-c", "echo up; exec sleep 600"],
                on_line=lambda rank, *_: os.kill(pid, signal.SIGKILL) if rank == 0 else None,
            )
    assert stale_labs() == ()


def test_a_lab_taken_down_during_a_run_is_a_peer_failure(state_dir: Path) -> None:
    lab = Lab(SPEC, keep=True)
    lab.up()

    def take_down(rank: int, stream: str, line: str) -> None:
        if rank == 0:
            taker.append(subprocess.Popen(python("import sys; from wirespeed.lab import Lab; Lab.attach().down()")))

    taker: list[subprocess.Popen[bytes]] = []
    with pytest.raises(PeerFailure, match="ended during the run"):
        lab.run(["sh", "-c", "echo up; exec sleep 600"], on_line=take_down, timeout_s=30.0)
    assert taker[0].wait(timeout=60) == 0
    lab.down()


def test_what_a_dead_lab_left_is_removed_and_nothing_else(state_dir: Path) -> None:
    with Lab(SPEC) as other:
        dead = Lab(SPEC, keep=True)
        dead.up()
        left = dead.popen("h0", ["sleep", "600"])
        bystander = subprocess.Popen(["sleep", "600"])
        try:
            os.kill(dead.status().keeper_pid, signal.SIGKILL)
            dead.close()
            wait_until(lambda: dead.name in stale_labs(), "the dead lab shows as stale")
            assert remove_stale() == (dead.name,)
            assert left.wait(timeout=60) == -signal.SIGTERM
            assert stale_labs() == ()
            assert bystander.poll() is None
            assert other.run(["true"]).returncode == 0
        finally:
            bystander.kill()
            bystander.wait()
            dead._keeper.wait()  # type: ignore[union-attr]


def test_a_name_in_use_is_refused_and_one_of_a_dead_lab_is_taken_over() -> None:
    named = LabSpec(hosts=1, rate_bit_per_s=1e9, name="twice")
    first = Lab(named)
    first.up()
    with pytest.raises(UsageError, match="'twice' is already up"):
        Lab(named).up()
    assert first.run(["true"]).returncode == 0
    os.kill(first.status().keeper_pid, signal.SIGKILL)
    wait_until(lambda: stale_labs() == ("twice",), "the dead lab shows as stale")
    with Lab(named) as second:
        assert second.name == "twice"
        assert second.run(["true"]).returncode == 0
    first.down()


def test_two_labs_at_once_have_the_same_addresses_and_do_not_meet() -> None:
    with Lab(SPEC) as one, Lab(SPEC) as two:
        assert one.name != two.name
        server = one.popen("h0", python("import socket; s = socket.create_server(('h0', 5000)); s.accept()"))
        knock = python("import socket, sys; sys.exit(socket.socket().connect_ex(('h0', 5000)))")
        wait_until(lambda: one.exec("h1", knock).returncode == 0, "h0 of the first lab answers")
        assert server.wait(timeout=60) == 0
        server = one.popen("h0", python("import socket; s = socket.create_server(('h0', 5000)); s.accept()"))
        assert two.exec("h1", knock).returncode == 111, "connection refused: nobody listens in the second lab"
        server.kill()
        server.wait()


def test_attach_means_the_only_lab_kept_and_never_another_programs_own() -> None:
    with pytest.raises(UsageError, match="no lab is up"):
        Lab.attach()
    kept = Lab(SPEC, keep=True)
    kept.up()
    with Lab(SPEC):
        attached = Lab.attach()
        assert (attached.name, attached.spec) == (kept.name, kept.spec)
        attached.down()
    with pytest.raises(UsageError, match="no lab is named"):
        Lab.attach(kept.name)
    kept.down()


def test_leaving_an_attached_lab_does_not_end_it() -> None:
    kept = Lab(SPEC, keep=True)
    kept.up()
    with Lab.attach(kept.name) as attached:
        assert attached.run(["true"]).returncode == 0
    assert kept.run(["true"]).returncode == 0
    kept.down()
    kept.down()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"schema": 99}', b"[]", b'{"schema": "1"}'])
def test_a_corrupt_journal_is_named_and_can_be_removed(state_dir: Path, content: bytes) -> None:
    folder = state_dir / "labs" / "broken"
    folder.mkdir(parents=True)
    (folder / "journal.json").write_bytes(content)
    with pytest.raises(DataError, match="broken/journal"):
        Lab.attach("broken")
    assert stale_labs() == ("broken",)
    assert remove_stale() == ("broken",)


def test_a_living_lab_with_a_corrupt_journal_still_answers_and_is_not_stale(state_dir: Path) -> None:
    with Lab(SPEC) as lab:
        (state_dir / "labs" / lab.name / "journal.json").write_bytes(b"{")
        assert stale_labs() == ()
        assert remove_stale() == ()
        with Lab.attach(lab.name) as attached:
            assert attached.exec("h0", ["true"]).returncode == 0


def test_a_name_cannot_leave_the_state_folder() -> None:
    for name in ("../x", "a/b", "", ".", "A", "-x", "x" * 40):
        with pytest.raises(UsageError, match="lab name"):
            LabSpec(hosts=1, rate_bit_per_s=1e9, name=name)
        with pytest.raises(UsageError, match="lab name"):
            ClusterLab.attach(name)


# In a mount namespace of its own: a file system of one page, which the folder's first file fills.
FULL_DISK = """
import ctypes, os, sys
from wirespeed.errors import MissingCapability
from wirespeed.lab import Lab, LabSpec, namespaces
folder, fill = sys.argv[1], int(sys.argv[2])
namespaces.become_lab_root()
namespaces.unshare(namespaces.CLONE_NEWNS)
namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_SLAVE)
assert ctypes.CDLL(None).mount(b"none", folder.encode(), b"tmpfs", 0, b"size=8k") == 0
with open(folder + "/filler", "wb") as file:
    file.write(bytes(fill))
os.environ["WIRESPEED_STATE_DIR"] = folder
try:
    Lab(LabSpec(hosts=1, rate_bit_per_s=1e9)).up()
except MissingCapability as error:
    print(error)
print(os.listdir(folder + "/labs"))
"""


@pytest.mark.parametrize("fill", [8192, 4096])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, fill: int) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    done = subprocess.run(python(FULL_DISK, folder, fill), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    message, left = done.stdout.splitlines()
    assert message.startswith("cannot write the lab's journal in ")
    assert "No space left on device" in message
    assert "WIRESPEED_STATE_DIR" in message
    assert left == "[]"


# A root without the rights of one (as in a container), below a limit of no user namespaces.
NO_RIGHTS = """
import ctypes, os, sys
from wirespeed.lab import namespaces
namespaces.unshare(namespaces.CLONE_NEWUSER)
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {os.environ['UID0']} 1")):
    namespaces.write_sysctl(f"/proc/self/{name}", text)
assert namespaces.write_sysctl("/proc/sys/user/max_user_namespaces", "0")
PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21
namespaces.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN)
os.execv(sys.executable, [sys.executable, "-m", "wirespeed", "lab", *sys.argv[1:]])
"""


def test_no_permission_is_named_with_what_would_give_it_and_exits_3(state_dir: Path) -> None:
    command = python(NO_RIGHTS, "up", "--hosts", "2", "--rate", "1gbit")
    env = {**os.environ, "UID0": str(os.geteuid())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 3, done.stderr
    assert "needs root or unprivileged user namespaces" in done.stderr
    assert "sysctl user.max_user_namespaces=10000" in done.stderr
    assert list((state_dir / "labs").iterdir()) == []


def test_a_state_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRESPEED_STATE_DIR", "/proc/nowhere")
    with pytest.raises(MissingCapability, match="cannot write the lab's journal"):
        Lab(SPEC).up()


def test_the_program_needs_no_working_folder_of_its_own(tmp_path: Path) -> None:
    """A module in the current folder must not shadow one that the keeper imports."""
    (tmp_path / "socket.py").write_text("raise SystemExit('shadowed')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from wirespeed.lab import *\nwith Lab(LabSpec.parse('1x1gbit')): pass"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
