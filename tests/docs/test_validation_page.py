"""docs/validation.md is what its script makes of the committed results, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "benchmarks" / "results" / "validate_lab.json"


def test_the_page_is_what_the_script_makes_of_the_committed_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "validation_page.py"), "--check"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_shows_every_scenario_that_was_run_and_no_other() -> None:
    lines = (ROOT / "docs" / "validation.md").read_text().splitlines()
    runs = json.loads(LAB.read_text())["results"]["runs"] if LAB.is_file() else []
    for run in runs:
        for row in run["rows"]:
            told = f" {row['error']:+.1%} "
            assert any(line.startswith(f"| {row['scenario']['name']} ") and told in line for line in lines)
    shown = [line for line in lines if line.startswith("| ") and " hosts, " in line and " Mbit/s" in line]
    assert len(shown) == sum(len(run["rows"]) for run in runs)
