"""Kernel parameters of a real network namespace: applied, kept by a second apply, rolled back, killed at every step."""

from __future__ import annotations

import json
from pathlib import Path

from lab_tools import python

from wirespeed.lab import Lab, LabSpec

TESTS = Path(__file__).parents[1]


def test_the_command_applies_and_rolls_back_in_a_namespace(tmp_path: Path):
    command = ["-m", "wirespeed", "doctor", "host", "--this-namespace", "--state-dir", str(tmp_path), "--json"]
    read = "print(open('/proc/sys/net/ipv4/tcp_slow_start_after_idle').read().strip())"

    def wirespeed(lab: Lab, *options: str) -> tuple[int, str]:
        import sys

        done = lab.exec("h0", [sys.executable, *command, *options], timeout_s=60)
        assert done.returncode is not None, done.stderr
        return done.returncode, done.stdout

    with Lab(LabSpec.parse("2x1gbit")) as lab:
        before = lab.exec("h0", python(read), timeout_s=60).stdout
        code, out = wirespeed(
            lab, "--apply", "--only", "tcp", "--level", "notice", "--rate", "25 Gbit/s", "--rtt", "1ms"
        )
        assert code == 0, out
        assert "net.ipv4.tcp_slow_start_after_idle" in {
            c["key"] for c in json.loads(out)["changes"] if c["action"] == "set"
        }
        assert lab.exec("h0", python(read), timeout_s=60).stdout == "0\n"
        assert lab.exec("h1", python(read), timeout_s=60).stdout == before == "1\n"  # only this namespace
        code, out = wirespeed(
            lab, "--apply", "--only", "tcp", "--level", "notice", "--rate", "25 Gbit/s", "--rtt", "1ms"
        )
        assert (code, {c["action"] for c in json.loads(out)["changes"]} - {"kept"}) == (0, set())
        code, out = wirespeed(lab, "--rollback")
        assert code == 0, out
        assert {c["action"] for c in json.loads(out)["changes"]} == {"restored"}
        assert lab.exec("h0", python(read), timeout_s=60).stdout == before
    assert not (tmp_path / "sysctl.json").exists()


def test_killed_at_any_step_on_a_real_kernel_rollback_repairs_everything(tmp_path: Path):
    with Lab(LabSpec.parse("2x1gbit")) as lab:
        import sys

        done = lab.exec("h0", [sys.executable, str(TESTS / "sysctl_steps.py"), str(tmp_path)], timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"apply": 16, "second": 16, "rollback": 8}
