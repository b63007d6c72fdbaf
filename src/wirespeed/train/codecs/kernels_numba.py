"""The compiled loops of all codecs but low-rank as a set of kernels: views of the buffers as flat numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from wirespeed.spec.payloads import TOPK_CHUNK
from wirespeed.train.codecs import kernels_compiled as loops
from wirespeed.train.codecs import kernels_packed as packed
from wirespeed.train.codecs import kernels_topk as topk_loops
from wirespeed.train.codecs.kernels import BlockBuffers, HalfBuffers, TopkBuffers
from wirespeed.train.codecs.layout import BlockLayout, TopkLayout

_Array = np.ndarray[Any, Any]


class NumbaKernels:
    """See ``Kernels``. CPU tensors only."""

    name = "numba"

    def half_work(self, num_elements: int, device: torch.device) -> None:
        """Nothing."""

    def half_encode(self, grad_n: Tensor, buffers: HalfBuffers) -> None:
        """See ``Kernels.half_encode``."""
        factor = np.float32(buffers.state_2.numpy()[0] * np.float32(1 / buffers.num_ranks))
        loops.half_encode(grad_n.numpy(), buffers.send_n.numpy().view(np.uint16), factor, np.float32(buffers.limit))

    def half_decode(self, grad_n: Tensor, buffers: HalfBuffers) -> None:
        """See ``Kernels.half_decode``."""
        loops.half_decode(
            buffers.send_n.numpy().view(np.uint16), grad_n.numpy(), buffers.state_2.numpy(), buffers.num_ranks
        )

    def block_work(self, layout: BlockLayout, device: torch.device) -> _Array:
        """Two blocks: a sum, and magnitudes that are added up."""
        return torch.zeros(2 * layout.block).numpy()

    def block_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: BlockBuffers) -> None:
        """See ``Kernels.block_encode``."""
        send, layout = buffers.send_b.numpy(), buffers.layout
        grad, residual, scales = grad_n.numpy(), residual_n.numpy(), send.view(np.float32)
        if layout.codec == "int8":
            loops.int8_encode(grad, residual, send.view(np.int8), scales, layout.shard, layout.shard_bytes)
        elif layout.codec == "int4":
            packed.int4_encode(
                grad, residual, send.view(np.int8), scales, layout.shard, layout.shard_bytes, buffers.work
            )
        else:
            packed.sign_encode(grad, residual, send, scales, layout.shard, layout.shard_bytes, buffers.work)

    def block_reduce(self, residual_n: Tensor, buffers: BlockBuffers, rank: int) -> None:
        """See ``Kernels.block_reduce``."""
        received, own, layout = buffers.received_b.numpy(), buffers.own_b.numpy(), buffers.layout
        first, size = layout.owned(rank)
        residual = residual_n.numpy()[first : first + size]
        scales, own_scales = received.view(np.float32), own[layout.value_bytes :].view(np.float32)
        own_values = own[: layout.value_bytes]
        if layout.codec == "int8":
            loops.int8_reduce(
                received.view(np.int8), scales, own_values.view(np.int8), own_scales,
                residual, buffers.work[: layout.block], layout.num_ranks, layout.shard,
            )  # fmt: skip
        elif layout.codec == "int4":
            packed.int4_reduce(
                received.view(np.int8), scales, own_values.view(np.int8), own_scales,
                residual, buffers.work, layout.num_ranks, layout.shard, layout.shard_bytes,
            )  # fmt: skip
        else:
            packed.sign_reduce(
                received, scales, own_values, own_scales,
                residual, buffers.work, layout.num_ranks, layout.shard, layout.shard_bytes,
            )  # fmt: skip

    def block_decode(self, grad_n: Tensor, buffers: BlockBuffers) -> None:
        """See ``Kernels.block_decode``."""
        gathered, layout = buffers.received_b.numpy(), buffers.layout
        grad, scales, share = grad_n.numpy(), gathered.view(np.float32), np.float32(1 / layout.num_ranks)
        if layout.codec == "int8":
            loops.int8_decode(gathered.view(np.int8), scales, grad, layout.shard, layout.shard_bytes, share)
        elif layout.codec == "int4":
            packed.int4_decode(gathered.view(np.int8), scales, grad, layout.shard, layout.shard_bytes, share)
        else:
            packed.sign_decode(gathered, scales, grad, layout.shard, layout.shard_bytes, share)

    def topk_work(self, layout: TopkLayout, device: torch.device) -> tuple[_Array, ...]:
        """One chunk's sum (twice: as fp32 and its bits), group maxima, and candidates with their magnitudes' bits."""
        total = torch.zeros(TOPK_CHUNK).numpy()  # torch's memory starts at a cache line, numpy's may not
        return (
            total,
            total.view(np.uint32),
            torch.zeros(TOPK_CHUNK, dtype=torch.int32).numpy().view(np.uint32),
            np.zeros(TOPK_CHUNK + topk_loops.LANES, np.int32),
            np.zeros(TOPK_CHUNK + topk_loops.LANES, np.uint32),
        )

    def topk_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: TopkBuffers) -> None:
        """See ``Kernels.topk_encode``."""
        send, residual, layout = buffers.send_b.numpy(), residual_n.numpy(), buffers.layout
        topk_loops.topk_encode(
            grad_n.numpy(), residual, residual.view(np.uint32),
            send[: layout.values_at].view(np.float32),
            send[layout.values_at : layout.indices_at].view(np.uint16),
            send[layout.indices_at :].view(np.uint16),
            layout.per_chunk, layout.per_rest, *buffers.work,
        )  # fmt: skip

    def topk_decode(self, grad_n: Tensor, buffers: TopkBuffers) -> None:
        """See ``Kernels.topk_decode``."""
        gathered, layout = buffers.gathered_b.numpy(), buffers.layout
        topk_loops.topk_decode(
            gathered.view(np.float32), gathered.view(np.uint16), grad_n.numpy(),
            layout.per_chunk, layout.per_rest, layout.num_ranks,
            layout.values_at // 2, layout.indices_at // 2, np.float32(1 / layout.num_ranks),
        )  # fmt: skip
