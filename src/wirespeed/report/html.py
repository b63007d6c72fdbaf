"""``report.html``: one file that needs no network, read by someone who was not there.

It opens from disk, holds its own plotting code, and forbids itself every request by its content security policy. Every
text of a record is escaped: names of scripts and hosts come from elsewhere. The figures lie in the page as JSON, and
the page draws them in the colours of light, dark or paper.
"""

from __future__ import annotations

import math
from pathlib import Path

from wirespeed import records
from wirespeed.report import markup, plots, tables
from wirespeed.report.summary import PREDICTION_BAND, Row, Summary, finite, share_text, split_rows, summarize
from wirespeed.spec.comparison import TuneRecord
from wirespeed.spec.strategy_file import StrategyFile, strategy_text
from wirespeed.units import format_duration, format_rate

Figures = dict[str, plots.Figure]


def write_report(path: str | Path, record: TuneRecord) -> Path:
    """Write the page as one step. Raises MissingCapability where the place cannot be written."""
    return records.write_bytes(path, report_page(record).encode())


def report_page(record: TuneRecord) -> str:
    """The whole page. It depends on the record alone: the same record gives the same bytes."""
    summary = summarize(record)
    figures: Figures = {}
    sections = "".join(
        (
            _header(record, summary),
            _notices(summary),
            _reason(summary),
            _comparison(summary),
            _breakdown(record, summary, figures),
            _losses(record, summary, figures),
            _predictions(record, summary, figures),
            _bytes(record, summary, figures),
            _network(record, figures),
            _use(record, summary),
            _origin(record),
        )
    )
    title = f"{record.chosen or 'no strategy'} for {Path(record.script).name} - wirespeed"
    return markup.page(title, f"{sections}{markup.footer(record)}", figures=figures)


def _figure(figures: Figures, name: str, figure: plots.Figure | None, label: str, kind: str = "") -> str:
    if figure is None:
        return ""
    figures[name] = figure
    height = figure["layout"]["height"]
    return (
        f'<figure class="{kind}" role="img" aria-label="{markup.text(label)}">'
        f'<div id="{name}" style="min-height:{height}px"></div></figure>\n'
    )


def _header(record: TuneRecord, summary: Summary) -> str:
    about = (
        f"wirespeed tune <b>{markup.text(record.script)}</b> on {markup.text(record.fabric.num_ranks)} ranks, "
        f"{markup.text(record.fabric.description)}"
    )
    return (
        f'<header>\n<p class="about">{about}</p>\n<h1 id="verdict">{markup.prose(summary.headline)}</h1>\n'
        f"{_tiles(summary)}</header>\n"
    )


def _tiles(summary: Summary) -> str:
    chosen = next((row for row in summary.rows if row.chosen), None)
    if chosen is None:
        return ""
    dense = next((row for row in summary.rows if row.codec == "dense" and row.state == "measured"), None)
    beside = dense if dense is not None and dense.name != chosen.name else None
    tiles = [("chosen strategy", chosen.name, f"fidelity {chosen.fidelity}")]
    if beside is not None and chosen.speed_up is not None:
        detail = f"{tables.duration_text(chosen.time_to_loss_s)}, dense {tables.duration_text(beside.time_to_loss_s)}"
        tiles.append(("reaches dense's loss", f"{chosen.speed_up:.2f}x sooner", detail))
    step_s = chosen.measured_step_s if chosen.measured_step_s is not None else chosen.predicted_step_s
    detail = "" if beside is None else f"dense {tables.duration_text(beside.measured_step_s)}"
    if not detail and chosen.predicted_step_s is not None and chosen.measured_step_s is not None:
        detail = f"predicted {format_duration(chosen.predicted_step_s)}"
    kind = "step" if chosen.state == "measured" else "step, predicted only"
    tiles.append((kind, tables.duration_text(step_s), detail))
    if chosen.exposed_share is not None:
        detail = "" if beside is None or beside.exposed_share is None else f"dense {share_text(beside.exposed_share)}"
        detail = f"of the step; {detail}" if detail else f"of the step, {tables.duration_text(chosen.exposed_s)}"
        tiles.append(("waiting for the network", share_text(chosen.exposed_share), detail))
    sent = chosen.wire_bytes if chosen.wire_bytes is not None else chosen.stated_bytes
    if sent is not None and len(tiles) < 5:
        sent_beside = None if beside is None else beside.wire_bytes
        detail = "per rank" if sent_beside is None else f"per rank; dense {tables.size_text(sent_beside)}"
        tiles.append(("sent per step", tables.size_text(sent), detail))
    return (
        '<dl class="tiles">\n'
        + "".join(
            f'<div class="tile{" chosen" if index == 0 else ""}"><dt>{markup.text(name)}</dt>'
            f'<dd class="value">{markup.text(value)}</dd><dd class="detail">{markup.text(detail)}</dd></div>\n'
            for index, (name, value, detail) in enumerate(tiles)
        )
        + "</dl>\n"
    )


