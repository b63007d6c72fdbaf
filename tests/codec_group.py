"""N ranks of one codec in one process, driven in lockstep with real collectives on their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wirespeed.spec.payloads import Shapes, square_shape
from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs import KernelChoice, Message, make_codec

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sent:
    """What one rank put into one collective."""

    collective: str
    send: Tensor
    size_bytes: int


class Group:
    """``step`` averages one bucket over all ranks, in place; residuals and buffers live from step to step."""

    def __init__(
        self,
        name: str,
        num_elements: int,
        num_ranks: int,
        kernels: KernelChoice = "torch",
        shapes: Shapes | None = None,
    ) -> None:
        self.strategy = Strategy.parse(name)
        self.num_ranks = num_ranks
        self.codec = make_codec(self.strategy, kernels=kernels)
        self.states = [
            torch.zeros(sum(self.codec.state_sizes(shapes or square_shape(num_elements)))) for _ in range(num_ranks)
        ]
        self.buffers: list[Any] = [
            self.codec.make_buffers(num_elements, num_ranks, CPU, shapes=shapes, state_s=state) for state in self.states
        ]
        self.residuals = [torch.zeros(num_elements) if self.codec.has_residual else None for _ in range(num_ranks)]

    def step(self, grads: list[Tensor]) -> list[list[Sent]]:
        """Per collective, what each rank sent."""
        exchanges = [
            iter(self.codec.exchange(grad, residual, buffers, rank=rank, num_ranks=self.num_ranks))
            for rank, (grad, residual, buffers) in enumerate(zip(grads, self.residuals, self.buffers, strict=True))
        ]
        log = []
        while True:
            messages = [next(exchange, None) for exchange in exchanges]
            if None in messages:
                assert messages == [None] * self.num_ranks  # all ranks end together
                return log
            log.append([Sent(m.collective, m.send.clone(), size_bytes(m)) for m in messages])
            deliver(messages)

    def held_back(self) -> Tensor:
        """The sum of all ranks' residuals, fp64."""
        return torch.stack([r.double() for r in self.residuals if r is not None] or [torch.zeros(1).double()]).sum(0)


def size_bytes(message: Message) -> int:
    """In the convention of ``records``: the whole output of an all_gather, else the send buffer."""
    counted = message.receive if message.collective == "all_gather" else message.send
    return counted.numel() * counted.element_size()


def deliver(messages: list[Message]) -> None:
    """The collective itself; sums in rank order, in the tensors' own type."""
    sends = [m.send.clone() for m in messages]
    match messages[0].collective:
        case "all_reduce":
            total = sends[0]
            for send in sends[1:]:
                total = total + send
            results = [total] * len(messages)
        case "all_gather":
            results = [torch.cat(sends)] * len(messages)
        case "all_to_all":
            parts = torch.stack([send.view(len(messages), -1) for send in sends])
            results = [parts[:, rank].reshape(-1) for rank in range(len(messages))]
    for message, result in zip(messages, results, strict=True):
        message.receive.copy_(result)


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor as it stands in memory."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def gradients(kind: str, num_elements: int, num_ranks: int, seed: int) -> list[Tensor]:
    """One bucket per rank."""
    source = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_ranks, num_elements, generator=source)
    match kind:
        case "gauss":
            grads = noise
        case "heavy":
            grads = noise**7
        case "sparse":
            grads = noise * (torch.rand(num_ranks, num_elements, generator=source) < 0.003)
        case "zeros":
            grads = noise * 0
        case "equal":
            grads = torch.ones_like(noise)
        case "denormal":
            grads = noise * 1e-41
        case "huge":
            grads = noise * 1e37
        case "layers":  # blocks of 700 entries whose sizes differ by up to 10^6, as layers' gradients do
            grads = (
                noise
                * 10.0
                ** (-6 * torch.rand(num_elements // 700 + 1, generator=source)).repeat_interleave(700)[:num_elements]
            )
        case _:
            raise AssertionError(kind)
    return list(grads.contiguous().unbind(0))
