"""The page of a plan: tables and plots of predictions in one file that needs no network.

Same shell, style and plotting code as the report of `tune`: texts are escaped, figures lie in the page as JSON, and a
content security policy forbids every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wirespeed import records
from wirespeed.report import markup
from wirespeed.report.plots import plain

PALETTE = ("#3f78ab", "#7fb3d9", "#c8437f", "#d55e00", "#009e73", "#6d6a9c", "#c9b458", "#8c8c8c", "#56b4e9", "#cc79a7")


def write_plan(
    path: str | Path,
    *,
    title: str,
    lead: str,
    tables: Iterable[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = (),
    figures: Iterable[tuple[str, dict[str, Any]]] = (),
    notes: Iterable[str] = (),
) -> Path:
    """Write the page as one step: ``tables`` are (title, headings, rows), ``figures`` (label, plotly figure)."""
    held: dict[str, dict[str, Any]] = {}
    body = [f"<header><h1>{markup.text(title)}</h1>\n<p class='lead'>{markup.text(lead)}</p></header>\n"]
    for label, figure in figures:
        name = f"figure{len(held)}"
        held[name] = figure
        height = figure["layout"]["height"]
        body.append(
            f'<section><h2>{markup.text(label)}</h2><figure role="img" aria-label="{markup.text(label)}">'
            f'<div id="{name}" style="min-height:{height}px"></div></figure></section>\n'
        )
    for label, headings, rows in tables:
        head = "".join(f"<th>{markup.text(heading.removesuffix('<'))}</th>" for heading in headings)
        lines = "".join("<tr>" + "".join(f"<td>{markup.text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
        body.append(
            f'<section><h2>{markup.text(label)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{lines}</tbody></table></div></section>\n"
        )
    items = "".join(f"<li>{markup.text(note)}</li>" for note in notes)
    if items:
        body.append(f"<section><h2>In words</h2><ul>{items}</ul></section>\n")
    page = markup.page(f"{title} - wirespeed", "".join(body), figures=held)
    return records.write_bytes(path, page.encode())


def stacked_bars(labels: Sequence[str], parts: Sequence[dict[str, float]], *, unit: str = "s") -> dict[str, Any]:
    """Horizontal bars of parts, one bar per label."""
    names = list(dict.fromkeys(name for one in parts for name in one))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(name),
            "y": [plain(label) for label in labels],
            "x": [one.get(name, 0.0) for one in parts],
            "marker": {"color": PALETTE[place % len(PALETTE)]},
        }
        for place, name in enumerate(names)
    ]
    return {
        "data": traces,
        "layout": {
            "barmode": "stack",
            "height": 120 + 34 * len(labels),
            "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "automargin": True},
            "legend": {"orientation": "h"},
            "margin": {"l": 10, "r": 10, "t": 30, "b": 40},
        },
    }


def lines(
    x: Sequence[float], series: Mapping[str, Sequence[float]], *, x_title: str, y_title: str, is_log: bool = False
) -> dict[str, Any]:
    """Curves over common x."""
    kind = "log" if is_log else "linear"
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(name),
                "x": list(x),
                "y": list(values),
                "line": {"color": PALETTE[place % len(PALETTE)]},
            }
            for place, (name, values) in enumerate(series.items())
        ],
        "layout": {
            "height": 420,
            "xaxis": {"title": {"text": x_title}, "type": kind},
            "yaxis": {"title": {"text": y_title}, "type": kind},
            "legend": {"orientation": "h"},
            "margin": {"l": 60, "r": 10, "t": 30, "b": 50},
        },
    }
