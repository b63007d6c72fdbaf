"""The head of a safetensors file, read without the library: where each tensor lies.

Chunks follow tensors, so the head is needed where no tensor is ever made. Layout: 8 bytes of little-endian length N,
N bytes of JSON, then the tensors' bytes, to which offsets in the JSON refer. Checked are bounds, overlaps and sizes; a
file that is cut short (an interrupted save) is refused here and not pushed.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from wirespeed.errors import DataError
from wirespeed.repo.manifest import Tensor

MAX_HEAD_BYTES = 512 * 1024**2
"""The reference reader stops at 100 MB, which models of a million tensors exceed."""

WIDTHS = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes per element."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What the head says. ``num_bytes`` is where the tensors' bytes begin. Tensors are in order of their offset."""

    num_bytes: int
    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def head_bytes(start: bytes, *, size_bytes: int, source: str) -> int:
    """How long the head is, length field included, from the first 8 bytes of a file. Raises DataError."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= min(MAX_HEAD_BYTES, size_bytes - 8):
        raise DataError(
            f"{source} has {size_bytes} bytes and a head of {length}",
            expected="a safetensors file",
            hint="it is cut short or something else; --as-is pushes it as plain bytes",
        )
    return 8 + length


def parse_head(content: bytes | memoryview, *, size_bytes: int, source: str) -> Head:
    """Read a head of ``content`` (length field included) of a file of ``size_bytes``. Raises DataError."""
    try:
        fields = msgspec.json.decode(bytes(content[8:]).rstrip(b" \0"), type=dict[str, Any])
        metadata = msgspec.convert(fields.pop("__metadata__", {}), dict[str, str])
        entries = msgspec.convert(fields, dict[str, _Entry])
    except (msgspec.MsgspecError, AttributeError, RecursionError) as fault:
        raise DataError(f"{source} has no proper safetensors head: {fault}") from fault
    tensors = []
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        width = WIDTHS.get(entry.dtype)
        if any(extent < 0 for extent in entry.shape) or not 0 <= begin <= end or len(content) + end > size_bytes:
            raise DataError(
                f"{source}: tensor {name!r} lies at {begin} to {end} of {size_bytes - len(content)} bytes",
                hint="the file is cut short: save it again",
            )
        if width is not None and width * math.prod(entry.shape) != end - begin:
            raise DataError(
                f"{source}: tensor {name!r} has {end - begin} bytes for shape {entry.shape} of {entry.dtype}"
            )
        tensors.append(
            Tensor(
                name=name,
                dtype=entry.dtype,
                shape=tuple(entry.shape),
                offset=len(content) + begin,
                num_bytes=end - begin,
            )
        )
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = len(content)
    for tensor in tensors:
        if tensor.offset < end:
            raise DataError(f"{source}: tensor {tensor.name!r} overlaps another")
        end = tensor.offset + tensor.num_bytes
    return Head(num_bytes=len(content), tensors=tuple(tensors), metadata=metadata)


def build_head(tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """A head for tensors (name, dtype, shape, bytes) that follow each other in this order."""
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = msgspec.json.encode(fields)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
