"""Kernel parameters applied and taken back, on a tree of files; the same on a real kernel in tests/lab."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from sysctl_steps import sweep
from wirespeed.doctor.check import Setting
from wirespeed.doctor.inventory import HostView
from wirespeed.doctor.sysctl import DROP_IN, JOURNAL, SysctlStore, refuse_in_container
from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.system import System

IDLE, RMEM = "net.ipv4.tcp_slow_start_after_idle", "net.ipv4.tcp_rmem"
WANTED = [Setting(key=IDLE, value="0"), Setting(key=RMEM, value="4096 131072 16777216")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for key, value in {
        IDLE: "1",
        RMEM: "4096\t131072\t6291456",
        "net.ipv4.tcp_fin_timeout": "60",
        "kernel.random.boot_id": "boot-1",
    }.items():
        path = tmp_path / "proc/sys" / key.replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    ns = tmp_path / "proc/self/ns"
    ns.mkdir(parents=True)
    (ns / "net").symlink_to("net:[4026531840]")
    return tmp_path


def value(root: Path, key: str) -> str:
    return " ".join((root / "proc/sys" / key.replace(".", "/")).read_text().split())


def put(root: Path, key: str, text: str) -> None:
    (root / "proc/sys" / key.replace(".", "/")).write_text(f"{text}\n")


def store(root: Path) -> SysctlStore:
    return SysctlStore(System(root))


def test_apply_sets_values_keeps_the_old_ones_and_writes_one_drop_in(root: Path):
    outcome = store(root).apply(WANTED)
    assert [(c.key, c.action, c.before, c.after) for c in outcome.changes] == [
        (IDLE, "set", "1", "0"),
        (RMEM, "set", "4096 131072 6291456", "4096 131072 16777216"),
    ]
    assert (value(root, IDLE), value(root, RMEM)) == ("0", "4096 131072 16777216")
    lines = (root / DROP_IN.lstrip("/")).read_text().splitlines()
    assert lines[1:] == [f"{IDLE} = 0", f"{RMEM} = 4096 131072 16777216"]
    journal = json.loads((root / JOURNAL.lstrip("/")).read_text())
    assert [(e["key"], e["old"], e["new"]) for e in journal["entries"]] == [
        (IDLE, "1", "0"),
        (RMEM, "4096 131072 6291456", "4096 131072 16777216"),
    ]
    assert journal["is_done"] is True
    assert journal["boot_id"] == "boot-1"


def test_rollback_restores_exactly_in_reverse_order_and_leaves_no_file(root: Path):
    store(root).apply(WANTED)
    outcome = store(root).rollback()
    assert [(c.key, c.action) for c in outcome.changes] == [(RMEM, "restored"), (IDLE, "restored")]
    assert (value(root, IDLE), value(root, RMEM)) == ("1", "4096 131072 6291456")
    assert not (root / DROP_IN.lstrip("/")).exists()
    assert not (root / JOURNAL.lstrip("/")).exists()


def test_a_second_apply_changes_nothing_and_keeps_the_first_old_value(root: Path):
    store(root).apply(WANTED)
    assert {c.action for c in store(root).apply(WANTED).changes} == {"kept"}
    store(root).apply([Setting(key=RMEM, value="4096 131072 33554432")])
    assert value(root, RMEM) == "4096 131072 33554432"
    store(root).rollback()
    assert value(root, RMEM) == "4096 131072 6291456"


def test_a_value_that_someone_else_changed_is_left_alone_and_reported(root: Path):
    store(root).apply(WANTED)
    put(root, IDLE, "2")
    again = store(root).apply(WANTED)
    assert [c.action for c in again.changes] == ["conflict", "kept"]
    assert value(root, IDLE) == "2"
    outcome = store(root).rollback()
    assert outcome.has_conflicts
    assert {c.key: c.action for c in outcome.changes} == {IDLE: "conflict", RMEM: "restored"}
    assert value(root, IDLE) == "2"
    assert not (root / DROP_IN.lstrip("/")).exists()  # our line must not set it at the next boot either


def test_lines_of_someone_else_in_our_drop_in_stay(root: Path):
    store(root).apply(WANTED)
    path = root / DROP_IN.lstrip("/")
    path.write_text(path.read_text() + "net.core.somaxconn = 8192\n")
    outcome = store(root).rollback()
    assert path.read_text() == "net.core.somaxconn = 8192\n"
    assert "someone else" in outcome.notes[0]


def test_a_dry_run_says_what_would_change_and_writes_nothing(root: Path):
    outcome = store(root).apply(WANTED, is_dry_run=True)
    assert outcome.is_dry_run
    assert [c.action for c in outcome.changes] == ["set", "set"]
    assert value(root, IDLE) == "1"
    assert not (root / "var").exists()
    store(root).apply(WANTED)
    assert [c.action for c in store(root).rollback(is_dry_run=True).changes] == ["restored", "restored"]
    assert value(root, IDLE) == "0"


def test_killed_at_any_step_rollback_repairs_everything(root: Path):
    kills = sweep(
        root,
        JOURNAL,
        DROP_IN,
        WANTED,
        [Setting(key=RMEM, value="4096 131072 8388608"), Setting(key="net.ipv4.tcp_fin_timeout", value="50")],
    )
    # apply: per parameter journal, write, journal; then drop-in and journal = 8; rollback: 2 writes, 2 removals = 4. Twice.
    assert kills == {"apply": 16, "second": 16, "rollback": 8}


def test_a_later_file_that_overrides_ours_is_named(root: Path):
    folder = root / "etc/sysctl.d"
    folder.mkdir(parents=True)
    (folder / "99-site.conf").write_text(f"{IDLE} = 1\n")
    (folder / "10-site.conf").write_text(f"{RMEM} = 4096 131072 1048576\n")
    outcome = store(root).apply(WANTED)
    assert len(outcome.notes) == 1
    assert outcome.notes[0].startswith(f"/etc/sysctl.d/99-site.conf sets {IDLE} to 1 and wins")


def test_after_a_reboot_rollback_still_works_and_says_so(root: Path):
    store(root).apply(WANTED)
    put(root, "kernel.random.boot_id", "boot-2")
    (root / "proc/self/ns/net").unlink()
    (root / "proc/self/ns/net").symlink_to("net:[4026531999]")  # a new boot, a new number
    outcome = store(root).rollback()
    assert value(root, IDLE) == "1"
    assert any("rebooted" in note for note in outcome.notes)


def test_the_journal_of_another_network_namespace_is_refused(root: Path):
    store(root).apply(WANTED)
    (root / "proc/self/ns/net").unlink()
    (root / "proc/self/ns/net").symlink_to("net:[4026532999]")
    for act in (store(root).rollback, lambda: store(root).apply(WANTED)):
        with pytest.raises(UsageError, match="another network namespace"):
            act()


def test_only_network_parameters_may_be_set(root: Path):
    for key in ("kernel.core_pattern", "net.ipv4.../../kernel/core_pattern", "net.ipv4.conf/all/rp_filter"):
        with pytest.raises(UsageError, match="kernel parameter"):
            store(root).apply([Setting(key=key, value="1")])


def test_two_values_for_one_parameter_are_refused(root: Path):
    with pytest.raises(UsageError, match="two values"):
        store(root).apply([Setting(key=IDLE, value="0"), Setting(key=IDLE, value="1")])


def test_a_parameter_that_is_gone_is_said_to_be_gone(root: Path):
    outcome = store(root).apply([Setting(key="net.ipv4.tcp_nothing", value="1")])
    assert [c.action for c in outcome.changes] == ["gone"]


def test_a_damaged_journal_is_refused_and_not_overwritten(root: Path):
    path = root / JOURNAL.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        store(root).apply(WANTED)
    assert value(root, IDLE) == "1"


def test_two_applies_at_the_same_time_are_refused(root: Path):
    path = (root / JOURNAL.lstrip("/")).with_suffix(".lock")
    path.parent.mkdir(parents=True)
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another apply"):
            store(root).apply(WANTED)


class ClampingSystem(System):
    """A kernel that takes no receive buffer above 8 MiB, and no value for the idle switch."""

    def write_setting(self, name: str, text: str) -> None:
        if name.endswith("tcp_rmem"):
            text = "4096 131072 " + str(min(int(text.split()[2]), 8388608))
        if name.endswith("after_idle"):
            raise MissingCapability(f"cannot set {name}: Operation not permitted")
        super().write_setting(name, text)


def test_what_the_kernel_clamps_or_refuses_is_said_and_rolled_back(root: Path):
    clamping = SysctlStore(ClampingSystem(root))
    outcome = clamping.apply(WANTED)
    assert {c.key: c.action for c in outcome.changes} == {IDLE: "refused", RMEM: "clamped"}
    assert value(root, RMEM) == "4096 131072 8388608"
    assert [c.action for c in clamping.apply([WANTED[1]]).changes] == ["kept"]
    assert IDLE not in (root / DROP_IN.lstrip("/")).read_text()
    assert not clamping.rollback().has_conflicts
    assert value(root, RMEM) == "4096 131072 6291456"


def test_a_container_with_a_network_of_its_own_is_refused(root: Path):
    (root / ".dockerenv").write_text("")
    with pytest.raises(UsageError, match="container"):
        refuse_in_container(HostView(System(root)))
