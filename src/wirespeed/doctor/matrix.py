"""Slow hosts, links, racks and uplinks from link measurements, by the model rate = min(sender, path, receiver).

A host's side is as fast as it was seen to be: the highest of the medians of its classes (partners in its rack, partners
elsewhere), so a slow partner or a busy uplink does not make it suspect. A link is slow where it is slower than both its
ends allow. Pairs of one round share uplinks; what racks carry together in a phase tells an uplink's capacity. Values
are held against the fabric's own upper tenth, so one that is slow everywhere has no outlier: compare with the NIC's
rate, or with earlier runs. With two hosts nothing can be told apart; what else cannot is said in ``cannot_tell``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_high

import msgspec

from wirespeed.doctor.check import Evidence, Finding, Remedy
from wirespeed.measure.links import Schedule, rounds
from wirespeed.records import LinkSample, LinksRecord
from wirespeed.units import format_percent, format_rate

SLOW = 0.9
"""Below this share of what is usual a cell or a host is suspect; goodput of a healthy link repeats within 3 %."""
MIN_Z = 3.5
"""Robust standard deviations below the median that an outlier must have besides (Iglewicz and Hoaglin)."""
MIN_DEVIATION = 0.02
"""Floor of the robust deviation: shaped links repeat so well that a loss of 1 % would else be an outlier."""
SUSPECT = 0.75
"""Below this share of the median a value is suspect however much the others vary, where it is measured again."""
UNSTEADY = 0.25
"""A window below this share of the transfer's best, in most transfers of a host and few of others: its link comes and
goes. TCP waits 200 ms at least before it sends again; a busy machine halves a window now and then."""

MANY_STALLS, FEW_STALLS = 0.4, 0.15
"""Shares of a host's transfers with a stall, and of all others', that make it one whose link comes and goes."""
SOME_STALLS, MORE_STALLS = 0.25, 0.3
"""Where it is measured again: a host's share that is enough to be suspect, and what it is above the others' besides."""

Cell = tuple[str, str]


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput by source and target, each as ``reached`` in a transfer's windows, and what the rounds were."""

    hosts: tuple[str, ...]
    bit_per_s: dict[Cell, float]
    dips: dict[Cell, tuple[float, ...]]
    """Slowest over fastest window, of the steadier transfer of the cell in each measurement."""
    racks: dict[str, str]
    """Host to rack; empty where it is not known."""
    phases: tuple[tuple[Cell, ...], ...]
    """Cells that were measured at the same time."""

    def is_cross(self, cell: Cell) -> bool:
        """Whether it leaves a rack."""
        return bool(self.racks) and self.racks.get(cell[0]) != self.racks.get(cell[1])


class MatrixReport(msgspec.Struct, frozen=True, kw_only=True):
    """What stands out. ``sending`` and ``receiving``: each host's side over the usual rate."""

    usual_bit_per_s: float
    sending: dict[str, float]
    receiving: dict[str, float]
    findings: tuple[Finding, ...]
    cannot_tell: tuple[str, ...] = ()


def matrix_of(
    record: LinksRecord,
    racks: Mapping[str, str] | None = None,
    *,
    again: Sequence[LinksRecord] = (),
    schedule: Schedule | None = None,
) -> Matrix:
    """The matrix of a record. ``schedule`` None: the rounds of ``bench links``, all pairs.

    ``again``: the same rounds measured again. A cell counts by its best: what is slow is never fast.
    """
    rates: dict[Cell, float] = {}
    dips: dict[Cell, tuple[float, ...]] = {}
    for held in (record, *again):
        steadiest: dict[Cell, float] = {}
        for sample in held.samples:
            if sample.is_bidirectional or not sample.bit_per_s:
                continue
            cell = (sample.source, sample.target)
            rates[cell] = max(rates.get(cell, 0.0), reached(sample.bit_per_s))
            steadiest[cell] = max(steadiest.get(cell, 0.0), _dip(sample))
        for cell, dip in steadiest.items():
            dips[cell] = (*dips.get(cell, ()), dip)
    table = rounds(len(record.hosts)) if schedule is None else schedule
    phases = []
    for pairs in table:
        forth = tuple((record.hosts[a], record.hosts[b]) for a, b in pairs)
        phases += [forth, tuple((b, a) for a, b in forth)]
    return Matrix(hosts=record.hosts, bit_per_s=rates, dips=dips, racks=dict(racks or {}), phases=tuple(phases))


