"""`wirespeed doctor fabric` in a lab: the host that was slowed is named with its side, and a page is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from wirespeed.lab import Lab, LabSpec


def test_a_slowed_host_is_named_and_confirmed_alone(tmp_path: Path):
    lines: list[str] = []
    page = tmp_path / "fabric.html"
    with Lab(LabSpec(hosts=4, rate_bit_per_s=200e6)) as lab:
        lab.fault("h2", "rate", rate_bit_per_s=100e6)
        result = lab.run(
            [sys.executable, "-m", "wirespeed", "doctor", "fabric", "--streams", "1", "--duration", "200 ms",
             "--congestion", "cubic", "--json", "--html", str(page)],
            timeout_s=120,
            on_line=lambda rank, stream, line: lines.append(line) if stream == "stdout" else None,
        )  # fmt: skip
    report = json.loads("\n".join(lines))
    assert result.returncode == 1
    assert report["was_retested"] is True
    (finding,) = report["findings"]
    assert (finding["id"], finding["subject"]) == ("link.slow-host", "h2")
    # Half of 200 Mbit/s, within what a shaped link repeats on a busy machine.
    assert 0.4 < finding["limit_bit_per_s"] / finding["full_bit_per_s"] < 0.6
    assert any("alone" in line["where"] for line in finding["evidence"])
    assert "host h2 is slow both ways" in page.read_text()
