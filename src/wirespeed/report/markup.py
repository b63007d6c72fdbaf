"""The frame of every page: one file that asks the network for nothing, and markup in which a text stays a text.

Texts come from logs, other hosts and scripts' names, so all of them are escaped here; only what is called markup is
not.
The content security policy forbids every request, and every script that does not carry the page's own nonce.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

from wirespeed.records import Record


def page(
    title: str,
    body: str,
    *,
    styles: Sequence[str] = ("report.css",),
    body_class: str = "",
    figures: Mapping[str, object] | None = None,
) -> str:
    """A whole page around ``body``, which is markup; the same arguments give the same bytes.

    ``figures``: Plotly figures by the id of the element that each is drawn into. None: the page runs no script at all.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    scripts = ""
    if figures is not None:
        from plotly.offline import get_plotlyjs

        data = data_of(figures)
        # A script of the page carries this; one that slipped in through a text does not, and is not run.
        nonce = hashlib.sha256((title + body + data).encode()).hexdigest()[:32]
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        )
        scripts = (
            f'<script type="application/json" id="figures">{data}</script>\n'
            f'<script nonce="{nonce}">{get_plotlyjs()}</script>\n'
            f'<script nonce="{nonce}">\n{asset("report.js")}</script>\n'
        )
    opening = f'<body class="{body_class}">' if body_class else "<body>"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{text(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{''.join(map(asset, styles))}</style>\n</head>\n{opening}\n{body}{scripts}</body>\n</html>\n"
    )


def footer(record: Record) -> str:
    """Which version made the page, and from a record of when."""
    version = record.environment.versions.get("wirespeed", "")
    return f"<footer>Made by wirespeed {text(version)} from a record of {text(record.created)}.</footer>\n"


def asset(name: str) -> str:
    """A style sheet or script that ships with the package."""
    return resources.files("wirespeed.report").joinpath("assets", name).read_text(encoding="utf-8")


def text(value: object) -> str:
    """Escaped, for an element or an attribute."""
    return html.escape(str(value), quote=True)


def prose(value: str) -> str:
    """Escaped text whose numbers stay in one line with their units."""
    return re.sub(r"(?<=\d) (?=(?:%|[mun]?s|[KMGT]?i?B|[kMG]?bit/s)(?!\w))", "\u00a0", text(value))


def data_of(value: object) -> str:
    """JSON for a script element: no text of it can end the element."""
    # The escapes read back the same.
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def section(title: str, lead: str, body: str) -> str:
    """A section: ``title`` and ``lead`` are texts, ``body`` is markup."""
    lead_markup = f'<p class="lead">{prose(lead)}</p>\n' if lead else ""
    return f"<section>\n<h2>{text(title)}</h2>\n{lead_markup}{body}</section>\n"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A table of names and values; a name without a value is left out."""
    lines = "".join(
        f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>\n' for name, value in pairs if value
    )
    return f'<div class="scroll"><table class="facts"><tbody>\n{lines}</tbody></table></div>\n'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts; the first cell of a row names it."""
    head = "".join(f'<th scope="col">{text(heading)}</th>' for heading in headings)
    lines = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>' + "".join(f"<td>{text(cell)}</td>" for cell in row[1:]) + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="words"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{lines}</tbody></table></div>\n"
    )


def items(texts: Iterable[str]) -> str:
    """A list of texts; nothing where there are none."""
    lines = "".join(f"<li>{prose(item)}</li>" for item in texts)
    return f"<ul>{lines}</ul>\n" if lines else ""
