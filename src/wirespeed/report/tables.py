"""The comparison as a table for a terminal.

All figures come from ``summary``. Made for 100 to 120 columns: where it does not fit, compute and bytes are left
out (the record and the page hold them); a number is never cut. Verdicts and the reason stand below, in full.
"""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wirespeed.report.summary import Row, Summary, split_rows, summarize
from wirespeed.spec.comparison import TuneRecord
from wirespeed.units import format_duration, format_size

ABSENT = "–"
MAX_WIDTH = 124
"""Wider lines are harder to follow than a wrapped note."""

Column = tuple[str, Callable[[Row], str]]


def duration_text(value_s: float | None) -> str:
    """A duration, or a dash where it is unknown."""
    return ABSENT if value_s is None else format_duration(value_s)


def size_text(num_bytes: float | None) -> str:
    """A size, or a dash where it is unknown."""
    return ABSENT if num_bytes is None else format_size(num_bytes)


def error_text(error: float | None) -> str:
    """A signed error: above zero where the prediction was longer than the measurement."""
    return ABSENT if error is None else f"{error * 100:+.1f} %"


def exposed_text(row: Row) -> str:
    """Exposed communication and its share of the step."""
    share = "" if row.exposed_share is None else f" ({row.exposed_share * 100:.0f} %)"
    return duration_text(row.exposed_s) + share


def loss_text(row: Row) -> str:
    """The final loss, or that it stopped being finite."""
    if row.final_loss is not None:
        return f"{row.final_loss:.4g}"
    return "diverged" if row.diverged_at_step is not None else ABSENT


def speed_up_text(row: Row) -> str:
    """How many times sooner than dense."""
    return ABSENT if row.speed_up is None else f"{row.speed_up:.2f}x"


def measured_text(row: Row) -> str:
    """The measured step with its spread."""
    if row.measured_step_s is None or row.measured_spread is None:
        return duration_text(row.measured_step_s)
    return f"{format_duration(row.measured_step_s)} ±{row.measured_spread * 100:.0f} %"


_STRATEGY: Column = ("  strategy", lambda row: f"{'*' if row.chosen else ' '} {row.name}")
_PREDICTED: Column = ("step\npredicted", lambda row: duration_text(row.predicted_step_s))
_MEASURED: Column = ("step\nmeasured", measured_text)
_MEASURED_SHORT: Column = ("step\nmeasured", lambda row: duration_text(row.measured_step_s))
_ERROR: Column = ("pred.\nerror", lambda row: error_text(row.prediction_error))
_COMPUTE: Column = ("\ncompute", lambda row: duration_text(row.compute_s))
_EXPOSED: Column = ("exposed\ncomm.", exposed_text)
_STATED: Column = ("bytes\nstated", lambda row: size_text(row.stated_bytes))
_WIRE: Column = ("bytes\non wire", lambda row: size_text(row.wire_bytes))
_LOSS: Column = ("final\nloss", loss_text)
_TIME: Column = ("to dense's\nloss", lambda row: duration_text(row.time_to_loss_s))
_SPEED_UP: Column = ("vs\ndense", speed_up_text)

_FULL = (_STRATEGY, _PREDICTED, _MEASURED, _ERROR, _COMPUTE, _EXPOSED, _STATED, _WIRE, _LOSS, _TIME, _SPEED_UP)
_MIDDLE = (_STRATEGY, _PREDICTED, _MEASURED_SHORT, _ERROR, _EXPOSED, _WIRE, _LOSS, _TIME, _SPEED_UP)
_NARROW = (_STRATEGY, _PREDICTED, _MEASURED_SHORT, _EXPOSED, _LOSS, _TIME, _SPEED_UP)


def comparison_table(record: TuneRecord, *, width: int | None = None) -> Table:
    """The comparison with its verdicts and the reason below it, for ``width`` columns (default: the terminal's)."""
    summary = summarize(record)
    rows, rest = split_rows(summary.rows)
    columns_available = Console().width if width is None else width
    variants = (_FULL, _MIDDLE, _NARROW)
    columns = next((v for v in variants if _needed_width(v, rows) <= columns_available), _NARROW)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
        title=Text(summary.headline, style="bold"),
        title_justify="left",
        caption=_notes(summary, rows, len(rest)),
        caption_justify="left",
        caption_style="",
        width=min(columns_available, MAX_WIDTH),
    )
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True, overflow="fold")
    for row in rows:
        style = "bold green" if row.chosen else "dim" if row.state == "predicted" else ""
        # Text, not markup: a strategy's name may hold square brackets.
        table.add_row(*(Text(cell(row)) for _, cell in columns), style=style)
    return table


def _needed_width(columns: tuple[Column, ...], rows: tuple[Row, ...]) -> int:
    # Beside its text a column has one space of padding and one of divider.
    widths = (max(cell_len(text) for text in [*heading.split("\n"), *map(cell, rows)]) + 2 for heading, cell in columns)
    return sum(widths) + 1


def _notes(summary: Summary, rows: tuple[Row, ...], num_hidden: int) -> Text:
    notes = Text()
    verdicts = [row for row in rows if row.verdict and row.verdict != "predicted only"]
    longest = max((len(row.name) for row in verdicts), default=0)
    for row in verdicts:
        style = "green" if row.chosen else "dim" if row.state == "predicted" else ""
        notes.append(f"{'*' if row.chosen else ' '} {row.name:<{longest}}  {row.verdict}\n", style=style)
    if num_hidden:
        notes.append(f"  and {num_hidden} more strategies that were only predicted\n", style="dim")
    if verdicts or num_hidden:
        notes.append("\n")
    notes.append("Why: ", style="bold")
    notes.append(summary.reason or "no reason was recorded.")
    for point in summary.points:
        notes.append(f"\n{point}")
    for warning in summary.warnings:
        notes.append("\nWarning: ", style="yellow")
        notes.append(warning)
    return notes
