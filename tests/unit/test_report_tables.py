"""The comparison in a terminal."""

from __future__ import annotations

import io
import math

import msgspec
import pytest
from report_records import make_losses, make_outcome, make_record
from rich.console import Console

from wirespeed.report.tables import comparison_table
from wirespeed.spec.comparison import TuneRecord

replace = msgspec.structs.replace


def shown(record: TuneRecord, width: int, *, colour: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None)
    console.print(comparison_table(record, width=width))
    return stream.getvalue()


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.lstrip("* ").startswith(start))


def test_wide_terminal_shows_every_figure_of_a_strategy():
    cells = line_of(shown(make_record(), 120), "int8  ").split("  ")
    assert [cell.strip() for cell in cells if cell.strip()] == [
        "* int8", "201 ms", "192 ms ±3 %", "+4.7 %", "137 ms", "55 ms (29 %)",
        "10.34 MiB", "10.83 MiB", "2.242", "23 s", "2.44x",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int):
    text = shown(make_record(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for name, step, time in (("dense ", "468 ms", "56.2 s"), ("topk@5%", "229 ms", "29.3 s")):
        assert step in line_of(text, name)
        assert time in line_of(text, name)


def test_narrow_terminal_drops_columns_and_keeps_verdicts():
    text = shown(make_record(), 80)
    assert "on wire" not in text
    assert "does not reach dense's loss in 120 steps" in text


def test_reason_points_and_warnings_follow_the_table():
    text = shown(make_record(), 120)
    assert text.index("topk@1%") < text.index("Why: int8 reaches dense's held-out loss soonest")
    assert text.index("Why: ") < text.index("4 of 5 predicted steps") < text.index("Warning: Hosts share 2 cores")


def test_only_the_chosen_strategy_is_starred():
    rows = shown(make_record(), 120).split("Why: ")[0].splitlines()
    # Once in the table, once among the verdicts.
    assert [line.split()[1] for line in rows if line.lstrip().startswith("*")] == ["int8", "int8"]


def test_strategies_that_did_not_run_are_dim():
    dim = "\x1b[2m"
    text = shown(make_record(), 120, colour=True)
    assert dim in next(line for line in text.splitlines() if "dense/4MiB" in line)
    assert dim not in next(line for line in text.splitlines() if "topk@1%" in line)


def test_names_with_markup_are_shown_as_they_are():
    record = make_record()
    outcome = replace(record.strategies[0], name="[red]x[/red]", verdict="[link=http://x]y")
    text = shown(replace(record, strategies=(outcome,)), 120)
    assert "[red]x[/red]" in text
    assert "[link=http://x]y" in text


def test_diverged_loss_is_a_word_and_absent_figures_are_dashes():
    record = make_record()
    points = tuple(replace(point, loss=math.inf) for point in make_losses(0.2))
    bad = make_outcome("topk@1%", predicted_s=0.2, measured_s=0.2, exposed_s=0.1, losses=points, final_loss=None)
    line = line_of(shown(replace(record, strategies=(bad,)), 120), "topk@1%")
    assert "diverged" in line
    assert line.split()[-2:] == ["–", "–"]


def test_record_without_strategies_still_prints():
    text = shown(replace(make_record(), strategies=(), chosen="", reason=""), 80)
    assert "No strategy was measured, so none was chosen." in text
    assert "no reason was recorded" in text


def with_many_predicted(record: TuneRecord) -> TuneRecord:
    # dense/1MiB is predicted to take 300 ms, dense/2MiB 301 ms, ...
    predicted = tuple(
        make_outcome(
            f"dense/{n}MiB", predicted_s=0.299 + n / 1e3, measured_s=None, exposed_s=0.1, verdict="predicted only"
        )
        for n in range(1, 20)
    )
    return replace(record, strategies=(*record.strategies[:5], *reversed(predicted)))


def test_of_many_predicted_strategies_the_fastest_are_shown_and_the_rest_counted():
    text = shown(with_many_predicted(make_record()), 120)
    names = [line.split()[0] for line in text.splitlines() if line.startswith("   dense/")]
    assert names == ["dense/4MiB", "dense/3MiB", "dense/2MiB", "dense/1MiB"]
    assert "and 15 more strategies that were only predicted" in text
    assert "predicted only" not in text
