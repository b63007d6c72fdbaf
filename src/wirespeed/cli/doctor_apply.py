"""`wirespeed doctor host --apply` and `--rollback`: kernel parameters set and taken back, and what to say of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wirespeed.errors import UsageError

if TYPE_CHECKING:
    from wirespeed.doctor.check import Severity
    from wirespeed.doctor.reports import HostReport
    from wirespeed.doctor.sysctl import Outcome, SysctlStore


def store_of(this_namespace: bool, state_dir: Path | None) -> SysctlStore:
    """The kernel parameters of this host, or of this namespace only."""
    from wirespeed.doctor.inventory import HostView
    from wirespeed.doctor.sysctl import DROP_IN, JOURNAL, SysctlStore, is_first_namespace, refuse_in_container
    from wirespeed.system import System

    system = System()
    if not this_namespace:
        refuse_in_container(HostView(system))
        if not is_first_namespace(system):
            raise UsageError(
                "this is a network namespace of its own",
                expected="the host's",
                hint="--this-namespace sets its parameters all the same",
            )
    journal = JOURNAL if state_dir is None else str(state_dir.absolute() / Path(JOURNAL).name)
    return SysctlStore(system, journal=journal, drop_in=None if this_namespace else DROP_IN)


def apply_findings(report: HostReport, level: Severity, store: SysctlStore, *, dry_run: bool, as_json: bool) -> int:
    """Set what findings of the level or worse ask for; the exit code."""
    from wirespeed.doctor.check import SEVERITIES

    counted = SEVERITIES[: SEVERITIES.index(level) + 1]
    settings = [
        setting
        for finding in report.findings
        if finding.severity in counted and finding.remedy is not None
        for setting in finding.remedy.settings
    ]
    left = sum(1 for f in report.findings if f.severity not in counted and f.remedy is not None and f.remedy.settings)
    if left:
        from wirespeed.cli.render import say

        say(f"{left} lesser findings also name parameters: --level notice applies them too")
    return report_outcome(store.apply(settings, is_dry_run=dry_run), as_json=as_json)


def report_outcome(outcome: Outcome, *, as_json: bool) -> int:
    """Print what was done; the exit code is 1 on conflicts."""
    if as_json:
        from wirespeed.cli.render import print_json

        print_json(outcome)
    else:
        from wirespeed.cli.doctor_render import show_outcome

        show_outcome(outcome)
    return 1 if outcome.has_conflicts else 0