def reached(windows_bit_per_s: Sequence[float]) -> float:
    """The second best of a transfer's windows: what is slow is slow in all of them, a busy machine only in some.

    Not the best: what waited for a reader that was held up comes all at once.
    """
    best = sorted(windows_bit_per_s)
    return best[-2] if len(best) > 2 else best[-1]


def _dip(sample: LinkSample) -> float:
    best = max(sample.bit_per_s)
    return min(sample.bit_per_s) / best if best > 0 else 0.0


def find_outliers(
    record: LinksRecord,
    racks: Mapping[str, str] | None = None,
    *,
    schedule: Schedule | None = None,
) -> MatrixReport:
    """What stands out in a record of link measurements."""
    return judge(matrix_of(record, racks, schedule=schedule))


def judge(matrix: Matrix, *, is_first_pass: bool = False) -> MatrixReport:
    """What stands out in a matrix; in a first pass also what may be noise, since it is measured again."""
    floor = SUSPECT if is_first_pass else 0.0
    rates = matrix.bit_per_s
    if not rates:
        return MatrixReport(
            usual_bit_per_s=0.0, sending={}, receiving={}, findings=(), cannot_tell=("no pair was measured",)
        )
    usual = _usual(matrix)
    share = {cell: rate / usual for cell, rate in rates.items()}
    sending = {host: _side(matrix, share, host, 0) for host in matrix.hosts}
    receiving = {host: _side(matrix, share, host, 1) for host in matrix.hosts}
    unsteady = _unsteady_hosts(matrix, is_first_pass=is_first_pass)
    limit = _limit([*sending.values(), *receiving.values()], floor)
    slow = [h for h in matrix.hosts if h not in unsteady and min(sending[h], receiving[h]) < limit]
    group = _group(slow, share) if not matrix.racks else ()
    findings = [_flapping(matrix, host) for host in unsteady]
    if group:
        findings.append(_group_finding(group, share, usual))
    else:
        findings += [_slow_host(h, sending[h], receiving[h], limit, share, usual) for h in slow]
    # What a link that comes and goes carries says nothing of an uplink; in a first pass it is not known yet to do so.
    set_aside = set() if is_first_pass else set(unsteady)
    steady = {cell: value for cell, value in share.items() if not set(cell) & set_aside}
    uplinks = _slow_uplinks(matrix, steady, sending, receiving, usual, is_first_pass=is_first_pass)
    findings += uplinks
    # A slow uplink explains slow paths. In a first pass it may be the other way round: both are measured again.
    if not group and (is_first_pass or not uplinks):
        findings += _slow_links(matrix, share, sending, receiving, unsteady, usual, floor)
    return MatrixReport(
        usual_bit_per_s=usual,
        sending=sending,
        receiving=receiving,
        findings=tuple(findings),
        cannot_tell=tuple(_cannot_tell(matrix, findings)),
    )


def unexplained(matrix: Matrix, report: MatrixReport) -> list[Cell]:
    """Cells below ``SLOW`` of the usual rate that no finding covers."""
    hosts = {finding.host for finding in report.findings if finding.host is not None}
    paths = {frozenset(f.subject.split(" ")[::2]) for f in report.findings if f.id == "link.slow-path"}
    uplinks = [f.subject for f in report.findings if f.id == "link.slow-uplink"]
    racks = {rack for subject in uplinks for rack in subject.split(" or ")}
    groups = {host for subject in uplinks for host in subject.split(", ")}
    return [
        cell
        for cell, rate in matrix.bit_per_s.items()
        if rate < SLOW * report.usual_bit_per_s
        and not hosts & set(cell)
        and not groups & set(cell)
        and frozenset(cell) not in paths
        and not (matrix.is_cross(cell) and racks & {matrix.racks.get(host) for host in cell})
    ]


