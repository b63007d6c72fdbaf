"""What a bucket becomes on the wire under each codec: shards, blocks, entries and factors, in elements and bytes.

``Strategy`` states collectives and bytes from these, and ``train/codecs`` lays its payloads out by the same ones, so
that what is predicted and what is sent cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from wirespeed.records import Collective

CodecName = Literal["dense", "half", "int8", "int4", "lowrank", "topk", "sign"]
CODECS: tuple[CodecName, ...] = get_args(CodecName)

INT8_BLOCK = 1024
"""Elements that share one fp32 scale: 0.4 % of overhead, and small enough that one outlier spoils little."""
INT4_BLOCK = 256
"""With 15 levels an outlier spoils more: 3 % of overhead."""
SIGN_BLOCK = 1024
"""3 % of overhead. A block has one magnitude for all its entries."""
TOPK_CHUNK = 16384
"""Elements per top-k chunk: fixed k per chunk gives static shapes, and 16-bit indices address it."""
BYTES_PER_ELEMENT = 4
"""Gradients are fp32 where they are reduced."""

Shapes = Sequence[tuple[int, ...]]
"""Shapes of a bucket's tensors, in the order in which they lie in it."""


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """Bytes that each rank sends, as a share of the size: nccl-tests' bus-bandwidth factors (doc/PERFORMANCE.md)."""
    if num_ranks < 2:
        return 0.0
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)


def hierarchical_shard_elements(num_elements: int, ranks_per_host: int) -> int:
    """Elements of a bucket that each rank of a host sums and sends to the other hosts, padded to be equal for all."""
    return math.ceil(num_elements / ranks_per_host)


BLOCK_FORMATS: dict[CodecName, tuple[int, int]] = {
    "int8": (INT8_BLOCK, 8),
    "int4": (INT4_BLOCK, 4),
    "sign": (SIGN_BLOCK, 1),
}
"""Codecs that quantize by blocks: elements per block, and bits per element."""


def block_shard_elements(codec: CodecName, num_elements: int, num_ranks: int) -> int:
    """Elements of the shard that each rank owns: equal for all ranks, padded to whole blocks."""
    block, _ = BLOCK_FORMATS[codec]
    per_rank = math.ceil(num_elements / num_ranks)
    return math.ceil(per_rank / block) * block


def block_shard_bytes(codec: CodecName, num_elements: int, num_ranks: int) -> int:
    """One shard on the wire: so many bits per element, and an fp32 scale per block."""
    block, bits = BLOCK_FORMATS[codec]
    shard = block_shard_elements(codec, num_elements, num_ranks)
    return shard * bits // 8 + shard // block * BYTES_PER_ELEMENT


def topk_counts(num_elements: int, ratio: float) -> tuple[int, int, int]:
    """``(whole chunks, entries sent of each, entries sent of the last part chunk)``; at least one entry per chunk."""
    whole, rest = divmod(num_elements, TOPK_CHUNK)
    return whole, max(1, round(TOPK_CHUNK * ratio)), max(1, round(rest * ratio)) if rest else 0


def topk_payload_bytes(num_elements: int, ratio: float) -> int:
    """What one rank sends of a bucket: fp16 value and 16-bit index per entry, and one fp32 scale per chunk."""
    whole, per_chunk, per_rest = topk_counts(num_elements, ratio)
    num_chunks = whole + (per_rest > 0)
    return 4 * (whole * per_chunk + per_rest) + BYTES_PER_ELEMENT * num_chunks


def lowrank_matrix(shape: tuple[int, ...], matrix_rank: int) -> tuple[int, int] | None:
    """``(rows, columns)`` that low-rank makes of a tensor; None where it is sent as it is.

    Rows are the first dimension, columns all others. Vectors stay as they are, and so do matrices whose two factors
    together would not be smaller than a half of them.
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if 0 < 2 * matrix_rank * (rows + columns) <= rows * columns else None


def square_shape(num_elements: int) -> Shapes:
    """A square matrix and what is left over: stands for a bucket of which only the size is known."""
    side = math.isqrt(num_elements)
    rest = num_elements - side * side
    return ((side, side), (rest,)) if rest else ((side, side),)


def lowrank_payload_bytes(num_elements: int, matrix_rank: int, shapes: Shapes | None = None) -> int:
    """What is summed for a bucket, on the mean of two steps: one factor of each matrix in turn, and all vectors."""
    twice = 0
    for shape in square_shape(num_elements) if shapes is None else shapes:
        matrix = lowrank_matrix(shape, matrix_rank)
        twice += 2 * math.prod(shape) if matrix is None else matrix_rank * sum(matrix)
    return BYTES_PER_ELEMENT * twice // 2