def _notices(summary: Summary) -> str:
    notices = ""
    if not summary.is_complete:
        notices += (
            '<div class="notice" id="incomplete"><h2>Not complete</h2><p>The comparison was stopped before its end. '
            "What is shown was really measured; what is missing did not run.</p></div>\n"
        )
    if summary.warnings:
        notices += f'<div class="notice" id="warnings"><h2>Mind</h2>{markup.items(summary.warnings)}</div>\n'
    return notices


def _reason(summary: Summary) -> str:
    points = [point for point in summary.points if not point.startswith("The comparison was stopped")]
    return markup.section(
        "Why", "", f"<p>{markup.prose(summary.reason or 'No reason was recorded.')}</p>\n{markup.items(points)}"
    )


_COLUMNS = (
    "step predicted",
    "step measured",
    "prediction error",
    "compute",
    "exposed communication",
    "bytes stated",
    "bytes on the wire",
    "final loss",
    "time to dense's loss",
    "vs dense",
)


def _comparison(summary: Summary) -> str:
    if not summary.rows:
        return markup.section("Comparison", "No strategy was run.", "")
    looks = plots.styles([(row.name, row.codec) for row in summary.rows])
    heads = "".join(f'<th scope="col">{markup.text(column)}</th>' for column in _COLUMNS)
    rows, rest = split_rows(summary.rows)
    body = "".join(_table_row(row, looks[row.name]["color"]) for row in rows)
    return markup.section(
        "Comparison",
        "Medians over steps, on the same script with the same seed. Bytes are per step and rank. Strategies in italics "
        "were predicted, not run.",
        '<div class="scroll"><table id="comparison"><thead><tr><th scope="col">strategy</th>'
        f"{heads}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n{_more(rest)}",
    )


def _more(rest: tuple[Row, ...]) -> str:
    if not rest:
        return ""
    fastest_first = sorted(rest, key=lambda row: row.predicted_step_s or math.inf)
    body = "".join(
        f'<tr class="predicted"><th scope="row">{markup.text(row.name)}</th>'
        f"<td>{markup.text(tables.duration_text(row.predicted_step_s))}</td><td>{markup.text(tables.exposed_text(row))}</td>"
        f"<td>{markup.text(tables.size_text(row.stated_bytes))}</td></tr>\n"
        for row in fastest_first
    )
    return (
        f"<details><summary>{len(rest)} more strategies that were only predicted</summary>\n"
        '<div class="scroll"><table class="narrow"><thead><tr><th scope="col">strategy</th>'
        '<th scope="col">step predicted</th><th scope="col">exposed communication</th>'
        f'<th scope="col">bytes stated</th></tr></thead>\n<tbody>\n{body}</tbody></table></div></details>\n'
    )


def _table_row(row: Row, colour: str) -> str:
    cells = (
        tables.duration_text(row.predicted_step_s),
        tables.measured_text(row),
        tables.error_text(row.prediction_error),
        tables.duration_text(row.compute_s),
        tables.exposed_text(row),
        tables.size_text(row.stated_bytes),
        tables.size_text(row.wire_bytes),
        tables.loss_text(row),
        tables.duration_text(row.time_to_loss_s),
        tables.speed_up_text(row),
    )
    kind = "chosen" if row.chosen else row.state
    tag = '<span class="tag">chosen</span>' if row.chosen else ""
    return (
        f'<tr class="{kind}"><th scope="row"><span class="swatch" style="background:{colour}"></span>'
        f"{markup.text(row.name)}{tag}<small>{markup.text(row.verdict)}</small></th>"
        f"{''.join(f'<td>{markup.text(cell)}</td>' for cell in cells)}</tr>\n"
    )


def _breakdown(record: TuneRecord, summary: Summary, figures: Figures) -> str:
    figure = plots.step_breakdown(record, split_rows(summary.rows)[0])
    if figure is None:
        return ""
    return markup.section(
        "Where a step's time goes",
        "Exposed communication is the time in which nothing is computed because gradients are on their way. "
        "The diamond is the step that was predicted before the run.",
        _figure(figures, "step-breakdown", figure, "Stacked bars of the parts of a step, per strategy"),
    )


