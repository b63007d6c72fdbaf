"""`wirespeed doctor host` on many hosts, over ssh or as ranks of a job; `doctor drift` and `doctor path`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wirespeed.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wirespeed.doctor.check import Severity
    from wirespeed.doctor.examine import Question
    from wirespeed.doctor.reports import ClusterReport, HostReport
    from wirespeed.doctor.suppressions import Suppression


def over_ranks(question: Question, timeout_s: float) -> ClusterReport | None:
    """The hosts of this launched job; None on ranks other than 0."""
    from wirespeed.doctor.gather import gather
    from wirespeed.launch import ranks

    return gather(ranks(), question, timeout_s=timeout_s)


def over_ssh(hosts: str, question: Question, *, ssh: str, sudo: bool, timeout_s: float) -> ClusterReport:
    """Hosts over ssh."""
    from wirespeed.cli.render import say
    from wirespeed.doctor.remote import examine_hosts, require_ssh
    from wirespeed.doctor.reports import ClusterReport, host_report
    from wirespeed.launch import expand_hostlist
    from wirespeed.measure.environment import capture
    from wirespeed.system import System

    command = shlex.split(ssh)
    if not command:
        raise UsageError("got an empty --ssh", expected="a command such as 'ssh -J bastion'")
    names = expand_hostlist(hosts)
    wrong = [name for name in names if name.startswith("-")]
    if wrong:
        raise UsageError(f"got host {wrong[0]!r}", expected="names that do not begin with -")
    system = System()
    require_ssh(system, command)
    say(f"looking at {len(names)} hosts over ssh")
    answers, failures = examine_hosts(names, question, system=system, ssh=command, use_sudo=sudo, timeout_s=timeout_s)
    environment = capture()
    reports = tuple(host_report(answer, environment, name=name) for name, answer in answers.items())
    return ClusterReport(environment=environment, hosts=reports, failures=failures)


def end_cluster(
    report: ClusterReport,
    told: tuple[Suppression, ...],
    *,
    level: Severity,
    prometheus: Path | None,
    page: Path | None,
    show_all: bool,
    as_json: bool,
) -> int:
    """Suppress, compare, print, and give the exit code."""
    from datetime import UTC, datetime

    import msgspec

    from wirespeed.doctor.check import SEVERITIES
    from wirespeed.doctor.drift import drift
    from wirespeed.doctor.suppressions import suppress

    today = datetime.now(UTC).date()
    hosts = tuple(suppress(one, told, today=today) for one in report.hosts)
    report = msgspec.structs.replace(report, hosts=hosts, drift=drift(hosts))
    if prometheus is not None:
        write_prometheus(report.hosts, prometheus)
    if page is not None:
        write_page(report, page)
    if as_json:
        from wirespeed.cli.render import print_json

        print_json(report)
    else:
        from wirespeed.cli.doctor_render import show_cluster

        show_cluster(report, show_all=show_all)
    if report.failures:
        return 4
    counted = SEVERITIES[: SEVERITIES.index(level) + 1]
    severities = {one.severity for one in report.drift} | {one.severity for one in report.findings}
    return 1 if severities & set(counted) else 0


def drift_of(
    reports: Annotated[
        list[Path], typer.Argument(help="Records of `wirespeed doctor host --json`.", metavar="REPORT...")
    ],
    *,
    level: Annotated[str, typer.Option("--level", help="From which severity on differences count.")] = "warning",
    show_all: Annotated[bool, typer.Option("--all", help="Every difference.")] = False,
    page: Annotated[
        Path | None, typer.Option("--html", help="Also write a page that needs no network.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Put reports of several hosts, or of one host before and after, side by side.

    Example:

      pdsh -w 'node[01-64]' 'wirespeed doctor host --json > /shared/%h.json'; wirespeed doctor drift /shared/*.json
    """
    import msgspec

    from wirespeed.doctor.check import SEVERITIES
    from wirespeed.doctor.reports import ClusterReport, HostReport
    from wirespeed.measure.environment import capture
    from wirespeed.records import read

    if level not in SEVERITIES:
        raise UsageError(f"got level {level!r}", expected=", ".join(SEVERITIES))
    held = [read(path, HostReport) for path in reports]
    if len(held) < 2:
        raise DataError(f"got {len(held)} report", expected="two or more")
    if len({report.host for report in held}) < len(held):  # one host at two times: told apart by file
        held = [
            msgspec.structs.replace(r, host=f"{r.host} ({path.name})") for r, path in zip(held, reports, strict=True)
        ]
    cluster = ClusterReport(environment=capture(), hosts=tuple(held))
    chosen = next(name for name in SEVERITIES if name == level)
    return end_cluster(cluster, (), level=chosen, prometheus=None, page=page, show_all=show_all, as_json=as_json)


def write_page(report: HostReport | ClusterReport, path: Path) -> None:
    """Write the page."""
    from wirespeed.cli.render import say
    from wirespeed.report import doctor_page

    say(f"wrote {doctor_page.write_page(path, report)}")


def write_prometheus(reports: Sequence[HostReport], path: Path) -> None:
    """Write the textfile."""
    from wirespeed.doctor.prometheus import textfile
    from wirespeed.records import write_bytes

    write_bytes(path, textfile(reports).encode())


def path_to(
    target: Annotated[str, typer.Argument(help="The other host: a name or an IPv4 address.", metavar="HOST")],
    *,
    count: Annotated[int, typer.Option("--count", "-c", help="Rounds, one per second.")] = 5,
    num_bytes: Annotated[
        int, typer.Option("--bytes", help="Payload, never fragmented: the MTU less 28 tests the whole path.")
    ] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Delay and loss of each hop on the way to another host. Needs no privilege; a switch is no hop.

    A hop that stays silent while later ones answer only declines to answer. Exit code 4 where the host does not answer.

    Examples:

      wirespeed doctor path node17

      wirespeed doctor path node17 --bytes 8972      whether 9000 bytes pass everywhere
    """
    from wirespeed.cli.render import make_table, print_json, say, show
    from wirespeed.doctor.hops import PathReport, trace
    from wirespeed.measure.environment import capture
    from wirespeed.measure.stats import median
    from wirespeed.units import format_duration, format_percent

    say(f"{count} rounds to {target}, one per second")
    address, hops = trace(target, num_rounds=count, num_bytes=num_bytes)
    report = PathReport(environment=capture(), target=target, address=address, hops=hops)
    if as_json:
        print_json(report)
    else:
        rows = [
            [
                str(hop.distance),
                ", ".join(hop.addresses) or "no answer",
                format_percent(hop.loss),
                *([format_duration(f(hop.rtts_s)) for f in (min, median, max)] if hop.rtts_s else ["-"] * 3),
                hop.problem,
            ]
            for hop in hops
        ]
        show(make_table(["hop", "address<", "no answer", "least", "median", "most", "problem<"], rows))
        if not report.is_reached:
            show(f"{target} itself did not answer: it is down, or a filter drops UDP or ICMP")
    return 0 if report.is_reached else 4
