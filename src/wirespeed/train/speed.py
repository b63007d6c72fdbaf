"""How fast the codecs' local stages run on this device: what `sim` needs beside the speed of the collectives.

Every stage of an exchange is timed by the wall clock, as in training: with this process's thread settings and with
whatever else runs on the machine. Where several ranks measure together they begin each stage together, and it counts as
long as the slowest of them takes, because the collective behind it waits for that one. Collectives are left out: what
would arrive from the other ranks is this rank's own message. A copy of the bucket is timed among the stages (codec
"memcpy"), so that a disturbed run shows.

It can be wrong where training differs: other processes on the cores, gradients in another cache, or data on which top-k
finds many equal entries. Gradients here are normal noise with error feedback.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wirespeed.errors import UsageError
from wirespeed.measure.environment import capture
from wirespeed.records import CodecSample, CodecsRecord
from wirespeed.spec.payloads import BYTES_PER_ELEMENT, Shapes
from wirespeed.spec.strategy import Strategy
from wirespeed.train.codecs import Codec, KernelChoice, Message, kernels_for, make_codec, warm_up
from wirespeed.units import KIB, MIB

DEFAULT_SIZES_BYTES = (256 * KIB, MIB, 4 * MIB, 25 * MIB)
"""From DDP's small last buckets to its default ``bucket_cap_mb``."""
_SHORTEST_S = 1e-9
"""An empty stage can end within one tick of the clock; a record holds positive times."""


Slowest = Callable[[float], float]
"""Gives every rank the largest of all ranks' numbers. All ranks call it equally often."""


@dataclass
class _Arm:
    """One codec at one size."""

    codec: Codec
    name: str
    buffers: Any


def measure_codecs(
    strategies: Sequence[Strategy],
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    *,
    num_ranks: int,
    repeats: int = 9,
    concurrent: int = 1,
    deadline_s: float = 60.0,
    kernels: KernelChoice = "auto",
    device: torch.device | None = None,
    shapes: Shapes = (),
    slowest: Slowest | None = None,
) -> CodecsRecord:
    """Time every local stage of the strategies' codecs for buckets of ``sizes_bytes`` of fp32 gradient.

    ``num_ranks`` (2 or more) is the group size whose messages are made and decoded. ``concurrent`` is recorded, not
    acted upon: say how many ranks call this at the same time on this machine. Bucket sizes of the strategies do not
    matter, and codecs that occur twice are measured once. ``shapes`` of a model's gradients, in the order in which
    backward makes them: a bucket of some size is made of as many of them; none: of one square matrix.

    ``slowest`` gives every rank the largest of all ranks' numbers, and makes them meet. Without it, where more ranks
    run than there are cores, a stage takes its CPU time over the share of a core that a rank has.

    Each size gets a share of ``deadline_s`` according to its bytes: as many rounds of all codecs as fit, at most
    ``repeats`` and at least one, so that every sample is there; on a slow machine it therefore takes longer. Building
    the compiled kernels comes before and is not counted. Memory: about six buckets of the largest size.
    """
    on = torch.device("cpu") if device is None else device
    names = {strategy.name.partition("/")[0]: strategy for strategy in strategies}
    _check(names, sizes_bytes, num_ranks=num_ranks, repeats=repeats, concurrent=concurrent, deadline_s=deadline_s)
    codecs = {name: make_codec(strategy, kernels=kernels) for name, strategy in names.items()}
    warm_up(kernels=kernels, device=on)
    samples: list[CodecSample] = []
    sizes = sorted(set(sizes_bytes))
    clock = _clock(on, concurrent if slowest is None else 1)
    agree = slowest or (lambda seconds: seconds)
    end_s = time.monotonic() + deadline_s
    for place, size_bytes in enumerate(sizes):
        left_s = end_s - time.monotonic()
        share_s = left_s * size_bytes / sum(sizes[place:])
        samples += _measure_size(codecs, size_bytes, num_ranks, repeats, share_s, clock, on, shapes, agree)
    return CodecsRecord(
        environment=capture(),
        device="cpu" if on.type == "cpu" else torch.cuda.get_device_name(on),
        kernels=kernels_for(kernels, on).name,
        num_ranks=num_ranks,
        concurrent=concurrent,
        samples=tuple(samples),
    )


def _check(
    names: dict[str, Strategy],
    sizes_bytes: Sequence[int],
    *,
    num_ranks: int,
    repeats: int,
    concurrent: int,
    deadline_s: float,
) -> None:
    if not names or not sizes_bytes:
        raise UsageError("got no strategy or no size", expected="at least one of each")
    if min(sizes_bytes) < BYTES_PER_ELEMENT:
        raise UsageError(f"got a bucket of {min(sizes_bytes)} bytes", expected="at least one fp32 element (4 bytes)")
    if num_ranks < 2:
        raise UsageError(f"got {num_ranks} ranks", expected="2 or more: one rank has nothing to encode")
    if repeats < 1 or concurrent < 1 or deadline_s <= 0:
        raise UsageError(
            f"got repeats={repeats}, concurrent={concurrent}, deadline_s={deadline_s:g}", expected="positive numbers"
        )


