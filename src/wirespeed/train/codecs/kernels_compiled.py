"""Compiled CPU loops: one pass over memory where it can be, one thread, GIL released.

No fastmath anywhere: the handling of inf and nan, and equal bytes with the torch kernels, rest on IEEE arithmetic
without contraction. Magnitudes are compared as integers (the bits of |x| order like |x|, with inf and nan above all),
because LLVM vectorises an integer maximum and would have to give up nan for a float one. Kernels take flat arrays:
with a stride that is not known to be 1, LLVM vectorises nothing.

Touch this file when something that it imports changes (numba's cache, see ``compiling``).
"""
# ruff: noqa: PLR0917 - numba compiles positional arguments; each kernel has one caller

from __future__ import annotations

from typing import Any

import numpy as np

from wirespeed.spec.payloads import INT8_BLOCK
from wirespeed.train.codecs.compiling import (
    INF,
    MAGNITUDE,
    NAN,
    ROUND,
    SIGN,
    ZERO,
    bits_of,
    float_of,
    jit,
)
from wirespeed.train.codecs.kernels import (
    BLOCK_TINY,
    HALF_JUMP_EXPONENT,
    HALF_SCALE_EXPONENT_LIMIT,
    HALF_TARGET_EXPONENT,
    HALF_TINY,
)


@jit
def to_half(value: np.float32) -> np.uint16:
    """fp16 bits of an fp32, nearest, half to even; too large becomes inf; a nan keeps its sign."""
    bits = bits_of(value)
    sign = np.uint32((bits & SIGN) >> np.uint32(16))
    size = np.uint32(bits & MAGNITUDE)
    odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(size + np.uint32(0xFFF) + odd - np.uint32(112 << 23)) >> np.uint32(13))
    # Adding 0.5 aligns the value to the spacing of fp16's subnormals, 2^-24, and rounds as the hardware rounds.
    small = np.uint32(bits_of(np.float32(float_of(size) + np.float32(0.5))) - np.uint32(0x3F000000))
    half = small if size < np.uint32(113 << 23) else normal
    half = np.uint32(0x7C00) if size >= np.uint32(0x477FF000) else half  # from 65520 on
    half = np.uint32(0x7E00) if size > INF else half
    return np.uint16(sign | half)


@jit
def from_half(half: np.uint16) -> Any:
    """The fp32 of fp16 bits: exact."""
    sign = np.uint32(np.uint32(half & np.uint16(0x8000)) << np.uint32(16))
    size = np.uint32(half & np.uint16(0x7FFF))
    normal = np.uint32(np.uint32(size << np.uint32(13)) + np.uint32(112 << 23))
    small = bits_of(np.float32(np.float32(size) * np.float32(2.0**-24)))
    bits = small if size < np.uint32(0x400) else normal
    bits = np.uint32(np.uint32(size << np.uint32(13)) + np.uint32(224 << 23)) if size >= np.uint32(0x7C00) else bits
    return float_of(np.uint32(sign | bits))


@jit
def half_encode(grad: Any, send: Any, factor: np.float32, limit: np.float32) -> None:
    """``send`` (uint16) = fp16 bits of ``grad * factor``, within HALF_TINY and ``limit``; not finite becomes nan."""
    tiny = bits_of(np.float32(HALF_TINY))
    for i in range(grad.size):
        scaled = np.float32(grad[i] * factor)
        scaled = limit if scaled > limit else scaled
        scaled = -limit if scaled < -limit else scaled
        bits = bits_of(np.float32(scaled + np.float32(grad[i] * ZERO)))
        size = np.uint32(bits & MAGNITUDE)
        size = tiny if np.uint32(size - np.uint32(1)) < tiny else size  # 0 wraps round and stays 0
        send[i] = to_half(float_of(np.uint32(np.uint32(bits & SIGN) | size)))


@jit
def half_decode(send: Any, grad: Any, state: Any, num_ranks: int) -> None:
    """``grad = send / scale``; adapt ``state`` (scale, whether adapted before) to the largest magnitude."""
    largest = np.uint16(0)
    inverse = np.float32(np.float32(1) / state[0])
    # The bits of an fp16 below 2^-14 count multiples of 2^-24.
    noise = np.uint16(min(num_ranks, 1023))
    for i in range(grad.size):
        half = send[i]
        size = np.uint16(half & np.uint16(0x7FFF))
        largest = max(largest, size)
        half = half if size > noise else np.uint16(0)
        grad[i] = np.float32(from_half(half) * inverse)
    if largest == 0 or largest >= np.uint16(0x7C00):
        return
    exponent = np.int64(bits_of(from_half(largest)) >> np.uint32(23)) - 127
    scale = np.float32(state[0] * np.float32(2.0 ** (HALF_TARGET_EXPONENT - exponent)))
    if state[1] > 0:
        jump = np.float32(scale * np.float32(2.0**-HALF_JUMP_EXPONENT))
        scale = min(scale, max(np.float32(state[0] * np.float32(2)), jump))
    scale = min(scale, np.float32(2.0**HALF_SCALE_EXPONENT_LIMIT))
    state[0] = max(scale, np.float32(2.0**-HALF_SCALE_EXPONENT_LIMIT))
    state[1] = np.float32(1)


@jit
def _int8_scales(largest: np.uint32) -> tuple[np.float32, np.float32]:
    """``(scale, 1 / scale)`` for the bits of a block's largest magnitude, which is finite."""
    size = float_of(largest)
    if size < np.float32(BLOCK_TINY):
        return ZERO, ZERO
    return np.float32(size * np.float32(1 / 127)), np.float32(np.float32(127) / size)


@jit
def int8_encode(grad: Any, residual: Any, values: Any, scales: Any, shard: int, shard_bytes: int) -> None:
    """``values`` (int8) and ``scales`` (fp32) view the same N records; sizes and offsets are in bytes."""
    for first in range(0, grad.size, INT8_BLOCK):
        last = min(first + INT8_BLOCK, grad.size)
        rank = first // shard
        at = rank * shard_bytes + first - rank * shard
        scale_at = (rank * shard_bytes + shard) // 4 + (first - rank * shard) // INT8_BLOCK
        g = grad[first:last]
        r = residual[first:last]
        q = values[at : at + last - first]
        largest = np.uint32(0)
        for i in range(g.size):
            largest = max(largest, np.uint32(bits_of(np.float32(g[i] + r[i])) & MAGNITUDE))
        if largest >= INF:
            scales[scale_at] = NAN
            q[:] = np.int8(0)
            continue
        scale, inverse = _int8_scales(largest)
        scales[scale_at] = scale
        for i in range(g.size):
            value = np.float32(g[i] + r[i])
            rounded = np.float32(np.float32(np.float32(value * inverse) + ROUND) - ROUND)
            q[i] = np.int8(rounded)
            r[i] = np.float32(value - np.float32(rounded * scale))


@jit
def int8_reduce(
    values: Any, scales: Any, own_values: Any, own_scales: Any, residual: Any, total: Any, num_ranks: int, shard: int
) -> None:
    """Add N received records, quantize the sum into the own record; ``residual`` is that of the own shard."""
    shard_bytes = shard + shard // INT8_BLOCK * 4
    for first in range(0, residual.size, INT8_BLOCK):
        block = first // INT8_BLOCK
        last = min(first + INT8_BLOCK, residual.size)
        total[:] = ZERO
        for rank in range(num_ranks):
            q = values[rank * shard_bytes + first : rank * shard_bytes + first + INT8_BLOCK]
            scale = scales[(rank * shard_bytes + shard) // 4 + block]
            for i in range(INT8_BLOCK):
                total[i] += np.float32(np.float32(q[i]) * scale)
        largest = np.uint32(0)
        for i in range(INT8_BLOCK):
            largest = max(largest, np.uint32(bits_of(total[i]) & MAGNITUDE))
        own = own_values[first : first + INT8_BLOCK]
        if largest >= INF:
            own_scales[block] = NAN
            own[:] = np.int8(0)
            continue
        scale, inverse = _int8_scales(largest)
        own_scales[block] = scale
        r = residual[first:last]
        for i in range(INT8_BLOCK):
            rounded = np.float32(np.float32(np.float32(total[i] * inverse) + ROUND) - ROUND)
            own[i] = np.int8(rounded)
            total[i] = np.float32(total[i] - np.float32(rounded * scale))
        for i in range(r.size):
            r[i] += total[i]


@jit
def int8_decode(values: Any, scales: Any, grad: Any, shard: int, shard_bytes: int, share: np.float32) -> None:
    """``grad = value * (scale * share)`` from N records."""
    for first in range(0, grad.size, INT8_BLOCK):
        last = min(first + INT8_BLOCK, grad.size)
        rank = first // shard
        at = rank * shard_bytes + first - rank * shard
        g = grad[first:last]
        q = values[at : at + last - first]
        scale = scales[(rank * shard_bytes + shard) // 4 + (first - rank * shard) // INT8_BLOCK]
        factor = np.float32(scale * share)
        for i in range(g.size):
            g[i] = np.float32(np.float32(q[i]) * factor)
