"""The figures of the report, as plotly's own JSON: plain data, so that making them needs no plotting library.

Every figure takes its ink from the page ("ink", "paper" and "grid" are set there for light, dark and print), so none is
set here. A codec keeps its colour in all figures, and strategies of one codec differ in dash and marker as well, so
that nothing rests on colour alone. The palette is Okabe and Ito's, which colour-blind readers can tell apart
(https://jfly.uni-koeln.de/color/). Values that are not finite are left out, never drawn as zero.
"""

from __future__ import annotations

import html
import math
from typing import Any

from wirespeed.report.summary import PREDICTION_BAND, Row, finite, outcome_losses
from wirespeed.spec.comparison import MeasuredFabric, TuneRecord
from wirespeed.units import MIB, format_duration, format_rate, format_size

Figure = dict[str, Any]

CODEC_COLOURS = {
    "dense": "#8c8c8c",
    "half": "#3b8fd0",
    "int8": "#d55e00",
    "int4": "#a6611a",
    "lowrank": "#cc79a7",
    "topk": "#009e73",
    "sign": "#6a3d9a",
}
OTHER_COLOURS = ("#7b5ea7", "#b8860b", "#56b4e9")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")

PARTS: tuple[tuple[str, str, str], ...] = (
    ("data", "data_s", "#c9b458"),
    ("forward", "forward_s", "#7fb3d9"),
    ("backward", "backward_s", "#3f78ab"),
    ("exposed communication", "exposed_s", "#c8437f"),
    ("optimizer", "optimizer_s", "#6d6a9c"),
    ("other", "other_s", "#a8a8a8"),
)
"""Parts of the step in the order in which they happen, with their colours: cool for compute, warm for waiting."""

MAX_MARKERS = 60
"""Points of a curve up to which each is marked."""
MAX_CELLS_WITH_TEXT = 16 * 16


def plain(text: str) -> str:
    """Text that plotly shows as it stands: its labels understand a little HTML, which a name must not reach."""
    return html.escape(text, quote=False)


