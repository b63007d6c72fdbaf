"""The loops of ``delta`` compiled: one pass over memory where numpy takes ten, without the interpreter's lock.

Imported by ``delta.load_loops`` alone, because importing the compiler takes longer than coding a small model. The first
use on a host compiles, for a second or two per function; numba keeps the result beside the package or in the user's
cache folder. Every function here gives bit for bit what delta's numpy does (tests hold one against the other).
Elements are unsigned integers of 2, 4 or 8 bytes; nothing is checked here but what a damaged payload can break.
"""
# ruff: noqa: PLR0917 - numba compiles positional arguments; each loop has one caller or two

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_BLOCK = 2048
"""Elements between two visits of a byte plane: they stay in the first-level cache."""
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


def _jit(function: Any) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(**options)(function)


def _split(new_n: Array, old_n: Array, is_delta: bool, planes: Array) -> None:
    """Byte planes (width, num), lowest first, of the elements, or of their zigzag differences to ``old_n``."""
    num, width = new_n.size, planes.shape[0]
    code = np.empty(_BLOCK, new_n.dtype)
    top, one, zero = code.dtype.type(8 * width - 1), code.dtype.type(1), code.dtype.type(0)
    for start in range(0, num, _BLOCK):
        # Slices, because with a sum for an index LLVM sees one that may be negative, and vectorises nothing.
        new_b, old_b = new_n[start : start + _BLOCK], old_n[start : start + _BLOCK]
        if is_delta:
            for i in range(new_b.size):
                code[i] = new_b[i] - old_b[i]
            for i in range(new_b.size):
                code[i] = (code[i] << one) ^ (zero - (code[i] >> top))
        else:
            for i in range(new_b.size):
                code[i] = new_b[i]
        for k in range(width):
            shift = code.dtype.type(8 * k)
            plane = planes[k][start : start + _BLOCK]
            for i in range(plane.size):
                plane[i] = code[i] >> shift


def _merge(planes: Array, num_used: int, old_n: Array, is_delta: bool, new_n: Array) -> None:
    """The inverse. Planes from ``num_used`` on are zero and not looked at."""
    num = new_n.size
    code = np.empty(_BLOCK, new_n.dtype)
    one, zero = code.dtype.type(1), code.dtype.type(0)
    for start in range(0, num, _BLOCK):
        new_b, old_b = new_n[start : start + _BLOCK], old_n[start : start + _BLOCK]
        plane = planes[0][start : start + _BLOCK]
        for i in range(plane.size):
            code[i] = plane[i]
        for k in range(1, num_used):
            shift = code.dtype.type(8 * k)
            plane = planes[k][start : start + _BLOCK]
            for i in range(plane.size):
                code[i] |= code.dtype.type(plane[i]) << shift
        if is_delta:
            for i in range(new_b.size):
                code[i] = (code[i] >> one) ^ (zero - (code[i] & one))
            for i in range(new_b.size):
                new_b[i] = old_b[i] + code[i]
        else:
            for i in range(new_b.size):
                new_b[i] = code[i]


def _scan(
    old_n: Array, new_n: Array, old_words: Array, new_words: Array, limits: tuple[int, int, int], gaps: Array,
    code: Array,
) -> tuple[int, int]:  # fmt: skip
    """Distances between changed elements and their zigzag differences: how many of each.

    (-1, 0) where more than ``limits[0]`` changed, or more than ``limits[2]`` among the first ``limits[1]``: whole
    blocks of this loop. ``old_words``, ``new_words``: the same memory eight bytes at a time; elements fill them.
    ``code`` has room for ``limits[0]`` elements, ``gaps`` for those and a 255th of all.
    """
    limit, glance, glance_limit = limits
    per = 8 // new_n.itemsize
    one, zero, top = code.dtype.type(1), code.dtype.type(0), code.dtype.type(8 * new_n.itemsize - 1)
    # Lists are made without a branch, first of words, then of elements: what changed cannot be foretold.
    words = np.empty(_BLOCK, np.uint32)
    places = np.empty(_BLOCK * per, np.uint32)
    num, num_gaps, last = 0, 0, np.int64(-1)
    for start in range(0, new_words.size, _BLOCK):
        old_w, new_w = old_words[start : start + _BLOCK], new_words[start : start + _BLOCK]
        num_words = np.uint64(0)
        for i in range(new_w.size):
            words[num_words] = i
            num_words += np.uint64(old_w[i] != new_w[i])
        old_b, new_b = old_n[start * per : (start + _BLOCK) * per], new_n[start * per : (start + _BLOCK) * per]
        num_here = np.uint64(0)
        for w in range(num_words):
            first = np.uint64(words[w]) * np.uint64(per)
            for k in range(per):
                at = first + np.uint64(k)
                places[num_here] = at
                num_here += np.uint64(old_b[at] != new_b[at])
        count = np.int64(num_here)
        if num + count > limit or (start * per < glance and num + count > glance_limit):
            return -1, 0
        before = last - start * per
        for p in range(count):
            at = places[p]
            gap = np.int64(at) - before - 1
            before = np.int64(at)
            while gap >= 255:
                gaps[num_gaps] = 255
                num_gaps += 1
                gap -= 255
            gaps[num_gaps] = gap
            num_gaps += 1
            difference = code.dtype.type(new_b[at] - old_b[at])
            code[num] = (difference << one) ^ (zero - (difference >> top))
            num += 1
        last = before + start * per
    return num, num_gaps


def _patch(new_n: Array, gaps: Array, code: Array) -> int:
    """Add differences to the elements they belong to: how many. -1: one lies outside; -2: distances do not match."""
    at, num = -1, 0
    for g in range(gaps.size):
        if gaps[g] == 255:
            at += 255
            continue
        at += gaps[g] + 1
        if at >= new_n.size:
            return -1
        if num == code.size:
            return -2
        new_n[at] += (code[num] >> _ONE) ^ (_ZERO - (code[num] & _ONE))
        num += 1
    return num


split = _jit(_split)
merge = _jit(_merge)
scan = _jit(_scan)
patch = _jit(_patch)
