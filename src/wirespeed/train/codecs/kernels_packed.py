"""Compiled CPU loops of the codecs with less than a byte per element: int4 and sign. See ``kernels_compiled``.

A block is put together in scratch space first, padded with zeros, so that the inner loops always run over whole blocks.
Sums of magnitudes are taken in halves (entry i plus entry i + 512, then i + 256 ...): the order is then the same in
every implementation, and it vectorises. Touch this file when something that it imports changes (numba's cache).
"""
# ruff: noqa: PLR0917 - numba compiles positional arguments; each kernel has one caller

from __future__ import annotations

from typing import Any

import numpy as np

from wirespeed.spec.payloads import INT4_BLOCK, SIGN_BLOCK
from wirespeed.train.codecs.compiling import INF, MAGNITUDE, NAN, ROUND, ZERO, bits_of, float_of, jit
from wirespeed.train.codecs.kernels import BLOCK_TINY

_PAIRS = INT4_BLOCK // 2
_BYTES = SIGN_BLOCK // 8


@jit
def _largest(total: Any, size: int) -> Any:
    """Bits of the largest magnitude; of inf and above where something is not finite."""
    largest = np.uint32(0)
    for i in range(size):
        largest = max(largest, np.uint32(bits_of(total[i]) & MAGNITUDE))
    return largest


@jit
def _quantize_int4(total: Any, values: Any) -> Any:
    """Write one block, leave in ``total`` what rounding took away, give the scale. nan: broken, nothing was done."""
    largest = _largest(total, INT4_BLOCK)
    if largest >= INF:
        for i in range(_PAIRS):
            values[i] = np.int8(0)
        return NAN
    size = float_of(largest)
    scale, inverse = ZERO, ZERO
    if size >= np.float32(BLOCK_TINY):
        scale, inverse = np.float32(size * np.float32(1 / 7)), np.float32(np.float32(7) / size)
    low, high = total[:_PAIRS], total[_PAIRS:INT4_BLOCK]
    for i in range(_PAIRS):
        first = np.float32(np.float32(np.float32(low[i] * inverse) + ROUND) - ROUND)
        second = np.float32(np.float32(np.float32(high[i] * inverse) + ROUND) - ROUND)
        values[i] = np.int8((np.int32(first) & np.int32(15)) | (np.int32(second) << np.int32(4)))
        low[i] = np.float32(low[i] - np.float32(first * scale))
        high[i] = np.float32(high[i] - np.float32(second * scale))
    return scale


@jit
def _low(pair: Any) -> Any:
    """The number in the low four bits."""
    return np.int32(np.int32(np.int32(pair) & np.int32(15)) ^ np.int32(8)) - np.int32(8)


