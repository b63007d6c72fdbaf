"""Reads the code blocks of Markdown files, runs the commands in them, and compares what they print with what is shown.

A ``console`` block holds commands after ``$ `` (a line that ends in a backslash goes on in the next) and, below each,
the first lines of its output. A shown line of ``...`` stands for any lines; nothing shown allows any output.
Numbers, with the unit beside them, are ignored: they differ from machine to machine. A comment above the block changes
what is done with it:

    <!-- not-run: needs a cluster -->     it is not run, for this reason
    <!-- needs: lab -->                   its page is run only where a lab can be made
    <!-- exit: 1 -->                      its last command ends with this exit code
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)[^`]*$")
_NUMBER = re.compile(r"[-+±]?\d[\d.,:]*(?:e[-+]?\d+)?(?: ?(?:%|[mun]?s|[KMGT]?i?B|[kMGT]?bit/s|x)(?![\w/]))?")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command with the output shown below it."""

    text: str
    shown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block. ``line`` counts from 1."""

    path: Path
    line: int
    language: str
    text: str
    not_run: str | None = None
    needs_lab: bool = False
    exit_code: int = 0

    @property
    def commands(self) -> tuple[Command, ...]:
        """The commands of a console block, in order."""
        found: list[tuple[list[str], list[str]]] = []
        goes_on = False
        for line in self.text.splitlines():
            if goes_on:
                found[-1][0].append(line.removeprefix("> ").rstrip("\\"))
            elif line.startswith("$ "):
                found.append(([line[2:].rstrip("\\")], []))
            elif found:
                found[-1][1].append(line)
            goes_on = line.endswith("\\") and (goes_on or line.startswith("$ "))
        return tuple(Command(text="".join(text), shown=tuple(shown)) for text, shown in found)


def read_blocks(path: Path) -> list[Block]:
    """All fenced blocks of a Markdown file."""
    blocks: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    index, comment = 0, ""
    while index < len(lines):
        fence = _FENCE.match(lines[index])
        if fence is None:
            if lines[index].strip():
                comment = lines[index].strip()
            index += 1
            continue
        start, indent = index + 1, len(fence["indent"])
        index = start
        while lines[index].strip() != "```":
            index += 1
        not_run = re.fullmatch(r"<!-- not-run: (.+) -->", comment)
        exit_code = re.fullmatch(r"<!-- exit: (\d+) -->", comment)
        blocks.append(
            Block(
                path=path,
                line=start,
                language=fence["language"],
                text="\n".join(line[indent:] for line in lines[start:index]),
                needs_lab=comment == "<!-- needs: lab -->",
                not_run=None if not_run is None else not_run[1],
                exit_code=0 if exit_code is None else int(exit_code[1]),
            )
        )
        index, comment = index + 1, ""
    return blocks


def shape(line: str) -> str:
    """The line without its numbers and with single spaces: what has to agree."""
    return " ".join(_NUMBER.sub("N", line).split())


def missing_line(shown: tuple[str, ...], printed: str) -> str | None:
    """The first shown line that the output lacks in its place, or None where the output has the shown shape."""
    have = [shape(line) for line in printed.splitlines() if line.strip()]
    at, may_skip = 0, False
    for line in shown:
        if line.strip() == "...":
            may_skip = True
            continue
        wanted = shape(line)
        if not wanted:
            continue
        if may_skip:
            while at < len(have) and have[at] != wanted:
                at += 1
            may_skip = False
        if at == len(have) or have[at] != wanted:
            return line
        at += 1
    return None