def styles(names_and_codecs: list[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Colour, dash and marker per strategy: colour by codec, the rest by order within the codec."""
    seen: dict[str, int] = {}
    unknown: list[str] = []
    chosen: dict[str, dict[str, str]] = {}
    for name, codec in names_and_codecs:
        order = seen[codec] = seen.get(codec, -1) + 1
        if codec not in CODEC_COLOURS and codec not in unknown:
            unknown.append(codec)
        colour = CODEC_COLOURS.get(codec) or OTHER_COLOURS[unknown.index(codec) % len(OTHER_COLOURS)]
        chosen[name] = {
            "color": colour,
            "dash": DASHES[order % len(DASHES)],
            "symbol": SYMBOLS[order % len(SYMBOLS)],
        }
    return chosen


def step_breakdown(record: TuneRecord, rows: tuple[Row, ...]) -> Figure | None:
    """Stacked bars: where a step's time goes per strategy, with the predicted step as a mark. Milliseconds."""
    outcomes = {outcome.name: outcome for outcome in record.strategies}
    pairs = [(outcomes[row.name], row) for row in rows]
    shown = [(o, row) for o, row in pairs if o.breakdown is not None or row.predicted_step_s is not None]
    if not shown:
        return None
    labels = [_label(row) for _, row in shown]
    traces: list[Figure] = []
    for part, field, colour in PARTS:
        values = [None if o.breakdown is None else finite(getattr(o.breakdown, field)) for o, _ in shown]
        if not any(values):
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": labels,
                "x": [None if value is None else value * 1e3 for value in values],
                "text": ["" if value is None else format_duration(value) for value in values],
                "textposition": "none",
                "hovertemplate": f"%{{y}}<br>{part}: %{{text}}<extra></extra>",
                "marker": {"color": colour, "line": {"width": 0}},
            }
        )
    predicted = [row.predicted_step_s for _, row in shown]
    if any(value is not None for value in predicted):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "predicted step",
                "y": labels,
                "x": [None if value is None else value * 1e3 for value in predicted],
                "text": ["" if value is None else format_duration(value) for value in predicted],
                "hovertemplate": "%{y}<br>predicted step: %{text}<extra></extra>",
                "marker": {
                    "symbol": "diamond-tall",
                    "size": 13,
                    "color": "paper",
                    "line": {"width": 2, "color": "ink"},
                },
            }
        )
    return {
        "data": traces,
        "layout": {
            "barmode": "stack",
            "showlegend": True,
            "bargap": 0.38,
            "height": 130 + 44 * len(shown),
            "xaxis": {"title": {"text": "milliseconds per step"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category", "showgrid": False},
            "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
            "margin": {"t": 44, "b": 50},
        },
    }


def loss_curves(record: TuneRecord, *, against: str) -> Figure | None:
    """Loss of every strategy against ``"time"`` (seconds of training) or ``"step"``, with the target as a line."""
    looks = styles([(o.name, o.strategy.codec) for o in record.strategies])
    traces: list[Figure] = []
    diverged: list[Figure] = []
    for outcome in record.strategies:
        points = outcome_losses(outcome, record.loss_kind)
        good = [point for point in points if point.loss is not None and math.isfinite(point.train_s)]
        if not good:
            continue
        xs = [point.train_s if against == "time" else point.step for point in good]
        look = looks[outcome.name]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(good) <= MAX_MARKERS else "lines",
                "name": plain(outcome.name),
                "x": xs,
                "y": [point.loss for point in good],
                "customdata": [[point.step, format_duration(point.train_s)] for point in good],
                "hovertemplate": "loss %{y:.4g} at step %{customdata[0]}, %{customdata[1]}",
                "line": {"color": look["color"], "dash": look["dash"], "width": 3 if outcome.chosen else 1.8},
                "marker": {"symbol": look["symbol"], "size": 6},
            }
        )
        if len(good) < len(points):
            diverged.append(
                {
                    "x": xs[-1],
                    "y": good[-1].loss,
                    "text": "not finite after this",
                    "showarrow": True,
                    "arrowcolor": look["color"],
                    "ax": 0,
                    "ay": 30,
                    "font": {"color": look["color"], "size": 11},
                }
            )
    if not traces:
        return None
    layout: Figure = {
        "height": 380,
        "showlegend": True,
        "xaxis": {
            "title": {"text": "seconds of training" if against == "time" else "step"},
            "rangemode": "tozero",
        },
        "yaxis": {"title": {"text": _loss_name(record)}, "automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 56, "b": 50},
        "annotations": diverged,
    }
    target = finite(record.loss_target)
    heights = [height for trace in traces for height in trace["y"]] + ([] if target is None else [target])
    room = (max(heights) - min(heights)) * 0.09 or 0.1
    layout["yaxis"]["range"] = [min(heights) - room, max(heights) + room / 2]
    if target is not None:
        layout["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": target,
                "y1": target,
                "line": {"color": "ink", "width": 1.4, "dash": "dot"},
            }
        ]
        layout["annotations"] = [
            *diverged,
            {
                "xref": "paper",
                "x": 0.01,
                "y": target,
                "xanchor": "left",
                "yanchor": "top",
                "text": f"where dense ends: {target:.4g}",
                "showarrow": False,
                "font": {"size": 12},
            },
        ]
    return {"data": traces, "layout": layout}


def predicted_against_measured(record: TuneRecord, rows: tuple[Row, ...]) -> Figure | None:
    """One point per measured strategy, with the line of a right prediction and the band of the project's bar. ms."""
    points = [row for row in rows if row.measured_step_s and row.predicted_step_s]
    if not points:
        return None
    looks = styles([(o.name, o.strategy.codec) for o in record.strategies])
    values = [value * 1e3 for row in points for value in (row.measured_step_s, row.predicted_step_s) if value]
    low, high = min(values) * 0.75, max(values) * 1.3
    above, below = 1 + PREDICTION_BAND, 1 - PREDICTION_BAND
    band = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": True}
    traces: list[Figure] = [
        {
            **band,
            "name": f"±{PREDICTION_BAND * 100:.0f} %",
            "x": [low, high, high, low],
            "y": [low * above, high * above, high * below, low * below],
            "fill": "toself",
            "fillcolor": "rgba(128,128,128,0.16)",
            "line": {"width": 0},
        },
        {**band, "name": "exact", "x": [low, high], "y": [low, high], "line": {"color": "ink", "width": 1.2}},
    ]
    for row in points:
        assert row.measured_step_s is not None
        assert row.predicted_step_s is not None
        look = looks[row.name]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(row.name),
                "x": [row.measured_step_s * 1e3],
                "y": [row.predicted_step_s * 1e3],
                "customdata": [[format_duration(row.predicted_step_s), format_duration(row.measured_step_s)]],
                "hovertemplate": "predicted %{customdata[0]}, measured %{customdata[1]}",
                "marker": {
                    "color": look["color"],
                    "symbol": look["symbol"],
                    "size": 14 if row.chosen else 11,
                    "line": {"width": 1.5, "color": "paper"},
                },
            }
        )
    ticks = [digit * 10.0**power for power in range(-6, 9) for digit in (1, 1.5, 2, 3, 4, 5, 7)]
    axis = {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": [tick for tick in ticks if low <= tick <= high],
        "ticktext": [f"{tick:g}" for tick in ticks if low <= tick <= high],
        "automargin": True,
    }
    return {
        "data": traces,
        "layout": {
            "height": 420,
            "xaxis": {**axis, "title": {"text": "measured step, ms"}},
            "yaxis": {**axis, "title": {"text": "predicted step, ms"}},
            "legend": {"orientation": "v", "x": 1.02, "y": 1},
            "margin": {"t": 16, "b": 50},
        },
    }


