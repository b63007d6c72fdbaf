"""Findings of the host checks, of measured links and of paths as causes: what they explain on the path the job uses.

The same finding on many hosts is one cause that names them all. What one host has and the others have not is likelier
to be why a job is slow than what all have alike, since collectives go at the pace of the slowest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from wirespeed.doctor.causes import Cause, Kind, make_cause
from wirespeed.doctor.check import SEVERITIES, Evidence, Finding
from wirespeed.doctor.dossier import Dossier
from wirespeed.doctor.drift import fold_hosts
from wirespeed.units import format_percent

LOSS = 0.01
"""Of the probes to the target, above which a path loses packets; a single one of the usual five rounds is more."""
MIN_PROBES = 20
_WEIGHTS = {"critical": 0.8, "warning": 0.6, "notice": 0.3}
_CAPABILITY = ("pci.", "nic.", "rdma.", "counters.", "gpu.", "link.")
"""Subjects whose warnings slow the path itself, as against settings that merely could."""


def host_causes(dossier: Dossier) -> Iterator[Cause]:
    """Findings of the checks, one cause per kind and title over all hosts, and what differs between hosts."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in (*dossier.host_findings, *dossier.facts.tools):
        groups.setdefault((finding.id, finding.subject, finding.title), []).append(finding)
    best: dict[str, Cause] = {}
    for same in groups.values():
        cause = _from_hosts(same, dossier)
        known = best.get(cause.id)
        # Of one kind on several subjects the worst stands for all; the count of the others is said.
        if known is None or cause.weight > known.weight:
            best[cause.id] = cause
    yield from best.values()
    yield from _drift(dossier)


def _from_hosts(same: list[Finding], dossier: Dossier) -> Cause:
    first = min(same, key=lambda finding: SEVERITIES.index(finding.severity))
    is_beside = first.path == "tcp" and uses_rdma(dossier)
    is_slow = first.limit_bit_per_s is not None or (
        first.severity != "notice" and first.id.startswith(_CAPABILITY) and first.path != "tcp"
    )
    kind: Kind = "capability" if is_slow and not is_beside else "setting"
    weight = _WEIGHTS[first.severity] + (0.05 if 0 < len(same) < dossier.num_hosts else 0.0)
    hosts = [finding.host for finding in same if finding.host]
    if len(hosts) > 1 or (hosts and dossier.num_hosts > 1):
        on = fold_hosts(list(dict.fromkeys(hosts)))
        first = dataclasses.replace(first, title=f"{on}: {first.title}", host=hosts[0] if len(hosts) == 1 else "")
    alternatives = "NCCL uses RDMA here: this touches start-up, storage and data loading only" if is_beside else ""
    return Cause(
        finding=dataclasses.replace(first, severity="notice") if is_beside else first,
        kind=kind,
        weight=weight / 2 if is_beside else weight,
        alternatives=alternatives,
    )


def uses_rdma(dossier: Dossier) -> bool:
    """Whether the job's own log says that its gradients go by RDMA."""
    return dossier.facts.nccl.uses_rdma


def _drift(dossier: Dossier) -> Iterator[Cause]:
    grave = [one for one in dossier.drift if one.severity != "notice"]
    for one in grave[:3]:
        odd = {value: hosts for value, hosts in one.hosts_of.items() if value != one.usual}
        usual = "no majority" if one.usual is None else one.usual
        yield make_cause(
            f"drift.{_slug(one.key)}",
            f"{one.num_differing} of {dossier.num_hosts or sum(len(h) for h in one.hosts_of.values())} hosts differ in "
            f"{one.key}: {fold_hosts([host for hosts in odd.values() for host in hosts])}",
            [
                Evidence(where=fold_hosts(list(hosts)), seen=f"{one.key} = {value}", expected=usual)
                for value, hosts in list(odd.items())[:4]
            ],
            kind="setting",
            weight=0.62 if one.num_differing <= 3 else 0.5,
            severity=one.severity,
            subject=one.key,
            path="any",
            fix="make them alike: ranks that differ fail, or hold up all others",
            commands=("wirespeed doctor drift <reports>",),
            source="majority over the hosts (Google cluster-health-scanner: golden configuration)",
        )


def _slug(key: str) -> str:
    words = "".join(c if c.isalnum() else "-" for c in key.lower())
    return "-".join(part for part in words.split("-") if part) or "fact"


def link_causes(dossier: Dossier) -> Iterator[Cause]:
    """What stands out among links: of a record, or of a report that has measured suspects again."""
    for finding in dossier.fabric_findings:
        yield Cause(finding=finding, kind="capability", weight=0.9)
    if dossier.links is not None:
        from wirespeed.doctor.matrix import find_outliers

        racks = {} if dossier.fabric is None else {host.name: host.rack for host in dossier.fabric.hosts}
        for finding in find_outliers(dossier.links, racks if len(set(racks.values())) > 1 else None).findings:
            yield Cause(finding=finding, kind="capability", weight=0.85)
    yield from _paths(dossier)


def _paths(dossier: Dossier) -> Iterator[Cause]:
    for report in dossier.paths:
        target = next((hop for hop in report.hops if hop.is_target), None)
        problems = [hop for hop in report.hops if hop.problem]
        if target is None:
            seen = problems[0] if problems else report.hops[-1] if report.hops else None
            where = (
                "no hop answered" if seen is None else f"hop {seen.distance} {', '.join(seen.addresses) or 'silent'}"
            )
            yield make_cause(
                "tcp.path-unreachable",
                f"{report.target} was not reached: {problems[0].problem if problems else 'nothing answers'}",
                [Evidence(where=where, seen=problems[0].problem if problems else "no answer", expected="an answer")],
                kind="capability", weight=0.75, severity="critical", subject=report.target, path="tcp",
                fix="routes and filters on the way; with --bytes above the path's MTU this is the MTU",
                commands=(f"wirespeed doctor path {report.target}", f"ip route get {report.address}"),
            )  # fmt: skip
        elif target.num_sent >= MIN_PROBES and target.loss > LOSS:
            first = next((hop for hop in report.hops if hop.loss >= target.loss), target)
            yield make_cause(
                "tcp.path-loss",
                f"{format_percent(target.loss)} of the probes to {report.target} are lost, from hop {first.distance} "
                "on",
                [
                    Evidence(
                        where=f"hop {hop.distance} {', '.join(hop.addresses)}",
                        seen=f"{format_percent(hop.loss)} without an answer",
                    )
                    for hop in (first, target)
                ],
                kind="capability", weight=0.7, severity="warning", subject=report.target, path="tcp",
                fix="look at the ports of that hop: errors, drops, a full queue",
                commands=(f"wirespeed doctor path {report.target} --count 100",),
                source=f"above {format_percent(LOSS)} of {MIN_PROBES} probes or more: own rule",
            )  # fmt: skip
