"""The same arithmetic in torch operations, for every device: the reference, and what runs without numba.

Operation by operation it rounds as ``kernels_compiled`` does, so products and sums are separate operations, rounding to
integers adds and takes away 1.5 * 2^23, and divisions have a tensor on both sides (CUDA turns a division by a number
into a product). Nothing waits for the device. Shapes are static. Top-k allocates temporaries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wirespeed.spec.payloads import TOPK_CHUNK
from wirespeed.train.codecs.kernels import (
    BLOCK_TINY,
    HALF_JUMP_EXPONENT,
    HALF_SCALE_EXPONENT_LIMIT,
    HALF_TARGET_EXPONENT,
    HALF_TINY,
    TOPK_SCALE_EXPONENT,
    TOPK_SCALE_EXPONENT_MIN,
    BlockBuffers,
    HalfBuffers,
    TopkBuffers,
)
from wirespeed.train.codecs.layout import BlockLayout, TopkLayout

_ROUND = 1.5 * 2**23


def _share(num_ranks: int) -> float:
    """1 / N, rounded to fp32."""
    return float(torch.tensor(1 / num_ranks))


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp32 of 2^exponent for int32 exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)


def _exponent(value: Tensor) -> Tensor:
    """int32 of floor(log2 |value|) for normal fp32; -127 for zero and subnormals."""
    return ((value.view(torch.int32) & 0x7FFFFFFF) >> 23) - 127


@dataclass
class _BlockWork:
    """Padded to whole shards: the bucket, a second one, and whether a block is broken; (blocks, block) each.

    ``num_valid``: elements of each block that are the bucket's own and not padding.
    """

    total: Tensor
    rounded: Tensor
    is_broken: Tensor
    num_valid: Tensor


class TorchKernels:
    """See ``Kernels``."""

    name = "torch"

    def half_work(self, num_elements: int, device: torch.device) -> Tensor:
        """One fp32 bucket."""
        return torch.zeros(num_elements, device=device)

    def half_encode(self, grad_n: Tensor, buffers: HalfBuffers) -> None:
        """See ``Kernels.half_encode``."""
        work: Tensor = buffers.work
        torch.mul(grad_n, buffers.state_2[0] * _share(buffers.num_ranks), out=work)
        work.clamp_(-buffers.limit, buffers.limit)
        work.add_(grad_n, alpha=0.0)  # inf was limited: 0 * inf makes it nan
        sizes = work.abs().clamp_(min=HALF_TINY).masked_fill_(work == 0, 0.0)
        buffers.send_n.copy_(sizes.copysign_(work))

    def half_decode(self, grad_n: Tensor, buffers: HalfBuffers) -> None:
        """See ``Kernels.half_decode``."""
        scale, is_adapted = buffers.state_2[0].clone(), buffers.state_2[1] > 0
        grad_n.copy_(buffers.send_n)
        largest = torch.linalg.vector_norm(grad_n, float("inf"))
        grad_n.masked_fill_(grad_n.abs() <= min(buffers.num_ranks, 1023) * HALF_TINY, 0.0)
        grad_n.mul_(1 / scale)
        aim = torch.ldexp(scale, HALF_TARGET_EXPONENT - _exponent(largest))
        grown = torch.maximum(scale * 2, aim * 2.0**-HALF_JUMP_EXPONENT)
        aim = torch.where(is_adapted, torch.minimum(aim, grown), aim)
        aim = aim.clamp(2.0**-HALF_SCALE_EXPONENT_LIMIT, 2.0**HALF_SCALE_EXPONENT_LIMIT)
        is_usable = torch.isfinite(largest) & (largest > 0)
        buffers.state_2[0] = torch.where(is_usable, aim, scale)
        buffers.state_2[1] = torch.where(is_usable, 1.0, buffers.state_2[1])

    def block_work(self, layout: BlockLayout, device: torch.device) -> _BlockWork:
        """Two fp32 buckets and a mask."""
        shape = (layout.num_ranks * layout.blocks_per_shard, layout.block)
        starts = torch.arange(shape[0], device=device) * layout.block
        return _BlockWork(
            total=torch.zeros(shape, device=device),
            rounded=torch.zeros(shape, device=device),
            is_broken=torch.zeros(shape, dtype=torch.bool, device=device),
            num_valid=(layout.num_elements - starts).clamp_(0, layout.block).float(),
        )

    def block_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: BlockBuffers) -> None:
        """See ``Kernels.block_encode``."""
        layout, work = buffers.layout, buffers.work
        size = layout.num_elements
        total_n = work.total.view(-1)
        torch.add(grad_n, residual_n, out=total_n[:size])
        total_n[size:].zero_()
        _quantize(work, layout, *_parts(buffers.send_b, layout))
        torch.where(work.is_broken.view(-1)[:size], residual_n, total_n[:size], out=residual_n)

    def block_reduce(self, residual_n: Tensor, buffers: BlockBuffers, rank: int) -> None:
        """See ``Kernels.block_reduce``."""
        layout, work = buffers.layout, buffers.work
        blocks = layout.blocks_per_shard
        own = _BlockWork(
            work.total[:blocks],
            work.rounded[:blocks],
            work.is_broken[:blocks],
            work.num_valid[rank * blocks : (rank + 1) * blocks],
        )
        values, scales = _parts(buffers.received_b, layout)
        own.total.zero_()
        for sender in range(layout.num_ranks):
            own.rounded.copy_(_unpacked(values[sender], layout))
            own.total.add_(own.rounded.mul_(scales[sender].unsqueeze(1)))
        first, size = layout.owned(rank)
        if layout.codec == "sign":  # padding was decoded too: one bit cannot say zero. int8 and int4 sent zeros
            own.total.view(-1)[size:].masked_fill_(torch.isfinite(own.total.view(-1)[size:]), 0.0)
        _quantize(own, layout, *_parts(buffers.own_b, layout))
        own.total.masked_fill_(own.is_broken, 0.0)
        residual_n[first : first + size].add_(own.total.view(-1)[:size])

    def block_decode(self, grad_n: Tensor, buffers: BlockBuffers) -> None:
        """See ``Kernels.block_decode``."""
        layout, work = buffers.layout, buffers.work
        values, scales = _parts(buffers.received_b, layout)
        work.total.copy_(_unpacked(values, layout))
        work.total.mul_((scales * _share(layout.num_ranks)).reshape(-1, 1))
        grad_n.copy_(work.total.view(-1)[: layout.num_elements])

    def topk_work(self, layout: TopkLayout, device: torch.device) -> Tensor:
        """One fp32 bucket."""
        return torch.zeros(layout.num_elements, device=device)

    def topk_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: TopkBuffers) -> None:
        """See ``Kernels.topk_encode``."""
        layout, send_b, work = buffers.layout, buffers.send_b, buffers.work
        torch.add(grad_n, residual_n, out=work)
        scales = send_b[: layout.values_at].view(torch.float32)
        values = send_b[layout.values_at : layout.indices_at].view(torch.float16)
        indices = send_b[layout.indices_at :].view(torch.int16)
        split, entries = layout.whole * TOPK_CHUNK, layout.whole * layout.per_chunk
        if layout.whole > 0:
            shape, sent = (layout.whole, TOPK_CHUNK), (layout.whole, layout.per_chunk)
            _select(
                work[:split].view(shape), residual_n[:split].view(shape), scales[: layout.whole],
                values[:entries].view(sent), indices[:entries].view(sent),
            )  # fmt: skip
        if layout.rest > 0:
            _select(
                work[split:].view(1, -1), residual_n[split:].view(1, -1), scales[layout.whole :],
                values[entries:].view(1, -1), indices[entries:].view(1, -1),
            )  # fmt: skip

    def topk_decode(self, grad_n: Tensor, buffers: TopkBuffers) -> None:
        """See ``Kernels.topk_decode``."""
        layout, gathered_b = buffers.layout, buffers.gathered_b
        device = grad_n.device
        chunk_of_entry = torch.arange(layout.num_entries, device=device) // layout.per_chunk
        records = gathered_b.view(layout.num_ranks, layout.payload_bytes)
        broken = torch.zeros(layout.num_chunks, device=device)
        grad_n.zero_()
        for record in records:
            factor = record[: layout.values_at].view(torch.float32) * _share(layout.num_ranks)
            values = record[layout.values_at : layout.indices_at].view(torch.float16).float()
            indices = record[layout.indices_at :].view(torch.int16).long() + chunk_of_entry * TOPK_CHUNK
            grad_n.index_add_(0, indices, values.mul_(factor[chunk_of_entry]))
            broken.add_(factor * 0.0)
        split = layout.whole * TOPK_CHUNK
        grad_n[:split].view(layout.whole, TOPK_CHUNK).add_(broken[: layout.whole].unsqueeze(1))
        grad_n[split:].add_(broken[layout.whole :])


def _parts(records_b: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """``(values, scales)`` of one or N records, one row each: bytes, and fp32."""
    rows = records_b.view(-1, layout.shard_bytes)
    return rows[:, : layout.value_bytes], rows[:, layout.value_bytes :].view(torch.float32)


def _quantize(work: _BlockWork, layout: BlockLayout, values: Tensor, scales: Tensor) -> None:
    """Write ``work.total`` as values and scales; what that took away is left in it. Broken blocks: 0, scale nan."""
    total, rounded, is_broken = work.total, work.rounded, work.is_broken
    largest = torch.abs(total, out=rounded).amax(1)
    is_finite = torch.isfinite(largest)
    is_broken.copy_(~is_finite.unsqueeze(1))
    if layout.codec == "sign":
        size = _mean_magnitude(rounded, work.num_valid)
        scale = torch.where(is_finite & (size >= BLOCK_TINY), size, 0.0)
        rounded.copy_(total > 0).mul_(2).sub_(1)
        is_sent = (total > 0) & ~is_broken
        values.copy_(_packed_bits(is_sent).view(values.shape))
    else:
        levels = 127.0 if layout.codec == "int8" else 7.0
        is_sent = is_finite & (largest >= BLOCK_TINY)
        inverse = torch.where(is_sent, torch.full_like(largest, levels) / largest, 0.0)
        scale = torch.where(is_sent, largest * float(torch.tensor(1 / levels)), 0.0)
        torch.mul(total, inverse.unsqueeze(1), out=rounded)
        rounded.add_(_ROUND).sub_(_ROUND).masked_fill_(is_broken, 0.0)
        whole = rounded.to(torch.int8)
        values.copy_((whole if layout.codec == "int8" else _packed_nibbles(whole)).view(torch.uint8).view(values.shape))
    scales.copy_(torch.where(is_finite, scale, torch.nan).view(scales.shape))
    total.sub_(rounded.mul_(scale.unsqueeze(1)))


def _mean_magnitude(magnitudes: Tensor, num_valid: Tensor) -> Tensor:
    """Mean of each block's valid entries, added in halves: the order is fixed, and 1/1024 keeps the sum finite."""
    block = magnitudes.shape[1]
    folded = magnitudes * (1 / block)
    while folded.shape[1] > 1:
        half = folded.shape[1] // 2
        folded = folded[:, :half] + folded[:, half:]
    count = num_valid.clamp(min=1)
    return folded[:, 0] * (torch.full_like(count, float(block)) / count)


def _packed_bits(is_set: Tensor) -> Tensor:
    """Bit k of byte j of a block: entry 128 k + j."""
    blocks, block = is_set.shape
    places = torch.arange(8, dtype=torch.uint8, device=is_set.device).view(1, 8, 1)
    return (is_set.view(blocks, 8, block // 8).to(torch.uint8) << places).sum(1, dtype=torch.uint8)


def _packed_nibbles(whole: Tensor) -> Tensor:
    """Byte j of a block: entry j in the low four bits, entry j + block / 2 in the high ones."""
    half = whole.shape[1] // 2
    return (whole[:, :half] & 15) | (whole[:, half:] << 4)


def _unpacked(values: Tensor, layout: BlockLayout) -> Tensor:
    """Values of any number of whole shards, (blocks, block): integers, or plus and minus one."""
    rows = values.reshape(-1, layout.value_bytes // layout.blocks_per_shard)
    if layout.codec == "int8":
        return rows.view(torch.int8)
    if layout.codec == "int4":
        pairs = rows.view(torch.int8)
        return torch.cat([((pairs & 15) ^ 8) - 8, pairs >> 4], dim=1)
    places = torch.arange(8, dtype=torch.uint8, device=rows.device).view(1, 8, 1)
    bits = (rows.unsqueeze(1) >> places) & 1
    return bits.view(len(rows), -1).to(torch.int8) * 2 - 1


def _select(total: Tensor, residual: Tensor, scales: Tensor, values: Tensor, indices: Tensor) -> None:
    """Encode rows (chunks) of ``total``; write their residuals. Rows that are not finite: zeros, scale nan."""
    k = values.shape[1]
    keys = total.abs()
    largest = keys.amax(1)
    is_broken = ~torch.isfinite(largest)
    total.masked_fill_(is_broken.unsqueeze(1), 0.0)
    keys.masked_fill_(is_broken.unsqueeze(1), 0.0)
    limit = keys.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    is_above, is_equal = keys > limit, keys == limit
    equal_left = k - is_above.sum(1, keepdim=True)
    is_taken = is_above | (is_equal & (is_equal.cumsum(1) <= equal_left))
    place = torch.where(is_taken, is_taken.cumsum(1) - 1, k)
    column = torch.arange(total.shape[1], device=total.device).expand(total.shape)
    taken = torch.empty(total.shape[0], k + 1, dtype=torch.int64, device=total.device)
    taken = taken.scatter_(1, place, column)[:, :k]
    exponent = torch.where(is_broken, 0, _exponent(largest) - TOPK_SCALE_EXPONENT).clamp(min=TOPK_SCALE_EXPONENT_MIN)
    scale, inverse = _power_of_two(exponent).unsqueeze(1), _power_of_two(-exponent).unsqueeze(1)
    wanted = total.gather(1, taken)
    values.copy_(wanted * inverse)
    indices.copy_(taken)
    scales.copy_(torch.where(is_broken, torch.nan, scale.squeeze(1)))
    total.scatter_(1, taken, wanted - values.float() * scale)
    torch.where(is_broken.unsqueeze(1), residual, total, out=residual)
