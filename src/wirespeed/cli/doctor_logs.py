"""`wirespeed doctor logs`, `wirespeed doctor fabric` and `wirespeed why`: from what a user has to the one cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from wirespeed.cli.render import make_table, print_json, say, stdout_console
from wirespeed.errors import UsageError
from wirespeed.units import format_duration, format_percent, format_rate

if TYPE_CHECKING:
    from rich.console import Console

    from wirespeed.doctor.causes import Cause
    from wirespeed.doctor.diagnose import Verdict
    from wirespeed.doctor.inquiry import FabricReport
    from wirespeed.records import LinksRecord

_JSON = typer.Option("--json", help="One JSON document on stdout.")
_HTML = typer.Option("--html", help="Also write a page that needs no network.", metavar="FILE", show_default=False)
_PROMETHEUS = typer.Option(
    "--prometheus", help="Also write a file for node_exporter's textfile collector.", metavar="FILE", show_default=False
)
_FILES = typer.Argument(help="Files or folders; - for standard input.", metavar="FILE...", show_default=False)
MAX_SHOWN = 5
MAX_ROWS = 40


def logs(
    files: Annotated[list[Path], _FILES],
    *,
    show_all: Annotated[bool, typer.Option("--all", help="All causes, not only the first few.")] = False,
    page: Annotated[Path | None, _HTML] = None,
    prometheus: Annotated[Path | None, _PROMETHEUS] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Read logs of one job: what NCCL chose, what failed first, and why. Nothing in them is run.

    NCCL 2.4 to 2.30 (NCCL_DEBUG=INFO) of one or all ranks, under any launcher, cut or compressed; torch's watchdog and
    flight recorder; dmesg; output of nccl-tests, perftest and iperf3. Exit code 1 where something is wrong.

    Examples:

      wirespeed doctor logs slurm-4711.out

      wirespeed doctor logs logs/ nccl_trace_rank_*

      kubectl logs -l job=train --prefix | wirespeed doctor logs -

      wirespeed doctor logs job.log --json
    """
    from wirespeed.doctor.diagnose import diagnose, facts_document, transport_lines
    from wirespeed.doctor.dossier import Dossier
    from wirespeed.doctor.log_scan import scan

    job = scan(_expand(files))
    verdict = diagnose(Dossier(sources=job.sources, facts=job))
    causes = verdict.causes
    _write_outputs(verdict, page, prometheus)
    if as_json:
        print_json({**facts_document(job), "causes": list(causes)})
    else:
        console = stdout_console()
        for line in transport_lines(job.nccl):
            console.print(line, markup=False)
        if job.failures:
            count = sum(f.is_primary for f in job.failures)
            console.print(
                f"failures: {count} primary, {len(job.failures) - count} that follow from others", markup=False
            )
        show_causes(console, causes, limit=None if show_all else MAX_SHOWN)
        if not causes:
            has_any = job.has_job_log or job.measurements or job.kernel
            console.print("nothing wrong was found" if has_any else _NOTHING, markup=False)
        _show_notes(job.notes)
    return _exit_code(causes)


_NOTHING = "no lines of NCCL, torch or a benchmark were found; hint: run the job with NCCL_DEBUG=INFO"


