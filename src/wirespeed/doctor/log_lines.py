"""Read a log of any size as blocks of whole lines, in constant memory: plain, gzip, bzip2, xz or zstd.

Compression is told by the first bytes, not by the name. Colour codes are removed. A line longer than a block (1 MiB)
is cut there; a compressed file that ends early gives what could be read, and ``notes`` says so. Text is bytes: logs
hold binary rubbish, and only what is shown to people is decoded.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from wirespeed.errors import DataError, MissingCapability

BLOCK_BYTES = 1024 * 1024
HEAD_BYTES = 64 * 1024
MAX_SHOWN = 400
"""Characters of a line that are kept as evidence."""

_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]{0,200}\x07")
_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Block(NamedTuple):
    """Whole lines of a file. ``first_line`` counts from 1."""

    source: str
    first_line: int
    data: bytes
    is_last: bool


class LogFile:
    """One file, or standard input where the path is ``-``. ``notes`` says what could not be read as it should."""

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self.notes: list[str] = []
        self.num_bytes = 0
        self.is_cut = False
        """The file does not end with a line end, so its last line may be part of one."""

    def head(self) -> bytes:
        """The first bytes, decompressed; empty for standard input, which can be read only once."""
        if self.name == "-":
            return b""
        with self._open() as stream:
            return self._read(stream, HEAD_BYTES)

    def blocks(self) -> Iterator[Block]:
        """The blocks in order. Raises DataError where the file cannot be read at all."""
        line = 1
        carry = b""
        with self._open() as stream:
            while chunk := self._read(stream, BLOCK_BYTES):
                self.num_bytes += len(chunk)
                end = chunk.rfind(b"\n")
                if end < 0:
                    carry += chunk
                    if len(carry) < BLOCK_BYTES:
                        continue
                    data, carry = carry, b""  # one line without an end: cut here
                else:
                    data, carry = carry + chunk[: end + 1], chunk[end + 1 :]
                yield Block(self.name, line, clean(data), False)
                line += data.count(b"\n")
        self.is_cut = bool(carry)
        yield Block(self.name, line, clean(carry), True)

    def whole(self, max_bytes: int) -> bytes:
        """All of it, for formats that are one document. Raises DataError above ``max_bytes``."""
        with self._open() as stream:
            parts: list[bytes] = []
            while chunk := self._read(stream, BLOCK_BYTES):
                self.num_bytes += len(chunk)
                if self.num_bytes > max_bytes:
                    raise DataError(f"{self.name} is over {max_bytes} bytes", expected="one document of that size")
                parts.append(chunk)
        return b"".join(parts)

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self.name == "-":
            yield sys.stdin.buffer
            return
        try:
            with Path(self.name).open("rb") as plain:
                magic = plain.read(6)
                plain.seek(0)
                if magic.startswith(_UTF16):
                    self._note("is UTF-16, and nothing was found in it; hint: iconv -f UTF-16 -t UTF-8")
                yield _decompressed(plain, magic, self.name)
        except OSError as fault:
            raise DataError(
                f"cannot read {self.name}: {fault.strerror or fault}", hint="give a regular file, or - for a pipe"
            ) from fault

    def _read(self, stream: BinaryIO, size: int) -> bytes:
        """Up to ``size`` bytes, fewer only at the end; what could be decompressed before damage is kept."""
        parts: list[bytes] = []
        missing = size
        # One raw read at a time: a read of everything would lose what came before the damage.
        read = getattr(stream, "read1", stream.read)
        while missing > 0:
            try:
                part = read(missing)
            except Exception as fault:
                if not isinstance(fault, EOFError | OSError | zlib.error | lzma.LZMAError) and (
                    type(fault).__name__ != "ZstdError"
                ):
                    raise
                if isinstance(fault, IsADirectoryError):
                    raise
                self._note(f"ends early or is damaged ({fault}): what came before was read")
                break
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _note(self, text: str) -> None:
        if f"{self.name} {text}" not in self.notes:
            self.notes.append(f"{self.name} {text}")


def _decompressed(stream: BinaryIO, magic: bytes, name: str) -> BinaryIO:
    if magic.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    if magic.startswith(_BZIP2):
        return cast(BinaryIO, bz2.BZ2File(stream))
    if magic.startswith(_XZ):
        return cast(BinaryIO, lzma.LZMAFile(stream))
    return _open_zstd(stream, name) if magic.startswith(_ZSTD) else stream


def _open_zstd(stream: BinaryIO, name: str) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        raise MissingCapability(
            f"{name} is zstd-compressed, and the Python package zstandard is not installed",
            hint=f"zstd -dc {name} | wirespeed doctor logs -   (or: pip install zstandard)",
        ) from None
    return cast(BinaryIO, zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(stream))


def clean(data: bytes) -> bytes:
    """Without colour codes."""
    return _COLOUR.sub(b"", data) if b"\x1b" in data else data


def shown(line: bytes) -> str:
    """A line as evidence: printable, without its end, and cut."""
    text = line.decode("utf-8", errors="replace").strip()
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 4] + " ..."
