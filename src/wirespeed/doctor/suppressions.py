"""Findings that someone decided to live with: each with a reason and a day on which the decision ends.

The file is TOML::

    [[suppress]]
    finding = "nic.below-own-speed"    # an id; * stands for anything
    subject = "eth1"                   # optional, * too
    hosts = "node[01-04]"              # optional
    reason = "the old switch has 10 Gbit/s ports; replaced in spring"
    expires = 2027-03-31

A finding is never lost: it moves to the report's ``suppressed``. An entry that has expired suppresses nothing and is
itself reported.
"""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from datetime import date
from pathlib import Path

import msgspec

from wirespeed.doctor.check import CheckResult, Evidence, Finding, Remedy
from wirespeed.doctor.reports import HostReport, Suppressed
from wirespeed.errors import DataError, WirespeedError
from wirespeed.launch import expand_hostlist


class Suppression(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decision."""

    finding: str
    reason: str
    expires: date
    subject: str = "*"
    hosts: str | None = None

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise DataError(f"the suppression of {self.finding!r} has no reason", expected="why, and by whom")
        if self.finding.strip("*.") == "":
            raise DataError(f"got a suppression of {self.finding!r}", expected="an id, or one part of it and *")
        if self.hosts is not None:
            expand_hostlist(self.hosts)

    def fits(self, finding: Finding, host: str) -> bool:
        """Whether it is about this finding on this host; a host's short and full name count as one."""
        if self.hosts is not None:
            names = expand_hostlist(self.hosts)
            if host not in names and host.split(".", maxsplit=1)[0] not in names:
                return False
        return fnmatch.fnmatchcase(finding.id, self.finding) and fnmatch.fnmatchcase(finding.subject, self.subject)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    suppress: tuple[Suppression, ...] = ()


def read_suppressions(path: str | Path) -> tuple[Suppression, ...]:
    """Read the file. Raises DataError naming what is wrong with it."""
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=_File).suppress
    except OSError as fault:
        raise DataError(f"cannot read {path}: {fault.strerror or fault}") from fault
    except (msgspec.MsgspecError, ValueError, WirespeedError) as fault:
        raise DataError(
            f"{path} is wrong: {fault}", expected="[[suppress]] entries with finding, reason and expires = YYYY-MM-DD"
        ) from fault


def suppress(report: HostReport, suppressions: tuple[Suppression, ...], *, today: date) -> HostReport:
    """The report without what is suppressed, and with a notice for each expired entry that would have fitted."""
    checks: list[CheckResult] = []
    kept_back: list[Suppressed] = []
    expired: dict[Suppression, Finding] = {}
    for check in report.checks:
        left = []
        for finding in check.findings:
            fitting = [s for s in suppressions if s.fits(finding, report.host)]
            alive = [s for s in fitting if s.expires >= today]
            if alive:
                kept_back.append(
                    Suppressed(finding=finding, reason=alive[0].reason, expires=alive[0].expires.isoformat())
                )
                continue
            left.append(finding)
            for suppression in fitting:
                expired.setdefault(suppression, finding)
        status = check.status
        if status == "found" and not left:
            status = "unknown" if check.unknowns else "passed"
        checks.append(replace(check, findings=tuple(left), status=status))
    if expired:
        findings = tuple(_expired(suppression, finding) for suppression, finding in expired.items())
        checks.append(
            CheckResult(
                name="suppressions",
                about="suppressions that have expired",
                status="found",
                duration_s=0.0,
                findings=findings,
            )
        )
    return msgspec.structs.replace(report, checks=tuple(checks), suppressed=(*report.suppressed, *kept_back))


def _expired(suppression: Suppression, finding: Finding) -> Finding:
    return Finding(
        id="host.suppression-expired",
        subject=suppression.finding,
        severity="notice",
        title=f"The suppression of {finding.id} on {finding.subject} ended on {suppression.expires.isoformat()}.",
        evidence=(Evidence(where="its reason", seen=suppression.reason),),
        remedy=Remedy(text="mend the cause, or decide again with a new day"),
        source="the suppressions file",
    )
