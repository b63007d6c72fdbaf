"""When each gradient is ready: names in the true backward order, with medians over steps.

The order differs from the reversed order of ``named_parameters`` (on ResNet-50 by up to ten places), so it is taken
from hooks. Costs about 1 us per parameter and step; meant for a few probing steps.
"""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Any

import torch

from wirespeed.spec.workload import GradientTensor


class GradientTimes:
    """Notes the time of every gradient of ``module`` since the end of the last forward pass."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
        self._began_s = time.perf_counter()
        self._current: dict[str, float] = {}
        self._seen: dict[str, list[float]] = {}
        self._handles: list[Any] = [module.register_forward_hook(lambda *_: self._begin())]
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hooked: Any = parameter
                self._handles.append(hooked.register_post_accumulate_grad_hook(lambda _, name=name: self._ready(name)))

    def end_step(self) -> None:
        """Keep what was noted since the last call."""
        for name, at in self._current.items():
            self._seen.setdefault(name, []).append(at)
        self._current = {}

    def gradients(self, *, skip: int = 2) -> tuple[GradientTensor, ...]:
        """The gradients in order, by median time; the first ``skip`` steps are left out when there are more."""
        ready = {name: median(times[skip:] or times) for name, times in self._seen.items()}
        return tuple(
            GradientTensor(
                name=name,
                num_elements=math.prod(self._shapes[name]),
                ready_s=max(0.0, at),
                shape=self._shapes[name],
            )
            for name, at in sorted(ready.items(), key=lambda item: item[1])
        )

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self) -> None:
        self._began_s = time.perf_counter()

    def _ready(self, name: str) -> None:
        self._current[name] = time.perf_counter() - self._began_s