def _losses(record: TuneRecord, summary: Summary, figures: Figures) -> str:
    by_time = plots.loss_curves(record, against="time")
    if by_time is None:
        return markup.section(
            "Does it still learn?", "No losses were seen in this run, so nothing is known about it.", ""
        )
    lead = "Lower and further left is better. "
    if summary.loss_target is not None:
        lead += f"The dotted line is the loss that dense ends with, {summary.loss_target:.4g}. "
    if record.loss_kind == "training":
        lead += "Curves are as recorded; times to the target rest on their running median. "
    lead += "Time is training time: evaluation is not counted. By step, equal curves mean that nothing is lost."
    body = _figure(figures, "loss-time", by_time, "Loss against training time, per strategy") + _figure(
        figures, "loss-step", plots.loss_curves(record, against="step"), "Loss against step, per strategy"
    )
    return markup.section("Does it still learn?", lead, f'<div class="pair">\n{body}</div>\n')


def _predictions(record: TuneRecord, summary: Summary, figures: Figures) -> str:
    figure = plots.predicted_against_measured(record, summary.rows)
    if figure is None:
        return ""
    return markup.section(
        "Was the prediction right?",
        f"On the line it was; within the band it was off by at most {PREDICTION_BAND * 100:.0f} %. Above the line the "
        "step was faster than predicted, below it slower.",
        _figure(figures, "prediction", figure, "Predicted step against measured step", "narrow"),
    )


def _bytes(record: TuneRecord, summary: Summary, figures: Figures) -> str:
    figure = plots.bytes_sent(record, split_rows(summary.rows)[0])
    if figure is None:
        return ""
    return markup.section(
        "What crosses the network",
        "Stated is what the strategy says a rank sends; counted on the wire has headers and retransmissions in it.",
        _figure(figures, "bytes", figure, "Bytes per step, per strategy"),
    )


def _network(record: TuneRecord, figures: Figures) -> str:
    fabric = record.fabric
    rates = [(rate, a, b) for a, targets in fabric.links.items() for b, rate in targets.items() if finite(rate)]
    facts = [
        ("network", fabric.description),
        ("hosts", f"{len(fabric.hosts)}: {', '.join(fabric.hosts)}"),
        ("ranks", str(fabric.num_ranks)),
        ("goodput between pairs, median", _rate(fabric.link_bit_per_s)),
        ("declared rate", _rate(fabric.declared_bit_per_s)),
        ("round trip", tables.duration_text(finite(fabric.rtt_s))),
    ]
    if rates:
        slowest = min(rates)
        facts.append(("slowest pair", f"{slowest[1]} to {slowest[2]}: {format_rate(slowest[0])}"))
    figure = plots.link_matrix(fabric)
    lead = "Goodput from each host to each other, measured before the runs." if figure is not None else ""
    return markup.section(
        "The network under it",
        lead,
        markup.facts(facts) + _figure(figures, "links", figure, "Goodput between all pairs of hosts", "narrow"),
    )


def _rate(bit_per_s: float | None) -> str:
    value = finite(bit_per_s)
    return tables.ABSENT if value is None else format_rate(value)


def _use(record: TuneRecord, summary: Summary) -> str:
    chosen = next((o for o in record.strategies if o.name == summary.chosen or o.chosen), None)
    if chosen is None:
        return ""
    row = next(row for row in summary.rows if row.name == chosen.name)
    if chosen.strategy.codec == "dense" and chosen.name == "dense":
        return markup.section(
            "What to do",
            "Leave the script as it is: dense is what it sends without wirespeed.",
            "",
        )
    held = StrategyFile(
        schema=1,
        strategy=chosen.strategy,
        predicted_step_s=row.predicted_step_s,
        measured_step_s=row.measured_step_s,
        note=record.reason,
    )
    code = 'from wirespeed.train import attach\n\nattach(model, strategy="strategy.toml")  # model: after DDP(model)'
    return markup.section(
        f"How to use {chosen.name}",
        "Keep this as strategy.toml (tune has written it beside this report) and add one line to the script, "
        "after the model is wrapped in DistributedDataParallel.",
        f"<h3>strategy.toml</h3><pre>{markup.text(strategy_text(held))}</pre>\n"
        f"<h3>the script</h3><pre>{markup.text(code)}</pre>\n",
    )


def _origin(record: TuneRecord) -> str:
    environment = record.environment
    facts = [
        ("script", " ".join((record.script, *record.arguments))),
        ("fidelity allowed", record.fidelity),
        ("host", environment.host),
        ("kernel", environment.kernel),
        ("CPU", f"{environment.cpu or 'unknown'}, {environment.num_cpus} used"),
        ("NICs", ", ".join(f"{name}: {what}" for name, what in environment.nics.items()) or "unknown"),
        ("versions", ", ".join(f"{name} {version}" for name, version in environment.versions.items())),
        ("git commit", environment.git_commit or "unknown"),
        ("made", record.created),
    ]
    return markup.section(
        "How this was measured",
        "The command makes it again.",
        f"<pre>{markup.text(environment.command)}</pre>\n{markup.facts(facts)}",
    )
