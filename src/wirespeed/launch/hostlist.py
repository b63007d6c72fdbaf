"""Host lists as Slurm writes them: ``node[01-64,70]``, ``r[1-2]n[01-03]-ib,login1``.

A number's leading zeros are kept for the whole range. The size is checked before anything is made.
"""

from __future__ import annotations

import itertools
import math
import re

from wirespeed.errors import UsageError

MAX_HOSTS = 100_000
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """The hosts of a list, in order, doubles kept. Raises UsageError for an empty or malformed list."""
    hosts: list[str] = []
    for word in _split(text):
        hosts += _expand_word(word, text, MAX_HOSTS - len(hosts))
    if not hosts:
        raise UsageError(f"got host list {text!r}", expected="at least one host, such as node[01-64,70]")
    return tuple(hosts)


def _split(text: str) -> list[str]:
    """Words between the commas that are outside brackets."""
    words, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise UsageError(f"got host list {text!r}", expected="matching brackets that are not nested")
        if letter == "," and depth == 0:
            words.append(text[start:index])
            start = index + 1
    if depth:
        raise UsageError(f"got host list {text!r}", expected="a ] for every [")
    words = [word.strip() for word in [*words, text[start:]]]
    return [word for word in words if word]


def _expand_word(word: str, text: str, room: int) -> list[str]:
    pieces: list[list[range | str]] = []
    widths: list[list[int]] = []
    end = 0
    for match in _PIECE.finditer(word):
        if match.start() != end:
            break
        end = match.end()
        if match[1] is None:
            pieces.append([match[2]])
            widths.append([0])
        else:
            ranges = [_parse_range(part.strip(), text) for part in match[1].split(",")]
            pieces.append([numbers for numbers, _ in ranges])
            widths.append([width for _, width in ranges])
    if end != len(word):
        raise UsageError(f"got host list {text!r}", expected="names, commas and [ranges]")
    sizes = [sum(1 if isinstance(part, str) else len(part) for part in piece) for piece in pieces]
    if math.prod(sizes) > room:
        raise UsageError(f"got a host list of more than {MAX_HOSTS} hosts", expected="fewer")
    choices = [
        [name for part, width in zip(piece, width_of, strict=True) for name in _names(part, width)]
        for piece, width_of in zip(pieces, widths, strict=True)
    ]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _names(part: range | str, width: int) -> list[str]:
    return [part] if isinstance(part, str) else [f"{number:0{width}d}" for number in part]


def _parse_range(part: str, text: str) -> tuple[range, int]:
    """A range and the width its numbers are padded to."""
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(f"got {part!r} in host list {text!r}", expected="a number or a range such as 01-64")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first or last - first >= MAX_HOSTS:
        raise UsageError(f"got {part!r} in host list {text!r}", expected=f"a rising range below {MAX_HOSTS} hosts")
    return range(first, last + 1), len(match[1])