def _usual(matrix: Matrix) -> float:
    """What a healthy pair reaches: the upper tenth inside racks, where uplinks play no part, else of all.

    Not the median: three slow hosts of eight slow down more than half of the cells, and a busy machine slows down any.
    """
    inside = [rate for cell, rate in matrix.bit_per_s.items() if not matrix.is_cross(cell)]
    cells = inside if len(inside) >= 4 else list(matrix.bit_per_s.values())
    return max(sorted(cells)[int(0.9 * len(cells))], 1.0)


def _limit(values: Sequence[float], floor: float = 0.0) -> float:
    """Below this a value is an outlier: by the robust deviation, and by at least 1 - SLOW; below ``floor`` always."""
    centre = median(values)
    deviation = max(1.4826 * median(abs(value - centre) for value in values), MIN_DEVIATION)
    unlikely = max(centre - MIN_Z * deviation, floor * centre)
    return min(SLOW * min(1.0, centre), unlikely) if len(values) > 4 else SLOW


def _side(matrix: Matrix, share: Mapping[Cell, float], host: str, end: int) -> float:
    """How fast one side of a host was seen to be: the best of its classes' medians."""
    inside = [value for cell, value in share.items() if cell[end] == host and not matrix.is_cross(cell)]
    across = [value for cell, value in share.items() if cell[end] == host and matrix.is_cross(cell)]
    # The higher of the two middle ones: with three hosts a row holds two cells, one of them of the slow partner.
    return max((median_high(values) for values in (inside, across) if values), default=1.0)


def _unsteady_hosts(matrix: Matrix, *, is_first_pass: bool) -> list[str]:
    """Hosts most of whose transfers had a window far below their best, where those of others have not."""
    found = []
    for host in matrix.hosts:
        own = [dip for cell, dips in matrix.dips.items() if host in cell for dip in dips]
        rest = [dip for cell, dips in matrix.dips.items() if host not in cell for dip in dips]
        own_share = sum(dip < UNSTEADY for dip in own) / len(own) if own else 0.0
        rest_share = sum(dip < UNSTEADY for dip in rest) / len(rest) if rest else 0.0
        if is_first_pass:
            is_unlike = rest_share <= own_share / 3 or own_share - rest_share >= MORE_STALLS
            is_found = own_share >= SOME_STALLS and is_unlike
        else:
            is_found = own_share >= MANY_STALLS and rest_share <= max(FEW_STALLS, own_share / 3)
        if is_found:
            found.append(host)
    return found


def _evidence(cells: Sequence[Cell], share: Mapping[Cell, float], usual: float) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            where=f"{source} -> {target}",
            seen=f"{format_rate(share[source, target] * usual)} ({format_percent(share[source, target])} of usual)",
            expected=format_rate(usual),
        )
        for source, target in sorted(cells, key=lambda cell: share[cell])[:4]
    )


def _slow_host(  # noqa: PLR0917 - one caller
    host: str, sends: float, receives: float, limit: float, share: Mapping[Cell, float], usual: float
) -> Finding:
    is_both = sends < limit and receives < limit
    side = "both ways" if is_both else "sending" if sends < limit else "receiving"
    level = min(sends, receives)
    cells = [cell for cell in share if (cell[0] == host and sends < limit) or (cell[1] == host and receives < limit)]
    return Finding(
        id="link.slow-host" if is_both else "link.slow-tx" if sends < limit else "link.slow-rx",
        subject=host,
        host=host,
        severity="critical" if level < 0.7 else "warning",
        title=f"host {host} is slow {side}: {format_percent(level)} of what the others reach",
        evidence=_evidence(cells, share, usual),
        remedy=Remedy(
            text="look at this host's NIC, cable and port, PCIe width, CPU load and interrupts before the fabric",
            commands=("wirespeed doctor host --during 10s", "ethtool <interface>; ethtool -S <interface>"),
        ),
        source=f"below {format_percent(SLOW)} of usual and {MIN_Z} robust deviations",
        limit_bit_per_s=level * usual,
        full_bit_per_s=usual,
    )


