"""Codecs: how one bucket of gradients is made small, sent and put together again.

``make_codec`` gives the codec of a strategy; call ``warm_up`` once before anything is timed, because the compiled
kernels are built on first use (seconds the first time on a host, then from numba's cache).
"""

from __future__ import annotations

import torch

from wirespeed.spec.payloads import CODECS
from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs.base import Codec, Message
from wirespeed.train.codecs.block import BlockCodec
from wirespeed.train.codecs.dense import DenseCodec
from wirespeed.train.codecs.half import HalfCodec
from wirespeed.train.codecs.kernels import KernelChoice, has_numba, kernels_for
from wirespeed.train.codecs.lowrank import LowrankCodec
from wirespeed.train.codecs.topk import TopkCodec

__all__ = ["Codec", "KernelChoice", "Message", "has_numba", "kernels_for", "make_codec", "warm_up"]


def make_codec(strategy: Strategy, *, kernels: KernelChoice = "auto") -> Codec:
    """The codec of ``strategy``. "auto" runs compiled loops on the CPU where numba is installed, torch elsewhere.

    Both kinds of kernels give equal bytes, but for low-rank, where they differ in the order of sums within a rank.
    Raises MissingCapability from ``make_buffers`` for "numba" without numba, and UsageError for "numba" on another
    device than the CPU.
    """
    match strategy.codec:
        case "dense":
            return DenseCodec(strategy)
        case "half":
            return HalfCodec(strategy, kernels)
        case "int8" | "int4" | "sign":
            return BlockCodec(strategy, kernels)
        case "topk":
            return TopkCodec(strategy, kernels)
        case "lowrank":
            return LowrankCodec(strategy, kernels)


def warm_up(*, kernels: KernelChoice = "auto", device: torch.device | None = None) -> None:
    """Run every kernel once on little data, so that no compilation falls into a timed step."""
    on = torch.device("cpu") if device is None else device
    simple = [Strategy(codec=codec) for codec in CODECS if codec != "lowrank"]
    for strategy in (*simple, *(Strategy(codec="lowrank", matrix_rank=matrix_rank) for matrix_rank in (4, 16))):
        codec = make_codec(strategy, kernels=kernels)
        grad_n = torch.ones(128 * 128, device=on)  # as a matrix it is worth a low rank
        residual_n = torch.zeros_like(grad_n) if codec.has_residual else None
        buffers = codec.make_buffers(len(grad_n), 2, on)
        for _ in range(2):  # low rank takes another way every other time
            for message in codec.exchange(grad_n, residual_n, buffers, rank=0, num_ranks=2):
                if message.collective == "all_gather":
                    message.receive.view(2, -1).copy_(message.send)
                elif message.collective == "all_to_all":
                    message.receive.copy_(message.send)
