"""The same arithmetic in torch operations, for every device: the reference, and what runs without numba.

Operation by operation it rounds as ``kernels_compiled`` does, so products and sums are separate operations, rounding to
integers adds and takes away 1.5 * 2^23, and divisions have a tensor on both sides (CUDA turns a division by a number
into a product). Nothing waits for the device. Shapes are static. Top-k allocates temporaries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wirespeed.spec.strategy import INT8_BLOCK, TOPK_CHUNK
from wirespeed.train.codecs.kernels import (
    HALF_JUMP_EXPONENT,
    HALF_SCALE_EXPONENT_LIMIT,
    HALF_TARGET_EXPONENT,
    HALF_TINY,
    INT8_TINY,
    TOPK_SCALE_EXPONENT,
    TOPK_SCALE_EXPONENT_MIN,
    HalfBuffers,
    Int8Buffers,
    TopkBuffers,
)
from wirespeed.train.codecs.layout import Int8Layout, TopkLayout

_ROUND = 1.5 * 2**23
_ONE_127TH = float(torch.tensor(1 / 127))


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
class _Int8Work:
    """Padded to whole shards: the bucket, a second one, and whether a block is broken. B blocks of 1024."""

    total: Tensor
    rounded: Tensor
    is_broken: Tensor


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

    def int8_work(self, layout: Int8Layout, device: torch.device) -> _Int8Work:
        """Two fp32 buckets and a mask."""
        shape = (layout.num_ranks * layout.blocks_per_shard, INT8_BLOCK)
        return _Int8Work(
            total=torch.zeros(shape, device=device),
            rounded=torch.zeros(shape, device=device),
            is_broken=torch.zeros(shape, dtype=torch.bool, device=device),
        )

    def int8_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: Int8Buffers) -> None:
        """See ``Kernels.int8_encode``."""
        layout, work = buffers.layout, buffers.work
        size = layout.num_elements
        total_n = work.total.view(-1)
        torch.add(grad_n, residual_n, out=total_n[:size])
        total_n[size:].zero_()
        _quantize(work.total, work.rounded, work.is_broken, *_parts(buffers.send_b, layout))
        torch.where(work.is_broken.view(-1)[:size], residual_n, total_n[:size], out=residual_n)

    def int8_reduce(self, residual_n: Tensor, buffers: Int8Buffers, rank: int) -> None:
        """See ``Kernels.int8_reduce``."""
        layout, work = buffers.layout, buffers.work
        blocks = layout.blocks_per_shard
        total, rounded, is_broken = work.total[:blocks], work.rounded[:blocks], work.is_broken[:blocks]
        values, scales = _parts(buffers.received_b, layout)
        total.zero_()
        for sender in range(layout.num_ranks):
            rounded.copy_(values[sender].view(blocks, INT8_BLOCK))
            total.add_(rounded.mul_(scales[sender].unsqueeze(1)))
        _quantize(total, rounded, is_broken, *_parts(buffers.own_b, layout))
        first, size = layout.owned(rank)
        total.masked_fill_(is_broken, 0.0)
        residual_n[first : first + size].add_(total.view(-1)[:size])

    def int8_decode(self, grad_n: Tensor, buffers: Int8Buffers) -> None:
        """See ``Kernels.int8_decode``."""
        layout, work = buffers.layout, buffers.work
        values, scales = _parts(buffers.received_b, layout)
        work.total.view(values.shape).copy_(values)
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


def _parts(records_b: Tensor, layout: Int8Layout) -> tuple[Tensor, Tensor]:
    """``(values, scales)`` of one or N records, one row each."""
    rows = records_b.view(-1, layout.shard_bytes)
    return rows[:, : layout.shard].view(torch.int8), rows[:, layout.shard :].view(torch.float32)


def _quantize(total: Tensor, rounded: Tensor, is_broken: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write ``total`` as int8 and scales; what rounding took away is left in ``total``. Broken blocks: 0, scale nan."""
    largest = torch.abs(total, out=rounded).amax(1)
    is_finite = torch.isfinite(largest)
    is_sent = is_finite & (largest >= INT8_TINY)
    inverse = torch.where(is_sent, torch.full_like(largest, 127.0) / largest, 0.0)
    scale = torch.where(is_sent, largest * _ONE_127TH, 0.0)
    is_broken.copy_(~is_finite.unsqueeze(1))
    torch.mul(total, inverse.unsqueeze(1), out=rounded)
    rounded.add_(_ROUND).sub_(_ROUND).masked_fill_(is_broken, 0.0)
    values.copy_(rounded.view(values.shape))
    scales.copy_(torch.where(is_finite, scale, torch.nan).view(scales.shape))
    total.sub_(rounded.mul_(scale.unsqueeze(1)))


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