def _flapping(matrix: Matrix, host: str) -> Finding:
    cells = sorted((cell for cell in matrix.dips if host in cell), key=lambda cell: min(matrix.dips[cell]))[:4]
    return Finding(
        id="link.flapping",
        subject=host,
        host=host,
        severity="critical",
        title=f"the link of host {host} comes and goes: transfers to and from it stall, others do not",
        evidence=tuple(
            Evidence(
                where=f"{source} -> {target}",
                seen=f"slowest window at {format_percent(min(matrix.dips[source, target]))} of the fastest",
                expected=f"above {format_percent(UNSTEADY)}",
            )
            for source, target in cells
        ),
        remedy=Remedy(
            text="exchange cable or optic, then look at the switch port",
            commands=("cat /sys/class/net/<interface>/carrier_changes", "dmesg -T | grep -i 'link'"),
        ),
        source="own rule",
    )


def _group(slow: Sequence[str], share: Mapping[Cell, float]) -> tuple[str, ...]:
    """Slow hosts that are fast among each other: what joins them to the rest is slow, not they."""
    if len(slow) < 2:
        return ()
    among = [share[a, b] for a in slow for b in slow if a != b and (a, b) in share]
    return tuple(slow) if among and min(among) >= SLOW else ()


def _group_finding(group: Sequence[str], share: Mapping[Cell, float], usual: float) -> Finding:
    cells = [cell for cell in share if (cell[0] in group) != (cell[1] in group)]
    level = median(share[cell] for cell in cells)
    return Finding(
        id="link.slow-uplink",
        subject=", ".join(group),
        severity="critical",
        title=f"what joins {', '.join(group)} to the others is slow: {format_percent(level)} of usual; among "
        "themselves "
        "they are fast",
        evidence=_evidence(cells, share, usual),
        remedy=Remedy(text="look at the uplink of their switch; give the racks with --racks to have it named"),
        source="own rule",
        limit_bit_per_s=level * usual,
        full_bit_per_s=usual,
    )


def _slow_uplinks(
    matrix: Matrix,
    share: Mapping[Cell, float],
    sending: Mapping[str, float],
    receiving: Mapping[str, float],
    usual: float,
    *,
    is_first_pass: bool,
) -> list[Finding]:
    """Racks whose pairs together never carry what their hosts could, in the phases in which several cross.

    In a first pass each rack that may be the one is a finding of its own where other racks can tell them apart.
    """
    racks = sorted(set(matrix.racks.values()))
    if len(racks) < 2:
        return []
    ratio: dict[str, float] = {}
    capacity: dict[str, float] = {}
    slowest: dict[str, list[Cell]] = {}
    for rack, end in ((rack, end) for rack in racks for end in (0, 1)):
        demands, totals, cells = [], [], []
        for phase in matrix.phases:
            crossing = [c for c in phase if c in share and matrix.is_cross(c) and matrix.racks.get(c[end]) == rack]
            if len(crossing) < 2:
                continue
            demands.append(sum(min(sending[s], receiving[t], 1.0) for s, t in crossing))
            totals.append(sum(share[cell] for cell in crossing))
            cells += crossing
        if len(demands) < 2:
            continue
        # What it carried once it can carry; a slow path or a busy machine makes single phases slow.
        level = max(totals) / max(*demands, 1e-9)
        if level < ratio.get(rack, 2.0):
            ratio[rack], capacity[rack], slowest[rack] = level, max(totals) * usual, cells
    suspects = [rack for rack in ratio if ratio[rack] < SLOW]
    named = slowest_by_far({rack: ratio[rack] for rack in suspects})
    if is_first_pass and len(racks) > 2:
        # Noise can put the second before the first; to measure one more costs a fraction of a second.
        worst = sorted(suspects, key=lambda rack: ratio[rack])
        groups = [[rack] for rack in worst[: max(2, len(named))]]
    else:
        groups = [named] if named else []
    return [
        _uplink(" or ".join(group), ratio[group[0]], capacity[group[0]], slowest[group[0]], share, usual)
        for group in groups
    ]


