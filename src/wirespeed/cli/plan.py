"""`wirespeed plan`: predict training strategies on a fabric, rank them, and say why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import msgspec
import typer

from wirespeed.errors import UsageError
from wirespeed.units import format_duration, format_size

if TYPE_CHECKING:
    from wirespeed.plan import FabricCosts, Search
    from wirespeed.spec.prediction import Prediction
    from wirespeed.spec.workload import TrainingWorkload

app = typer.Typer(
    help="Predict what a strategy or a network would give, before running it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

FidelityName = Literal["exact", "half", "compressed", "lossy"]

_WORKLOAD = typer.Option("--workload", "-w", help="Workload file, or the record of `wirespeed tune`.", metavar="FILE")
_FABRIC = typer.Option("--fabric", "-f", help="fabric.toml, from `wirespeed fabric calibrate`.", metavar="FILE")
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


@app.command("train")
def train(
    *,
    workload: Annotated[Path, _WORKLOAD],
    fabric: Annotated[Path, _FABRIC],
    fidelity: Annotated[str, _FIDELITY] = "half",
    strategy: Annotated[list[str] | None, _STRATEGY] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Every bucket size, not only each codec's best.")] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Predict the training step under every legal strategy, fastest first, and choose one.

    A gain below 5 % is no reason to change: then the answer is "change nothing".

    Examples:

      wirespeed plan train --workload workload.json --fabric fabric.toml

      wirespeed plan train -w tune.json -f fabric.toml --fidelity lossy --json

      wirespeed plan train -w workload.json -f fabric.toml -s dense -s half/4MiB -s topk@1%
    """
    from wirespeed.plan import best_of_each_codec, choose

    allowed = _fidelity(fidelity)
    held, found, _ = _search(workload, fabric, allowed, strategy)
    choice = choose(found.predictions, allowed)
    if as_json:
        _print_json(
            {
                "schema": 1,
                "kind": "plan",
                "fidelity": fidelity,
                "chosen": choice.strategy.name,
                "reason": choice.reason,
                "changes_nothing": choice.changes_nothing,
                "speedup": choice.speedup,
                "predictions": [{"name": p.strategy.name, **msgspec.to_builtins(p)} for p in found.predictions],
                "skipped": found.skipped,
            }
        )
        return
    _print_table(found.predictions if show_all else best_of_each_codec(found.predictions), choice.strategy.name)
    print(f"change nothing: {choice.reason}" if choice.changes_nothing else f"use {choice.reason}")
    if held.origin != "measured":
        print(f"note: the workload's times are {held.origin}, not measured", file=sys.stderr)
    _report_skipped(found.skipped)


@app.command("explain")
def explain_step(
    *,
    workload: Annotated[Path, _WORKLOAD],
    fabric: Annotated[Path, _FABRIC],
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="Which strategy to explain.")] = "dense",
    fidelity: Annotated[str, _FIDELITY] = "half",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Say where the step's time goes, which resource binds, and what each change would give.

    Examples:

      wirespeed plan explain --workload workload.json --fabric fabric.toml

      wirespeed plan explain -w workload.json -f fabric.toml --strategy int8/4MiB
    """
    from wirespeed.plan import choose, explain, predict
    from wirespeed.spec.strategy import Strategy

    wanted = Strategy.parse(strategy)
    allowed = _fidelity(fidelity)
    held, found, costs = _search(workload, fabric, allowed, None)
    choice = choose(found.predictions, allowed)
    told = explain(held, predict(held, wanted, costs.fabric), costs, choice=choice)
    if as_json:
        _print_json({"schema": 1, "kind": "explanation", "name": wanted.name, **msgspec.to_builtins(told)})
        return
    for line in told.lines:
        print(line)
    _report_skipped(found.skipped)


def _search(
    workload: Path, fabric: Path, fidelity: FidelityName, names: list[str] | None
) -> tuple[TrainingWorkload, Search, FabricCosts]:
    from wirespeed.fabric.files import read_fabric
    from wirespeed.plan import costs_of, read_workload, search
    from wirespeed.spec.strategy import Strategy

    held, network = read_workload(workload), read_fabric(fabric)
    strategies = None if not names else list(dict.fromkeys([Strategy(), *map(Strategy.parse, names)]))
    return held, search(held, network, fidelity, strategies=strategies), costs_of(held, network)


def _fidelity(text: str) -> FidelityName:
    for name in get_args(FidelityName):
        if name == text:
            return cast(FidelityName, name)
    raise UsageError(f"got fidelity {text!r}", expected=", ".join(get_args(FidelityName)))


def _print_json(document: dict[str, Any]) -> None:
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


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
