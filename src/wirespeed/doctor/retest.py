"""What stood out on a fabric, measured again before it is believed: alone, and against known-good partners.

Slow again alone: the host or the path. Fine alone and slow together with others: what they share.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median

import msgspec

from wirespeed.doctor.check import Evidence, Finding
from wirespeed.doctor.matrix import SLOW, UNSTEADY, Cell, Matrix, MatrixReport, reached, slowest_by_far
from wirespeed.measure.links import Schedule, rounds
from wirespeed.records import LinksRecord
from wirespeed.units import format_percent, format_rate

MAX_EXACT_HOSTS = 32
NUM_MATCHINGS = 15
"""Random matchings beyond that many hosts: each host meets 15 others (Imbue's p2p_ib_test.py takes as many)."""
PARTNERS = 2
MAX_TOGETHER = 4
MAX_SUSPECTS = 8
MAX_RETESTS = 12
PASSES = (1, 1, 3)
"""Repeats of what is suspect after the first measurement, and of what still is after each of these: what is fine once
is fine, and few suspects get more care."""
SETTLED = 0.02
"""A limit shows: the four best of what is slow agree within this share. What noise slowed down does not."""
FLAPPING_PASSES = 2
"""A link that seemed to come and go is looked at in so many of them at least."""
STALLS, SURE_STALLS, NO_STALLS = 0.33, 0.5, 0.1
"""Shares of its transfers that stall: what confirms it, and what needs no further look."""


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


def suspects(
    report: MatrixReport,
    matrix: Matrix,
    *,
    still: Sequence[Finding] | None = None,
    repeats: int = PASSES[0],
) -> Schedule:
    """The rounds of another pass, each several times: of all findings of the report, or of those that ``still`` stand.

    A suspect host with known-good partners and a suspect path: each pair alone. The hosts of a suspect rack: together,
    as they were when it stood out. Which partners they get follows from the report, and is the same in each pass.
    """
    index = {host: number for number, host in enumerate(matrix.hosts)}
    bad = {finding.subject for finding in report.findings}
    racks: list[Finding] = []
    others: list[Finding] = []
    for finding in worst_first(report.findings if still is None else still):
        (racks if finding.id == "link.slow-uplink" else others).append(finding)
    # Racks first: a halved uplink makes more paths suspect than can be measured again.
    chosen = [*racks, *others][:MAX_SUSPECTS]
    # Also of racks that are done with: what a pair carried with its rack and what it carried alone must not be mixed.
    uplinks = [finding for finding in report.findings if finding.id == "link.slow-uplink"]
    taken = {frozenset(pair) for finding in uplinks for pair in _together(finding, matrix, report)}
    good = [host for host in _best_first(report, matrix) if host not in bad]
    table: dict[tuple[tuple[int, int], ...], None] = {}
    for finding in chosen:
        for pairs in _rounds_of(finding, matrix, report, good, taken):
            # All hosts of a rack send at the same time, and then all receive: the first of each pair is the rack's.
            numbers = tuple((index[a], index[b]) for a, b in pairs)
            table[numbers if len(numbers) > 1 else tuple((min(pair), max(pair)) for pair in numbers)] = None
    return [list(pairs) for pairs in list(table)[:MAX_RETESTS]] * repeats


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Links that come and go, then by how little of the usual rate is left."""

    def level(finding: Finding) -> float:
        limit, full = finding.limit_bit_per_s, finding.full_bit_per_s
        return limit / full if limit is not None and full else 0.0

    return sorted(findings, key=level)


def _best_first(report: MatrixReport, matrix: Matrix) -> list[str]:
    return sorted(
        matrix.hosts, key=lambda h: -min(report.sending.get(h, 0.0), report.receiving.get(h, 0.0))
    )  # fmt: skip


def _rounds_of(
    finding: Finding, matrix: Matrix, report: MatrixReport, good: Sequence[str], taken: set[frozenset[str]]
) -> list[list[tuple[str, str]]]:
    if finding.id == "link.slow-path":
        one, _, other = finding.subject.split(" ")
        return [] if frozenset((one, other)) in taken else [[(one, other)]]
    if finding.id == "link.slow-uplink":
        pairs = _together(finding, matrix, report)
        return [pairs] if pairs else []
    # Partners of the same rack where there are any: an uplink must not stand between. A pair that is measured with its
    # rack is not measured alone too, or one could not tell the counts apart.
    rack = matrix.racks.get(finding.subject)
    free = [h for h in good if h != finding.subject and frozenset((h, finding.subject)) not in taken]
    near = [h for h in free if matrix.racks.get(h) == rack]
    far = [h for h in free if h not in near]
    return [[(finding.subject, partner)] for partner in (*near, *far)[:PARTNERS]]


def _inside(finding: Finding, matrix: Matrix) -> list[str]:
    """The hosts of a suspect rack; where racks are not known the subject lists them."""
    first = finding.subject.split(" or ")[0]
    inside = [h for h in matrix.hosts if matrix.racks.get(h) == first]
    return inside or [h for h in finding.subject.split(", ") if h in matrix.hosts]


def _together(finding: Finding, matrix: Matrix, report: MatrixReport) -> list[tuple[str, str]]:
    """Hosts of the suspect rack (or group), each with a good host elsewhere.

    Of different racks as far as there are, not of another suspect rack, not over a path that is suspect itself.
    """
    inside = _inside(finding, matrix)
    outside = [h for h in _best_first(report, matrix) if h not in inside]
    bad_racks = {f.subject for f in report.findings if f.id == "link.slow-uplink"}
    bad_hosts = {f.subject for f in report.findings if f.host is not None}
    bad_paths = [set(f.subject.split(" ")) for f in report.findings if f.id == "link.slow-path"]
    pairs: list[tuple[str, str]] = []
    for host in inside[:MAX_TOGETHER]:
        left = [h for h in outside if h not in {partner for _, partner in pairs}]
        used = [matrix.racks.get(partner) for _, partner in pairs]
        cost = {
            h: (
                h in bad_hosts,
                any({host, h} <= path for path in bad_paths),
                used.count(matrix.racks.get(h)),
                matrix.racks.get(h) in bad_racks,
            )
            for h in left
        }
        if left:
            pairs.append((host, min(left, key=cost.__getitem__)))
    return pairs


class Again:
    """What the second pass measured: per direction the rates over the usual one, in the order of the repeats."""

    def __init__(self, record: LinksRecord, usual: float) -> None:
        self.shares: dict[Cell, list[float]] = defaultdict(list)
        self.windows: dict[Cell, list[list[float]]] = defaultdict(list)
        self.dips: dict[Cell, list[float]] = defaultdict(list)
        self.together: set[Cell] = set()
        """What was measured with all hosts of a rack: it says nothing of each of them."""
        for sample in record.samples:
            if sample.bit_per_s and not sample.is_bidirectional:
                cell = (sample.source, sample.target)
                self.shares[cell].append(reached(sample.bit_per_s) / usual)
                self.windows[cell].append([rate / usual for rate in sample.bit_per_s])
                self.dips[cell].append(min(sample.bit_per_s) / max(1.0, *sample.bit_per_s))

    def alone(self) -> list[Cell]:
        """Pairs that were measured by themselves."""
        return [cell for cell in self.shares if cell not in self.together]

    def stalls(self, host: str) -> float:
        """The share of a host's transfers in which a window fell far below the best."""
        dips = [dip for cell in self.alone() if host in cell for dip in self.dips[cell]]
        return sum(dip < UNSTEADY for dip in dips) / len(dips) if dips else 0.0

    def sums(self, cells: Sequence[Cell]) -> list[list[float]]:
        """Of cells that were measured together: per repeat what they carried in each window, all together."""
        repeats = zip(*(self.windows.get(cell, []) for cell in cells), strict=False)
        return [[sum(shares) for shares in zip(*windows, strict=False)] for windows in repeats]

    def best(self, cell: Cell) -> float:
        """The best of the repeats: a slow path is never fast, a busy machine is not always slow."""
        return max(self.shares[cell])


def confirm(
    report: MatrixReport, again: LinksRecord, matrix: Matrix | None = None
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """The findings that hold when measured again, and what was dropped with the reason."""
    weighed, ratios, _ = _weigh(report, again, matrix)
    slow = slowest_by_far({subject: ratio for subject, ratio in ratios.items() if ratio < SLOW})
    weighed = [(finding, why or _explained(finding, slow, matrix)) for finding, why in weighed]
    kept = tuple(finding for finding, why in weighed if why is None)
    return kept, tuple(f"{finding.title}: {why}" for finding, why in weighed if why is not None)


def left_of(report: MatrixReport, again: LinksRecord, matrix: Matrix, num_passes: int) -> list[Finding]:
    """What to measure on after so many passes: what there was no room for, and what stands and is not settled."""
    weighed, _, held = _weigh(report, again, matrix)
    left = []
    for finding, why in weighed:
        if finding.id == "link.flapping":
            share = held.stalls(finding.subject)
            is_doubtful = NO_STALLS <= share < SURE_STALLS and num_passes < len(PASSES)
            is_open = num_passes < FLAPPING_PASSES or is_doubtful
        elif why is None:
            is_open = num_passes < len(PASSES) or not _is_settled(finding, held, report, matrix)
        else:
            is_open = why == _NOT_AGAIN
        if is_open:
            left.append(finding)
    return left


def _is_settled(finding: Finding, held: Again, report: MatrixReport, matrix: Matrix) -> bool:
    """Whether what is slow came to the same rate four times, and never to more.

    By the best window of each repeat: a limit shows in one of them even while the machine is busy, and what only the
    machine made slow comes to another rate each time.
    """
    if finding.id == "link.slow-uplink":
        pairs = _together(finding, matrix, report)
        ways = [held.sums(cells) for cells in (pairs, [(b, a) for a, b in pairs])]
        peaks = [[max(windows) / len(pairs) for windows in way] for way in ways]
        series = [min(peaks, key=lambda levels: max(levels, default=math.inf))]
    else:
        words = finding.subject.split(" ")
        alone = held.alone()
        if finding.id == "link.slow-path":
            cells = [cell for cell in alone if set(cell) == {words[0], words[-1]}]
        else:  # each side with its best partner: that is what a side is judged by
            sides = [[cell for cell in alone if cell[end] == finding.subject] for end in (0, 1)]
            cells = [max(side, key=held.best) for side in sides if side]
        first = {cell: rate / report.usual_bit_per_s for cell, rate in matrix.bit_per_s.items()}
        # What the first passes saw counts: a limit holds then too.
        series = [[*map(max, held.windows[cell]), first.get(cell, 0.0)] for cell in cells if held.best(cell) < SLOW]
    best = [sorted(levels, reverse=True) for levels in series if levels]
    return all(len(levels) >= 4 and levels[0] - levels[3] <= SETTLED * levels[0] for levels in best)


_NOT_AGAIN = f"not measured again, as there were more than {MAX_SUSPECTS} suspects"


def _weigh(
    report: MatrixReport, again: LinksRecord, matrix: Matrix | None
) -> tuple[list[tuple[Finding, str | None]], dict[str, float], Again]:
    """Each finding with its second evidence and why it is dropped, if it is; what each rack carried; and all of it."""
    held = Again(again, report.usual_bit_per_s)
    for finding in report.findings:
        if finding.id == "link.slow-uplink" and matrix is not None:
            for one, other in _together(finding, matrix, report):
                held.together |= {(one, other), (other, one)}
    weighed: list[tuple[Finding, str | None]] = []
    ratios: dict[str, float] = {}
    for finding in report.findings:
        if finding.id == "link.slow-uplink" and matrix is not None:
            ratio, evidence = _uplink_again(finding, held, report, matrix)
            if evidence:
                ratios[finding.subject] = ratio
            why = None if ratio < SLOW else "the rack carried all of it when measured again"
        else:
            verdict = _again(finding, held, report)
            evidence = verdict or ()
            why = None if verdict else _NOT_AGAIN if verdict is not None else "fine when measured again alone"
        told = _as_seen(_one_way(finding, held, report), held) if why is None else finding
        weighed.append((dataclasses.replace(told, evidence=(*told.evidence, *evidence)), why))
    return weighed, ratios, held


def _explained(finding: Finding, slow: Sequence[str], matrix: Matrix | None) -> str | None:
    """Why a finding that held needs no cause of its own beside the racks whose uplinks are slow."""
    if finding.id == "link.slow-uplink" and slow and finding.subject not in slow:
        return f"its traffic to {' and '.join(slow)} explains it"
    if finding.id == "link.slow-path" and matrix is not None:
        one, _, other = finding.subject.split(" ")
        ends = {matrix.racks.get(host) for host in (one, other)}
        if len(ends) == 2 and (racks := [rack for rack in slow if rack in ends]):
            return f"the uplink of rack {racks[0]} explains it"
    return None


def _one_way(finding: Finding, held: Again, report: MatrixReport) -> Finding:
    """A path that was slow both ways and is so in one only when measured again."""
    one, way, other = finding.subject.split(" ") if " <-> " in finding.subject else ("", "", "")
    ways = [(s, t) for s, t in ((one, other), (other, one)) if held.shares.get((s, t))]
    slow = [(s, t) for s, t in ways if held.best((s, t)) < SLOW * _possible(report, held, s, t)]
    if way != "<->" or len(slow) != 1:
        return finding
    source, target = slow[0]
    title = finding.title.replace(f"{one} to and from {other}", f"{source} to {target}")
    return dataclasses.replace(finding, subject=f"{source} -> {target}", title=title)


_SIDES = {"link.slow-host": "both ways", "link.slow-tx": "sending", "link.slow-rx": "receiving"}


def _as_seen(finding: Finding, held: Again) -> Finding:
    """A slow host by the sides that were slow when it was measured again alone, with partners that are fine."""
    sends, receives = _sides(finding.subject, held)
    if finding.id not in _SIDES or sends is None or receives is None or min(sends, receives) >= SLOW:
        return finding
    side = "link.slow-tx" if receives >= SLOW else "link.slow-rx" if sends >= SLOW else "link.slow-host"
    title = finding.title.replace(f"slow {_SIDES[finding.id]}:", f"slow {_SIDES[side]}:")
    return dataclasses.replace(finding, id=side, title=title)


def _sides(host: str, held: Again) -> tuple[float | None, float | None]:
    """What a host sent and received when it was measured again, over the usual rate: with its best partner."""
    levels = [[held.best(cell) for cell in held.alone() if cell[end] == host] for end in (0, 1)]
    sends, receives = (max(level, default=None) for level in levels)
    return sends, receives


def _again(finding: Finding, held: Again, report: MatrixReport) -> tuple[Evidence, ...] | None:
    """Evidence of the second measurement, empty where there was none; None where it speaks against the finding."""
    if finding.id == "link.slow-path":
        one, way, other = finding.subject.split(" ")
        cells = [(one, other), (other, one)] if way == "<->" else [(one, other)]
    else:
        cells = [cell for cell in held.alone() if finding.subject in cell]
    seen = [cell for cell in cells if held.shares.get(cell)]
    if not seen:
        return ()
    sides = [side for side in _sides(finding.subject, held) if side is not None]
    level = min(sides, default=1.0)
    seen.sort(key=held.best)
    lines = tuple(
        Evidence(
            where=f"{s} -> {t}, alone",
            seen=f"{format_rate(held.best((s, t)) * report.usual_bit_per_s)} ({format_percent(held.best((s, t)))})",
        )
        for s, t in seen[:2]
    )
    if finding.id == "link.slow-path":
        # A path to a slow host is as slow as the host, and no slower: it is not the path.
        return lines if any(held.best((s, t)) < SLOW * _possible(report, held, s, t) for s, t in seen) else None
    if finding.id == "link.flapping":
        # It comes and goes: not all of its transfers stall, and on a busy machine one of others may.
        is_slow = median(held.best(cell) for cell in seen) < SLOW
        return lines if held.stalls(finding.subject) >= STALLS or is_slow else None
    return lines if level < SLOW else None


def _uplink_again(
    finding: Finding, held: Again, report: MatrixReport, matrix: Matrix
) -> tuple[float, tuple[Evidence, ...]]:
    """What the rack's hosts, together, carried of what they could: in the best repeat, the worse way. 0: not measured.

    Not measured again it stands: there is no second rack, or its hosts have no partners.
    """
    pairs = _together(finding, matrix, report)
    worst: tuple[float, list[Cell]] = (math.inf, [])
    for cells in (pairs, [(b, a) for a, b in pairs]):
        if len(cells) < 2 or not all(held.shares.get(cell) for cell in cells):
            continue
        # Hosts of a group that is only known by being slow together are not slow themselves.
        alone = [min(_alone(held, cells, report, s, 0), _alone(held, cells, report, t, 1)) for s, t in cells]
        possible = max(sum(alone), 1e-9) if matrix.racks else float(len(cells))
        ratio = max(reached(windows) for windows in held.sums(cells)) / possible
        worst = min(worst, (ratio, cells))
    ratio, cells = worst
    if not cells:
        return 0.0, ()
    return ratio, tuple(
        Evidence(
            where=f"{s} -> {t}, together",
            seen=f"{format_rate(held.best((s, t)) * report.usual_bit_per_s)} ({format_percent(held.best((s, t)))})",
        )
        for s, t in cells[:2]
    )


def _alone(held: Again, together: Collection[Cell], report: MatrixReport, host: str, end: int) -> float:
    """What one side of a host can do: as it was first seen, or better where it was measured again on its own."""
    again = [held.best(cell) for cell in held.shares if cell[end] == host and cell not in together]
    first = (report.sending, report.receiving)[end].get(host, 1.0)
    return min(1.0, max([first, *again]))


def _possible(report: MatrixReport, held: Again, source: str, target: str) -> float:
    """What both ends of a path can do, as each was seen at its best."""
    return min(_alone(held, held.together, report, source, 0), _alone(held, held.together, report, target, 1))


def joined(records: Sequence[LinksRecord]) -> LinksRecord:
    """One record of several of the same hosts."""
    samples = tuple(sample for record in records for sample in record.samples)
    return msgspec.structs.replace(records[0], samples=samples)
