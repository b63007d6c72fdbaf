"""Pages of the doctor: a verdict, a host, many hosts, a fabric; each one file that needs no network and runs no script.

For someone who was not there: first the one sentence, then what shows it, then what to do about it. Texts come from
logs and other hosts, and all of them are escaped; the content security policy forbids scripts and every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from wirespeed import records
from wirespeed.doctor.causes import Cause, WhatItGives
from wirespeed.doctor.check import Evidence, Finding, Remedy, Severity
from wirespeed.doctor.diagnose import Verdict
from wirespeed.doctor.drift import fold_hosts
from wirespeed.doctor.gains import best_gain
from wirespeed.doctor.inquiry import FabricReport
from wirespeed.doctor.reports import ClusterReport, HostReport, counts
from wirespeed.records import Record
from wirespeed.report import markup
from wirespeed.units import format_duration, format_percent, format_rate

DoctorRecord = Verdict | HostReport | ClusterReport | FabricReport
MAX_CELLS = 64
"""Hosts in a matrix or a drift cell before the rest is counted."""
_WORDS: dict[Severity, str] = {"critical": "critical", "warning": "warning", "notice": "notice"}


def write_page(path: str | Path, record: DoctorRecord) -> Path:
    """Write the page as one step. Raises MissingCapability where the place cannot be written."""
    return records.write_bytes(path, page_of(record).encode())


def page_of(record: DoctorRecord) -> str:
    """The whole page; the same record gives the same bytes."""
    if isinstance(record, Verdict):
        return _shell(record, record.headline, _verdict(record))
    if isinstance(record, HostReport):
        return _shell(record, _host_headline(record), _host(record))
    if isinstance(record, ClusterReport):
        return _shell(record, _cluster_headline(record), _cluster(record))
    return _shell(record, _fabric_headline(record), _fabric(record))


# -------------------------------------------------------------------- the frame


def _shell(record: Record, title: str, body: str) -> str:
    environment = record.environment
    facts = [
        ("command", environment.command),
        ("on host", f"{environment.host}, kernel {environment.kernel}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in environment.versions.items())),
        ("made", record.created),
    ]
    made = markup.section("How this was made", "", markup.facts(facts))
    return markup.page(
        f"{title} - wirespeed doctor",
        f"{body}{made}{markup.footer(record)}",
        styles=("report.css", "doctor.css"),
        body_class="doctor",
    )


def _header(about: str, headline: str, tone: str, tiles: Sequence[tuple[str, str, str]]) -> str:
    held = "".join(
        f'<div class="tile"><dt>{markup.text(name)}</dt><dd class="value">{markup.text(value)}</dd>'
        f'<dd class="detail">{markup.text(detail)}</dd></div>\n'
        for name, value, detail in tiles
    )
    return (
        f'<header class="{tone}">\n<p class="about">{markup.text(about)}</p>\n<h1>{markup.text(headline)}</h1>\n'
        f'<dl class="tiles">\n{held}</dl></header>\n'
    )


# -------------------------------------------------------------------- findings


def _card(
    number: int,
    finding: Finding,
    *,
    hosts: str = "",
    alternatives: str = "",
    gives: WhatItGives | None = None,
    max_evidence: int = 6,
) -> str:
    """One finding: what it is, what shows it, what to do, how to undo it, what it gives."""
    rows = [("on", markup.text(hosts))] if hosts else []
    rows += [("seen", "".join(_evidence(line) for line in finding.evidence[:max_evidence]))]
    if finding.remedy is not None:
        rows += _remedy(finding.remedy)
    if gives is not None:
        rows.append(("gives", _gain(gives)))
    if alternatives:
        rows.append(("or", markup.text(alternatives)))
    rows.append(("why", f"{markup.text(finding.source)} <code>{markup.text(finding.id)}</code>".strip()))
    body = "".join(f"<dt>{name}</dt><dd>{markup}</dd>\n" for name, markup in rows)
    word = _WORDS[finding.severity]
    return (
        f'<article class="card {word}">\n<h3><span class="number">{number}</span>'
        f'<span class="mark">{word}</span> {markup.text(finding.title)}</h3>\n<dl>\n{body}</dl>\n</article>\n'
    )


def _evidence(line: Evidence) -> str:
    expected = f' <span class="expected">expected {markup.text(line.expected)}</span>' if line.expected else ""
    return (
        f'<div class="line"><span class="where">{markup.text(line.where)}</span> <code>{markup.text(line.seen)}</code>'
        f"{expected}</div>"
    )


def _remedy(remedy: Remedy) -> list[tuple[str, str]]:
    rows = [("do", markup.text(remedy.text) + _commands(remedy.commands))]
    if remedy.settings:
        values = "\n".join(f"{one.key} = {one.value}" for one in remedy.settings)
        rows.append(
            (
                "set",
                f"<pre>{markup.text(values)}</pre><p>wirespeed doctor host --apply sets it, --rollback undoes it</p>",
            )
        )
    if remedy.caution:
        rows.append(("caution", markup.text(remedy.caution)))
    if remedy.undo:
        rows.append(("undo", _commands(remedy.undo)))
    return rows


def _commands(commands: Sequence[str]) -> str:
    return f"<pre>{markup.text(chr(10).join(commands))}</pre>" if commands else ""


def _gain(gives: WhatItGives) -> str:
    """Two bars: the step as it is, and as it is predicted."""
    after = max(0.0, min(1.0, gives.step_s / gives.now_s)) if gives.now_s > 0 else 1.0
    return (
        f'<div class="gain"><span>now</span><span class="bar" style="width:100%"></span>'
        f"<b>{markup.text(format_duration(gives.now_s))}</b>"
        f"<span>{'at best' if gives.is_bound else 'then'}</span>"
        f'<span class="bar then" style="width:{after * 100:.1f}%"></span>'
        f"<b>{markup.text(format_duration(gives.step_s))}</b></div>"
        f"<p>{markup.text(format_percent(gives.gain))} less per step; {markup.text(gives.basis)}</p>"
    )


def _tone(findings: Iterable[Finding]) -> str:
    severities = {finding.severity for finding in findings}
    return "critical" if "critical" in severities else "warning" if "warning" in severities else "fine"


def _said(numbers: dict[Severity, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in numbers.items() if count) or "none"


# -------------------------------------------------------------------- a verdict


def _verdict(verdict: Verdict) -> str:
    findings = [cause.finding for cause in verdict.causes]
    numbers = counts(findings)
    best = best_gain([cause for cause in verdict.causes if cause.finding.severity != "notice"])
    word = {True: "yes", False: "no", None: "not known"}[verdict.is_network]
    tiles = [("is it the network?", word, "" if verdict.exposure else "no exposed time in these files")]
    if best is not None:
        name = "step, at best" if best.is_bound else "step, predicted"
        tiles.append((name, format_duration(best.step_s), f"now {format_duration(best.now_s)}"))
    tiles.append(("causes", str(sum(numbers.values())), _said(numbers)))
    about = f"wirespeed why, {len(verdict.sources)} file" + ("s" if len(verdict.sources) != 1 else "")
    chain = [
        ("exposed communication", verdict.exposure),
        ("transport", verdict.transport),
        ("measured", verdict.capability),
    ]
    rows = "".join(
        f'<tr><th scope="row">{markup.text(name)}</th>'
        f"<td>{'<br>'.join(map(markup.text, lines)) or 'not in these files'}</td></tr>\n"
        for name, lines in chain
    )
    body = _header(about, verdict.headline, _tone(findings), tiles)
    body += markup.section(
        "What was looked at", "In this order: each answer makes the next question moot.",
        f'<div class="scroll"><table class="facts"><tbody>\n{rows}</tbody></table></div>\n',
    )  # fmt: skip
    body += _causes(verdict.causes)
    if verdict.notes:
        body += markup.section("Mind", "", markup.items(verdict.notes))
    return body + markup.section("Files", "", markup.items(verdict.sources))


def _causes(causes: Sequence[Cause]) -> str:
    if not causes:
        return markup.section("Causes", "Nothing wrong was found.", "")
    real = [cause for cause in causes if cause.finding.severity != "notice"]
    rest = [cause for cause in causes if cause.finding.severity == "notice"]
    cards = "".join(
        _card(number, cause.finding, alternatives=cause.alternatives, gives=cause.gives)
        for number, cause in enumerate(real, start=1)
    )
    body = markup.section("Causes", "The first one is the one to mend first.", cards) if real else ""
    if rest:
        notices = "".join(
            _card(number, cause.finding, alternatives=cause.alternatives, gives=cause.gives)
            for number, cause in enumerate(rest, start=len(real) + 1)
        )
        body += markup.section(
            "Worth knowing", "Notices: mending them is not expected to make this job faster.", notices
        )
    return body


# -------------------------------------------------------------------- hosts


def _host_headline(report: HostReport) -> str:
    first = next(iter(report.findings), None)
    if first is None:
        return f"{report.host}: nothing wrong was found"
    return f"{report.host}: {first.title}"


def _host(report: HostReport) -> str:
    numbers = counts(report.findings)
    watched = "counters not watched" if report.during_s is None else f"watched {format_duration(report.during_s)}"
    tiles = [
        ("findings", str(sum(numbers.values())), _said(numbers)),
        ("checks", str(len(report.checks)), watched),
        ("not known", str(len(report.unknowns)), "as root" if report.is_root else "without root"),
    ]
    body = _header("wirespeed doctor host", _host_headline(report), _tone(report.findings), tiles)
    cards = "".join(_card(number, finding) for number, finding in enumerate(report.findings, start=1))
    if cards:
        body += markup.section("Findings", "Worst first.", cards)
    body += _suppressed(report)
    if report.unknowns:
        rows = [[one.what, one.why, one.hint] for one in report.unknowns]
        body += markup.section(
            "Not known", "A check that cannot see is not a check that passed.",
            markup.table(["what", "why", "how to see it"], rows),
        )  # fmt: skip
    return body + _checks(report)


def _suppressed(report: HostReport) -> str:
    if not report.suppressed:
        return ""
    rows = [[one.finding.title, one.reason, one.expires] for one in report.suppressed]
    return markup.section(
        "Suppressed", "Someone decided to live with these.", markup.table(["finding", "reason", "until"], rows)
    )


def _checks(report: HostReport) -> str:
    rows = [[check.name, check.status.replace("_", " "), check.about, check.why] for check in report.checks]
    facts = [[fact.key, fact.value] for fact in report.facts]
    return (
        f"<details><summary>All {len(rows)} checks</summary>\n"
        f"{markup.table(['check', 'status', 'about', 'why not'], rows)}"
        f"</details>\n<details><summary>All {len(facts)} facts</summary>\n{markup.table(['fact', 'value'], facts)}"
        "</details>\n"
    )


def _cluster_headline(report: ClusterReport) -> str:
    findings = report.findings
    if report.failures:
        return f"{len(report.failures)} of {len(report.hosts) + len(report.failures)} hosts gave no answer"
    if findings:
        hosts = [
            finding.host for finding in findings if (finding.id, finding.title) == (findings[0].id, findings[0].title)
        ]
        return f"{fold_hosts(list(dict.fromkeys(hosts)))}: {findings[0].title}"
    grave = [one for one in report.drift if one.severity != "notice"]
    if grave:
        return f"{grave[0].num_differing} of {len(report.hosts)} hosts differ in {grave[0].key}"
    return f"{len(report.hosts)} hosts: nothing wrong was found"


def _cluster(report: ClusterReport) -> str:
    numbers = counts(report.findings)
    grave = sum(one.severity != "notice" for one in report.drift)
    tiles = [
        (
            "hosts",
            str(len(report.hosts)),
            f"{len(report.failures)} gave no answer" if report.failures else "all answered",
        ),
        ("findings", str(sum(numbers.values())), _said(numbers)),
        ("differences", str(len(report.drift)), f"{grave} that matter"),
    ]
    body = _header("wirespeed doctor host, many hosts", _cluster_headline(report), _tone(report.findings), tiles)
    if report.failures:
        rows = [[one.host, one.why] for one in report.failures]
        body += markup.section("No answer", "", markup.table(["host", "why"], rows))
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.id, finding.subject, finding.title), []).append(finding)
    cards = "".join(
        _card(
            number, same[0],
            hosts=f"{fold_hosts([one.host for one in same])} ({len(same)} of {len(report.hosts)})",
        )
        for number, same in enumerate(groups.values(), start=1)
    )  # fmt: skip
    if cards:
        body += markup.section("Findings", "Each kind once, with its hosts; worst first.", cards)
    if report.drift:
        rows = [
            [
                one.key,
                "no majority" if one.usual is None else one.usual,
                f"{one.num_differing} of {len(report.hosts)}",
                "; ".join(
                    f"{value}: {fold_hosts(hosts)}" for value, hosts in one.hosts_of.items() if value != one.usual
                ),
            ]
            for one in report.drift
        ]
        body += markup.section(
            "Drift", "What differs between hosts that should be alike, gravest first.",
            markup.table(["fact", "usual", "differ", "where"], rows),
        )  # fmt: skip
    rows = [
        [host.host, _said(counts(host.findings)), str(len(host.unknowns)), "yes" if host.is_root else "no"]
        for host in report.hosts
    ]
    return body + markup.section("Hosts", "", markup.table(["host", "findings", "not known", "as root"], rows))


# -------------------------------------------------------------------- a fabric


def _fabric_headline(report: FabricReport) -> str:
    if report.findings:
        return report.findings[0].title
    return f"{len(report.hosts)} hosts: no host, link or uplink stands out"


def _fabric(report: FabricReport) -> str:
    numbers = counts(report.findings)
    tiles = [
        ("usual rate between two", format_rate(report.usual_bit_per_s), f"{len(report.hosts)} hosts"),
        ("findings", str(len(report.findings)), _said(numbers)),
        ("suspects measured again", "yes" if report.was_retested else "no", f"{len(report.dropped)} dropped"),
    ]
    body = _header("wirespeed doctor fabric", _fabric_headline(report), _tone(report.findings), tiles)
    cards = "".join(_card(number, finding) for number, finding in enumerate(report.findings, start=1))
    if cards:
        body += markup.section("Findings", "", cards)
    if report.hosts:
        body += markup.section("Hosts", "Each side of a host, as a share of the usual rate.", _sides(report))
    if report.cannot_tell:
        body += markup.section("Cannot tell", "", markup.items(report.cannot_tell))
    if report.dropped:
        body += markup.section(
            "Dropped", "These stood out once and were fine when measured again.", markup.items(report.dropped)
        )
    return body


def _sides(report: FabricReport) -> str:
    rows = "".join(
        f'<tr><th scope="row">{markup.text(host)}</th>{_side(report.sending.get(host))}'
        f"{_side(report.receiving.get(host))}</tr>\n"
        for host in report.hosts
    )
    return (
        '<div class="scroll"><table class="sides"><thead><tr><th scope="col">host</th><th scope="col">sends</th>'
        f'<th scope="col">receives</th></tr></thead><tbody>\n{rows}</tbody></table></div>\n'
    )


def _side(share: float | None) -> str:
    if share is None:
        return "<td>not measured</td>"
    low = " low" if share < 0.9 else ""
    return (
        f'<td><span class="meter"><span class="fill{low}" style="width:{min(1.0, max(0.0, share)) * 100:.0f}%"></span>'
        f"</span>{markup.text(format_percent(share))}</td>"
    )
