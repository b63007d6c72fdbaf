"""Compiled CPU loops of top-k. See ``kernels_compiled`` for what holds of all of them.

Top-k, per chunk: add the residual and keep the maximum of each of a few hundred groups (strided, so that this
vectorises); the k-th largest of these maxima is passed by at least k entries, one of each of k groups, and typically by
1.2 k; only those are collected and searched for the exact k-th largest. Both searches bisect and count.

Touch this file when something that it imports changes (numba's cache, see ``compiling``).
"""
# ruff: noqa: PLR0917 - numba compiles positional arguments; each kernel has one caller

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from wirespeed.spec.payloads import TOPK_CHUNK
from wirespeed.train.codecs.compiling import (
    INF,
    MAGNITUDE,
    NAN,
    ZERO,
    bits_of,
    float_of,
    intrinsic_of,
    jit,
)
from wirespeed.train.codecs.kernels import (
    TOPK_SCALE_EXPONENT,
    TOPK_SCALE_EXPONENT_MIN,
)
from wirespeed.train.codecs.kernels_compiled import from_half, to_half

LANES = 64
"""Entries compared at once where top-k collects candidates: one bit each of a 64-bit mask."""


@intrinsic_of
def _copy_and_mask(context: Any, bits: Any, start: Any, threshold: Any, target: Any) -> Any:
    """Copy LANES entries to ``target``; bit i says whether the magnitude in ``bits[start + i]`` reaches ``threshold``.

    Written as vector operations of LLVM's own, which every target lowers to what it has: its loop vectoriser does not
    find this by itself.
    """
    if not isinstance(bits, types.Array) or bits.dtype != types.uint32 or target.dtype != types.uint32:
        return None

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        vector = ir.VectorType(ir.IntType(32), LANES)
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), vector.as_pointer())
        loaded = builder.load(pointer)
        loaded.align = 4
        out = context.make_array(signature.args[3])(context, builder, arguments[3])
        stored = builder.store(loaded, builder.bitcast(builder.gep(out.data, [arguments[1]]), vector.as_pointer()))
        stored.align = 4
        single = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        splat = builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), lanes)
        size = builder.and_(loaded, ir.Constant(vector, [0x7FFFFFFF] * LANES))
        return builder.bitcast(builder.icmp_unsigned(">=", size, splat), ir.IntType(LANES))

    return types.uint64(bits, types.intp, types.uint32, target), build


