"""What happens to logs on their way: cut, interleaved byte by byte, laced with binary rubbish, coloured, joined."""

from __future__ import annotations

import random
from collections.abc import Callable


def cut_lines(text: bytes, source: random.Random) -> bytes:
    """Some lines end early, as when a process dies or a quota is reached."""
    lines = text.split(b"\n")
    return b"\n".join(line[: source.randrange(len(line) + 1)] if source.random() < 0.05 else line for line in lines)


def cut_ends(text: bytes, source: random.Random) -> bytes:
    """The file begins and ends anywhere."""
    first = source.randrange(len(text) // 2 + 1)
    return text[first : source.randrange(first, len(text) + 1)]


def interleave(text: bytes, source: random.Random) -> bytes:
    """Two ranks write into one pipe without line buffering: a piece of one line stands inside another."""
    lines = text.split(b"\n")
    for index in range(0, len(lines) - 1, 2):
        if source.random() < 0.1:
            at = source.randrange(len(lines[index]) + 1)
            lines[index] = lines[index][:at] + lines[index + 1] + lines[index][at:]
            lines[index + 1] = b""
    return b"\n".join(lines)


def lace(text: bytes, source: random.Random) -> bytes:
    """Bytes of a crash dump or a terminal between the lines."""
    lines = text.split(b"\n")
    for index in range(len(lines)):
        if source.random() < 0.03:
            lines[index] += source.randbytes(source.randrange(1, 200))
    return b"\n".join(lines)


def join(text: bytes, source: random.Random) -> bytes:
    """Line ends are lost, or become those of another system."""
    pieces = text.split(b"\n")
    return b"".join(piece + source.choice((b"\n", b"\n", b"\n", b"\r\n", b"\r", b"")) for piece in pieces)


def shuffle(text: bytes, source: random.Random) -> bytes:
    """The lines of several ranks in any order."""
    lines = text.split(b"\n")
    source.shuffle(lines)
    return b"\n".join(lines)


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut_lines, cut_ends, interleave, lace, join, shuffle)