@jit
def int4_encode(grad: Any, residual: Any, values: Any, scales: Any, shard: int, shard_bytes: int, work: Any) -> None:
    """``values`` (int8) and ``scales`` (fp32) view the same N records; ``work`` holds two blocks."""
    total = work[:INT4_BLOCK]
    for first in range(0, grad.size, INT4_BLOCK):
        last = min(first + INT4_BLOCK, grad.size)
        rank = first // shard
        within = first - rank * shard
        at = rank * shard_bytes + within // 2
        g, r = grad[first:last], residual[first:last]
        for i in range(g.size):
            total[i] = np.float32(g[i] + r[i])
        for i in range(g.size, INT4_BLOCK):
            total[i] = ZERO
        scale = _quantize_int4(total, values[at : at + _PAIRS])
        scales[(rank * shard_bytes + shard // 2) // 4 + within // INT4_BLOCK] = scale
        if scale == scale:  # noqa: PLR0124 - not nan
            for i in range(r.size):
                r[i] = total[i]


@jit
def int4_reduce(
    values: Any, scales: Any, own_values: Any, own_scales: Any, residual: Any, work: Any,
    num_ranks: int, shard: int, shard_bytes: int,
) -> None:  # fmt: skip
    """Add N received records, quantize the sum into the own record; ``residual`` is that of the own shard."""
    total = work[:INT4_BLOCK]
    low, high = total[:_PAIRS], total[_PAIRS:]
    for first in range(0, residual.size, INT4_BLOCK):
        block = first // INT4_BLOCK
        total[:] = ZERO
        for rank in range(num_ranks):
            at = rank * shard_bytes + first // 2
            q = values[at : at + _PAIRS]
            scale = scales[(rank * shard_bytes + shard // 2) // 4 + block]
            for i in range(_PAIRS):
                low[i] += np.float32(np.float32(_low(q[i])) * scale)
                high[i] += np.float32(np.float32(q[i] >> np.int8(4)) * scale)
        own_scale = _quantize_int4(total, own_values[first // 2 : first // 2 + _PAIRS])
        own_scales[block] = own_scale
        if own_scale == own_scale:  # noqa: PLR0124 - not nan
            r = residual[first : min(first + INT4_BLOCK, residual.size)]
            for i in range(r.size):
                r[i] += total[i]


@jit
def int4_decode(values: Any, scales: Any, grad: Any, shard: int, shard_bytes: int, share: np.float32) -> None:
    """``grad = value * (scale * share)`` from N records."""
    for first in range(0, grad.size, INT4_BLOCK):
        rank = first // shard
        within = first - rank * shard
        at = rank * shard_bytes + within // 2
        q = values[at : at + _PAIRS]
        factor = np.float32(scales[(rank * shard_bytes + shard // 2) // 4 + within // INT4_BLOCK] * share)
        low = grad[first : min(first + _PAIRS, grad.size)]
        for i in range(low.size):
            low[i] = np.float32(np.float32(_low(q[i])) * factor)
        if first + _PAIRS < grad.size:
            high = grad[first + _PAIRS : min(first + INT4_BLOCK, grad.size)]
            for i in range(high.size):
                high[i] = np.float32(np.float32(q[i] >> np.int8(4)) * factor)


@jit
def _quantize_sign(total: Any, magnitudes: Any, values: Any, num_valid: int) -> Any:
    """Write one block, leave in ``total`` what the scale does not say, and give it. nan: broken, nothing was done."""
    if _largest(total, SIGN_BLOCK) >= INF:
        for j in range(_BYTES):
            values[j] = np.uint8(0)
        return NAN
    for i in range(SIGN_BLOCK):
        magnitudes[i] = np.float32(float_of(np.uint32(bits_of(total[i]) & MAGNITUDE)) * np.float32(1 / SIGN_BLOCK))
    half = SIGN_BLOCK // 2
    while half > 0:
        lower, upper = magnitudes[:half], magnitudes[half : 2 * half]
        for i in range(half):
            lower[i] = np.float32(lower[i] + upper[i])
        half //= 2
    scale = np.float32(magnitudes[0] * np.float32(np.float32(SIGN_BLOCK) / np.float32(num_valid)))
    if scale < np.float32(BLOCK_TINY):
        scale = ZERO
    for j in range(_BYTES):
        values[j] = np.uint8(0)
    for k in range(8):
        part = total[k * _BYTES : (k + 1) * _BYTES]
        for j in range(_BYTES):
            values[j] |= np.uint8(np.uint8(part[j] > ZERO) << np.uint8(k))
    for i in range(SIGN_BLOCK):
        total[i] = np.float32(total[i] - (scale if total[i] > ZERO else -scale))
    return scale


@jit
def sign_encode(grad: Any, residual: Any, values: Any, scales: Any, shard: int, shard_bytes: int, work: Any) -> None:
    """``values`` (uint8) and ``scales`` (fp32) view the same N records; ``work`` holds two blocks."""
    total, magnitudes = work[:SIGN_BLOCK], work[SIGN_BLOCK:]
    for first in range(0, grad.size, SIGN_BLOCK):
        last = min(first + SIGN_BLOCK, grad.size)
        rank = first // shard
        within = first - rank * shard
        at = rank * shard_bytes + within // 8
        g, r = grad[first:last], residual[first:last]
        for i in range(g.size):
            total[i] = np.float32(g[i] + r[i])
        for i in range(g.size, SIGN_BLOCK):
            total[i] = ZERO
        scale = _quantize_sign(total, magnitudes, values[at : at + _BYTES], last - first)
        scales[(rank * shard_bytes + shard // 8) // 4 + within // SIGN_BLOCK] = scale
        if scale == scale:  # noqa: PLR0124 - not nan
            for i in range(r.size):
                r[i] = total[i]


@jit
def sign_reduce(
    values: Any, scales: Any, own_values: Any, own_scales: Any, residual: Any, work: Any,
    num_ranks: int, shard: int, shard_bytes: int,
) -> None:  # fmt: skip
    """Add N received records, quantize the sum into the own record; ``residual`` is that of the own shard."""
    total, magnitudes = work[:SIGN_BLOCK], work[SIGN_BLOCK:]
    for first in range(0, residual.size, SIGN_BLOCK):
        block = first // SIGN_BLOCK
        last = min(first + SIGN_BLOCK, residual.size)
        total[:] = ZERO
        for rank in range(num_ranks):
            at = rank * shard_bytes + first // 8
            q = values[at : at + _BYTES]
            scale = scales[(rank * shard_bytes + shard // 8) // 4 + block]
            for k in range(8):
                part = total[k * _BYTES : (k + 1) * _BYTES]
                for j in range(_BYTES):
                    part[j] += scale if (q[j] >> np.uint8(k)) & np.uint8(1) else -scale
        for i in range(last - first, SIGN_BLOCK):  # padding was decoded too: one bit cannot say zero
            if np.uint32(bits_of(total[i]) & MAGNITUDE) < INF:
                total[i] = ZERO
        own_scale = _quantize_sign(total, magnitudes, own_values[first // 8 : first // 8 + _BYTES], last - first)
        own_scales[block] = own_scale
        if own_scale == own_scale:  # noqa: PLR0124 - not nan
            r = residual[first:last]
            for i in range(r.size):
                r[i] += total[i]


@jit
def sign_decode(values: Any, scales: Any, grad: Any, shard: int, shard_bytes: int, share: np.float32) -> None:
    """``grad`` is plus or minus ``scale * share``, from N records."""
    for first in range(0, grad.size, SIGN_BLOCK):
        rank = first // shard
        within = first - rank * shard
        at = rank * shard_bytes + within // 8
        q = values[at : at + _BYTES]
        factor = np.float32(scales[(rank * shard_bytes + shard // 8) // 4 + within // SIGN_BLOCK] * share)
        for k in range(8):
            begin = first + k * _BYTES
            if begin < grad.size:
                g = grad[begin : min(begin + _BYTES, grad.size)]
                for j in range(g.size):
                    g[j] = factor if (q[j] >> np.uint8(k)) & np.uint8(1) else -factor
