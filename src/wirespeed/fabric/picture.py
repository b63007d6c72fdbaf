"""A fabric as one HTML page with a drawing (SVG): opens from disk, loads nothing, follows light and dark.

Width of a line is the rate upwards, on a logarithmic scale; branches that look alike are one box with a shadow. Text is
escaped; there is no script.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from wirespeed.fabric.drawing import Branch, draw
from wirespeed.fabric.topology import Fabric

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 236, 56, 24, 74
_COLOURS = {"switch": "#3f78ab", "group": "#3f78ab", "rack": "#3b8fd0", "router": "#3b8fd0", "host": "#009e73"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --paper: #ffffff; --soft: #5b6570; --grid: #c9d0d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --paper: #14171a; --soft: #a4adb6; --grid: #39414a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1200px; padding: 0 1rem; }
.picture { overflow-x: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .detail { fill: var(--soft); font-size: 11px; } table { border-collapse: collapse; margin-top: 1.5rem; }
td, th { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
"""


def fabric_page(fabric: Fabric, facts: Sequence[tuple[str, str]]) -> str:
    """The page. ``facts`` are rows of a table below the drawing."""
    title = html.escape(fabric.name or "fabric")
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in facts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f'<div class="picture">{fabric_svg(fabric)}</div>'
        f"<p>A box with a shadow stands for several that look alike; a thicker line carries more.</p>"
        f"<table>{rows}</table></body></html>\n"
    )


def fabric_svg(fabric: Fabric) -> str:
    """The drawing alone."""
    root = draw(fabric)
    lines: list[str] = []
    boxes: list[str] = []
    width = _place(root, 0.0, 0, lines, boxes)[1]
    height = _depth(root) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    label = html.escape(f"{fabric.name or 'fabric'}: {len(fabric.hosts)} hosts")
    return (
        f'<svg role="img" aria-label="{label}" width="{width + 8:.0f}" height="{height + 12:.0f}" '
        f'viewBox="0 0 {width + 8:.0f} {height + 12:.0f}">{"".join(lines)}{"".join(boxes)}</svg>'
    )


def _depth(branch: Branch) -> int:
    return 1 + max(map(_depth, branch.children), default=0)


def _place(branch: Branch, left: float, level: int, lines: list[str], boxes: list[str]) -> tuple[float, float]:
    """Draw a branch with its left edge at ``left``; gives the middle of its box and the width of all of it."""
    top = level * (BOX_HEIGHT + GAP_Y) + 4
    middles: list[tuple[float, Branch]] = []
    width = 0.0
    for child in branch.children:
        middle, took = _place(child, left + width, level + 1, lines, boxes)
        middles.append((middle, child))
        width += took + GAP_X
    width = max(width - GAP_X, BOX_WIDTH)
    middle = (middles[0][0] + middles[-1][0]) / 2 if middles else left + BOX_WIDTH / 2
    for at, child in middles:
        lines.append(
            f'<line x1="{middle:.1f}" y1="{top + BOX_HEIGHT}" x2="{at:.1f}" y2="{top + BOX_HEIGHT + GAP_Y}" '
            f'stroke="{_COLOURS[child.kind]}" stroke-width="{_thickness(child.rate_bit_per_s):.1f}" opacity="0.6"/>'
        )
    boxes.append(_box(branch, middle - BOX_WIDTH / 2, top))
    return middle, width


def _box(branch: Branch, x: float, top: float) -> str:
    colour = _COLOURS[branch.kind]
    shape = f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7" fill="var(--paper)" stroke="{colour}"'
    shadow = f'<rect x="{x + 5:.1f}" y="{top + 5}" {shape} opacity="0.6"/>' if len(branch.names) > 1 else ""
    words = _wrap(branch.detail, 38)
    detail = "".join(
        f'<text class="detail" x="{x + 10:.1f}" y="{top + 35 + 13 * i}">{html.escape(line)}</text>'
        for i, line in enumerate(words)
    )
    return (
        f"<g><title>{html.escape(f'{branch.title}: {branch.detail}')}</title>{shadow}"
        f'<rect x="{x:.1f}" y="{top}" {shape} stroke-width="1.6"/>'
        f'<text x="{x + 10:.1f}" y="{top + 19}">{html.escape(_cut(branch.title, 34))}</text>{detail}</g>'
    )


def _wrap(text: str, width: int) -> list[str]:
    if len(text) <= width:
        return [text]
    at = text.rfind(" ", 0, width + 1)
    at = width if at < 1 else at
    return [text[:at], _cut(text[at:].strip(), width)]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _thickness(bit_per_s: float | None) -> float:
    # 1 Gbit/s is 1.5 points wide and each factor of ten adds two; a line of unknown rate is thin.
    return 1.0 if bit_per_s is None else max(1.0, min(14.0, 1.5 + 2 * math.log10(max(bit_per_s, 1e8) / 1e9)))
