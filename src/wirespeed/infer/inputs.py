"""What a batch job reads: files, folders, globs, lists, tar archives and WebDataset shards, as one list of items.

The order is that of the arguments, sorted within each, so that two runs over the same files agree. An item is where its
bytes lie, not the bytes: of an archive, its member's offset. Folders and archives give what looks like an image by its
suffix (a WebDataset sample's other members, such as labels, stay behind); a file named by itself is always taken.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from wirespeed.errors import DataError, UsageError

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".npy"))
_OPENERS: dict[str, Callable[[str], object]] = {
    ".tar": lambda path: Path(path).open("rb"),  # noqa: SIM115 - closed by whoever reads it
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.bz2": bz2.open,
    ".tar.xz": lzma.open,
}
_GLOB = frozenset("*?[")
_MAX_LIST_BYTES = 1 << 30


class Item(NamedTuple):
    """One input. ``offset`` is -1 for a whole file; else the bytes lie in the (decompressed) archive ``path``."""

    key: str
    path: str
    offset: int = -1
    size: int = -1


class Inputs(NamedTuple):
    """All inputs, in order, each once. ``num_repeated``: how many were named again."""

    items: list[Item]
    num_repeated: int


def expand(given: Sequence[str]) -> Inputs:
    """The items that the arguments name. ``@FILE`` is a list with one argument per line.

    Raises UsageError for what is not there or holds nothing, DataError for an archive that cannot be read.
    """
    seen: set[str] = set()
    items: list[Item] = []
    num_repeated = 0
    for text in given:
        found = 0
        for item in _expand_one(text):
            found += 1
            if item.key in seen:
                num_repeated += 1
                continue
            seen.add(item.key)
            items.append(item)
        if not found:
            raise UsageError(
                f"{text} holds no inputs",
                expected=f"files that end in {', '.join(sorted(SUFFIXES))}, or archives of them",
            )
    if not items:
        raise UsageError("got no inputs", expected="files, folders, globs, @lists or tar archives")
    return Inputs(items, num_repeated)


def archive_suffix(path: str) -> str | None:
    """The suffix by which a path is an archive, or None."""
    lower = path.lower()
    return next((suffix for suffix in _OPENERS if lower.endswith(suffix)), None)


def open_archive(path: str) -> BinaryIO:
    """The bytes of an archive, decompressed as they are read. Raises OSError."""
    suffix = archive_suffix(path)
    assert suffix is not None
    return cast(BinaryIO, _OPENERS[suffix](path))


def is_sequential(path: str) -> bool:
    """Whether an archive can only be read from front to back."""
    return archive_suffix(path) not in (None, ".tar")


def _expand_one(text: str) -> Iterator[Item]:
    if text.startswith("@"):
        for line in _lines(text[1:]):
            yield from _expand_one(line)
    elif os.path.isdir(text):
        yield from _folder(text)
    elif os.path.exists(text):
        yield from _file(text)
    elif _GLOB & set(text):
        for path in sorted(glob.glob(text, recursive=True)):
            yield from _folder(path) if os.path.isdir(path) else _file(path)
    else:
        raise UsageError(f"there is no {text}", expected="a file, a folder, a glob, @LIST or a tar archive")


def _lines(path: str) -> list[str]:
    try:
        if os.path.getsize(path) > _MAX_LIST_BYTES:
            raise UsageError(f"{path} is over {_MAX_LIST_BYTES} bytes", expected="a list of inputs, one per line")
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as fault:
        raise UsageError(f"cannot read the list {path}: {fault.strerror}") from fault
    lines = [line for line in text.splitlines() if line.strip()]
    if any(line.startswith("@") for line in lines):
        raise UsageError(f"the list {path} names another list", expected="files, folders, globs and archives")
    return lines


def _folder(path: str) -> Iterator[Item]:
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            whole = os.path.join(folder, name)
            if name.startswith("."):
                continue
            if archive_suffix(name) is not None:
                yield from _members(whole)
            elif _is_image(name):
                yield Item(whole, whole)


def _file(path: str) -> Iterable[Item]:
    return _members(path) if archive_suffix(path) is not None else [Item(path, path)]


def _members(path: str) -> Iterator[Item]:
    try:
        with open_archive(path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                if member.isreg() and _is_image(member.name):
                    yield Item(f"{path}::{member.name}", path, member.offset_data, member.size)
    except (tarfile.TarError, EOFError, lzma.LZMAError) as fault:
        raise DataError(f"{path} is not a tar archive that can be read: {fault}") from fault
    except OSError as fault:
        raise DataError(f"cannot read {path}: {fault.strerror or fault}") from fault


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES
