"""topk: of every chunk of 16,384 entries send the k largest, as fp16 and 16-bit index; one all_gather, error feedback.

The selection is exact within a chunk: the k-th largest of a few hundred group maxima is a threshold that at least k
entries pass and few more do, so only those few are looked at closely (``kernels_topk``). k is fixed, so that
messages have one size whatever the data. Values are divided by a power of two per chunk, so that fp16 neither overflows
nor underflows; what fp16's rounding takes away stays in the residual with all that was not sent. A chunk that holds inf
or nan on any rank comes out as nan on every rank; its residual stays as it was.

It changes what the optimizer sees: check the loss. Traffic grows with N (every rank receives N payloads).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wirespeed.train.codecs.base import Message, StatelessCodec, average_alone
from wirespeed.train.codecs.kernels import TopkBuffers, kernels_for
from wirespeed.train.codecs.layout import TopkLayout


class TopkCodec(StatelessCodec):
    """Chunk-wise top-k with a fixed number of entries per chunk."""

    stages: tuple[str, ...] = ("encode", "decode")
    has_residual = True

    def allocate(self, num_elements: int, num_ranks: int, device: torch.device) -> TopkBuffers:
        """About 4 (N + 1) bytes per entry sent (the torch kernels: some 40 bytes per element more)."""
        assert self.strategy.ratio is not None
        kernels = kernels_for(self.kernels, device)
        layout = TopkLayout.of(num_elements, num_ranks, self.strategy.ratio)
        records = torch.zeros(num_ranks + 1, layout.payload_bytes, dtype=torch.uint8, device=device)
        return TopkBuffers(
            kernels=kernels,
            layout=layout,
            send_b=records[num_ranks],
            gathered_b=records[:num_ranks].view(-1),
            work=kernels.topk_work(layout, device),
        )

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: TopkBuffers, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """See ``Codec.exchange``."""
        if average_alone(grad_n, residual_n, num_ranks):
            return
        assert residual_n is not None
        b = buffers
        b.kernels.topk_encode(grad_n, residual_n, b)
        yield Message("all_gather", b.send_b, b.gathered_b)
        b.kernels.topk_decode(grad_n, b)
