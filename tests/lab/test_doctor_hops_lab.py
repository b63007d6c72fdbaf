"""The way between two hosts of a lab: one hop, since a switch is none."""

from __future__ import annotations

import json
import sys

from wirespeed.lab import Lab, LabSpec


def test_a_host_behind_the_switch_is_one_hop_away():
    command = [sys.executable, "-m", "wirespeed", "doctor", "path", "h1", "--count", "2", "--json"]
    with Lab(LabSpec.parse("2x1gbit")) as lab:
        done = lab.exec("h0", command, timeout_s=60)
        assert done.returncode == 0, done.stderr
        (hop,) = json.loads(done.stdout)["hops"]
        assert (hop["is_target"], len(hop["rtts_s"])) == (True, 2)
