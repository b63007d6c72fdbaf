"""`wirespeed plan`: predict strategies and layouts on a fabric, rank them, and say why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import msgspec
import typer

from wirespeed.cli import plan_collective, plan_serve, plan_what_if
from wirespeed.cli.plan_answer import (
    answer_document,
    print_answer,
    print_table,
    report_skipped,
    strategies_document,
    write_page,
)
from wirespeed.errors import UsageError

if TYPE_CHECKING:
    from wirespeed.plan import Search
    from wirespeed.plan.question import Question
    from wirespeed.sim.costs import StepCosts
    from wirespeed.spec.workload import TrainingWorkload

app = typer.Typer(
    help="Predict what a strategy, a layout or a network would give, before running it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
plan_serve.register(app)
plan_what_if.register(app)
plan_collective.register(app)

FidelityName = Literal["exact", "half", "compressed", "lossy"]

_WORKLOAD = typer.Option("--workload", "-w", help="Workload file, or the record of `wirespeed tune`.", metavar="FILE")
_MODEL = typer.Option("--model", "-m", help="A model of the catalogue, such as gpt3-175b or llama3-8b@4096.")
_FABRIC = typer.Option(
    "--fabric", "-f", help='fabric.toml, or one line: "fat-tree hosts=64 nic=400g-ib island=nvlink4".', metavar="FABRIC"
)
_FIDELITY = typer.Option(
    "--fidelity",
    help="How faithful gradients must stay: exact, half (16 bit), compressed (error feedback) or lossy.",
)
_STRATEGY = typer.Option(
    "--strategy",
    "-s",
    help="Only these beside dense, such as int8, topk@1% or half/4MiB; may be repeated.",
    metavar="STRATEGY",
)
_JSON = typer.Option("--json", help="One JSON document on stdout.")
_HTML = typer.Option("--html", help="Write a page with plots.", metavar="FILE")
_DEVICE = typer.Option("--device", "-d", help="Accelerator, such as a100, h100 or h100,matrix_share=0.5.")
_BATCH = typer.Option("--batch", "-b", help="Samples per step of all devices; default a customary one.")
_DTYPE = typer.Option("--dtype", help="Arithmetic: fp32, tf32, fp16, bf16, fp8.")
_CURRENT = typer.Option("--current", help='The layout in use, such as "tp8 pp8x2 dp4 mb1 zero1", to compare with.')
_THROUGHPUT = typer.Option("--samples-per-s", help="What one device alone trains at, measured; default a roofline.")
_SLOWDOWN = typer.Option("--slowdown", help="How much slower than its kind the slowest device is (1 and above).")


@app.command("train")
def train(
    *,
    model: Annotated[str | None, _MODEL] = None,
    workload: Annotated[Path | None, _WORKLOAD] = None,
    fabric: Annotated[str, _FABRIC],
    device: Annotated[str, _DEVICE] = "a100",
    batch: Annotated[int | None, _BATCH] = None,
    dtype: Annotated[str, _DTYPE] = "bf16",
    current: Annotated[str | None, _CURRENT] = None,
    samples_per_s: Annotated[float | None, _THROUGHPUT] = None,
    slowdown: Annotated[float, _SLOWDOWN] = 1.0,
    fidelity: Annotated[str, _FIDELITY] = "half",
    strategy: Annotated[list[str] | None, _STRATEGY] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Every candidate, not only each codec's best.")] = False,
    as_json: Annotated[bool, _JSON] = False,
    html: Annotated[Path | None, _HTML] = None,
) -> None:
    """Predict the training step under every legal strategy or layout, fastest first, and choose one.

    A model of the catalogue is laid out over tensor, pipeline, data and expert parallel; what does not divide or does
    not fit is refused. Where a replica fits on a device, the strategies of data parallelism are ranked as well. A
    workload was measured by `wirespeed tune` and is always data parallel. A gain below 5 % is no reason to change: then
    the answer is "change nothing".

    Examples:

      wirespeed plan train --model gpt3-175b --fabric "fat-tree hosts=64 nic=400g-ib nics=8 island=nvlink4" -d h100

      wirespeed plan train --model resnet50 --fabric "star hosts=8 nic=10g" --device v100 --dtype fp32

      wirespeed plan train -w tune.json -f fabric.toml --fidelity lossy --json
    """
    from wirespeed.plan import best_of_each_codec, choose

    allowed = _fidelity(fidelity)
    _one_of(model, workload)
    if workload is not None:
        held, found, _ = _search(workload, fabric, allowed, strategy)
        choice = choose(found.predictions, allowed)
        if as_json:
            _print_json({"schema": 1, "kind": "plan", **strategies_document(found, choice, fidelity)})
        else:
            print_table(found.predictions if show_all else best_of_each_codec(found.predictions), choice.strategy.name)
            print(f"change nothing: {choice.reason}" if choice.changes_nothing else f"use {choice.reason}")
            if held.origin != "measured":
                print(f"note: the workload's times are {held.origin}, not measured", file=sys.stderr)
            report_skipped(found.skipped)
        return
    from wirespeed.plan.question import ask

    question = _question(model, fabric, device, batch, dtype, current, samples_per_s, slowdown, allowed)
    answer = ask(question)
    if html is not None:
        write_page(html, answer)
    if as_json:
        _print_json(answer_document(answer, fidelity))
        return
    print_answer(answer, show_all=show_all)


@app.command("explain")
def explain_step(
    *,
    model: Annotated[str | None, _MODEL] = None,
    workload: Annotated[Path | None, _WORKLOAD] = None,
    fabric: Annotated[str, _FABRIC],
    device: Annotated[str, _DEVICE] = "a100",
    batch: Annotated[int | None, _BATCH] = None,
    dtype: Annotated[str, _DTYPE] = "bf16",
    current: Annotated[str | None, _CURRENT] = None,
    samples_per_s: Annotated[float | None, _THROUGHPUT] = None,
    slowdown: Annotated[float, _SLOWDOWN] = 1.0,
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="Which strategy to explain.")] = "dense",
    fidelity: Annotated[str, _FIDELITY] = "half",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Say where the step's time goes, which resource and link bind, what each change would give, and how sure that is.

    Is it bandwidth- or latency-bound? Would RDMA pay? Each is answered by predicting the same step with that change.
    With --current the layout in use is explained, else the best one.

    Examples:

      wirespeed plan explain --workload workload.json --fabric fabric.toml --strategy int8/4MiB

      wirespeed plan explain --model llama3-70b -f "fat-tree hosts=16 nic=100g nics=8 island=nvlink4" -d h100

      wirespeed plan explain -m megatron-22b -f "star hosts=4 nic=200g-ib nics=8 island=nvlink3" --current "tp8 pp1 dp4"
    """
    from wirespeed.plan import choose, explain

    allowed = _fidelity(fidelity)
    _one_of(model, workload)
    from wirespeed.spec.strategy import Strategy

    wanted = Strategy.parse(strategy)
    if model is not None:
        from wirespeed.plan.question import ask

        question = _question(model, fabric, device, batch, dtype, current, samples_per_s, slowdown, allowed)
        answer = ask(question)
        if answer.layouts is not None and strategy == "dense":
            from wirespeed.plan.layout_words import explain_layout

            one = answer.layouts.chosen if answer.layouts.baseline is None else answer.layouts.baseline
            words = explain_layout(question, one, answer.layouts)
            if as_json:
                _print_json({"schema": 1, "kind": "explanation", "name": words.layout, **msgspec.to_builtins(words)})
            else:
                print("\n".join(words.lines))
            return
        if answer.workload is None or answer.strategies is None:
            raise UsageError(
                f"got strategy {strategy!r} for {question.model.name}, a replica of which does not fit on one device",
                expected="no --strategy: its layout is explained instead",
            )
        held, found, costs = answer.workload, answer.strategies, _placed_costs(question)
    else:
        assert workload is not None
        held, found, costs = _search(workload, fabric, allowed, None)
    from wirespeed.sim import predict_step

    choice = choose(found.predictions, allowed)
    told = explain(held, predict_step(held, wanted, costs), costs, choice=choice)
    if as_json:
        _print_json({"schema": 1, "kind": "explanation", "name": wanted.name, **msgspec.to_builtins(told)})
        return
    for line in told.lines:
        print(line)
    report_skipped(found.skipped)