def link_matrix(fabric: MeasuredFabric) -> Figure | None:
    """Goodput between pairs of hosts, from 0 to the fastest, so that even links look even. Bits per second."""
    rates = [rate for targets in fabric.links.values() for rate in targets.values() if math.isfinite(rate)]
    if not rates:
        return None
    named = [host for source, targets in fabric.links.items() for host in (source, *targets)]
    hosts = [host for host in dict.fromkeys([*fabric.hosts, *named]) if host in named]
    grid = [[finite(fabric.links.get(source, {}).get(target)) for target in hosts] for source in hosts]
    scale, unit = _rate_unit(max(rates))
    values = [[None if rate is None else rate / scale for rate in line] for line in grid]
    labels = [plain(host) for host in hosts]
    return {
        "data": [
            {
                "type": "heatmap",
                "x": labels,
                "y": labels,
                "z": values,
                "zmin": 0,
                "zmax": max(rates) / scale,
                "xgap": 2,
                "ygap": 2,
                "colorscale": [[0, "#3b1f5c"], [0.5, "#2f7f8f"], [0.8, "#7cc28c"], [1, "#e6efb0"]],
                "colorbar": {"title": {"text": unit}, "thickness": 14, "outlinewidth": 0},
                "text": [["" if value is None else f"{value:.3g}" for value in line] for line in values],
                "texttemplate": "%{text}" if len(hosts) ** 2 <= MAX_CELLS_WITH_TEXT else "",
                "customdata": [["" if rate is None else format_rate(rate) for rate in line] for line in grid],
                "hovertemplate": "%{y} to %{x}: %{customdata}<extra></extra>",
                "hoverongaps": False,
            }
        ],
        "layout": {
            "height": 170 + max(36 * len(hosts), 140),
            "xaxis": {"title": {"text": "to"}, "type": "category", "showgrid": False, "automargin": True},
            "yaxis": {
                "title": {"text": "from"},
                "type": "category",
                "autorange": "reversed",
                "showgrid": False,
                "automargin": True,
            },
            "margin": {"t": 16, "b": 50},
        },
    }


def bytes_sent(record: TuneRecord, rows: tuple[Row, ...]) -> Figure | None:
    """What one rank sends per step: as the strategy states it, and as counted on the wire. MiB."""
    shown = [row for row in rows if row.stated_bytes is not None or row.wire_bytes is not None]
    if not shown:
        return None
    looks = styles([(o.name, o.strategy.codec) for o in record.strategies])
    labels = [_label(row) for row in shown]
    traces: list[Figure] = []
    for name, values, opacity in (
        ("stated", [row.stated_bytes for row in shown], 0.4),
        ("counted on the wire", [row.wire_bytes for row in shown], 1.0),
    ):
        if all(value is None for value in values):
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": labels,
                "x": [None if value is None else value / MIB for value in values],
                "text": ["" if value is None else format_size(value) for value in values],
                "textposition": "outside",
                "cliponaxis": False,
                "hovertemplate": f"%{{y}}<br>{name}: %{{text}}<extra></extra>",
                "marker": {"color": [_faded(looks[row.name]["color"], opacity) for row in shown]},
            }
        )
    return {
        "data": traces,
        "layout": {
            "barmode": "group",
            "bargap": 0.3,
            "height": 110 + 48 * len(shown),
            "xaxis": {"title": {"text": "MiB per step and rank"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category", "showgrid": False},
            "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
            "margin": {"t": 44, "b": 50, "r": 90},
        },
    }


def _faded(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def _label(row: Row) -> str:
    name = plain(row.name)
    return f"<b>{name}</b>" if row.chosen else name if row.state == "measured" else f"<i>{name}</i>"


def _loss_name(record: TuneRecord) -> str:
    if record.loss_kind == "training":
        return "training loss"
    return "held-out loss" if any(outcome.losses for outcome in record.strategies) else "training loss"


def _rate_unit(bit_per_s: float) -> tuple[float, str]:
    return (1e9, "Gbit/s") if bit_per_s >= 0.5e9 else (1e6, "Mbit/s")
