"""Where a file is cut: at its tensors where it has any, else where its content says so.

safetensors: every tensor is cut on its own, every 8 MiB, so that a frozen tensor is found again whatever stands before
it; runs of tiny tensors share a chunk. Other files: a rolling hash over 32 bytes cuts where its top bits are zero
(about 2 MiB apart, 512 KiB to 8 MiB), so that an insertion moves only the cuts near it.

Cut points decide what is shared between versions, never whether bytes are right: they may change between releases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from wirespeed.errors import DataError
from wirespeed.repo.manifest import Tensor
from wirespeed.repo.safetensors import WIDTHS, Head, head_bytes, parse_head

PIECE_BYTES = 8 * 1024**2
"""Of a large tensor, and at most of anything: 140 GB are 17,000 of them, and eight in flight are 64 MiB."""
TINY_BYTES = 64 * 1024
GROUP_BYTES = 1024**2
MIN_CUT_BYTES = 512 * 1024
CUT_BITS = 21
"""A cut is expected every 2^21 bytes."""
_WINDOW = 32


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file. ``key`` finds the same part in another version: (tensor, offset in it), else None."""

    offset: int
    length: int
    width: int = 1
    key: tuple[str, int] | None = None


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a file is cut. ``pieces`` is None where only its content can tell (``cut_stream``)."""

    pieces: tuple[Piece, ...] | None = None
    tensors: tuple[Tensor, ...] = ()


def is_safetensors(path: str) -> bool:
    """By its name."""
    return path.endswith(".safetensors")


def layout_of(path: str, *, handle: int, size_bytes: int) -> Layout:
    """Of an open file. Raises DataError where it is named ``.safetensors`` and is none."""
    if not is_safetensors(path):
        return Layout()
    length = head_bytes(os.pread(handle, 8, 0), size_bytes=size_bytes, source=path)
    head = parse_head(_read(handle, length, path), size_bytes=size_bytes, source=path)
    return Layout(pieces=tuple(_pieces(head, size_bytes)), tensors=head.tensors)


def _read(handle: int, length: int, source: str) -> bytes:
    parts: list[bytes] = []
    done = 0
    while done < length:
        part = os.pread(handle, min(length - done, 1 << 30), done)
        if not part:
            raise DataError(f"{source} became shorter while it was read")
        parts.append(part)
        done += len(part)
    return b"".join(parts)


def _pieces(head: Head, size_bytes: int) -> Iterator[Piece]:
    yield from _plain(0, head.num_bytes)
    end = head.num_bytes
    group: list[Tensor] = []
    for tensor in (t for t in head.tensors if t.num_bytes):
        is_tiny = tensor.num_bytes <= TINY_BYTES
        fits = group and tensor.offset + tensor.num_bytes - group[0].offset <= GROUP_BYTES
        if group and not (is_tiny and fits and tensor.offset == end and tensor.dtype == group[0].dtype):
            yield _group(group)
            group = []
        yield from _plain(end, tensor.offset)
        if is_tiny:
            group.append(tensor)
        else:
            width = WIDTHS.get(tensor.dtype, 1)
            for at in range(0, tensor.num_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, tensor.num_bytes - at)
                yield Piece(offset=tensor.offset + at, length=length, width=width, key=(tensor.name, at))
        end = tensor.offset + tensor.num_bytes
    if group:
        yield _group(group)
    yield from _plain(end, size_bytes)


def _group(tensors: list[Tensor]) -> Piece:
    first, last = tensors[0], tensors[-1]
    length = last.offset + last.num_bytes - first.offset
    return Piece(offset=first.offset, length=length, width=WIDTHS.get(first.dtype, 1), key=(first.name, 0))


def _plain(start: int, end: int) -> Iterator[Piece]:
    for at in range(start, end, PIECE_BYTES):
        yield Piece(offset=at, length=min(PIECE_BYTES, end - at))


def cut_stream(read: Callable[[int, int], memoryview], size_bytes: int) -> Iterator[Piece]:
    """Content-defined pieces of a file that ``read(offset, length)`` gives."""
    start = 0
    while start < size_bytes:
        # What is too short to be cut is not even hashed, as in FastCDC.
        ahead = min(PIECE_BYTES, size_bytes - start)
        length = ahead
        step = 1 << 17
        at = MIN_CUT_BYTES
        while at < ahead:
            window = read(start + at - _WINDOW, min(step, ahead - at) + _WINDOW)
            cut = first_cut(window)
            if cut is not None:
                length = at + cut
                break
            at += len(window) - _WINDOW
        yield Piece(offset=start, length=length)
        start += length


def first_cut(window: memoryview) -> int | None:
    """The first place after its first 32 bytes where the hash of the 32 bytes before it asks for a cut, less 32."""
    if len(window) <= _WINDOW:
        return None
    # The gear hash h[i] = 2 h[i-1] + gear[b[i]] over 32 bits forgets what is 32 bytes back; doubling gives all at once.
    hashes = _GEAR[np.frombuffer(window, np.uint8)]
    for span in (1, 2, 4, 8, 16):
        shifted = np.left_shift(hashes[:-span], np.uint32(span))
        np.add(shifted, hashes[span:], out=shifted)
        hashes = shifted
    found = np.flatnonzero(hashes < np.uint32(1 << (32 - CUT_BITS)))
    found = found[found > 0]
    return int(found[0]) if found.size else None


_GEAR: npt.NDArray[np.uint32] = np.random.Generator(np.random.PCG64(0x57495245)).integers(
    0, 2**32, 256, dtype=np.uint32
)