def _one_of(model: str | None, workload: Path | None) -> None:
    if (model is None) == (workload is None):
        raise UsageError(
            "got both or neither of --model and --workload",
            expected="one of them",
            hint="--model takes a name of the catalogue, --workload a file of `wirespeed tune`",
        )


def _question(
    model: str | None,
    fabric: str,
    device: str,
    batch: int | None,
    dtype: str,
    current: str | None,
    samples_per_s: float | None,
    slowdown: float,
    fidelity: FidelityName,
) -> Question:
    from wirespeed.plan.question import make_question

    assert model is not None
    return make_question(
        model=model,
        fabric=fabric,
        device=device,
        global_batch=batch,
        dtype=dtype,
        current=current,
        samples_per_s=samples_per_s,
        slowdown=slowdown,
        fidelity=fidelity,
    )


def _placed_costs(question: Question) -> StepCosts:
    from wirespeed.plan.axes import PlacedCosts

    return PlacedCosts(question.fabric, question.placement, question.device, backend=question.backend)


def _search(
    workload: Path, fabric: str, fidelity: FidelityName, names: list[str] | None
) -> tuple[TrainingWorkload, Search, StepCosts]:
    from wirespeed.fabric.words import load_fabric
    from wirespeed.plan import costs_of, read_workload, search
    from wirespeed.plan.axes import PlacedCosts
    from wirespeed.spec.strategy import Strategy

    held, network = read_workload(workload), load_fabric(fabric)
    is_own = all(curve.rate_bit_per_s is None for curve in network.collectives)
    strategies = None if not names else list(dict.fromkeys([Strategy(), *map(Strategy.parse, names)]))
    if network.collectives and is_own and not network.uplinks and not network.switches:
        return held, search(held, network, fidelity, strategies=strategies), costs_of(held, network)
    from wirespeed.fabric.placement import place

    costs = PlacedCosts(network, place(network, held.num_ranks, held.ranks_per_host), None)
    return held, search(held, network, fidelity, strategies=strategies, costs=costs), costs


def _fidelity(text: str) -> FidelityName:
    for name in get_args(FidelityName):
        if name == text:
            return cast(FidelityName, name)
    raise UsageError(f"got fidelity {text!r}", expected=", ".join(get_args(FidelityName)))


def _print_json(document: dict[str, Any]) -> None:
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
