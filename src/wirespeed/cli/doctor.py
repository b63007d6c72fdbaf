"""`wirespeed doctor host`: checks of this host or of many, kernel parameters applied and taken back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from wirespeed.errors import UsageError
from wirespeed.units import parse_duration, parse_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wirespeed.doctor.check import Finding, Severity
    from wirespeed.doctor.examine import Question
    from wirespeed.doctor.reports import HostReport
    from wirespeed.doctor.suppressions import Suppression
    from wirespeed.system import System


class _FilesOrCommand(TyperGroup):
    """``wirespeed doctor FILE...`` is the verdict on these files; a command of that name goes before a file."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names, else the verdict where it names a file."""
        if self.get_command(ctx, args[0]) is None and (args[0] == "-" or Path(args[0]).exists()):
            return "verdict", self.get_command(ctx, "verdict"), args
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_FilesOrCommand,
    help="Find what is wrong with a host, a fabric or a job's logs, and say how to mend and undo it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_SITE_SUPPRESSIONS = Path("/etc/wirespeed/suppressions.toml")


@app.callback()
def _group() -> None:
    """Find what is wrong with a host, a fabric or a job's logs, and say how to mend and undo it.

    `wirespeed doctor FILE...` gives the verdict on a job's logs, traces and records, as `wirespeed why` does.
    """


