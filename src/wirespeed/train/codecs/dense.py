"""dense: one all_reduce of fp32, scaled by 1/N before the sum as DDP's own reducer does it: results equal DDP's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wirespeed.train.codecs.base import Message, StatelessCodec, average_alone


class DenseCodec(StatelessCodec):
    """The exact average, to fp32 rounding."""

    stages: tuple[str, ...] = ("encode", "decode")
    has_residual = False

    def allocate(self, num_elements: int, num_ranks: int, device: torch.device) -> None:
        """Nothing: the gradient itself is the message."""

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: None, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """See ``Codec.exchange``."""
        if average_alone(grad_n, residual_n, num_ranks):
            return
        grad_n.mul_(1 / num_ranks)
        yield Message("all_reduce", grad_n, grad_n)
