"""dense: one all_reduce of fp32, scaled by 1/N before the sum as DDP's own reducer does it: results equal DDP's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wirespeed.spec.strategy import Shapes, Strategy
from wirespeed.train.codecs.base import Message, average_alone


class DenseCodec:
    """The exact average, to fp32 rounding."""

    stages: tuple[str, ...] = ("encode", "decode")
    has_residual = False

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

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
    ) -> None:
        """Nothing: the gradient itself is the message."""

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: None, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """See ``Codec.exchange``."""
        if average_alone(grad_n, residual_n, num_ranks):
            return
        grad_n.mul_(1 / num_ranks)
        yield Message("all_reduce", grad_n, grad_n)