@app.command("host")
def host(
    *,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="A subject (nic, rdma, tcp ...) or a check; may be repeated.", metavar="NAME"),
    ] = None,
    during: Annotated[
        str | None, typer.Option("--during", help="Watch counters for so long, while the job runs.", metavar="TIME")
    ] = None,
    around: Annotated[
        str | None,
        typer.Option(
            "--around", help="Watch counters while this command runs, such as a benchmark.", metavar="COMMAND"
        ),
    ] = None,
    rtt: Annotated[
        str | None, typer.Option("--rtt", help="Round trip between the job's hosts, where you know it.", metavar="TIME")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", help="The link's rate, where the interface does not say it.", metavar="RATE")
    ] = None,
    peers: Annotated[
        str | None, typer.Option("--peers", help="The job's other hosts, to check the routes to.", metavar="HOSTS")
    ] = None,
    level: Annotated[
        str, typer.Option("--level", help="From which severity on findings count: critical, warning or notice.")
    ] = "warning",
    suppressions: Annotated[
        Path | None,
        typer.Option("--suppressions", help=f"Findings to live with; default {_SITE_SUPPRESSIONS}.", metavar="FILE"),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("--hosts", help="Look at these over ssh, such as node[01-64].", metavar="HOSTS")
    ] = None,
    ssh: Annotated[str, typer.Option("--ssh", help="The ssh command, with options.")] = "ssh",
    sudo: Annotated[bool, typer.Option("--sudo", help="Use sudo -n on the other hosts.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", help="How long to wait for each of the other hosts.", metavar="TIME")
    ] = "60s",
    apply: Annotated[bool, typer.Option("--apply", help="Set the kernel parameters that findings ask for.")] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Put back what --apply set, where it is still ours.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --apply or --rollback: only say what would change.")
    ] = False,
    this_namespace: Annotated[
        bool,
        typer.Option("--this-namespace", help="Apply in a container or network namespace, not kept over a reboot."),
    ] = False,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", help="Where old values are kept.", metavar="FOLDER")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Also write all that was seen, to look at elsewhere.", metavar="FILE"),
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Look at a recorded host instead of this one.", metavar="FILE")
    ] = None,
    prometheus: Annotated[
        Path | None,
        typer.Option("--prometheus", help="Also write a file for node_exporter's textfile collector.", metavar="FILE"),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Also write a page that needs no network.", metavar="FILE")
    ] = None,
    health_check: Annotated[
        bool,
        typer.Option("--health-check", help="Print one line; critical findings only. For Slurm's HealthCheckProgram."),
    ] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="With --health-check: drain this node in Slurm if it fails.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every check and every fact.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Check a host: kernel parameters, NICs, PCI Express, RDMA, GPUs, NCCL settings, routes, counters.

    Findings carry evidence, a remedy with its undo, and the source of the threshold. What could not be read is listed
    as not known, never taken as fine. Exit code 1 where a finding is at or above --level.

    Only kernel parameters are ever changed, and only by --apply; commands that reset a link are printed.

    Examples:

      wirespeed doctor host

      sudo wirespeed doctor host --during 10s          counters, while the job runs

      sudo wirespeed doctor host --around 'mpirun ... all_reduce_perf -b 1G -e 1G'      counters, around a benchmark

      wirespeed doctor host --hosts 'node[01-64]'      many hosts over ssh, and what differs between them

      srun -N64 --ntasks-per-node=1 wirespeed doctor host      the same from inside a job

      sudo wirespeed doctor host --apply --dry-run     then --apply, and --rollback to undo

      wirespeed doctor host --health-check --drain     as HealthCheckProgram in slurm.conf

      wirespeed doctor host --record host.json; wirespeed doctor host --from host.json
    """
    from wirespeed.doctor.check import SEVERITIES

    if level not in SEVERITIES:
        raise UsageError(f"got level {level!r}", expected=", ".join(SEVERITIES))
    chosen = next(name for name in SEVERITIES if name == level)
    _check_combination(
        hosts=hosts, apply=apply, rollback=rollback, dry_run=dry_run, recorded=recorded, record=record, drain=drain,
        health_check=health_check,
    )  # fmt: skip
    from wirespeed.cli.doctor_apply import apply_findings, report_outcome, store_of

    if rollback:
        return report_outcome(store_of(this_namespace, state_dir).rollback(is_dry_run=dry_run), as_json=as_json)
    if around is not None and (during is not None or hosts is not None or recorded is not None):
        raise UsageError("got --around with --during, --hosts or --from", expected="--around alone")
    question = _question(during, rtt, rate, peers, only)
    told = _read_suppressions(suppressions)
    is_one = apply or health_check or recorded is not None or record is not None
    if hosts is not None or (not is_one and _is_many_ranks()):
        from wirespeed.cli.doctor_hosts import end_cluster, over_ranks, over_ssh

        wait_s = parse_duration(timeout)
        report = (
            over_ranks(question, wait_s)
            if hosts is None
            else over_ssh(hosts, question, ssh=ssh, sudo=sudo, timeout_s=wait_s)
        )
        return (
            0
            if report is None
            else end_cluster(
                report, told, level=chosen, prometheus=prometheus, page=page, show_all=show_all, as_json=as_json
            )
        )
    system = _system(record, recorded)
    report_of_one = _examine(system, question, told, around=around)
    if record is not None:
        _write_record(system, record)
    if prometheus is not None:
        from wirespeed.cli.doctor_hosts import write_prometheus

        write_prometheus([report_of_one], prometheus)
    if page is not None:
        from wirespeed.cli.doctor_hosts import write_page

        write_page(report_of_one, page)
    if apply:
        store = store_of(this_namespace, state_dir)
        return apply_findings(report_of_one, chosen, store, dry_run=dry_run, as_json=as_json)
    if health_check:
        return _health_check(report_of_one, drain=drain)
    if as_json:
        from wirespeed.cli.render import print_json

        print_json(report_of_one)
    else:
        from wirespeed.cli.doctor_render import show_host

        show_host(report_of_one, show_all=show_all)
    return _exit_code(report_of_one.findings, chosen)


def _check_combination(
    *,
    hosts: str | None,
    apply: bool,
    rollback: bool,
    dry_run: bool,
    recorded: Path | None,
    record: Path | None,
    drain: bool,
    health_check: bool,
) -> None:
    if apply and rollback:
        raise UsageError("got --apply and --rollback", expected="one of them")
    if dry_run and not (apply or rollback):
        raise UsageError("got --dry-run alone", expected="--apply --dry-run or --rollback --dry-run")
    if drain and not health_check:
        raise UsageError("got --drain alone", expected="--health-check --drain")
    if hosts is not None and (apply or rollback or health_check or recorded is not None or record is not None):
        raise UsageError(
            "got --hosts with an option for one host", expected="--hosts alone",
            hint="on many hosts at once: `pdsh -w ... wirespeed doctor host --apply`, where wirespeed is installed",
        )  # fmt: skip
    if recorded is not None and (apply or rollback or record is not None or drain):
        raise UsageError("got --from with an option that needs the host itself", expected="--from alone")


def _system(record: Path | None, recorded: Path | None) -> System:
    from wirespeed.doctor.recorded import RecordedSystem, Recorder
    from wirespeed.system import System

    if recorded is not None:
        return RecordedSystem.load(recorded)
    return System() if record is None else Recorder()


def _question(
    during: str | None, rtt: str | None, rate: str | None, peers: str | None, only: list[str] | None
) -> Question:
    from wirespeed.doctor.examine import Question, select

    select(only or ())  # a wrong name is our mistake, not that of 64 hosts
    return Question(
        during_s=None if during is None else parse_duration(during),
        rtt_s=None if rtt is None else parse_duration(rtt),
        rate_bit_per_s=None if rate is None else parse_rate(rate),
        peers=() if peers is None else _addresses(peers),
        only=tuple(only or ()),
    )


def _examine(
    system: System, question: Question, told: tuple[Suppression, ...], *, around: str | None = None
) -> HostReport:
    from dataclasses import replace
    from datetime import UTC, datetime

    from wirespeed.cli.render import say
    from wirespeed.doctor.examine import examine
    from wirespeed.doctor.reports import host_report
    from wirespeed.doctor.suppressions import suppress
    from wirespeed.measure.environment import capture

    if around is not None:
        from wirespeed.doctor.examine import MAX_DURING_S

        asked = replace(question, during_s=MAX_DURING_S)
        examination = examine(system, asked, wait=lambda limit_s: _run(around, limit_s))
    else:
        if question.during_s is not None:
            say(f"watching counters for {question.during_s:g} s")
        examination = examine(system, question)
    return suppress(host_report(examination, capture()), told, today=datetime.now(UTC).date())


def _run(command: str, limit_s: float) -> None:
    """Run the command that counters are watched around; what it prints goes to stderr, where news goes."""
    import shlex
    import subprocess

    from wirespeed.cli.render import say

    try:
        done = subprocess.run(shlex.split(command), stdout=sys.stderr, timeout=limit_s, check=False)
    except (OSError, ValueError) as fault:
        raise UsageError(f"cannot run --around {command!r}: {fault}") from fault
    except subprocess.TimeoutExpired:
        say(f"note: the command was ended after {limit_s:g} s")
        return
    if done.returncode != 0:
        say(f"note: the command ended with {done.returncode}; the counters were watched all the same")


def _addresses(peers: str) -> tuple[str, ...]:
    from wirespeed.doctor.remote import addresses
    from wirespeed.launch import expand_hostlist

    names = expand_hostlist(peers)
    found = addresses(names)
    lost = [name for name in names if name not in found]
    if lost:
        raise UsageError(f"got --peers with {', '.join(lost[:5])}", expected="names that resolve to IPv4 addresses")
    return tuple(found.values())


def _is_many_ranks() -> bool:
    """Whether a launcher started several of us, each to look at its own host.

    An sbatch script itself has SLURM_PROCID=0 and the job's task count too, but is no step: there is one of it.
    """
    from wirespeed.launch import is_launched, ranks

    if not is_launched():
        return False
    place = ranks()
    is_script = place.launcher == "slurm" and not {"SLURM_STEP_ID", "SLURM_STEPID"} & os.environ.keys()
    return place.world_size > 1 and not is_script


def _read_suppressions(path: Path | None) -> tuple[Suppression, ...]:
    from wirespeed.doctor.suppressions import read_suppressions

    if path is not None:
        return read_suppressions(path)
    return read_suppressions(_SITE_SUPPRESSIONS) if _SITE_SUPPRESSIONS.exists() else ()


def _write_record(system: System, path: Path) -> None:
    from wirespeed.cli.render import say
    from wirespeed.doctor.recorded import Recorder
    from wirespeed.records import write_bytes

    assert isinstance(system, Recorder)
    say(f"wrote {write_bytes(path, system.to_json())}: it holds host names, addresses and kernel messages")


def _health_check(report: HostReport, *, drain: bool) -> int:
    from wirespeed.doctor import health
    from wirespeed.system import System

    why = health.reason(report)
    print("ok" if why is None else why)
    if drain and why is not None:
        print(health.drain(System(), report, node=os.environ.get("SLURMD_NODENAME")), file=sys.stderr)
    return 0 if why is None else 1


def _exit_code(findings: Sequence[Finding], level: Severity) -> int:
    from wirespeed.doctor.check import SEVERITIES

    counted = SEVERITIES[: SEVERITIES.index(level) + 1]
    return 1 if any(finding.severity in counted for finding in findings) else 0
