"""How commands speak: what goes to stdout, what to stderr, and in which form."""

from __future__ import annotations

import json

import pytest
from report_records import make_record

from wirespeed import records
from wirespeed.cli import render


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_pipe_gets_plain_text_at_full_width(capsys):
    render.show(render.make_table(["strategy", "verdict<"], [["int8", "v" * 90]], title="title"))
    out = capsys.readouterr().out
    assert "v" * 90 in out
    assert "\x1b" not in out


def test_columns_of_the_environment_outrank_the_width_of_a_pipe(monkeypatch):
    monkeypatch.setenv("COLUMNS", "77")
    assert render.stdout_console().width == 77


def test_cells_and_news_are_text_and_never_markup(capsys):
    render.show(render.make_table(["name"], [["[red]x[/red]"]]))
    render.say("[bold]y[/bold]")
    captured = capsys.readouterr()
    assert "[red]x[/red]" in captured.out
    assert captured.err == "[bold]y[/bold]\n"


def test_record_is_printed_as_it_would_be_written(capsys):
    render.print_json(make_record())
    assert capsys.readouterr().out.encode() == records.to_json(make_record())


def test_other_documents_are_one_json_document_too(capsys):
    render.print_json({"a": 1})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": 1}
    assert out.endswith("}\n")
