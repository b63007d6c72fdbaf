"""`wirespeed plan`: predict strategies and layouts on a fabric, rank them, and say why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import msgspec
import typer

from wirespeed.cli import plan_serve, plan_what_if
from wirespeed.errors import UsageError
from wirespeed.units import format_duration, format_percent, format_size

if TYPE_CHECKING:
    from wirespeed.plan import Search
    from wirespeed.plan.question import Answer, Question
    from wirespeed.sim.costs import StepCosts
    from wirespeed.sim.parallelism import LayoutPrediction
    from wirespeed.spec.prediction import Prediction
    from wirespeed.spec.workload import TrainingWorkload

app = typer.Typer(
    help="Predict what a strategy, a layout or a network would give, before running it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
plan_serve.register(app)
plan_what_if.register(app)

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

      wirespeed plan train --workload tune.json --fabric fabric.toml --fidelity lossy --json
    """
    from wirespeed.plan import best_of_each_codec, choose

    allowed = _fidelity(fidelity)
    _one_of(model, workload)
    if workload is not None:
        held, found, _ = _search(workload, fabric, allowed, strategy)
        choice = choose(found.predictions, allowed)
        if as_json:
            _print_json({"schema": 1, "kind": "plan", **_strategies_document(found, choice, fidelity)})
        else:
            _print_table(found.predictions if show_all else best_of_each_codec(found.predictions), choice.strategy.name)
            print(f"change nothing: {choice.reason}" if choice.changes_nothing else f"use {choice.reason}")
            if held.origin != "measured":
                print(f"note: the workload's times are {held.origin}, not measured", file=sys.stderr)
            _report_skipped(found.skipped)
        return
    from wirespeed.plan.question import ask

    question = _question(model, fabric, device, batch, dtype, current, samples_per_s, slowdown, allowed)
    answer = ask(question)
    if html is not None:
        _write_page(html, answer)
    if as_json:
        _print_json(_answer_document(answer, fidelity))
        return
    _print_answer(answer, show_all=show_all)


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
    _report_skipped(found.skipped)


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
    strategies = None if not names else list(dict.fromkeys([Strategy(), *map(Strategy.parse, names)]))
    if network.collectives:
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


def _strategies_document(found: Search, choice: Any, fidelity: str) -> dict[str, Any]:
    return {
        "fidelity": fidelity,
        "chosen": choice.strategy.name,
        "reason": choice.reason,
        "changes_nothing": choice.changes_nothing,
        "speedup": choice.speedup,
        "predictions": [{"name": p.strategy.name, **msgspec.to_builtins(p)} for p in found.predictions],
        "skipped": found.skipped,
    }


def _answer_document(answer: Answer, fidelity: str) -> dict[str, Any]:
    question = answer.question
    document: dict[str, Any] = {
        "schema": 1,
        "kind": "plan",
        "model": question.model.name,
        "num_parameters": question.model.num_parameters,
        "device": question.device.name,
        "fabric": question.fabric.name,
        "num_ranks": question.num_ranks,
        "global_batch": question.global_batch,
        "step_s": answer.step_s,
    }
    if answer.layouts is not None:
        held = answer.layouts
        document["layouts"] = {
            "chosen": held.chosen.layout.name,
            "reason": held.reason,
            "changes_nothing": held.changes_nothing,
            "num_tried": held.num_tried,
            "refused": held.refused,
            "predictions": [{"name": p.layout.name, **msgspec.to_builtins(p)} for p in held.predictions],
        }
    if answer.strategies is not None and answer.choice is not None:
        document["strategies"] = _strategies_document(answer.strategies, answer.choice, fidelity)
        document["links"] = answer.bindings
    return document


