"""int8, int4, sign: quantize by blocks, send each shard to its owner, add there in fp32, quantize again, gather.

Two roundings whatever the number of ranks, and about 2, 1 or 1/4 bytes per element on the wire. Each block carries one
fp32 scale: its largest magnitude over 127 (int8) or 7 (int4), or its mean magnitude (sign, whose entries are all sent
as plus or minus that). Both roundings go into residuals: the first into the sender's, the second into the owner's, on
its shard. A block that holds inf or nan on any rank comes out as nan on every rank; its residual stays as it was.

One bit cannot say zero: under sign an entry without gradient that shares a block with others moves to and fro by the
block's scale, and error feedback holds the mean at zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wirespeed.train.codecs.base import Message, StatelessCodec, average_alone
from wirespeed.train.codecs.kernels import BlockBuffers, kernels_for
from wirespeed.train.codecs.layout import BlockLayout


class BlockCodec(StatelessCodec):
    """Block-wise quantization both ways; the strategy's codec says to how many bits."""

    stages: tuple[str, ...] = ("encode", "reduce", "decode")
    has_residual = True

    def allocate(self, num_elements: int, num_ranks: int, device: torch.device) -> BlockBuffers:
        """int8: about 2 + 1/N bytes per element (the torch kernels: 10 more)."""
        kernels = kernels_for(self.kernels, device)
        layout = BlockLayout.of(self.strategy.codec, num_elements, num_ranks)
        # Zeroed once: no stage writes the padding behind the last element, and it is sent.
        records = torch.zeros(2 * num_ranks + 1, layout.shard_bytes, dtype=torch.uint8, device=device)
        return BlockBuffers(
            kernels=kernels,
            layout=layout,
            send_b=records[:num_ranks].view(-1),
            received_b=records[num_ranks : 2 * num_ranks].view(-1),
            own_b=records[2 * num_ranks],
            work=kernels.block_work(layout, device),
        )

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: BlockBuffers, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """See ``Codec.exchange``."""
        if average_alone(grad_n, residual_n, num_ranks):
            return
        assert residual_n is not None
        b = buffers
        b.kernels.block_encode(grad_n, residual_n, b)
        yield Message("all_to_all", b.send_b, b.received_b)
        b.kernels.block_reduce(residual_n, b, rank)
        yield Message("all_gather", b.own_b, b.received_b)
        b.kernels.block_decode(grad_n, b)