def why(
    files: Annotated[list[Path], _FILES],
    *,
    show_all: Annotated[bool, typer.Option("--all", help="All causes, not only the first few.")] = False,
    page: Annotated[Path | None, _HTML] = None,
    prometheus: Annotated[Path | None, _PROMETHEUS] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Say why the job is slow or failed, from whatever files there are: the verdict, one cause first.

    Takes logs, profilers' traces (torch.profiler, Nsight Systems' SQLite), outputs of benchmarks and tools, and
    records of wirespeed (tune, profile, bench, doctor host, doctor fabric, fabric.toml). Exposed communication comes
    first: where it is below 5 % of the step, the network is not the bottleneck.

    Examples:

      wirespeed why slurm-4711.out

      wirespeed why traces/ slurm-4711.out cluster.json --html why.html

      wirespeed why tune.json fabric.toml links.json job.log

      wirespeed why *.log all_reduce.txt ib_write_bw.txt host.json --json
    """
    from wirespeed.doctor.diagnose import diagnose
    from wirespeed.doctor.dossier import read_dossier

    verdict = diagnose(read_dossier(_expand(files)))
    _write_outputs(verdict, page, prometheus)
    if as_json:
        print_json(verdict)
    else:
        _show_verdict(verdict, show_all=show_all)
    return _exit_code(verdict.causes)


def _write_outputs(verdict: Verdict, page: Path | None, prometheus: Path | None) -> None:
    if page is not None:
        from wirespeed.report.doctor_page import write_page

        say(f"wrote {write_page(page, verdict)}")
    if prometheus is not None:
        from wirespeed.doctor.prometheus import verdict_textfile
        from wirespeed.records import write_bytes

        # One file per job: the collector reads all of them, and samples of two jobs must differ.
        write_bytes(prometheus, verdict_textfile(verdict, job=prometheus.stem).encode())


def fabric(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Records of `bench links`; none: measure now.", metavar="[LINKS.JSON]..."),
    ] = None,
    *,
    racks: Annotated[
        str | None,
        typer.Option("--racks", help="Which hosts share a rack: 'node[01-16];node[17-32]', or a fabric.toml."),
    ] = None,
    streams: Annotated[str, typer.Option("--streams", help="Connections at once; several counts by commas.")] = "1,4",
    duration: Annotated[str, typer.Option("--duration", help="How long each transfer is measured.")] = "500 ms",
    congestion: Annotated[str | None, typer.Option("--congestion", help="Congestion control, such as cubic.")] = None,
    timeout: Annotated[str, typer.Option("--timeout", help="Longest wait for a host beyond its work.")] = "15 s",
    join_timeout: Annotated[str, typer.Option("--join-timeout", help="Longest wait for all ranks.")] = "60 s",
    seed: Annotated[int, typer.Option("--seed", help="Of the random matchings beyond 32 hosts.")] = 0,
    history: Annotated[
        Path | None, typer.Option("--history", help="Compare with the runs in this folder, and add this one.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the measured links here.")] = None,
    page: Annotated[Path | None, _HTML] = None,
    prometheus: Annotated[Path | None, _PROMETHEUS] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Find slow hosts, links, racks and uplinks from measurements of all pairs; suspects are measured again, alone.

    Without a file it measures, as one command on every host under a launcher; beyond 32 hosts it takes 15 seeded random
    matchings. With files it judges what `bench links` wrote. Exit code 1 on findings.

    Examples:

      srun --ntasks-per-node=1 wirespeed doctor fabric --racks 'node[01-16];node[17-32]' --history /shared/links

      wirespeed lab run --spec 4x200mbit -- wirespeed doctor fabric

      wirespeed doctor fabric links.json
    """
    from wirespeed import launch, units
    from wirespeed.doctor.inquiry import check_fabric, report_of
    from wirespeed.measure.messages import SocketOptions
    from wirespeed.records import LinksRecord, read, write

    where = {} if racks is None else _racks(racks)
    if files is not None and len(files) > 1 and (page is not None or prometheus is not None):
        raise UsageError("got several records with --html or --prometheus", expected="one record")
    if files:
        results = [(report_of(record, where), record) for record in (read(path, LinksRecord) for path in files)]
    else:
        ranks = launch.ranks()
        result = check_fabric(
            ranks,
            racks=where,
            streams=_counts(streams),
            duration_s=units.parse_duration(duration),
            options=SocketOptions(congestion=congestion),
            timeout_s=units.parse_duration(timeout),
            join_timeout_s=units.parse_duration(join_timeout),
            seed=seed,
            progress=say if ranks.rank == 0 else None,
        )
        if result is None:
            return 0
        results = [result]
    has_findings = False
    for report, record in results:
        if out is not None and not files:
            say(f"wrote {write(out, record)}")
        changed = report if history is None else _with_history(report, record, history)
        has_findings = has_findings or any(finding.severity != "notice" for finding in changed.findings)
        _write_fabric(changed, page, prometheus)
        if as_json:
            print_json(changed)
        else:
            _show_fabric(changed)
    return 1 if has_findings else 0


def _write_fabric(report: FabricReport, page: Path | None, prometheus: Path | None) -> None:
    if page is not None:
        from wirespeed.report.doctor_page import write_page

        say(f"wrote {write_page(page, report)}")
    if prometheus is not None:
        from wirespeed.doctor.prometheus import fabric_textfile
        from wirespeed.records import write_bytes

        write_bytes(prometheus, fabric_textfile(report).encode())


def _counts(text: str) -> list[int]:
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise UsageError(f"got --streams {text!r}", expected="numbers by commas, such as 1,4")
    return [int(part) for part in text.split(",")]


def _racks(text: str) -> dict[str, str]:
    """Host to rack, of a fabric.toml or of host lists between semicolons."""
    from wirespeed.fabric.files import read_fabric
    from wirespeed.launch import expand_hostlist

    if text.endswith(".toml"):
        return {host.name: host.rack for host in read_fabric(text).hosts}
    found: dict[str, str] = {}
    for number, hosts in enumerate(part for part in text.split(";") if part.strip()):
        name, equals, listed = hosts.partition("=")
        for host in expand_hostlist((listed if equals else hosts).strip()):
            if host in found:
                raise UsageError(f"got host {host!r} in two racks", expected="each host once in --racks")
            found[host] = name.strip() if equals else f"r{number}"
    return found


