"""How `wirespeed plan train` shows an answer: tables, one JSON document, a page with plots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wirespeed.units import format_duration, format_percent, format_size

if TYPE_CHECKING:
    from wirespeed.plan import Choice, Search
    from wirespeed.plan.question import Answer
    from wirespeed.sim.parallelism import LayoutPrediction
    from wirespeed.spec.prediction import Prediction


def strategies_document(found: Search, choice: Choice, fidelity: str) -> dict[str, Any]:
    """The strategies of data parallelism as JSON."""
    return {
        "fidelity": fidelity,
        "chosen": choice.strategy.name,
        "reason": choice.reason,
        "changes_nothing": choice.changes_nothing,
        "speedup": choice.speedup,
        "predictions": [{"name": p.strategy.name, **msgspec.to_builtins(p)} for p in found.predictions],
        "skipped": found.skipped,
    }


def answer_document(answer: Answer, fidelity: str) -> dict[str, Any]:
    """A whole answer as JSON."""
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
        document["strategies"] = strategies_document(answer.strategies, answer.choice, fidelity)
        document["links"] = answer.bindings
        document["cadences"] = {
            name: {"step_s": one.step_s, "exposed_s": one.exposed_s, "lower_bound_s": one.lower_bound_s}
            for name, one in answer.cadences.items()
        }
    return document


def print_answer(answer: Answer, *, show_all: bool) -> None:
    """Tables and advice on stdout, remarks on stderr."""
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
        print_table(found.predictions if show_all else best_of_each_codec(found.predictions), choice.strategy.name)
        print(f"change nothing: {choice.reason}" if choice.changes_nothing else f"use {choice.reason}")
        links = ", ".join(f"{collective} by {link}" for collective, link in answer.bindings.items())
        say(f"limited: {links}" if links else "one rank: nothing is sent")
        if answer.cadences:
            _print_cadences(answer)
        if answer.workload is not None and answer.workload.origin == "assumed":
            say("note: device times are a roofline's, up to 40 % off for convolutions; give --samples-per-s")
        report_skipped(found.skipped)
    if question.model.origin == "assumed":
        say(f"note: {question.model.source}")


def _print_cadences(answer: Answer) -> None:
    from wirespeed.cli.render import say
    from wirespeed.plan.question import CADENCES

    # Seconds for as many samples as one plain step has: an accumulated step has several times as many.
    parts = [
        f"{name} {format_duration(one.step_s / CADENCES[name].accumulation)}" for name, one in answer.cadences.items()
    ]
    assert answer.choice is not None
    what = f"{answer.choice.strategy.name} exchanged less often, per {answer.question.global_batch} samples"
    say(f"{what}: {', '.join(parts)}")
    say("fewer exchanges change what is computed: hold the loss against that of every step before using one")


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


def write_page(path: Path, answer: Answer) -> None:
    """The answer as a page with plots."""
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


def print_table(predictions: Sequence[Prediction], chosen: str) -> None:
    """Strategies, the chosen one marked."""
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


def report_skipped(skipped: dict[str, str]) -> None:
    """What could not be predicted, by reason, on stderr."""
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print(f"not predicted: {', '.join(names)}: {reason}", file=sys.stderr)