def _print_answer(answer: Answer, *, show_all: bool) -> None:
    from wirespeed.cli.render import make_table, say, show
    from wirespeed.plan import best_of_each_codec

    question = answer.question
    print(
        f"{question.model.name}: {question.model.num_parameters / 1e9:.3g} G parameters on {question.num_ranks} x "
        f"{question.device.name} in {question.num_hosts} hosts, {question.global_batch} samples per step"
    )
    if answer.layouts is not None:
        held = answer.layouts
        rows = list(held.predictions if show_all else held.predictions[:5])
        rows += [one for one in (held.baseline, held.chosen) if one is not None and one not in rows]
        show(make_table(_LAYOUT_HEADINGS, [_layout_row(one, held.chosen) for one in rows]))
        print(f"change nothing: {held.reason}" if held.changes_nothing else f"use {held.reason}")
        tried = f"{held.num_tried} layouts tried"
        refused = ", ".join(f"{count} for {reason}" for reason, count in held.refused.items())
        say(tried + (f", {sum(held.refused.values())} refused ({refused})" if refused else ""))
    if answer.strategies is not None and answer.choice is not None:
        if answer.layouts is not None:
            print("\nData parallel, one replica per device:")
        choice, found = answer.choice, answer.strategies
        _print_table(found.predictions if show_all else best_of_each_codec(found.predictions), choice.strategy.name)
        print(f"change nothing: {choice.reason}" if choice.changes_nothing else f"use {choice.reason}")
        links = ", ".join(f"{collective} by {link}" for collective, link in answer.bindings.items())
        say(f"limited: {links}" if links else "one rank: nothing is sent")
        if answer.workload is not None and answer.workload.origin == "assumed":
            say(
                "note: device times are a roofline's, up to 40 % off for convolutions; --samples-per-s takes a measured rate"
            )
        _report_skipped(found.skipped)
    if question.model.origin == "assumed":
        say(f"note: {question.model.source}")


_LAYOUT_HEADINGS = ["", "layout<", "step", "± ", "TFLOP/s", "exposed", "bubble", "memory", "binding<", "busiest link<"]


def _layout_row(one: LayoutPrediction, chosen: LayoutPrediction) -> list[str]:
    bubble_s = one.parts_s.get("pipeline bubble and transfers", 0.0)
    return [
        "*" if one.layout == chosen.layout else "",
        one.layout.name,
        format_duration(one.step_s),
        format_percent(float(f"{one.uncertainty:.1g}")),
        f"{one.flop_per_s / 1e12:.0f}",
        format_percent(one.exposed_s / one.step_s),
        format_percent(bubble_s / one.step_s),
        format_size(one.memory.total_bytes),
        one.binding,
        one.binding_link or "-",
    ]


def _write_page(path: Path, answer: Answer) -> None:
    from wirespeed.cli.render import say
    from wirespeed.plan.layout_words import explain_layout
    from wirespeed.report.plan_page import stacked_bars, write_plan

    question = answer.question
    figures, tables, notes = [], [], []
    if answer.layouts is not None:
        held = answer.layouts
        bars = stacked_bars([p.layout.name for p in held.predictions], [p.parts_s for p in held.predictions])
        figures.append(("Where a step's time goes, by layout", bars))
        rows = [_layout_row(one, held.chosen) for one in held.predictions]
        tables.append(("Layouts", _LAYOUT_HEADINGS, rows))
        notes += list(explain_layout(question, held.chosen, held).lines)
    if answer.strategies is not None and answer.choice is not None:
        from wirespeed.plan import best_of_each_codec

        best = best_of_each_codec(answer.strategies.predictions)
        parts = [{"compute": p.compute_s, "exposed communication": p.exposed_s} for p in best]
        bars = stacked_bars([p.strategy.name for p in best], parts)
        figures.append(("Data parallel: compute and exposed communication, by strategy", bars))
        notes.append(answer.choice.reason)
    where = f"{question.num_ranks} x {question.device.name}, {question.fabric.name}"
    title = f"{question.model.name} on {question.num_ranks} x {question.device.name}"
    say(f"wrote {write_plan(path, title=title, lead=where, figures=figures, tables=tables, notes=notes)}")


def _print_table(predictions: Sequence[Prediction], chosen: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("", "strategy", "fidelity", "step", "exposed", "sent per step", "binding", "in range"):
        table.add_column(name, justify="right" if name in ("step", "exposed", "sent per step") else "left")
    for prediction in predictions:
        strategy = prediction.strategy
        table.add_row(
            "*" if strategy.name == chosen else "",
            strategy.name,
            strategy.fidelity,
            format_duration(prediction.step_s),
            format_duration(prediction.exposed_s),
            format_size(prediction.wire_bytes),
            prediction.binding,
            "yes" if prediction.is_in_range else "no",
        )
    Console().print(table)


def _report_skipped(skipped: dict[str, str]) -> None:
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print(f"not predicted: {', '.join(names)}: {reason}", file=sys.stderr)