def slowest_by_far(ratio: Mapping[str, float]) -> list[str]:
    """The racks that explain the others: each slow phase of a rack is also one of its partners'."""
    best = min(ratio.values(), default=1.0)
    return [rack for rack, value in ratio.items() if value < best + 0.25 * (1 - best)]


def _uplink(  # noqa: PLR0917 - one caller
    subject: str, ratio: float, capacity: float, cells: Sequence[Cell], share: Mapping[Cell, float], usual: float
) -> Finding:
    return Finding(
        id="link.slow-uplink",
        subject=subject,
        severity="warning" if ratio > 0.7 else "critical",
        title=f"the uplink of rack {subject} carries {format_rate(capacity)} where its hosts could send "
        f"{format_rate(capacity / ratio)}: oversubscribed or slow",
        evidence=_evidence(list(dict.fromkeys(cells)), share, usual),
        remedy=Remedy(
            text="a member of the uplink may be down; else place the ranks so that less crosses racks (wirespeed plan)",
            commands=("ethtool <uplink ports of the switch>",),
        ),
        source="own rule",
        limit_bit_per_s=capacity,
        full_bit_per_s=capacity / ratio,
    )


def _slow_links(  # noqa: PLR0917 - one caller
    matrix: Matrix,
    share: Mapping[Cell, float],
    sending: Mapping[str, float],
    receiving: Mapping[str, float],
    unsteady: Sequence[str],
    usual: float,
    floor: float,
) -> list[Finding]:
    if len(matrix.hosts) < 3:
        return []
    residual = {
        (s, t): value / max(1e-9, min(sending[s], receiving[t], 1.0))
        for (s, t), value in share.items()
        if s not in unsteady and t not in unsteady
    }
    if not residual:
        return []
    limit = _limit(list(residual.values()), floor)
    slow = sorted((cell for cell, value in residual.items() if value < limit), key=lambda cell: residual[cell])
    findings = []
    done: set[Cell] = set()
    for source, target in slow:
        if (source, target) in done:
            continue
        back = (target, source)
        is_both = back in slow
        done |= {(source, target), back}
        cells = [(source, target), back] if is_both else [(source, target)]
        level = median(share[cell] for cell in cells)
        findings.append(
            Finding(
                id="link.slow-path",
                subject=f"{source} {'<->' if is_both else '->'} {target}",
                severity="critical" if level < 0.7 else "warning",
                title=f"the path {source} {'to and from' if is_both else 'to'} {target} is slow: "
                f"{format_percent(level)} "
                "of usual, while both hosts are fast with others",
                evidence=_evidence(cells, share, usual),
                remedy=Remedy(
                    text="a route, an ECMP member or one switch link: try other source ports, compare traceroutes",
                    commands=(f"ip route get <address of {target}>", f"traceroute -n {target}"),
                ),
                source=f"below {format_percent(SLOW)} of what both ends allow",
                limit_bit_per_s=level * usual,
                full_bit_per_s=usual,
            )
        )
    return findings


def _cannot_tell(matrix: Matrix, findings: Sequence[Finding]) -> list[str]:
    lines = []
    count = len(matrix.hosts)
    if count == 2:
        lines.append("with two hosts a slow pair may be either host or the path: measure with a third")
    elif count == 3 and findings:
        lines.append("with three hosts a slow host and two slow paths look alike: measure with a fourth")
    lines += [
        f"which of racks {finding.subject} has the slow uplink: their traffic passes both"
        for finding in findings
        if finding.id == "link.slow-uplink" and " or " in finding.subject
    ]
    missing = sum((a, b) not in matrix.bit_per_s for a in matrix.hosts for b in matrix.hosts if a != b)
    if missing:
        lines.append(f"{missing} of {count * (count - 1)} directions were not measured: a slow path may be among them")
    return lines
