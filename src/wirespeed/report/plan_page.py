"""The page of a plan: tables and plots of predictions in one file that needs no network.

Same shell, style and plotting code as the report of `tune`: texts are escaped, figures lie in the page as JSON, and a
content security policy forbids every request.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from wirespeed import records
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
    from plotly.offline import get_plotlyjs

    held: dict[str, dict[str, Any]] = {}
    body = [f"<header><h1>{_text(title)}</h1>\n<p class='lead'>{_text(lead)}</p></header>\n"]
    for label, figure in figures:
        name = f"figure{len(held)}"
        held[name] = figure
        height = figure["layout"]["height"]
        body.append(
            f'<section><h2>{_text(label)}</h2><figure role="img" aria-label="{_text(label)}">'
            f'<div id="{name}" style="min-height:{height}px"></div></figure></section>\n'
        )
    for label, headings, rows in tables:
        head = "".join(f"<th>{_text(heading.removesuffix('<'))}</th>" for heading in headings)
        lines = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
        body.append(
            f'<section><h2>{_text(label)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{lines}</tbody></table></div></section>\n"
        )
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    if items:
        body.append(f"<section><h2>In words</h2><ul>{items}</ul></section>\n")
    data = json.dumps(held, allow_nan=False).replace("<", "\\u003c")
    nonce = hashlib.sha256(("".join(body) + data).encode()).hexdigest()[:32]
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)} - wirespeed</title>\n"
        f'<link rel="icon" href="data:,">\n<style>\n{_asset("report.css")}</style>\n</head>\n<body>\n{"".join(body)}'
        f'<script type="application/json" id="figures">{data}</script>\n'
        f'<script nonce="{nonce}">{get_plotlyjs()}</script>\n'
        f'<script nonce="{nonce}">\n{_asset("report.js")}</script>\n</body>\n</html>\n'
    )
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


def _asset(name: str) -> str:
    return resources.files("wirespeed.report").joinpath("assets", name).read_text(encoding="utf-8")


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
