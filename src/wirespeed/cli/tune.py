"""`wirespeed tune` and `wirespeed profile`."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from wirespeed.cli import render
from wirespeed.cli.signals import terminable
from wirespeed.errors import InternalError, MissingCapability, UsageError, WirespeedError
from wirespeed.spec.strategy import FIDELITIES, Fidelity, Strategy
from wirespeed.units import format_duration, format_rate, parse_duration

if TYPE_CHECKING:
    from wirespeed.spec.comparison import TuneRecord
    from wirespeed.tune.loop import TuneOptions
    from wirespeed.tune.places import Place

_Script = Annotated[
    str, typer.Argument(help="A training script that uses DistributedDataParallel. Its arguments follow.")
]
_ProfiledScript = Annotated[
    str | None, typer.Argument(help="A training script, as of `tune`; its arguments follow. Not with --trace.")
]
_Lab = Annotated[
    str | None,
    typer.Option(
        "--lab", help="Run in a virtual cluster, such as 4x1gbit. Without it: under torchrun or srun, all ranks."
    ),
]
_Out = Annotated[Path, typer.Option("--out", help="Folder for records, report and strategy.toml.")]
_Steps = Annotated[
    int, typer.Option("--steps", min=6, help="Optimizer steps per run (fewer when the budget is short).")
]
_Budget = Annotated[str, typer.Option("--budget", help="Time for everything, such as 5m.")]
_Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of every run.")]
_Stall = Annotated[str, typer.Option("--stall-timeout", help="Give a run up when no step ends within this.")]
_Start = Annotated[str, typer.Option("--start-timeout", help="Give a run up when its first step takes longer.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the Record as JSON on stdout.")]


def tune(
    context: typer.Context,
    script: _Script,
    lab: _Lab = None,
    fidelity: Annotated[
        str, typer.Option("--fidelity", help="How far a chosen strategy may go: exact, half, compressed or lossy.")
    ] = "half",
    strategies: Annotated[
        str | None, typer.Option("--strategies", help="Run these, comma-separated, instead of the promising ones.")
    ] = None,
    steps: _Steps = 120,
    budget: _Budget = "5m",
    seed: _Seed = 0,
    out: _Out = Path("out/tune"),
    stall_timeout: _Stall = "90s",
    start_timeout: _Start = "2m",
    as_json: _Json = False,
) -> int:
    """Make a training script's gradient exchange fast: measure, predict, try, compare, choose.

    Runs SCRIPT as it is (dense), measures the network, predicts every strategy, runs the promising ones from the same
    seed, and prints step time, exposed communication, bytes and loss of each, prediction beside measurement.

    [bold]Examples[/bold]

      wirespeed tune examples/char_gpt.py --lab 4x1gbit --fidelity compressed

      wirespeed tune --lab 8x200mbit --budget 10m train.py --batch-size 64

      torchrun --nnodes 4 --nproc-per-node 1 ... -m wirespeed tune train.py
    """
    check_torch()
    from wirespeed.tune.loop import TuneOptions

    if fidelity not in FIDELITIES:
        raise UsageError(f"got --fidelity {fidelity!r}", expected=f"one of {', '.join(get_args(Fidelity))}")
    named = None
    if strategies is not None:
        named = tuple(Strategy.parse(part) for part in strategies.split(",") if part.strip())
        if not named:
            raise UsageError(f"got --strategies {strategies!r}", expected="at least one, such as int8,topk@1%")
    options = TuneOptions(
        script=script,
        arguments=tuple(context.args),
        fidelity=fidelity,
        budget_s=_seconds(budget, "--budget"),
        num_steps=steps,
        seed=seed,
        out=out,
        strategies=named,
        stall_timeout_s=_seconds(stall_timeout, "--stall-timeout"),
        start_timeout_s=_seconds(start_timeout, "--start-timeout"),
    )
    return _run(options, lab, as_json=as_json)


def profile(
    context: typer.Context,
    script: _ProfiledScript = None,
    lab: _Lab = None,
    steps: _Steps = 40,
    budget: _Budget = "3m",
    seed: _Seed = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for records and report (out/profile); of traces: the record.")
    ] = None,
    stall_timeout: _Stall = "90s",
    start_timeout: _Start = "2m",
    trace: Annotated[
        list[str] | None,
        typer.Option("--trace", help="Instead of a script: traces of torch.profiler or nsys (SQLite), or folders."),
    ] = None,
    nic_rate: Annotated[
        str | None, typer.Option("--nic-rate", help="With --trace: line rate of one NIC, such as 400gbit.")
    ] = None,
    nics_per_host: Annotated[int, typer.Option("--nics-per-host", min=1, help="With --trace: NICs in use.")] = 1,
    ranks_per_host: Annotated[int, typer.Option("--ranks-per-host", min=1, help="With --trace: ranks.")] = 1,
    step_name: Annotated[
        str | None, typer.Option("--step-name", help="With --trace: pattern of the NVTX ranges that are steps.")
    ] = None,
    as_json: _Json = False,
) -> int:
    """Where does my step go? Runs SCRIPT as it is, splits its step, and predicts what strategies would give.

    With --trace nothing is run: reads what torch.profiler (JSON, also .gz) or Nsight Systems (nsys export --type
    sqlite) recorded of any job, all ranks' files at once if there are several, and tells how much communication is
    hidden, how much is exposed, who waits for whom, and how full the NICs were.

    [bold]Examples[/bold]

      wirespeed profile --lab 4x1gbit examples/char_gpt.py

      wirespeed profile --trace traces/rank0.json.gz --trace traces/rank1.json.gz --nic-rate 100gbit

      wirespeed profile --trace job.sqlite --nic-rate 400gbit --nics-per-host 8 --ranks-per-host 8 --json
    """
    if trace:
        from wirespeed.cli.traces import profile_traces

        # More files may follow the first: `--trace a.json b.json`, as a shell's wildcard gives them.
        others = [*([] if script is None else [script]), *context.args]
        return profile_traces(
            [*trace, *others],
            nic_rate=nic_rate,
            nics_per_host=nics_per_host,
            ranks_per_host=ranks_per_host,
            step_name=step_name,
            out=out,
            as_json=as_json,
        )
    if script is None:
        raise UsageError(
            "got neither a SCRIPT nor --trace", expected="one of them", hint="wirespeed profile --lab 4x1gbit SCRIPT"
        )
    check_torch()
    from wirespeed.tune.loop import TuneOptions

    options = TuneOptions(
        script=script,
        arguments=tuple(context.args),
        fidelity="lossy",
        budget_s=_seconds(budget, "--budget"),
        num_steps=steps,
        seed=seed,
        out=Path("out/profile") if out is None else out,
        stall_timeout_s=_seconds(stall_timeout, "--stall-timeout"),
        start_timeout_s=_seconds(start_timeout, "--start-timeout"),
        profile_only=True,
    )
    return _run(options, lab, as_json=as_json)


def _seconds(text: str, option: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise UsageError(f"got {option} {text!r}", expected="a time above zero")
    return seconds


def check_torch() -> None:
    """Raise MissingCapability where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise MissingCapability("torch is not installed", hint="pip install 'wirespeed[train]'")


