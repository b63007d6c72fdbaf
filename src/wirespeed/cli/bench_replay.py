"""`wirespeed bench replay`: a large model's gradients over a small lab, its compute replaced by sleep."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wirespeed import units
from wirespeed.cli.render import make_table, print_json, say, show
from wirespeed.cli.signals import terminable
from wirespeed.errors import UsageError, WirespeedError
from wirespeed.records import write
from wirespeed.spec.strategy import Strategy

if TYPE_CHECKING:
    from wirespeed.cli.tune import Display
    from wirespeed.spec.replay import ReplayRecord
    from wirespeed.tune.places import Place
    from wirespeed.tune.replay import ReplayOptions

MAX_HOSTS = 64


def bench_replay(
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model of the catalogue, or `list`.", metavar="NAME")
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option("--workload", "-w", help="Instead: your own job, from the tune.json of `tune`.", metavar="FILE"),
    ] = None,
    hosts: Annotated[int | None, typer.Option("--hosts", "-n", help="Hosts, with one rank each.")] = None,
    rate: Annotated[str | None, typer.Option("--rate", "-r", help="Each host's link, such as 10gbit.")] = None,
    exposed: Annotated[
        str | None,
        typer.Option("--exposed", help="Instead of --rate: the link at which dense is exposed by this, such as 35%."),
    ] = None,
    strategies: Annotated[
        str, typer.Option("--strategies", "-s", help="What to compare, by commas; dense is always among them.")
    ] = "dense,half,int8",
    compute: Annotated[
        str | None, typer.Option("--compute", help="Forward and backward together, such as 300ms; default assumed.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Divide bytes and rates by this; default what fits this machine.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of a strategy in each round.")] = 8,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds over all strategies, in turn.")] = 2,
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="Measure network and codecs first, and predict each step.")
    ] = True,
    stall_timeout: Annotated[
        str, typer.Option("--stall-timeout", help="Give up when no step ends within this.")
    ] = "2m",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the record here.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as one JSON document.")] = False,
) -> int:
    """Train a large model on 2 to 16 hosts of a lab on this machine, with real DDP, buckets and network.

    Layers sleep until the time at which their gradient would be there; gradients, their order and their buckets are
    real. Bytes and rates are divided by one common scale so that two cores suffice; times are those of full size. The
    codecs have that much less to do: they stand for ones that are faster by the scale, as an accelerator's are.
    Without --rate and --exposed it runs on the ranks of a launcher, over their own network and at full size.

    Examples:

      wirespeed bench replay --model resnet50 --hosts 4 --rate 10gbit

      wirespeed bench replay -m bert-large -n 8 -r 25gbit -s dense,half,int8/4MiB,topk@1% --compute 400ms

      wirespeed bench replay -m gpt2-xl -n 2 --exposed 35% --json

      wirespeed bench replay --workload out/tune/tune.json --hosts 16 --rate 1gbit

      torchrun --nnodes 4 --nproc-per-node 1 ... --no-python wirespeed bench replay --model bert-large
    """
    if model == "list":
        _show_models()
        return 0
    from wirespeed.cli.tune import Display, check_torch

    check_torch()
    with terminable(), tempfile.TemporaryDirectory(prefix="wirespeed-replay-") as folder, Display() as display:
        place = _joined(rate, exposed, hosts)
        options, lab_rate_bit_per_s = _options(
            model, workload, rate, exposed, strategies, compute, scale,
            num_ranks=(4 if hosts is None else hosts) if place is None else place.num_ranks,
            ranks_per_host=1 if place is None else place.ranks_per_host,
            steps=steps, rounds=rounds, predicts=predict, stall_timeout_s=units.parse_duration(stall_timeout),
        )  # fmt: skip
        if place is None:
            place = _build_lab(options.workload.num_ranks, lab_rate_bit_per_s, display)
        record = _run(options, place, Path(folder), display)
    if out is not None:
        say(f"wrote {write(out, record)}")
    if as_json:
        print_json(record)
    else:
        show_replay(record)
    return 0


def _joined(rate: str | None, exposed: str | None, hosts: int | None) -> Place | None:
    """The job that a launcher started, where there is one and no lab was asked for."""
    from wirespeed import launch

    if rate is not None and exposed is not None:
        raise UsageError("got --rate and --exposed", expected="one of them: the second finds the first")
    if rate is not None or exposed is not None:
        if hosts is not None and not 2 <= hosts <= MAX_HOSTS:
            raise UsageError(f"got --hosts {hosts}", expected=f"2 to {MAX_HOSTS}")
        return None
    if not launch.is_launched():
        raise UsageError(
            "got neither --rate nor --exposed, and no launcher's variables",
            expected="a link for the lab, such as --rate 10gbit, or a start by torchrun, srun or mpirun",
        )
    if hosts is not None:
        raise UsageError("got --hosts under a launcher", expected="the ranks that the launcher started")
    from wirespeed.tune.spmd import join_as_rank

    return join_as_rank()


def _options(
    model: str | None,
    workload: Path | None,
    rate: str | None,
    exposed: str | None,
    strategies: str,
    compute: str | None,
    scale: float | None,
    *,
    num_ranks: int,
    ranks_per_host: int,
    steps: int,
    rounds: int,
    predicts: bool,
    stall_timeout_s: float,
) -> tuple[ReplayOptions, float]:
    """The options, and the rate of the lab's links (0 without a lab)."""
    import msgspec

    from wirespeed.plan.bounds import rate_for_exposed
    from wirespeed.plan.models import load_model, replay_workload, scaled_workload
    from wirespeed.plan.workloads import read_workload

    if (model is None) == (workload is None):
        raise UsageError("got neither or both of --model and --workload", expected="one", hint="--model list shows all")
    if scale is not None and not 1 <= scale < 1e6:
        raise UsageError(f"got --scale {scale:g}", expected="1 or more")
    named = [Strategy.parse(part) for part in strategies.split(",") if part.strip()]
    wanted = tuple(dict.fromkeys([Strategy(), *named]))
    compute_s = None if compute is None else units.parse_duration(compute)
    if model is not None:
        known = load_model(model)
        full = replay_workload(known, num_ranks=num_ranks, compute_s=compute_s)
        title, source = known.title, f"{known.source}; {known.batch}"
    else:
        assert workload is not None
        if compute_s is not None:
            raise UsageError("got --compute and --workload", expected="the times of the workload", hint="leave one out")
        full = msgspec.structs.replace(read_workload(workload), num_ranks=num_ranks)
        title, source = workload.stem, f"workload of {workload}"
    full = msgspec.structs.replace(full, ranks_per_host=ranks_per_host, cpus_per_rank=None)
    from wirespeed.lab.layout import HEADER_EFFICIENCY
    from wirespeed.tune.replay import ReplayOptions, fitting_scale

    rate_bit_per_s = 0.0
    if rate is not None:
        rate_bit_per_s = units.parse_rate(rate)
    elif exposed is not None:
        # A lab's link carries 1448 bytes of payload in 1514 that its shaper counts.
        rate_bit_per_s = rate_for_exposed(full, units.parse_ratio(exposed)) / HEADER_EFFICIENCY
    if scale is None:
        scale = float(fitting_scale(rate_bit_per_s, num_ranks, full.num_elements)) if rate_bit_per_s else 1.0
    options = ReplayOptions(
        title=title,
        source=source,
        workload=scaled_workload(full, scale),
        strategies=wanted,
        scale=scale,
        num_steps=steps,
        rounds=rounds,
        predicts=predicts,
        stall_timeout_s=stall_timeout_s,
    )
    return options, rate_bit_per_s / scale


