"""A lab without root: user namespaces, as an unprivileged user of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import wirespeed

NOBODY = 65534

PROGRAM = """
import sys
from wirespeed.lab import Lab, LabSpec, why_unavailable
reason = why_unavailable()
if reason is not None:
    print("unavailable:", reason)
    raise SystemExit
with Lab(LabSpec.parse(sys.argv[1])) as lab:
    result = lab.run(["sh", "-c", "hostname; setsid sleep 600 &"], on_line=lambda rank, _, line: print(rank, line))
    status = lab.status()
    lab.fault("h1", "down")
    lab.fault("h1", "heal")
print(result.returncode, status.rootless, status.hosts[0].sends_bit_per_s)
"""


def interpreter() -> str:
    """A Python that other users may run: ours may be below root's home."""
    for candidate in (sys.executable, "/usr/bin/python3"):
        if os.geteuid() != 0:
            return sys.executable
        found = as_nobody([candidate, "-c", "import sys; print(sys.version_info[:2])"], {})
        if found is not None and found.stdout.strip() == str(sys.version_info[:2]):
            return candidate
    pytest.skip("no Python of this version that an unprivileged user may run")


def as_nobody(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd="/", env=env,
            **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}),
        )  # fmt: skip
    except (PermissionError, FileNotFoundError):
        return None


@pytest.fixture
def open_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that everybody may read, and a state folder that nobody owns."""
    folder = tmp_path_factory.mktemp("rootless")
    shutil.copytree(Path(wirespeed.__file__).parent, folder / "src" / "wirespeed")
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.geteuid() and str(path).startswith("/tmp/"):
            path.chmod(0o755)
    (folder / "state").mkdir()
    if os.geteuid() == 0:
        os.chown(folder / "state", NOBODY, NOBODY)
    return folder


@pytest.mark.parametrize("spec", ["2x1gbit", "4x1gbit/2racks:500mbit+1ms"])
def test_a_lab_works_without_root(open_dir: Path, spec: str) -> None:
    packages = [path for path in sys.path if path.endswith("site-packages")]
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join([str(open_dir / "src"), *packages]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "WIRESPEED_STATE_DIR": str(open_dir / "state"),
    }
    done = as_nobody([interpreter(), "-c", PROGRAM, spec], env)
    assert done is not None
    if done.stdout.startswith("unavailable:"):
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr
    *hosts, last = sorted(done.stdout.splitlines(), key=lambda line: line.startswith("0 True"))
    assert sorted(hosts) == [f"{rank} h{rank}" for rank in range(int(spec[0]))]
    assert last == "0 True 1000000000.0"
    assert list((open_dir / "state" / "labs").iterdir()) == []
