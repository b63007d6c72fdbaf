"""int8: quantize by blocks, send each shard to its owner, add there in fp32, quantize again, gather. Error feedback.

Two roundings whatever the number of ranks, and about 2 bytes per element on the wire. Each block of 1024 carries one
fp32 scale, its largest magnitude / 127. Both roundings go into residuals: the first into the sender's, the second into
the owner's, on its shard. A block that holds inf or nan on any rank comes out as nan on every rank; its residual stays
as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wirespeed.spec.strategy import Shapes, Strategy
from wirespeed.train.codecs.base import Message, average_alone
from wirespeed.train.codecs.kernels import Int8Buffers, KernelChoice, kernels_for
from wirespeed.train.codecs.layout import Int8Layout


class Int8Codec:
    """Block-wise int8 both ways."""

    stages: tuple[str, ...] = ("encode", "reduce", "decode")
    has_residual = True

    def __init__(self, strategy: Strategy, kernels: KernelChoice = "auto") -> None:
        self.strategy = strategy
        self._choice = kernels

    def state_sizes(self, shapes: Shapes) -> tuple[int, ...]:
        """See ``Codec.state_sizes``: none."""
        return (0,) * len(shapes)

    def make_buffers(
        self,
        num_elements: int,
        num_ranks: int,
        device: torch.device,
        *,
        shapes: Shapes | None = None,
        state_s: Tensor | None = None,
    ) -> Int8Buffers:
        """About 2 + 1/N bytes per element (the torch kernels: 10 more)."""
        kernels = kernels_for(self._choice, device)
        layout = Int8Layout.of(num_elements, num_ranks)
        # Zeroed once: no stage writes the padding behind the last element, and it is sent.
        records = torch.zeros(2 * num_ranks + 1, layout.shard_bytes, dtype=torch.uint8, device=device)
        return Int8Buffers(
            kernels=kernels,
            layout=layout,
            send_b=records[:num_ranks].view(-1),
            received_b=records[num_ranks : 2 * num_ranks].view(-1),
            own_b=records[2 * num_ranks],
            work=kernels.int8_work(layout, device),
        )

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: Int8Buffers, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """See ``Codec.exchange``."""
        if average_alone(grad_n, residual_n, num_ranks):
            return
        assert residual_n is not None
        b = buffers
        b.kernels.int8_encode(grad_n, residual_n, b)
        yield Message("all_to_all", b.send_b, b.received_b)
        b.kernels.int8_reduce(residual_n, b, rank)
        yield Message("all_gather", b.own_b, b.received_b)
        b.kernels.int8_decode(grad_n, b)
