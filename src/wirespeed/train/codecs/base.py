"""What a codec is: local stages with a collective between each two.

A codec's ``exchange`` is a generator. It runs a local stage, yields the ``Message`` that has to cross the network, and
goes on when that collective has ended; after its last stage the averaged gradient stands in ``grad_n``. Whoever drives
it (the session's lanes, the speed measurement, a test with all ranks in one process) decides on threads, process groups
and timing, so the code of a codec reads from top to bottom and holds none of these.

Shape suffixes: n gradient elements of the bucket, N ranks, b bytes of a message, s numbers of a codec's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wirespeed.records import Collective
from wirespeed.spec.payloads import Shapes
from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs.kernels import KernelChoice


@dataclass(frozen=True)
class Message:
    """One collective to perform. For all_reduce ``receive`` is ``send`` (summed in place)."""

    collective: Collective
    send: Tensor
    receive: Tensor


class Codec(Protocol):
    """One codec with its parameters. Stateless: buffers, residuals and state belong to the caller."""

    strategy: Strategy
    stages: tuple[str, ...]
    """Names of the local stages: one more than the exchange has messages."""
    has_residual: bool
    """Whether it uses error feedback."""

    def state_sizes(self, shapes: Shapes) -> tuple[int, ...]:
        """Numbers that the codec learns from step to step, per tensor of a bucket; all 0 for most codecs."""
        ...

    def make_buffers(
        self,
        num_elements: int,
        num_ranks: int,
        device: torch.device,
        *,
        shapes: Shapes | None = None,
        state_s: Tensor | None = None,
    ) -> Any:
        """Allocate what one bucket's exchange needs; reused every step, never shared by two exchanges in flight.

        ``shapes`` of the bucket's tensors: None for one square matrix. ``state_s`` (fp32, ``state_sizes`` numbers,
        zeros at first) is the caller's, who may save it and give it again; None: the buffers hold it themselves.
        """
        ...

    def exchange(
        self, grad_n: Tensor, residual_n: Tensor | None, buffers: Any, *, rank: int, num_ranks: int
    ) -> Iterator[Message]:
        """Average ``grad_n`` (contiguous fp32, in place) over the ranks.

        ``residual_n`` (fp32, same shape, updated in place) is what earlier steps held back; it is added before encoding
        and afterwards holds what was not sent. Over all ranks and any number of steps the sum of the results times N,
        plus the sum of the residuals, equals the sum of the gradients to rounding.
        """
        ...


class StatelessCodec(ABC):
    """Base of the codecs that learn nothing from step to step and do not mind what shapes a bucket's tensors have."""

    def __init__(self, strategy: Strategy, kernels: KernelChoice = "auto") -> None:
        self.strategy = strategy
        self.kernels: KernelChoice = kernels

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
    ) -> Any:
        """See ``Codec.make_buffers``."""
        return self.allocate(num_elements, num_ranks, device)

    @abstractmethod
    def allocate(self, num_elements: int, num_ranks: int, device: torch.device) -> Any:
        """The buffers of one bucket's exchange, for which its size is enough."""


def average_alone(grad_n: Tensor, residual_n: Tensor | None, num_ranks: int) -> bool:
    """Whether nothing has to be sent: the bucket is empty, or this is the only rank (the residual is then flushed)."""
    if num_ranks > 1 and grad_n.numel() > 0:
        return False
    if residual_n is not None:
        grad_n.add_(residual_n)
        residual_n.zero_()
    return True