def _run(options: TuneOptions, lab: str | None, *, as_json: bool) -> int:
    from wirespeed.tune.loop import Tuning

    Tuning.check(options)
    with terminable(), Display() as display:
        place = _find_place(lab, display)
        failure: BaseException | None = None
        try:
            tuning = Tuning(options=options, place=place, progress=display)
            if not place.is_shaped:
                tuning.warnings.append(f"the network was {place.description}")
            tuning.run()
        except BaseException as fault:  # whatever it is, what was measured is kept
            failure = fault
        finally:
            display.phase("taking down what was set up")
            place.close(_exit_code(failure))
    if failure is not None:
        if not tuning.outcomes:
            raise failure
        tuning.warnings.append(f"ended early: {str(failure) if isinstance(failure, WirespeedError) else 'interrupted'}")
    record = tuning.record()
    tuning.write(record)
    _show(record, options, as_json=as_json)
    if failure is not None:
        print(f"wirespeed: ended early, what was measured is kept in {options.out}", file=sys.stderr)
        raise failure
    return 0


def _exit_code(failure: BaseException | None) -> int:
    match failure:
        case None:
            return 0
        case WirespeedError():
            return failure.exit_code
        case KeyboardInterrupt():
            return 130
        case SystemExit(code=int(code)):
            return code
        case _:
            return InternalError.exit_code


def _show(record: TuneRecord, options: TuneOptions, *, as_json: bool) -> None:
    from wirespeed.report.html import write_report
    from wirespeed.report.tables import comparison_table

    page = write_report(options.out / "report.html", record)
    if as_json:
        render.print_json(record)
        return
    console = render.stdout_console()
    link = record.fabric.link_bit_per_s
    measured = "" if link is None else f", link {format_rate(link)} measured"
    for line in (
        f"{record.script} on {record.fabric.description}, {record.fabric.num_ranks} ranks{measured}",
        comparison_table(record, width=console.width),
        f'report: {page}   use it: attach(..., strategy="{options.out / "strategy.toml"}")',
    ):
        console.print(line, markup=False, soft_wrap=isinstance(line, str))


def _find_place(lab: str | None, display: Display) -> Place:
    from wirespeed import launch
    from wirespeed.tune.places import LabPlace, LoopbackPlace

    if lab is None:
        if launch.is_launched():
            from wirespeed.tune.spmd import join_as_rank

            return join_as_rank()
        raise UsageError(
            "got neither --lab nor a launcher's variables",
            expected="--lab HOSTSxRATE, or a start by torchrun, srun or mpirun",
            hint="on one machine: wirespeed tune --lab 4x1gbit SCRIPT",
        )
    from wirespeed.lab import Lab, LabSpec, why_unavailable

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("got --lab under torchrun", expected="one of them", hint="a lab starts its ranks itself")
    spec = LabSpec.parse(lab)
    if spec.hosts < 2:
        raise UsageError(f"got --lab {lab!r}: one host", expected="at least two", hint="one has nothing to exchange")
    missing = why_unavailable()
    if missing is not None:
        display.note(f"no virtual cluster here ({missing}): running unshaped on loopback, so the network is NOT {lab}")
        return LoopbackPlace(spec.hosts, why=missing)
    display.phase(f"building a lab of {spec.hosts} hosts at {format_rate(spec.rate_bit_per_s)}")
    made = Lab(spec)
    made.up()
    return LabPlace(made)


class Display:
    """Progress on stderr: a bar on a terminal, a line per phase elsewhere."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._task: Any = None
        self._began_s = time.monotonic()

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
            )

            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def phase(self, text: str, *, total: int | None = None) -> None:
        """See ``tune.loop.Progress``."""
        if self._progress is None:
            print(f"[{format_duration(time.monotonic() - self._began_s)}] {text}", file=sys.stderr, flush=True)
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=total)

    def advance(self, step: int) -> None:
        """See ``tune.loop.Progress``."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)

    def note(self, text: str) -> None:
        """See ``tune.loop.Progress``."""
        if self._progress is None:
            print(f"wirespeed: {text}", file=sys.stderr, flush=True)
        else:
            self._progress.console.print(text, style="yellow", markup=False)
