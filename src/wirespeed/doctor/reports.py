"""Records of the doctor: what the checks of one host said, and what many hosts said side by side."""

from __future__ import annotations

from wirespeed.doctor.check import CheckResult, Fact, Finding, worst_first
from wirespeed.records import Record


class HostReport(Record, frozen=True, kw_only=True, tag="host_report"):
    """Every check of one host, those that passed and those that could not know included."""

    host: str
    is_root: bool
    during_s: float | None = None
    """How long counters were watched; None where they were not."""
    checks: tuple[CheckResult, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, worst first."""
        return worst_first(finding for check in self.checks for finding in check.findings)

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts, in the order of the checks."""
        return tuple(fact for check in self.checks for fact in check.facts)
