"""The door to /proc, /sys and subprocesses, on recorded trees and real processes."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from wirespeed.errors import MissingCapability
from wirespeed.system import System, free_port


@pytest.fixture
def tree(tmp_path: Path) -> System:
    folder = tmp_path / "sys/class/net/eth0"
    folder.mkdir(parents=True)
    (folder / "mtu").write_text("1500\n")
    (folder / "vendor").write_text("0x15b3\n")
    (folder / "padded").write_text("0022\n")
    (folder / "name").write_bytes(b"caf\xe9\n\n")
    (folder / "speed").write_text("fast\n")
    (folder / "empty").write_text("")
    return System(tmp_path)


def test_reads_lie_below_the_root(tree: System):
    assert tree.read_text("/sys/class/net/eth0/mtu") == "1500"
    assert tree.list_dir("/sys/class/net") == ("eth0",)


def test_absent_files_are_unknown_and_absent_folders_empty(tree: System):
    assert tree.read_text("/sys/none") is None
    assert tree.read_int("/sys/none") is None
    assert tree.list_dir("/sys/none") == ()
    assert tree.read_text("/sys/class") is None  # a folder is no file


@pytest.mark.parametrize(("name", "value"), [("mtu", 1500), ("vendor", 0x15B3), ("padded", 22)])
def test_integers_are_decimal_or_hexadecimal(tree: System, name: str, value: int):
    assert tree.read_int(f"/sys/class/net/eth0/{name}") == value


@pytest.mark.parametrize("name", ["speed", "empty"])
def test_text_that_is_no_integer_is_unknown(tree: System, name: str):
    assert tree.read_int(f"/sys/class/net/eth0/{name}") is None


def test_text_that_is_not_utf8_is_still_read(tree: System):
    assert tree.read_text("/sys/class/net/eth0/name") == "caf\ufffd"


def test_command_gives_exit_code_and_both_outputs():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    done = System().run([sys.executable, "-c", code], timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")


def test_output_that_is_not_utf8_does_not_raise():
    done = System().run([sys.executable, "-c", "import os; os.write(1, b'\\xff')"], timeout_s=60)
    assert done.stdout == "\ufffd"


def test_command_reads_no_terminal():
    done = System().run([sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))"], timeout_s=60)
    assert done.stdout == "''\n"


def test_deadline_ends_the_command_and_its_children_and_keeps_what_was_said():
    # The child holds the pipe open and would outlive its parent by an hour.
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    done = System().run([sys.executable, "-c", code], timeout_s=5)
    assert done.returncode is None
    child = int(done.stdout)
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:
        os.sched_yield()
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that its reaper has yet to collect."""
    status = System().read_text(f"/proc/{pid}/status")
    return status is not None and "State:\tZ" not in status


def test_program_that_is_absent_or_may_not_run_is_a_missing_capability(tmp_path: Path):
    with pytest.raises(MissingCapability, match="program 'wirespeed-no-such' is not installed"):
        System().run(["wirespeed-no-such"])
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(MissingCapability, match="cannot be run: Permission denied"):
        System().run([str(plain)])


def test_why_a_file_cannot_be_read_is_told_apart(tree: System, tmp_path: Path):
    assert tree.read("/sys/class/net/eth0/mtu").text == "1500"
    assert tree.read("/sys/none").problem == "absent"
    assert tree.read("/sys/class").problem == "unreadable"  # a folder
    assert tree.read("/sys/class/net/eth0/mtu/more").problem == "absent"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_denied(tree: System, tmp_path: Path):
    (tmp_path / "secret").write_text("1")
    (tmp_path / "secret").chmod(0)
    assert tree.read("/secret").problem == "denied"


def test_links_end_below_the_root_or_nowhere(tree: System, tmp_path: Path):
    device = tmp_path / "sys/devices/pci0000:00/0000:00:03.0"
    device.mkdir(parents=True)
    (tmp_path / "sys/class/net/eth0/device").symlink_to("../../../devices/pci0000:00/0000:00:03.0")
    (tmp_path / "sys/out").symlink_to("/etc/passwd")
    (tmp_path / "sys/loop").symlink_to("loop")
    assert tree.real_path("/sys/class/net/eth0/device") == "/sys/devices/pci0000:00/0000:00:03.0"
    assert tree.real_path("/sys/out") is None
    assert tree.real_path("/sys/loop") is None
    assert tree.real_path("/sys/none") is None


def test_of_other_processes_environments_only_known_variables_are_kept(tree: System, tmp_path: Path):
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "environ").write_bytes(b"NCCL_ALGO=Ring\0AWS_SECRET_ACCESS_KEY=x\0RANK=3\0HF_TOKEN=y\0")
    assert tree.process_environ(7) == {"NCCL_ALGO": "Ring", "RANK": "3"}
    assert tree.process_environ(8) is None


def test_a_setting_is_written_in_one_call_and_a_refusal_is_said(tree: System, tmp_path: Path):
    tree.write_setting("/sys/class/net/eth0/mtu", "9000")
    assert tree.read_text("/sys/class/net/eth0/mtu") == "9000"
    with pytest.raises(MissingCapability, match="cannot set /sys/none"):
        tree.write_setting("/sys/none", "1")


def test_a_file_is_replaced_as_a_whole_and_removed_once(tree: System, tmp_path: Path):
    tree.replace_file("/etc/new/file", b"one")
    tree.replace_file("/etc/new/file", b"two")
    assert (tmp_path / "etc/new/file").read_bytes() == b"two"
    assert [path.name for path in (tmp_path / "etc/new").iterdir()] == ["file"]
    tree.remove_file("/etc/new/file")
    tree.remove_file("/etc/new/file")
    with pytest.raises(MissingCapability, match="cannot write"):
        tree.replace_file("/sys/class/net/eth0/mtu/more", b"")


def test_a_command_gets_its_input_and_speaks_english():
    code = "import os, sys; print(len(sys.stdin.buffer.read()), os.environ['LC_ALL'])"
    assert System().run([sys.executable, "-c", code], timeout_s=60, stdin=b"x" * 100_000).stdout == "100000 C\n"


def test_a_free_port_is_one_that_no_outgoing_connection_is_given():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = first - 10_000 if first >= 22_000 else 51_000  # with less room below them it takes what there is
    for _ in range(20):
        port = free_port(also_above=10_000)
        assert 10_000 <= port < end
        with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 10_000)):
            pass


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        drawn = iter([port - 10_000, 2_345])
        monkeypatch.setattr("wirespeed.system.secrets.randbelow", lambda _: next(drawn))
        assert free_port() == 12_345
