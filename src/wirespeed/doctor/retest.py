"""Measure a fabric, then measure what stood out again, alone and against known-good partners, before it is believed.

Slow again alone: the host or the path. Fine alone and slow together with others: what they share. An SPMD program like
``measure_links``: every rank calls ``check_fabric``, and rank 0 decides what the second pass measures.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from wirespeed.doctor.check import Evidence, Finding
from wirespeed.doctor.matrix import SLOW, UNSTEADY, Matrix, MatrixReport, judge, matrix_of
from wirespeed.launch import Ranks
from wirespeed.measure.links import Schedule, measure_links, rounds
from wirespeed.measure.messages import SocketOptions
from wirespeed.records import LinksRecord, Record
from wirespeed.units import format_percent, format_rate

MAX_EXACT_HOSTS = 32
NUM_MATCHINGS = 15
"""Random matchings beyond that many hosts: each host meets 15 others (Imbue's p2p_ib_test.py takes as many)."""
PARTNERS = 2
MAX_RETESTS = 24
NUM_PINGS = 20
"""Round trips are only needed to know how long slow start takes."""
REPEATS = 3
"""The best of as many counts: a slow path is never fast, a busy machine is not always slow."""


class FabricReport(Record, frozen=True, kw_only=True, tag="fabric_report"):
    """What stands out on a fabric. ``dropped``: what stood out once and was fine when measured again."""

    hosts: tuple[str, ...]
    usual_bit_per_s: float
    sending: dict[str, float]
    receiving: dict[str, float]
    findings: tuple[Finding, ...]
    cannot_tell: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    was_retested: bool = False


def schedule_of(num_hosts: int, *, seed: int = 0) -> Schedule:
    """All pairs in rounds; seeded random matchings where there are too many hosts for that."""
    if num_hosts <= MAX_EXACT_HOSTS:
        return rounds(num_hosts)
    source = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    table = []
    for _ in range(NUM_MATCHINGS):
        order = list(range(num_hosts))
        source.shuffle(order)
        table.append([(min(a, b), max(a, b)) for a, b in zip(order[::2], order[1::2], strict=False)])
    return table


def suspects(report: MatrixReport, matrix: Matrix) -> Schedule:
    """The pairs to measure alone, one per round: a suspect host with known-good partners, a suspect path itself."""
    index = {host: number for number, host in enumerate(matrix.hosts)}
    bad = {finding.subject for finding in report.findings}
    good = sorted(
        (h for h in matrix.hosts if h not in bad),
        key=lambda h: -min(report.sending.get(h, 0.0), report.receiving.get(h, 0.0)),
    )
    pairs: dict[tuple[int, int], None] = {}
    for finding in report.findings:
        for one, other in _pairs_of(finding, matrix, good):
            a, b = index[one], index[other]
            pairs[min(a, b), max(a, b)] = None
    return [[pair] for pair in list(pairs)[:MAX_RETESTS]] * REPEATS


def _pairs_of(finding: Finding, matrix: Matrix, good: Sequence[str]) -> list[tuple[str, str]]:
    if finding.id == "link.slow-path":
        one, _, other = finding.subject.split(" ")
        return [(one, other)]
    if finding.id == "link.slow-uplink":
        cells = [tuple(evidence.where.split(" -> ")) for evidence in finding.evidence[:1]]
        return [(cell[0], cell[1]) for cell in cells]
    # Partners of the same rack where there are any: an uplink must not stand between.
    rack = matrix.racks.get(finding.subject)
    near = [h for h in good if h != finding.subject and matrix.racks.get(h) == rack]
    far = [h for h in good if h != finding.subject and h not in near]
    return [(finding.subject, partner) for partner in (*near, *far)[:PARTNERS]]


def confirm(report: MatrixReport, again: LinksRecord) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """The findings that hold when measured alone, and what was dropped with the reason."""
    rates: dict[tuple[str, str], float] = {}
    dips: dict[tuple[str, str], float] = {}
    for sample in again.samples:
        if sample.bit_per_s and not sample.is_bidirectional:
            cell = (sample.source, sample.target)
            rates[cell] = max(rates.get(cell, 0.0), median(sample.bit_per_s) / report.usual_bit_per_s)
            dips[cell] = min(dips.get(cell, 1.0), min(sample.bit_per_s) / max(1.0, *sample.bit_per_s))
    kept: list[Finding] = []
    dropped: list[str] = []
    for finding in report.findings:
        verdict = _again(finding, rates, dips, report.usual_bit_per_s)
        if verdict is None:
            dropped.append(f"{finding.title}: fine when measured again alone")
        else:
            kept.append(dataclasses.replace(_one_way(finding, rates), evidence=(*finding.evidence, *verdict)))
    return tuple(kept), tuple(dropped)


def _one_way(finding: Finding, rates: Mapping[tuple[str, str], float]) -> Finding:
    """A path that was slow both ways and is so in one only when measured again."""
    one, way, other = finding.subject.split(" ") if " <-> " in finding.subject else ("", "", "")
    slow = [(s, t) for s, t in ((one, other), (other, one)) if rates.get((s, t), 0.0) < SLOW]
    if way != "<->" or len(slow) != 1:
        return finding
    source, target = slow[0]
    title = finding.title.replace(f"{one} to and from {other}", f"{source} to {target}")
    return dataclasses.replace(finding, subject=f"{source} -> {target}", title=title)


def _again(
    finding: Finding, rates: Mapping[tuple[str, str], float], dips: Mapping[tuple[str, str], float], usual: float
) -> tuple[Evidence, ...] | None:
    """Evidence of the second measurement; None where it speaks against the finding. Nothing measured is no verdict."""
    if finding.id == "link.slow-path":
        one, way, other = finding.subject.split(" ")
        cells = [(one, other), (other, one)] if way == "<->" else [(one, other)]
    elif finding.id == "link.slow-uplink":
        cells = [tuple(e.where.split(" -> ")) for e in finding.evidence[:1]]  # type: ignore[misc]
    else:
        ends = {"link.slow-tx": (0,), "link.slow-rx": (1,)}.get(finding.id, (0, 1))
        cells = [cell for cell in rates if any(cell[end] == finding.subject for end in ends)]
    seen = [cell for cell in cells if cell in rates]
    if not seen:
        return ()
    level = median(rates[cell] for cell in seen)
    lines = tuple(
        Evidence(where=f"{s} -> {t}, alone", seen=f"{format_rate(rates[s, t] * usual)} ({format_percent(rates[s, t])})")
        for s, t in seen[:2]
    )
    if finding.id == "link.slow-uplink":
        return lines  # fine alone is what oversubscription looks like; slow alone is a slow uplink: both are findings
    if finding.id == "link.flapping":
        # It comes and goes: one more stall in any of the repeats is enough, and none at all speaks against it.
        return lines if min(dips[cell] for cell in seen) < UNSTEADY or level < SLOW else None
    return lines if level < SLOW else None


def check_fabric(
    ranks: Ranks,
    *,
    racks: Mapping[str, str] | None = None,
    streams: Sequence[int] = (1, 4),
    duration_s: float = 0.5,
    options: SocketOptions | None = None,
    timeout_s: float = 15.0,
    join_timeout_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> tuple[FabricReport, LinksRecord] | None:
    """Measure all pairs (or matchings), judge, measure suspects again. Every rank calls it; rank 0 gets the result.

    Raises what ``measure_links`` raises: PeerFailure names the host that does not answer.
    """

    seen: list[MatrixReport] = []
    again: list[LinksRecord] = []

    def follow_up(record: LinksRecord) -> Schedule:
        if seen:
            again.append(record)
            return ()
        matrix = matrix_of(record, racks, schedule=schedule_of(len(record.hosts), seed=seed))
        seen.append(judge(matrix))
        return suspects(seen[0], matrix)

    first = measure_links(
        ranks,
        streams=streams,
        duration_s=duration_s,
        num_pings=NUM_PINGS,
        options=options,
        timeout_s=timeout_s,
        join_timeout_s=join_timeout_s,
        progress=progress,
        schedule=lambda count: schedule_of(count, seed=seed),
        follow_up=follow_up,
    )
    if first is None:
        return None
    report = seen[0]
    findings, dropped = confirm(report, again[0]) if again else (report.findings, ())
    return _report(first, report, findings, dropped=dropped, was_retested=bool(again)), first


def _report(
    record: LinksRecord,
    report: MatrixReport,
    findings: Sequence[Finding],
    *,
    dropped: Sequence[str] = (),
    was_retested: bool = False,
) -> FabricReport:
    return FabricReport(
        environment=record.environment,
        hosts=record.hosts,
        usual_bit_per_s=report.usual_bit_per_s,
        sending=report.sending,
        receiving=report.receiving,
        findings=tuple(findings),
        cannot_tell=report.cannot_tell if findings else (),
        dropped=tuple(dropped),
        was_retested=was_retested,
    )


def report_of(record: LinksRecord, racks: Mapping[str, str] | None = None) -> FabricReport:
    """The report of a record that was measured before: nothing is measured again."""
    report = judge(matrix_of(record, racks))
    return _report(record, report, report.findings)
