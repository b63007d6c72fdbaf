"""A model whose compute is sleep: real autograd, real gradients of the real shapes, at the recorded times.

One layer per parameter, chained in the order in which backward makes the gradients. In backward a layer sleeps to an
absolute deadline, counted from the start of this backward pass, and hands out its gradient; so what the reducer, a hook
or a codec takes meanwhile does not push later gradients back, as it does not on an accelerator. A deadline that has
passed is not waited for. Parameters are one number seen through strides of zero: only gradients take memory, and those
only where DDP keeps them, in its buckets. Gradients are normal noise, different on every rank and the same every step.

It is wrong where compute and communication share something: cores, memory bandwidth, or an accelerator's processors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wirespeed.spec.workload import TrainingWorkload

NOISE = 1e-3
"""Standard deviation of the gradients: of the size that real ones have, and far from fp16's ends."""


class Stopwatch:
    """Where a backward pass began. ``None`` between passes."""

    def __init__(self) -> None:
        self.began_s: float | None = None

    def sleep_to(self, at_s: float) -> None:
        """Sleep until ``at_s`` after the start of this backward pass; the first call of a pass starts it."""
        if self.began_s is None:
            self.began_s = time.perf_counter()
        left_s = self.began_s + at_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _Sleep(torch.autograd.Function):
    """Forward: nothing. Backward: sleep to the deadline, then give the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, layer: ReplayLayer) -> Tensor:
        ctx.layer = layer
        ctx.shape = parameter.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer: ReplayLayer = ctx.layer
        layer.stopwatch.sleep_to(layer.ready_s)
        return grad, layer.noise[: layer.num_elements].view(ctx.shape), None


class _End(torch.autograd.Function):
    """The end of backward: sleeps until all of it is over, though no gradient is made there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: ReplayModule) -> Tensor:
        ctx.model = model
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        model: ReplayModule = ctx.model
        model.stopwatch.sleep_to(model.backward_s)
        model.stopwatch.began_s = None
        return grad, None


class ReplayLayer(torch.nn.Module):
    """One parameter and the time at which its gradient is there."""

    def __init__(self, shape: Sequence[int], ready_s: float, stopwatch: Stopwatch, noise: Tensor) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(1).expand(tuple(shape)))
        self.num_elements = math.prod(shape)
        self.ready_s = ready_s
        self.stopwatch = stopwatch
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        """Pass ``x`` on."""
        result: Tensor = _Sleep.apply(x, self.parameter, self)  # type: ignore[no-untyped-call]
        return result


class ReplayModule(torch.nn.Module):
    """The whole model: ``module(batch).backward()`` takes forward and backward as the workload tells.

    A gradient of unknown shape is a vector. ``seed``: of the noise.
    """

    def __init__(self, workload: TrainingWorkload, *, seed: int = 0) -> None:
        super().__init__()
        self.forward_s = workload.forward_s + workload.data_s
        self.backward_s = workload.backward_s
        self.stopwatch = Stopwatch()
        generator = torch.Generator().manual_seed(seed)
        longest = max(gradient.num_elements for gradient in workload.gradients)
        noise = torch.randn(longest, generator=generator) * NOISE
        layers = [
            ReplayLayer(gradient.shape or (gradient.num_elements,), gradient.ready_s, self.stopwatch, noise)
            for gradient in workload.gradients
        ]
        # Forward visits the layers against the order of backward: the last gradient belongs to the first layer.
        self.layers = torch.nn.ModuleList(reversed(layers))
        self.anchor = torch.ones((), requires_grad=True)

    def forward(self, _: Tensor) -> Tensor:
        """Sleep through the forward pass; gives a scalar to call ``backward`` on."""
        began_s = time.perf_counter()
        x: Tensor = _End.apply(self.anchor, self)  # type: ignore[no-untyped-call]
        for layer in self.layers:
            x = layer(x)
        left_s = began_s + self.forward_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return x


class ReplayOptimizer(torch.optim.Optimizer):
    """An optimizer that takes its time and changes nothing."""

    def __init__(self, parameters: Any, *, step_s: float) -> None:
        super().__init__(parameters, {})
        self.step_s = step_s

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sleep for the recorded time."""
        if self.step_s > 0:
            time.sleep(self.step_s)
