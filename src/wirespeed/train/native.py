"""Dense without a communication hook: DDP's own reduction, heard and not touched.

With a hook DDP copies gradients into its buckets as they are, and the hook has to divide them: one more pass over all
of them than DDP makes on its own, which divides while it copies. On a CPU that is 3 % of a step (``benchmarks/
overhead.py``). So under dense a session has no hook: when a backward's gradients are complete, and when they are
averaged, is heard from the autograd engine's final callbacks.

What the backend raises then comes out of ``backward`` as torch's own error. ``explain_failures`` adds what it means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from wirespeed.train.lanes import as_peer_failure

_is_explaining = False


class NativeReduction:
    """Hears of the synchronising backwards of a DDP model that has no hook."""

    def __init__(
        self, ddp: DistributedDataParallel, *, on_computed: Callable[[], None], on_reduced: Callable[[], None]
    ) -> None:
        self._ddp = ddp
        self._on_computed = on_computed
        self._on_reduced = on_reduced
        self._is_in_backward = False
        self._syncs = True
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        self.num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        """Of all gradients: what a synchronising backward sums, whether or not a parameter took part."""
        hooked: Any = parameters
        self._handles = [p.register_post_accumulate_grad_hook(self._ready) for p in hooked]

    def forward_begins(self) -> None:
        """Whether the backward of this forward synchronises is settled here (``no_sync``)."""
        self._is_in_backward = False  # an error may have ended the last one
        self._syncs = bool(self._ddp.require_backward_grad_sync)

    def remove(self) -> None:
        """Hear no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _ready(self, _: Tensor) -> None:
        if self._is_in_backward or not self._syncs:
            return
        self._is_in_backward = True
        # DDP queues its finalisation with its last bucket, after this: the engine runs them in order.
        _queue(self._computed)

    def _computed(self) -> None:
        self._on_computed()
        _queue(self._reduced)

    def _reduced(self) -> None:
        self._is_in_backward = False
        self._on_reduced()


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def explain_failures() -> None:
    """Behind the traceback of an error of the backend that ends the program, say what such an error means. Once."""
    global _is_explaining  # noqa: PLW0603 - the hook is the process's
    if _is_explaining:
        return
    _is_explaining = True
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        before(kind, value, trace)
        told = as_peer_failure(value) if isinstance(value, RuntimeError) else value
        if told is not value:
            sys.stderr.write(f"wirespeed: {told}\n")

    sys.excepthook = hook