def _with_history(report: FabricReport, record: LinksRecord, folder: Path) -> FabricReport:
    from wirespeed.doctor.history import earlier, find_changes, keep

    before, notes = earlier(folder)
    say(f"kept {keep(folder, record)}, compared with {len(before)} earlier runs")
    for note in notes:
        say(f"note: {note}")
    named = {finding.subject for finding in report.findings}
    changes = [finding for finding in find_changes(record, before) if finding.subject not in named]
    return msgspec.structs.replace(report, findings=(*report.findings, *changes))


def _show_fabric(report: FabricReport) -> None:
    console = stdout_console()
    usual = format_rate(report.usual_bit_per_s)
    console.print(f"{len(report.hosts)} hosts, usual rate between two: {usual}", markup=False)
    if len(report.hosts) <= MAX_ROWS:
        rows = [
            [host, format_percent(report.sending.get(host, 0.0)), format_percent(report.receiving.get(host, 0.0))]
            for host in report.hosts
        ]
        console.print(make_table(["host", "sends", "receives"], rows))
    for number, finding in enumerate(report.findings, start=1):
        console.print(f"{number}. {finding.title}", style="bold", markup=False)
        for line in finding.evidence[:6]:
            expected = f" (expected {line.expected})" if line.expected else ""
            console.print(f"   seen: {line.where}: {line.seen}{expected}", markup=False)
        if finding.remedy is not None:
            console.print(f"   do: {finding.remedy.text}", markup=False)
            for command in finding.remedy.commands:
                console.print(f"       $ {command}", markup=False)
    if not report.findings:
        console.print("no host, link or uplink stands out", markup=False)
    for what in report.cannot_tell:
        console.print(f"cannot tell: {what}", markup=False)
    for what in report.dropped:
        say(f"dropped: {what}")
    if report.findings and not report.was_retested:
        say("note: from one measurement; run it without a file to have suspects measured again")


def _expand(files: Sequence[Path]) -> list[Path]:
    """Folders become the files below them, hidden ones left out."""
    found: list[Path] = []
    for path in files:
        if str(path) != "-" and path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if not inside:
                raise UsageError(f"got folder {path}", expected="a folder with files in it")
            found += inside
        else:
            found.append(path)
    return found


def _exit_code(causes: Sequence[Cause]) -> int:
    return 1 if any(cause.finding.severity != "notice" for cause in causes) else 0


def _show_verdict(verdict: Verdict, *, show_all: bool) -> None:
    console = stdout_console()
    console.print(verdict.headline, style="bold", markup=False)
    for title, lines in (
        ("exposed communication", verdict.exposure),
        ("transport", verdict.transport),
        ("measured", verdict.capability),
    ):
        for index, line in enumerate(lines):
            console.print(f"{title + ':' if index == 0 else '':<23}{line}", markup=False)
    show_causes(console, verdict.causes, limit=None if show_all else MAX_SHOWN)
    _show_notes(verdict.notes)


def show_causes(console: Console, causes: Sequence[Cause], *, limit: int | None) -> None:
    """Causes as numbered paragraphs: what, what shows it, what to do, what it gives."""
    from wirespeed.doctor.diagnose import evidence_text

    held = causes if limit is None else causes[:limit]
    for number, cause in enumerate(held, start=1):
        finding = cause.finding
        console.print(f"\n{number}. {finding.title}", style="bold", markup=False)
        console.print(
            f"   {finding.severity}, {finding.id}" + (f", see {finding.source}" if finding.source else ""),
            style="dim",
            markup=False,
        )
        for line in finding.evidence[:4]:
            console.print(f"   seen: {evidence_text(line)}", markup=False)
        if finding.remedy is not None:
            console.print(f"   do: {finding.remedy.text}", markup=False)
            for command in finding.remedy.commands:
                console.print(f"       $ {command}", markup=False)
            if finding.remedy.caution:
                console.print(f"   caution: {finding.remedy.caution}", markup=False)
            if finding.remedy.undo:
                console.print(f"   undo: {'; '.join(finding.remedy.undo)}", markup=False)
        if cause.alternatives:
            console.print(f"   or: {cause.alternatives}", markup=False)
        if cause.gives is not None:
            console.print(
                f"   gives: {format_duration(cause.gives.now_s)} -> {'at best ' if cause.gives.is_bound else ''}"
                f"{format_duration(cause.gives.step_s)} per step "
                f"({format_percent(cause.gives.gain)} less; {cause.gives.basis})",
                markup=False,
            )
    if limit is not None and len(causes) > limit:
        console.print(f"\n{len(causes) - limit} more with --all", markup=False)


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        say(f"note: {note}")