@intrinsic_of
def _lowest_bit(context: Any, mask: Any) -> Any:
    """Index of the lowest bit set; undefined for 0."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.intp(types.uint64), build


@jit
def _count_at_least(keys: Any, size: int, threshold: np.uint32) -> Any:
    count = np.int32(0)
    for i in range(size):
        count += np.int32(keys[i] >= threshold)
    return np.int64(count)


@jit
def _threshold(keys: Any, size: int, k: int, enough: int, low: int, high: int) -> Any:
    """A key that at least k and at most ``enough`` of the first ``size`` keys reach; with ties, the k-th largest.

    At least k reach ``low``, none exceeds ``high``. Halves the interval of keys, so magnitudes by their logarithm.
    """
    while low < high:
        trial = low + (high - low + 1) // 2
        count = _count_at_least(keys, size, np.uint32(trial))
        if count < k:
            high = trial - 1
        else:
            low = trial
            if count <= enough:
                break
    return low


@jit
def _group_threshold(groups: Any, num_groups: int, k: int, largest: np.uint32) -> Any:
    """A key that at least k of the group maxima reach, and few more."""
    low, high, width = np.int64(0), np.int64(largest), np.int64(4 << 23)
    while high - width > 0:  # look below the largest first by a factor 2^4, then 2^8 ...
        if _count_at_least(groups, num_groups, np.uint32(high - width)) >= k:
            low = high - width
            break
        high -= width
        width *= 2
    return _threshold(groups, num_groups, k, k + k // 16, low, high)


@jit
def _add_and_group(g: Any, r: Any, total: Any, groups: Any, num_groups: int) -> None:
    """``total = g + r``; ``groups``: bits of the largest magnitude among entries of equal index modulo num_groups.

    Four arrays, not more: with five, LLVM gives up on proving them apart and vectorises nothing (3x slower).
    """
    groups[:num_groups] = np.uint32(0)
    for first in range(0, g.size, num_groups):
        last = min(first + num_groups, g.size)
        g_row, r_row, total_row = g[first:last], r[first:last], total[first:last]
        for i in range(g_row.size):
            value = np.float32(g_row[i] + r_row[i])
            total_row[i] = value
            groups[i] = max(groups[i], np.uint32(bits_of(value) & MAGNITUDE))


@jit
def _collect(bits: Any, size: int, threshold: np.uint32, target: Any, found: Any, found_keys: Any) -> Any:
    """Copy ``bits`` to ``target``; list the magnitudes that reach the threshold, by index ascending, and how many."""
    count: Any = 0
    whole = size // LANES * LANES
    for first in range(0, whole, LANES):
        mask = _copy_and_mask(bits, first, threshold, target)
        while mask != np.uint64(0):
            index = first + _lowest_bit(mask)
            found[count] = index
            found_keys[count] = np.uint32(bits[index] & MAGNITUDE)
            count += 1
            mask = np.uint64(mask & np.uint64(mask - np.uint64(1)))
    for index in range(whole, size):
        target[index] = bits[index]
        key = np.uint32(bits[index] & MAGNITUDE)
        found[count] = index
        found_keys[count] = key
        count += np.int64(key >= threshold)
    return count


@jit
def _keep_largest(found: Any, found_keys: Any, count: int, k: int, low: int, high: int) -> None:
    """Move the k largest of ``count`` candidates to the front, in order; of equal ones the first stay."""
    limit = np.uint32(_threshold(found_keys, count, k, k, low, high))
    equal_left: Any = k - _count_at_least(found_keys, count, np.uint32(limit + np.uint32(1)))
    kept: Any = 0
    for i in range(count):
        key = found_keys[i]
        is_equal = np.int64(key == limit)
        taken = np.int64(key > limit) | (is_equal & np.int64(equal_left > 0))
        found[kept] = found[i]
        kept += taken
        equal_left -= taken & is_equal


@jit
def _topk_chunk(
    g: Any, r: Any, r_bits: Any, k: int, values: Any, indices: Any,
    total: Any, total_bits: Any, groups: Any, found: Any, found_keys: Any,
) -> Any:  # fmt: skip
    """Encode one chunk and give its scale (nan: it holds inf or nan; its residual is left alone)."""
    size = g.size
    num_groups = 512
    while num_groups < 3 * k:
        num_groups *= 2
    num_groups = min(num_groups, size)
    _add_and_group(g, r, total, groups, num_groups)
    largest = np.uint32(0)
    for i in range(num_groups):
        largest = max(largest, groups[i])
    if largest >= INF:
        for i in range(k):
            values[i] = np.uint16(0)
            indices[i] = np.uint16(i)
        return NAN
    threshold = _group_threshold(groups, num_groups, k, largest)
    count = _collect(total_bits, size, np.uint32(threshold), r_bits, found, found_keys)
    if count > k:
        _keep_largest(found, found_keys, count, k, threshold, np.int64(largest))
    exponent: Any = max(np.int64(largest >> np.uint32(23)) - 127 - TOPK_SCALE_EXPONENT, TOPK_SCALE_EXPONENT_MIN)
    scale = float_of(np.uint32(np.uint32(127 + exponent) << np.uint32(23)))
    inverse = float_of(np.uint32(np.uint32(127 - exponent) << np.uint32(23)))
    picked = found_keys  # free again; three loops, because the middle one vectorises
    for i in range(k):
        picked[i] = total_bits[found[i]]
        indices[i] = np.uint16(found[i])
    for i in range(k):
        value = float_of(picked[i])
        half = to_half(np.float32(value * inverse))
        values[i] = half
        picked[i] = bits_of(np.float32(value - np.float32(from_half(half) * scale)))
    for i in range(k):
        r_bits[found[i]] = picked[i]
    return scale


@jit
def topk_encode(
    grad: Any, residual: Any, residual_bits: Any, scales: Any, values: Any, indices: Any, per_chunk: int, per_rest: int,
    total: Any, total_bits: Any, groups: Any, found: Any, found_keys: Any,
) -> None:  # fmt: skip
    """Encode every chunk; ``values`` and ``indices`` are uint16."""
    entry = 0
    for chunk in range(scales.size):
        first = chunk * TOPK_CHUNK
        last = min(first + TOPK_CHUNK, grad.size)
        k = per_chunk if last - first == TOPK_CHUNK else per_rest
        scales[chunk] = _topk_chunk(
            grad[first:last], residual[first:last], residual_bits[first:last], k,
            values[entry : entry + k], indices[entry : entry + k],
            total, total_bits, groups, found, found_keys,
        )  # fmt: skip
        entry += k


@jit
def topk_decode(
    scales: Any, halves: Any, grad: Any, per_chunk: int, per_rest: int, num_ranks: int, values_at: int, indices_at: int,
    share: np.float32,
) -> None:  # fmt: skip
    """``scales`` and ``halves`` view all N records, as fp32 and as uint16; the offsets are in uint16."""
    record = halves.size // num_ranks
    entry = 0
    for first in range(0, grad.size, TOPK_CHUNK):
        last = min(first + TOPK_CHUNK, grad.size)
        k = per_chunk if last - first == TOPK_CHUNK else per_rest
        g = grad[first:last]
        g[:] = ZERO
        is_finite = True
        for rank in range(num_ranks):
            factor = np.float32(scales[rank * record // 2 + first // TOPK_CHUNK] * share)
            is_finite = is_finite and factor == factor  # noqa: PLR0124 - nan
            values = halves[rank * record + values_at + entry : rank * record + values_at + entry + k]
            indices = halves[rank * record + indices_at + entry : rank * record + indices_at + entry + k]
            for i in range(k):
                index = np.int64(indices[i])
                if index < g.size:
                    g[index] += np.float32(from_half(values[i]) * factor)
                else:  # a damaged message must not write elsewhere, nor pass unseen
                    is_finite = False
        if not is_finite:
            g[:] = NAN
        entry += k
