"""`wirespeed doctor logs`, `wirespeed doctor fabric` and `wirespeed why`: from what a user has to the one cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wirespeed.cli.render import print_json, say, stdout_console
from wirespeed.errors import UsageError
from wirespeed.units import format_duration, format_percent

if TYPE_CHECKING:
    from rich.console import Console

    from wirespeed.doctor.causes import Cause
    from wirespeed.doctor.diagnose import Verdict

_JSON = typer.Option("--json", help="One JSON document on stdout.")
_FILES = typer.Argument(help="Files or folders; - for standard input.", metavar="FILE...", show_default=False)
MAX_SHOWN = 5


def logs(
    files: Annotated[list[Path], _FILES],
    *,
    show_all: Annotated[bool, typer.Option("--all", help="All causes, not only the first few.")] = False,
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
    from wirespeed.doctor.diagnose import causes_of, facts_document, transport_lines
    from wirespeed.doctor.dossier import Dossier
    from wirespeed.doctor.log_scan import scan

    job = scan(_expand(files))
    causes = causes_of(Dossier(sources=job.sources, facts=job))
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
            console.print("nothing wrong was found" if job.has_job_log or job.measurements else _NOTHING, markup=False)
        _show_notes(job.notes)
    return _exit_code(causes)


_NOTHING = "no lines of NCCL, torch or a benchmark were found; hint: run the job with NCCL_DEBUG=INFO"


def why(
    files: Annotated[list[Path], _FILES],
    *,
    show_all: Annotated[bool, typer.Option("--all", help="All causes, not only the first few.")] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Say why the job is slow or failed, from whatever files there are: the verdict, one cause first.

    Takes logs, benchmark outputs, and records of wirespeed (tune, profile, bench links, doctor host, fabric.toml).
    Exposed communication comes first: where it is below 5 % of the step, the network is not the bottleneck.

    Examples:

      wirespeed why slurm-4711.out

      wirespeed why tune.json fabric.toml links.json job.log

      wirespeed why *.log all_reduce.txt ib_write_bw.txt host.json --json
    """
    from wirespeed.doctor.diagnose import diagnose
    from wirespeed.doctor.dossier import read_dossier

    verdict = diagnose(read_dossier(_expand(files)))
    if as_json:
        print_json(verdict)
    else:
        _show_verdict(verdict, show_all=show_all)
    return _exit_code(verdict.causes)


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
        console.print(f"   {finding.severity}, {finding.id}" + (f", see {finding.source}" if finding.source else ""),
                      style="dim", markup=False)  # fmt: skip
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
                f"   gives: {format_duration(cause.gives.now_s)} -> {format_duration(cause.gives.step_s)} per step "
                f"({format_percent(cause.gives.gain)} less; {cause.gives.basis})", markup=False,
            )  # fmt: skip
    if limit is not None and len(causes) > limit:
        console.print(f"\n{len(causes) - limit} more with --all", markup=False)


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        say(f"note: {note}")
