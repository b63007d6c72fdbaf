"""A chunk's change to its base as 8-bit numbers: what an update costs when every weight has moved, and may be rounded.

Of each ``BLOCK`` elements the differences are divided by the largest over 127 and rounded. The version that is made is
what comes out of that, not the files: its digests are those of the rounded weights, and every reader gets the same
bits, since base + scale * code is one multiplication and one addition in fp32, then rounded to the type of the weights.
Nothing is lost for good: the next update is the difference to what was published, so that it makes up for the rounding
of this one, as error feedback does in training.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wirespeed.repo import planes as planes_store

BLOCK = 256
"""Elements of one scale: 4 bytes for 256, 1.6 % on top of the codes."""
_STRIP = 256 * BLOCK
"""Elements worked on at a time: what fits into a core's cache."""
MIN_SHARE = {4: 0.25, 2: 0.5}
"""By element size: below this share of changed elements a sparse difference is as small, and exact."""
DTYPES: tuple[str, ...] = ("F32", "F16", "BF16")

Dtype = Literal["F32", "F16", "BF16"]
Array = npt.NDArray[Any]
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


def quantize(base: memoryview | bytes, new: memoryview | bytes, *, dtype: Dtype) -> tuple[memoryview, bytes] | None:
    """What ``new`` becomes, and the payload that makes it of ``base``. Elements of ``dtype``, as many in both.

    None where it is not worth it: lengths differ, few elements changed, or something is not finite.
    """
    width = WIDTHS[dtype]
    if len(base) != len(new) or len(new) % width or not len(new):
        return None
    old_n, new_n = (np.frombuffer(content, f"<u{width}") for content in (base, new))
    if np.count_nonzero(old_n != new_n) < MIN_SHARE[width] * new_n.size:
        return None
    num_blocks = -(-new_n.size // BLOCK)
    codes = np.zeros(num_blocks * BLOCK, np.int8)
    scales = np.empty(num_blocks, np.float32)
    made = np.empty_like(new_n)
    for start in range(0, new_n.size, _STRIP):
        here = slice(start, min(start + _STRIP, new_n.size))
        blocks = slice(start // BLOCK, -(-here.stop // BLOCK))
        old = _floats(old_n[here], dtype)
        change = np.zeros((blocks.stop - blocks.start) * BLOCK, np.float32)
        np.subtract(_floats(new_n[here], dtype), old, out=change[: old.size])
        grid = change.reshape(-1, BLOCK)
        scale = np.abs(grid).max(axis=1) / np.float32(127)
        if not np.isfinite(scale).all():
            return None
        scales[blocks] = scale
        # Below the smallest normal number a quotient overflows: such a block does not change.
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > np.finfo(np.float32).tiny)
        grid *= inverse[:, None]
        np.rint(grid, out=grid)
        codes[start : start + change.size] = change.astype(np.int8)
        made[here] = _apply(old, codes[start : start + old.size], scales[blocks], dtype)
        if not np.isfinite(_floats(made[here], dtype)).all():
            return None
    head = bytes([DTYPES.index(dtype)])
    payload = head + planes_store.join([codes[: new_n.size].view(np.uint8), scales.view(np.uint8)])
    return made.view(np.uint8).data, payload


def dequantize(payload: memoryview | bytes, base: memoryview | bytes, *, width: int) -> Array:
    """The elements, as integers of ``width``. Raises ValueError where the payload makes no sense."""
    rest = memoryview(payload)
    dtype = DTYPES[rest[0]]
    if WIDTHS[dtype] != width:
        raise ValueError(f"it is of {dtype}, and its elements have {width} bytes")
    old_n = np.frombuffer(base, f"<u{width}")
    num_blocks = -(-old_n.size // BLOCK)
    codes, raw_scales = np.empty(old_n.size, np.uint8), np.empty(4 * num_blocks, np.uint8)
    _, rest = planes_store.read_plane(rest[1:], codes)
    _, rest = planes_store.read_plane(rest, raw_scales)
    if len(rest):
        raise ValueError(f"{len(rest)} bytes too many")
    scales = raw_scales.view(np.float32)
    made = np.empty_like(old_n)
    for start in range(0, old_n.size, _STRIP):
        here = slice(start, min(start + _STRIP, old_n.size))
        blocks = slice(start // BLOCK, -(-here.stop // BLOCK))
        made[here] = _apply(_floats(old_n[here], dtype), codes[here].view(np.int8), scales[blocks], dtype)
    return made


def _apply(old: Array, codes: Array, scales: Array, dtype: str) -> Array:
    """base + scale * code, rounded twice in fp32 and once to the type of the weights: the same on every machine."""
    change = codes.astype(np.float32)
    change *= np.repeat(scales, BLOCK)[: change.size]
    change += old
    return _integers(change, dtype)


def _floats(elements: Array, dtype: str) -> Array:
    """In fp32, exactly."""
    if dtype == "F32":
        return elements.view(np.float32)
    if dtype == "F16":
        return elements.view(np.float16).astype(np.float32)
    return (elements.astype(np.uint32) << 16).view(np.float32)


def _integers(values: Array, dtype: str) -> Array:
    """Rounded to the nearest of the type, ties to even."""
    if dtype == "F32":
        return values.view(np.uint32)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
