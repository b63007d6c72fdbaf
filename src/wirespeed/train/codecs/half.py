"""half: one all_reduce of fp16, scaled so that small entries survive and saturating so that no sum overflows.

Each rank sends ``g * scale / N``, limited so that even the sum of N limits is finite (``kernels.half_limit``). The
scale is a power of two, kept with the bucket's buffers and adapted from the averaged result: that is equal on all
ranks, so all ranks adapt alike without another collective. It shrinks at once and otherwise grows twofold per step; the
first step only finds it, and until then works as plain fp16 would. inf and nan come out as nan on every rank and leave
the scale alone. It relies on all_reduce giving equal bytes to every rank, as gloo's and NCCL's do.

What it can lose: entries that saturate (one rank's more than about 128 times the largest average of the last step), and
averages 2^31 / N times smaller than the largest. The state is two numbers per bucket; without it (another division into
buckets) the first step finds the scale again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wirespeed.spec.payloads import Shapes
from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs.base import Message, average_alone
from wirespeed.train.codecs.kernels import HalfBuffers, KernelChoice, half_limit, kernels_for


class HalfCodec:
    """fp16 on the wire, fp32 at both ends."""

    stages: tuple[str, ...] = ("encode", "decode")
    has_residual = False

    def __init__(self, strategy: Strategy, kernels: KernelChoice = "auto") -> None:
        self.strategy = strategy
        self._choice = kernels

    def state_sizes(self, shapes: Shapes) -> tuple[int, ...]:
        """See ``Codec.state_sizes``: a bucket's scale, with every tensor that may come to stand first in one."""
        return (2,) * len(shapes)

    def make_buffers(
        self,
        num_elements: int,
        num_ranks: int,
        device: torch.device,
        *,
        shapes: Shapes | None = None,
        state_s: Tensor | None = None,
    ) -> HalfBuffers:
        """2 bytes per element, and the bucket's scale (1 at first)."""
        kernels = kernels_for(self._choice, device)
        state_2 = torch.zeros(2, device=device) if state_s is None else state_s[:2]
        if float(state_2[0]) == 0:
            state_2[0] = 1.0
        return HalfBuffers(
            kernels=kernels,
            num_ranks=num_ranks,
            limit=half_limit(num_ranks),
            send_n=torch.zeros(num_elements, dtype=torch.float16, device=device),
            state_2=state_2,
            work=kernels.half_work(num_elements, device),
        )

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: HalfBuffers, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """See ``Codec.exchange``."""
        if average_alone(grad_n, residual_n, num_ranks):
            return
        b = buffers
        b.kernels.half_encode(grad_n, b)
        yield Message("all_reduce", b.send_n, b.send_n)
        b.kernels.half_decode(grad_n, b)
