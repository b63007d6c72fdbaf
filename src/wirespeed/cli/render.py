"""How commands speak: tables for people on stdout, one JSON document for programs, logs and progress on stderr.

Colour follows the terminal and NO_COLOR (rich honours both). Where stdout is a pipe or a file, tables take
``PIPE_WIDTH`` columns, since rich's own guess of 80 would cut them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

import msgspec
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from wirespeed.records import Record, to_json

PIPE_WIDTH = 120


def stdout_console() -> Console:
    """Where results go."""
    return Console(width=_width(sys.stdout.isatty()), highlight=False)


def stderr_console() -> Console:
    """Where logs and progress go."""
    return Console(stderr=True, width=_width(sys.stderr.isatty()), highlight=False)


def _width(is_terminal: bool) -> int | None:
    # COLUMNS, where set, is the user's word and rich follows it.
    return None if is_terminal or os.environ.get("COLUMNS", "").isdigit() else PIPE_WIDTH


def show(renderable: RenderableType) -> None:
    """Print a table or a text on stdout."""
    stdout_console().print(renderable)


def say(message: str) -> None:
    """One line of news on stderr, as it stands: nothing in it is markup."""
    stderr_console().print(Text(message))


def print_json(document: Record | msgspec.Struct | dict[str, object]) -> None:
    """The one JSON document of ``--json``. A record is printed as it would be written."""
    content = to_json(document) if isinstance(document, Record) else _plain_json(document)
    sys.stdout.write(content.decode())
    sys.stdout.flush()


def _plain_json(document: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def make_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """A table in the style of all commands: the first column to the left, all others to the right.

    A heading that ends in ``<`` is left-aligned without it. Cells are text, never markup.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
        title=Text(title, style="bold") if title else None,
        title_justify="left",
    )
    for index, heading in enumerate(headings):
        is_left = index == 0 or heading.endswith("<")
        table.add_column(Text(heading.removesuffix("<")), justify="left" if is_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
