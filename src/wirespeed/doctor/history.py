"""Earlier measurements of the same fabric in one folder, and what has become slower since.

A run alone cannot see that everything is slower than last week, nor a link that was always odd. Kept are records of
``bench links`` (or ``doctor fabric``) named by their time; compared are directions that the last MIN_RUNS or more runs
have measured too. Hosts that were renamed or exchanged have no history.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from wirespeed.doctor.check import Evidence, Finding, Remedy
from wirespeed.errors import DataError
from wirespeed.records import LinksRecord, read, write
from wirespeed.units import format_percent, format_rate

MIN_RUNS = 3
MAX_RUNS = 20
SLOWER = 0.85
"""Below this share of its own median a direction is slower than before: runs days apart differ by up to 10 %."""
MAX_FINDINGS = 20


def keep(folder: str | Path, record: LinksRecord) -> Path:
    """Add a record to the folder. A second one of the same second gets a number."""
    stamp = record.created.replace(":", "").replace("+0000", "Z")
    target = Path(folder) / f"links-{stamp}.json"
    number = 1
    while target.exists():
        number += 1
        target = Path(folder) / f"links-{stamp}-{number}.json"
    return write(target, record)


def earlier(folder: str | Path) -> tuple[tuple[LinksRecord, ...], tuple[str, ...]]:
    """The last records of a folder, oldest first, and what could not be read."""
    records: list[LinksRecord] = []
    notes: list[str] = []
    for path in sorted(Path(folder).glob("links-*.json"))[-MAX_RUNS:]:
        try:
            records.append(read(path, LinksRecord))
        except DataError as fault:
            notes.append(f"left out of the history: {fault}")
    return tuple(sorted(records, key=lambda r: r.created)), tuple(notes)


def find_changes(record: LinksRecord, before: tuple[LinksRecord, ...]) -> tuple[Finding, ...]:
    """Hosts and directions that are slower than in earlier runs; many slow directions of one host are one finding."""
    past: dict[tuple[str, str], list[float]] = defaultdict(list)
    for old in before:
        for cell, rate in _rates(old).items():
            past[cell].append(rate)
    ratios = {
        cell: (rate, median(past[cell]))
        for cell, rate in _rates(record).items()
        if len(past.get(cell, ())) >= MIN_RUNS and median(past[cell]) > 0
    }
    slow = {cell: pair for cell, pair in ratios.items() if pair[0] < SLOWER * pair[1]}
    if ratios and len(slow) > len(ratios) / 2:
        return (_finding("fabric", "the whole fabric is slower than before", slow),)
    findings = []
    left = dict(slow)
    for host in record.hosts:
        own = {cell: pair for cell, pair in slow.items() if host in cell}
        known = sum(host in cell for cell in ratios)
        if known >= 4 and len(own) > known / 2:
            findings.append(_finding(host, f"host {host} is slower than before", own))
            left = {cell: pair for cell, pair in left.items() if host not in cell}
    findings += [
        _finding(f"{s} -> {t}", f"the path {s} to {t} is slower than before", {(s, t): pair})
        for (s, t), pair in left.items()
    ]
    return tuple(findings[:MAX_FINDINGS])


def _rates(record: LinksRecord) -> dict[tuple[str, str], float]:
    rates: dict[tuple[str, str], float] = {}
    for sample in record.samples:
        if sample.bit_per_s and not sample.is_bidirectional:
            cell = (sample.source, sample.target)
            rates[cell] = max(rates.get(cell, 0.0), median(sample.bit_per_s))
    return rates


def _finding(subject: str, title: str, cells: dict[tuple[str, str], tuple[float, float]]) -> Finding:
    level = median(now / before for now, before in cells.values())
    worst = sorted(cells.items(), key=lambda item: item[1][0] / item[1][1])[:4]
    return Finding(
        id="link.slower-than-before",
        subject=subject,
        severity="warning",
        title=f"{title}: {format_percent(level)} of its own median",
        evidence=tuple(
            Evidence(where=f"{s} -> {t}", seen=format_rate(now), expected=format_rate(before))
            for (s, t), (now, before) in worst
        ),
        remedy=Remedy(text="what changed since: driver, firmware, cabling, neighbours on the same switch"),
        source=f"below {format_percent(SLOWER)} of the median of the last {MAX_RUNS} runs",
    )