def _build_lab(num_hosts: int, rate_bit_per_s: float, display: Display) -> Place:
    from wirespeed.lab import Lab, LabSpec
    from wirespeed.tune.places import LabPlace

    display.phase(f"building a lab of {num_hosts} hosts at {units.format_rate(rate_bit_per_s)}")
    lab = Lab(LabSpec(hosts=num_hosts, rate_bit_per_s=rate_bit_per_s))
    lab.up()
    return LabPlace(lab)


def _run(options: ReplayOptions, place: Place, folder: Path, display: Display) -> ReplayRecord:
    from wirespeed.tune.replay import run_replay

    code = 1
    try:
        record = run_replay(options, place, folder, display)
        code = 0
    except WirespeedError as fault:
        code = fault.exit_code
        raise
    finally:
        display.phase("taking down what was set up")
        place.close(code)
    return record


def show_replay(record: ReplayRecord) -> None:
    """The table of a replay."""
    from wirespeed.tune.replay import describe

    for line in describe(record):
        show(line)
    link = "unknown" if record.goodput_bit_per_s is None else units.format_rate(record.goodput_bit_per_s)
    declared = "" if record.declared_bit_per_s is None else f" of {units.format_rate(record.declared_bit_per_s)}"
    show(f"link: {link} measured{declared}")
    dense = next(arm for arm in record.arms if arm.strategy == Strategy())
    rows = [
        [
            arm.name,
            arm.strategy.fidelity,
            "-" if arm.predicted_step_s is None else units.format_duration(arm.predicted_step_s),
            units.format_duration(arm.step_s),
            units.format_percent(arm.spread),
            "-" if arm.prediction_error is None else f"{arm.prediction_error * 100:+.1f} %",
            f"{units.format_duration(arm.exposed_s)} ({arm.exposed_share:.0%})",
            "-" if arm.wire_bytes_per_step is None else units.format_size(arm.wire_bytes_per_step),
            f"{dense.step_s / arm.step_s:.2f}x",
        ]
        for arm in record.arms
    ]
    headings = ["strategy", "fidelity<", "predicted", "step", "spread", "error", "exposed", "on the wire", "vs dense"]
    show(make_table(headings, rows))
    for warning in record.warnings:
        say(f"wirespeed: {warning}")


def _show_models() -> None:
    from wirespeed.plan.models import load_model, model_names

    rows = []
    for name in model_names():
        held = load_model(name)
        rows.append(
            [
                name,
                held.title,
                f"{held.num_parameters / 1e6:.1f} M",
                str(len(held.tensors)),
                held.batch,
                units.format_duration(held.assumed_compute_s),
            ]
        )
    show(make_table(["model", "title<", "parameters", "tensors", "batch<", "assumed compute"], rows))
    say("any other model that `wirespeed plan train --model` knows also serves, in reverse forward order")
