"""The compiled loops of ``kernels_compiled`` as a set of kernels: views of the buffers as flat numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from wirespeed.spec.strategy import INT8_BLOCK, TOPK_CHUNK
from wirespeed.train.codecs import kernels_compiled as loops
from wirespeed.train.codecs.kernels import HalfBuffers, Int8Buffers, TopkBuffers
from wirespeed.train.codecs.layout import Int8Layout, TopkLayout

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

    def int8_work(self, layout: Int8Layout, device: torch.device) -> _Array:
        """One block's sum."""
        return torch.zeros(INT8_BLOCK).numpy()

    def int8_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: Int8Buffers) -> None:
        """See ``Kernels.int8_encode``."""
        send, layout = buffers.send_b.numpy(), buffers.layout
        loops.int8_encode(
            grad_n.numpy(), residual_n.numpy(), send.view(np.int8), send.view(np.float32),
            layout.shard, layout.shard_bytes,
        )  # fmt: skip

    def int8_reduce(self, residual_n: Tensor, buffers: Int8Buffers, rank: int) -> None:
        """See ``Kernels.int8_reduce``."""
        received, own, layout = buffers.received_b.numpy(), buffers.own_b.numpy(), buffers.layout
        first, size = layout.owned(rank)
        loops.int8_reduce(
            received.view(np.int8), received.view(np.float32),
            own[: layout.shard].view(np.int8), own[layout.shard :].view(np.float32),
            residual_n.numpy()[first : first + size], buffers.work, layout.num_ranks, layout.shard,
        )  # fmt: skip

    def int8_decode(self, grad_n: Tensor, buffers: Int8Buffers) -> None:
        """See ``Kernels.int8_decode``."""
        gathered, layout = buffers.received_b.numpy(), buffers.layout
        loops.int8_decode(
            gathered.view(np.int8), gathered.view(np.float32), grad_n.numpy(),
            layout.shard, layout.shard_bytes, np.float32(1 / layout.num_ranks),
        )  # fmt: skip

    def topk_work(self, layout: TopkLayout, device: torch.device) -> tuple[_Array, ...]:
        """One chunk's sum (twice: as fp32 and its bits), group maxima, and candidates with their magnitudes' bits."""
        total = torch.zeros(TOPK_CHUNK).numpy()  # torch's memory starts at a cache line, numpy's may not
        return (
            total,
            total.view(np.uint32),
            torch.zeros(TOPK_CHUNK, dtype=torch.int32).numpy().view(np.uint32),
            np.zeros(TOPK_CHUNK + loops.LANES, np.int32),
            np.zeros(TOPK_CHUNK + loops.LANES, np.uint32),
        )

    def topk_encode(self, grad_n: Tensor, residual_n: Tensor, buffers: TopkBuffers) -> None:
        """See ``Kernels.topk_encode``."""
        send, residual, layout = buffers.send_b.numpy(), residual_n.numpy(), buffers.layout
        loops.topk_encode(
            grad_n.numpy(), residual, residual.view(np.uint32),
            send[: layout.values_at].view(np.float32),
            send[layout.values_at : layout.indices_at].view(np.uint16),
            send[layout.indices_at :].view(np.uint16),
            layout.per_chunk, layout.per_rest, *buffers.work,
        )  # fmt: skip

    def topk_decode(self, grad_n: Tensor, buffers: TopkBuffers) -> None:
        """See ``Kernels.topk_decode``."""
        gathered, layout = buffers.gathered_b.numpy(), buffers.layout
        loops.topk_decode(
            gathered.view(np.float32), gathered.view(np.uint16), grad_n.numpy(),
            layout.per_chunk, layout.per_rest, layout.num_ranks,
            layout.values_at // 2, layout.indices_at // 2, np.float32(1 / layout.num_ranks),
        )  # fmt: skip
