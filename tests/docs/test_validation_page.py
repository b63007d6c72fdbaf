"""docs/validation.md is what its script makes of the committed results, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_makes_of_the_committed_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "validation_page.py"), "--check"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_shows_every_scenario_that_was_run() -> None:
    import json

    results = json.loads((ROOT / "benchmarks" / "results" / "validate_lab.json").read_text())["results"]
    lines = (ROOT / "docs" / "validation.md").read_text().splitlines()
    rows = [row for run in results["runs"] for row in run["rows"]]
    assert len(rows) >= 20
    for row in rows:
        told = f"{row['error']:+.1%}"
        assert any(line.startswith(f"| {row['scenario']['name']} ") and f" {told} " in line for line in lines)
