"""Slurm's HealthCheckProgram: one quiet run that drains the node for critical findings.

Slurm ends the program after 60 s and ignores its output; the program itself must drain the node. A node that is drained
already is left alone, so that a person's reason is never replaced, and nothing is ever resumed.
"""

from __future__ import annotations

import re

from wirespeed.doctor.reports import HostReport
from wirespeed.errors import PeerFailure
from wirespeed.system import System

MAX_REASON = 200


def reason(report: HostReport) -> str | None:
    """The reason to drain, or None where nothing is critical."""
    critical = [finding for finding in report.findings if finding.severity == "critical"]
    if not critical:
        return None
    more = f" (+{len(critical) - 1} more)" if len(critical) > 1 else ""
    text = f"wirespeed: {critical[0].id} {critical[0].subject}: {critical[0].title}"
    return re.sub(r"\s+", " ", text)[: MAX_REASON - len(more)] + more


def drain(system: System, report: HostReport, *, node: str | None = None) -> str:
    """Drain this node where something is critical; says what was done. ``node``: its name in Slurm, by default short.

    Raises MissingCapability without scontrol, PeerFailure where the controller does not do it.
    """
    why = reason(report)
    if why is None:
        return "nothing is critical: the node stays as it is"
    name = report.host.split(".")[0] if node is None else node
    shown = system.run(["scontrol", "show", "node", name], timeout_s=15.0)
    if shown.returncode != 0:
        raise PeerFailure(f"scontrol does not know node {name!r}: {(shown.stderr or shown.stdout).strip()[:200]}")
    state = re.search(r"\bState=(\S+)", shown.stdout)
    if state is not None and ("DRAIN" in state[1] or "DOWN" in state[1]):
        return f"{name} is {state[1]} already and stays so"
    done = system.run(["scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={why}"], timeout_s=15.0)
    if done.returncode != 0:
        raise PeerFailure(
            f"scontrol did not drain {name}: {(done.stderr or done.stdout).strip()[:200]}",
            hint="HealthCheckProgram runs as root; by hand you need Slurm's operator rights",
        )
    return f"drained {name}: {why}"
