"""`wirespeed doctor host`: how long it takes, whether recorded hosts give their golden findings, what kill -9 leaves.

Bars: every golden file holds; an apply, a second apply and a rollback that are killed at every step in a network
namespace are all repaired by a rollback; the command takes under 2 s as root and without root on this machine. The
ratio to an empty Python process is recorded beside the seconds, as the machine is shared and others differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _harness import Bar, arguments, finish, run_interleaved

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from doctor_trees import DATA, TREES, system_of  # noqa: E402 - the tests' recorded hosts
from wirespeed.doctor.examine import examine  # noqa: E402
from wirespeed.doctor.recorded import RecordedSystem  # noqa: E402
from wirespeed.lab import Lab, LabSpec, why_unavailable  # noqa: E402

NOBODY = 65534
MAX_S = 2.0


def _golden() -> dict[str, bool]:
    systems = {name: system_of(make()) for name, make in TREES.items()}
    systems["ci_machine"] = RecordedSystem.load(DATA / "ci_machine.json")
    held = {}
    for name, system in systems.items():
        found = [[f.severity, f.id, f.subject, f.title] for c in examine(system).checks for f in c.findings]
        held[name] = found == json.loads((DATA / f"{name}.golden.json").read_text())["findings"]
    return held


def _kills() -> dict[str, int] | None:
    if why_unavailable() is not None:
        return None
    with tempfile.TemporaryDirectory() as folder, Lab(LabSpec.parse("2x1gbit")) as lab:
        done = lab.exec("h0", [sys.executable, str(TESTS / "sysctl_steps.py"), folder], timeout_s=300)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else None


def _command(*, is_root: bool) -> str:
    """Run the command; without root as nobody, with the system's own Python: that of a venv may lie in root's home."""
    is_dropped = not is_root and os.geteuid() == 0
    user = NOBODY if is_dropped else None
    python = "/usr/bin/python3" if is_dropped else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        done = subprocess.run(
            [python, "-m", "wirespeed", "doctor", "host", "--json"],
            user=user,
            group=user,
            extra_groups=[] if is_dropped else None,
            cwd=folder,
            env={**os.environ, "HOME": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def main() -> int:
    """Run and give the exit status."""
    options = arguments(__doc__ or "")
    golden, kills = _golden(), _kills()
    runs = run_interleaved(
        {
            "python": lambda: subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=60),
            "root": lambda: _command(is_root=True),
            "no_root": lambda: _command(is_root=False),
        },
        rounds=3 if options.quick else 9,
    )
    medians = {name: run.summary()["median_wall_s"] for name, run in runs.items()}
    for name in ("root", "no_root"):
        print(f"doctor host, {name}: median {medians[name]:.2f} s, worst {max(runs[name].wall_s):.2f} s, "
              f"{medians[name] / medians['python']:.1f} x an empty Python process")  # fmt: skip
    unseen = json.loads(_command(is_root=False))
    assert unseen["is_root"] is False
    root_adds = sorted({u["what"] for c in unseen["checks"] for u in c["unknowns"] if "root" in u["hint"]})
    print(f"recorded hosts: {sum(golden.values())} of {len(golden)} as their golden files; kills repaired: {kills}")
    print(f"without root it says that root would add: {', '.join(root_adds) or 'nothing'}")
    bars = [
        Bar("golden_hosts", sum(golden.values()), len(golden)),
        Bar("golden_hosts_at_least_8", len(golden), 8),
        Bar("kills_repaired", 0 if kills is None else sum(kills.values()), 40),
        Bar("root_worst_s", max(runs["root"].wall_s), MAX_S, at_least=False),
        Bar("no_root_worst_s", max(runs["no_root"].wall_s), MAX_S, at_least=False),
    ]
    results = {
        "runs": {name: run.summary() for name, run in runs.items()},
        "ratio_to_python": {name: medians[name] / medians["python"] for name in ("root", "no_root")},
        "golden": golden,
        "kills": kills,
        "root_would_add": root_adds,
    }
    return finish("doctor_host", bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
