"""How the doctor speaks on a terminal: findings with evidence and remedy, what is unknown, and hosts side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from wirespeed.cli.render import make_table, show
from wirespeed.doctor.check import CheckResult, Finding, Severity
from wirespeed.doctor.drift import fold_hosts
from wirespeed.doctor.reports import ClusterReport, HostReport, counts
from wirespeed.doctor.sysctl import Outcome
from wirespeed.units import format_duration

_STYLES: dict[Severity, str] = {"critical": "bold red", "warning": "yellow", "notice": "cyan"}
_INDENT = 12
_WIDTH = 100


def show_host(report: HostReport, *, show_all: bool) -> None:
    """One host: a line that sums up, the findings, what could not be seen, the checks."""
    show(_summary(report))
    rdma = any(fact.key.startswith("rdma.") and fact.value.endswith("ACTIVE") for fact in report.facts)
    if rdma and any(finding.path == "tcp" for finding in report.findings):
        show("RDMA is active: findings marked (tcp) touch set-up, storage and data loading, not gradients over RDMA.")
    for finding in report.findings:
        show(render_finding(finding, has_host=False))
    for held in report.suppressed:
        show(f"suppressed until {held.expires}: {held.finding.id} {held.finding.subject} ({held.reason})")
    _show_unknowns(report)
    if show_all:
        show(make_table(["check", "status<", "time", "about<"], [_check_row(check) for check in report.checks]))
        show(make_table(["fact", "value<"], [[fact.key, fact.value] for fact in report.facts]))


def show_cluster(report: ClusterReport, *, show_all: bool) -> None:
    """Many hosts: each kind of finding once with its hosts, then what differs, then who did not answer."""
    numbers = _said(counts(report.findings))
    show(Text(f"{len(report.hosts)} hosts: {numbers}", style="bold"))
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.id, finding.subject, finding.title), []).append(finding)
    for same in groups.values():
        hosts = fold_hosts([finding.host for finding in same])
        show(render_finding(same[0], has_host=True, hosts=f"{hosts} ({len(same)} of {len(report.hosts)})"))
    if report.drift:
        rows = [
            [
                drift.key,
                "no majority" if drift.usual is None else drift.usual,
                f"{drift.num_differing} of {len(report.hosts)} differ",
                "; ".join(
                    f"{value}: {fold_hosts(hosts)}" for value, hosts in drift.hosts_of.items() if value != drift.usual
                ),
            ]
            for drift in report.drift
            if show_all or drift.severity != "notice" or drift.num_differing <= max(3, len(report.hosts) // 10)
        ]
        show(make_table(["what differs", "usual<", "hosts<", "where<"], rows, title="Drift"))
    for failure in report.failures:
        show(Text(f"no answer: {failure.host}: {failure.why}", style="bold red"))
    missing = sum(1 for host in report.hosts if not host.is_root)
    if missing:
        show(f"{missing} of {len(report.hosts)} hosts were not looked at as root: --sudo sees more")


def show_outcome(outcome: Outcome) -> None:
    """What an apply or a rollback did."""
    if outcome.changes:
        verb = "would be " if outcome.is_dry_run else ""
        rows = [
            [c.key, f"{verb}{c.action}" if c.action in ("set", "restored") else c.action, c.before, c.after, c.note]
            for c in outcome.changes
        ]
        show(make_table(["parameter", "action<", "before<", "after<", "note<"], rows))
    else:
        show("no kernel parameter to change")
    for note in outcome.notes:
        show(f"note: {note}")


def render_finding(finding: Finding, *, has_host: bool, hosts: str = "") -> Group:
    """A finding as indented lines."""
    head = Text()
    head.append(f"{finding.severity.upper():<10}", style=_STYLES[finding.severity])
    head.append(finding.title, style="bold")
    if finding.path == "tcp":
        head.append(" (tcp)", style="dim")
    lines: list[Text] = [Text(), head]
    if has_host:
        lines += _line("on", hosts)
    for evidence in finding.evidence:
        expected = f" (expected {evidence.expected})" if evidence.expected else ""
        lines += _line("seen", f"{evidence.where}: {evidence.seen}{expected}")
    if finding.remedy is not None:
        lines += _line("do", finding.remedy.text)
        lines += _commands("", finding.remedy.commands)
        if finding.remedy.caution:
            lines += _line("caution", finding.remedy.caution)
        lines += _commands("undo", finding.remedy.undo)
        if finding.remedy.settings:
            lines += _line("", "`wirespeed doctor host --apply` sets it, `--rollback` takes it back")
    lines += _line("why", f"{finding.source}  [{finding.id}]" if finding.source else f"[{finding.id}]")
    return Group(*lines)


def _line(label: str, text: str) -> list[Text]:
    wrapped = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    first = Text(f"{'':<4}{label:<{_INDENT - 4}}", style="dim")
    first.append(wrapped[0], style="default")
    return [first, *(Text(" " * _INDENT + part) for part in wrapped[1:])]


def _commands(label: str, commands: Sequence[str]) -> list[Text]:
    # Never wrapped: commands are copied.
    return [
        Text.assemble((f"{'':<4}{label if place == 0 else '':<{_INDENT - 4}}", "dim"), f"$ {command}")
        for place, command in enumerate(commands)
    ]


def _summary(report: HostReport) -> Text:
    watched = "" if report.during_s is None else f", counters watched for {format_duration(report.during_s)}"
    text = Text(f"{report.host}: ", style="bold")
    worst = next(iter(report.findings), None)
    style = "green" if worst is None else _STYLES[worst.severity]
    text.append(_said(counts(report.findings)), style=style)
    text.append(f" in {len(report.checks)} checks{watched}")
    return text


def _said(numbers: dict[Severity, int]) -> str:
    words = [
        f"{count} {name}{'s' if count > 1 and name != 'critical' else ''}" for name, count in numbers.items() if count
    ]
    return ", ".join(words) if words else "no findings"


def _show_unknowns(report: HostReport) -> None:
    unknowns = report.unknowns
    if not unknowns:
        return
    root = [unknown for unknown in unknowns if "root" in unknown.hint]
    show(Text(f"\nNot known ({len(unknowns)}): a check that cannot see is not a check that passed", style="bold"))
    if root and not report.is_root:
        show(f"    root would add: {'; '.join(unknown.what for unknown in root)}")
    for unknown in unknowns:
        if unknown not in root or report.is_root:
            hint = f" ({unknown.hint})" if unknown.hint else ""
            for line in _line("", f"{unknown.what}: {unknown.why}{hint}"):
                show(line)


def _check_row(check: CheckResult) -> list[str]:
    about = f"{check.about} ({check.why})" if check.why else check.about
    return [check.name, check.status.replace("_", " "), format_duration(check.duration_s), about]
