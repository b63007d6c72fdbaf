"""``wirespeed report``: show a comparison that `wirespeed tune` recorded, in the terminal or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wirespeed import records
from wirespeed.cli import render
from wirespeed.spec.comparison import TuneRecord


def report(
    record_file: Annotated[
        Path, typer.Argument(metavar="TUNE.JSON", help="A record that `wirespeed tune` wrote.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Also write the comparison as one HTML page.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """Show what `wirespeed tune` found: the table, the choice and why, and a page to pass on.

    The page is one file that opens from disk and needs no network.

    Examples:

      wirespeed report out/demo/tune.json

      wirespeed report out/demo/tune.json -o report.html

      wirespeed report out/demo/tune.json --json | jq -r .headline
    """
    from wirespeed.report.html import write_report
    from wirespeed.report.summary import summarize
    from wirespeed.report.tables import comparison_table

    record = records.read(record_file, TuneRecord)
    if as_json:
        render.print_json(summarize(record))
    else:
        console = render.stdout_console()
        console.print(comparison_table(record, width=console.width))
    if out is not None:
        render.say(f"wrote {write_report(out, record)}")