def _measure_size(  # noqa: PLR0917
    codecs: dict[str, Codec],
    size_bytes: int,
    num_ranks: int,
    repeats: int,
    share_s: float,
    clock: Callable[[], float],
    device: torch.device,
    shapes: Shapes,
    agree: Slowest,
) -> Iterator[CodecSample]:
    num_elements = size_bytes // BYTES_PER_ELEMENT
    source = torch.Generator(device=device).manual_seed(0)
    noise_n = torch.randn(num_elements, generator=source, device=device)
    grad_n = torch.empty_like(noise_n)
    residual_n = torch.zeros_like(noise_n)  # one for all: what it holds stays of the gradient's size
    cut = bucket_shapes(shapes, num_elements)
    arms = [
        _Arm(codec, name, codec.make_buffers(num_elements, num_ranks, device, shapes=cut))
        for name, codec in codecs.items()
    ]
    times_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    end_s = time.monotonic() + share_s
    for round_ in range(-1, repeats):  # round -1 touches all memory and is dropped
        if round_ > 0 and agree(time.monotonic() - end_s) > 0:
            break
        if round_ == 0:
            times_s.clear()
        times_s["memcpy", "copy"].append(agree(_time_copy(noise_n, grad_n, clock)))
        for arm in arms:
            grad_n.copy_(noise_n)
            for stage, seconds in _time_stages(arm, grad_n, residual_n, num_ranks, clock, agree):
                times_s[arm.name, stage].append(seconds)
    for (name, stage), seconds_ in times_s.items():
        yield CodecSample(codec=name, stage=stage, size_bytes=size_bytes, times_s=tuple(seconds_))


def slowest_of(group: dist.ProcessGroup | None, device: torch.device) -> Slowest:
    """``Slowest`` over a process group; None: the default one."""

    def agree(seconds: float) -> float:
        held = torch.tensor([seconds], dtype=torch.float64, device=device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
        return float(held.item())

    return agree


def bucket_shapes(shapes: Shapes, num_elements: int) -> Shapes | None:
    """Shapes of a bucket of ``num_elements``: of ``shapes`` in turn those that fit; what is left is a vector."""
    sizes = [(shape, math.prod(shape)) for shape in shapes if math.prod(shape) > 0]
    if not sizes:
        return None
    cut: list[tuple[int, ...]] = []
    left = num_elements
    while left >= min(size for _, size in sizes):
        for shape, size in sizes:
            if size <= left:
                cut.append(shape)
                left -= size
    return [*cut, (left,)] if left else cut


def _time_copy(source: Tensor, target: Tensor, clock: Callable[[], float]) -> float:
    started_s = clock()
    target.copy_(source)
    return max(clock() - started_s, _SHORTEST_S)


def _time_stages(  # noqa: PLR0917
    arm: _Arm,
    grad_n: Tensor,
    residual_n: Tensor,
    num_ranks: int,
    clock: Callable[[], float],
    agree: Slowest,
) -> Iterator[tuple[str, float]]:
    """``(stage, seconds)`` of one exchange as rank 0."""
    residual = residual_n if arm.codec.has_residual else None
    steps = iter(arm.codec.exchange(grad_n, residual, arm.buffers, rank=0, num_ranks=num_ranks))
    for stage in arm.codec.stages:
        agree(0.0)  # begin together
        started_s = clock()
        message = next(steps, None)
        yield stage, agree(max(clock() - started_s, _SHORTEST_S))
        if message is not None:
            deliver_own(message, num_ranks)


def deliver_own(message: Message, num_ranks: int) -> None:
    """Pretend that every rank sent what this one, rank 0, sent. For all_reduce the sum is left at this rank's share."""
    match message.collective:
        case "all_gather":
            message.receive.view(num_ranks, -1).copy_(message.send)
        case "all_to_all":
            message.receive.view(num_ranks, -1).copy_(message.send.view(num_ranks, -1)[0])
        case _:
            assert message.receive is message.send


def _clock(device: torch.device, concurrent: int) -> Callable[[], float]:
    """Seconds of a stage as a rank feels them, see ``measure_codecs``."""
    if device.type == "cuda":

        def synchronized() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return synchronized
    share = len(os.sched_getaffinity(0)) / concurrent
    return time.perf_counter if share >= 1 else lambda: time.thread_time() / share
