"""Records of the doctor: what the checks of one host said, and what many hosts said side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from wirespeed.doctor.check import CheckResult, Fact, Finding, Severity, Unknown, on_host, worst_first
from wirespeed.doctor.examine import Examination, as_document
from wirespeed.errors import DataError, WirespeedError
from wirespeed.records import Environment, Record


class Suppressed(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that someone decided to live with, and why."""

    finding: Finding
    reason: str
    expires: str


class HostReport(Record, frozen=True, kw_only=True, tag="host_report"):
    """Every check of one host, those that passed and those that could not know included."""

    host: str
    is_root: bool
    during_s: float | None = None
    """How long counters were watched; None where they were not."""
    checks: tuple[CheckResult, ...]
    suppressed: tuple[Suppressed, ...] = ()
    """Taken out of ``checks``."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings that are not suppressed, worst first."""
        return worst_first(on_host(finding, self.host) for check in self.checks for finding in check.findings)

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """What could not be seen, each once."""
        return tuple(dict.fromkeys(unknown for check in self.checks for unknown in check.unknowns))

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts, in the order of the checks."""
        return tuple(fact for check in self.checks for fact in check.facts)


class HostFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A host that gave no report."""

    host: str
    why: str


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One fact on which hosts differ. ``usual`` is None where no value has a majority."""

    key: str
    severity: Severity
    usual: str | None
    hosts_of: dict[str, tuple[str, ...]]
    """Value -> hosts, the most common first."""

    @property
    def num_differing(self) -> int:
        """Hosts that do not have the usual value; all of them where there is none."""
        return sum(len(hosts) for value, hosts in self.hosts_of.items() if value != self.usual)


class ClusterReport(Record, frozen=True, kw_only=True, tag="cluster_report"):
    """Reports of many hosts, what differs between them, and the hosts that did not answer."""

    hosts: tuple[HostReport, ...]
    failures: tuple[HostFailure, ...] = ()
    drift: tuple[Drift, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All hosts' findings, worst first; those of drift stand in ``drift``."""
        return worst_first(finding for host in self.hosts for finding in host.findings)


def host_report(examination: Examination, environment: Environment, *, name: str | None = None) -> HostReport:
    """The record of an examination. ``name``: what the caller calls that host."""
    return HostReport(
        environment=environment,
        host=examination.host if name is None else name,
        is_root=examination.is_root,
        during_s=examination.during_s,
        checks=examination.checks,
    )


def examination_from_json(content: bytes | str, *, source: str) -> Examination:
    """An examination that another host wrote. Raises DataError where it is none: that host is not trusted."""
    try:
        return msgspec.json.decode(content, type=Examination)
    except (msgspec.MsgspecError, RecursionError, WirespeedError) as fault:
        raise DataError(f"{source} sent a report that is not understood: {fault}") from fault


def examination_to_json(examination: Examination) -> str:
    """One line of JSON, made without msgspec as the packed file does."""
    return json.dumps(as_document(examination))


def counts(findings: Iterable[Finding]) -> dict[Severity, int]:
    """How many of each severity."""
    held: dict[Severity, int] = {"critical": 0, "warning": 0, "notice": 0}
    for finding in findings:
        held[finding.severity] += 1
    return held
