"""What a session hears of the training loop: forward passes, backward's end, optimizer steps; and the clock's marks.

Hooks on the module and on the optimizer; the loop itself does not change. Without an optimizer given, every optimizer
that holds a parameter of the model is heard: the first to step after a forward ends the step, what others do before the
next forward is counted to it. ``torch.compile`` leaves the hooks alone (they run outside of what it compiles).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from wirespeed.measure.steps import StepClock


class LoopEvents:
    """Hears of one model's training loop. The session sets what is to be called before it listens."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, clock: StepClock) -> None:
        self._module = module
        self._optimizer = optimizer
        self.optimizers: list[torch.optim.Optimizer] = [] if optimizer is None else [optimizer]
        """Those that were given or have stepped, in the order in which they first did."""
        self._clock = clock
        self._handles: list[Any] = []
        self._has_forward = False
        """Whether a training forward pass has run since the last step: several optimizers may share one step."""
        self.on_forward: Callable[[], None] = _nothing
        """A training forward begins; it does not count as begun yet."""
        self.on_optimizer: Callable[[], None] = _nothing
        """An optimizer of the model is about to step."""
        self.on_stepped: Callable[[], None] = _nothing
        """The optimizer has stepped; the step's time still runs."""
        self.on_second_optimizer: Callable[[], None] = _nothing
        """Another optimizer has stepped after the one that ended the step."""
        self.on_step: Callable[[], None] = _nothing
        """The step has ended."""

    def listen(self) -> None:
        """Register the hooks."""
        module = self._module
        quiet: Any = torch.compiler.disable
        self._handles += [
            module.register_forward_pre_hook(quiet(lambda *_: self._forward_begins())),
            module.register_forward_hook(quiet(lambda *_: self._forward_ended())),
        ]
        if self._optimizer is not None:
            self._handles += [
                self._optimizer.register_step_pre_hook(lambda *_: self._step_begins()),
                self._optimizer.register_step_post_hook(lambda *_: self._step_ended()),
            ]
            return
        mine = {id(p) for p in module.parameters()}

        def is_mine(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

        def ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if is_mine(optimizer):
                if all(optimizer is not known for known in self.optimizers):
                    self.optimizers.append(optimizer)
                self._step_ended()

        self._handles += [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._step_begins() if is_mine(optimizer) else None),
            register_optimizer_step_post_hook(ends),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.optimizers.clear()

    def _is_training(self) -> bool:
        return torch.is_grad_enabled() and self._module.training

    def _forward_begins(self) -> None:
        if self._clock.is_evaluating:
            return
        if not self._is_training():
            self._clock.begin_evaluation()
            return
        self.on_forward()
        if not self._clock.has_begun:
            self._clock.begin()
        self._clock.mark("forward_begin")

    def _forward_ended(self) -> None:
        if self._clock.is_evaluating:
            return
        if self._is_training():
            self._has_forward = True
            self._clock.mark("forward_end")
        else:
            self._clock.end_evaluation()

    def _step_begins(self) -> None:
        self._clock.mark("optimizer_begin")
        self.on_optimizer()

    def _step_ended(self) -> None:
        if not self._clock.has_begun:
            return
        if not self._has_forward:  # a second optimizer's part of the step that the first one ended
            self._clock.mark("optimizer_end")
            self._clock.extend_step()
            self.on_second_optimizer()
            return
        self._has_forward = False
        self.on_stepped()
        self._clock.mark("optimizer_end")
        self._clock.end_step()
        self.on_step()


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when this backward has ended, DDP's own finalisation included.

    The engine runs its final callbacks in order and takes up new ones while it does. DDP queues its finalisation just
    after this hook returns, so a callback queued by our callback comes after it.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))


def is_in_backward() -> bool:
    """Whether autograd runs in this thread: not where a rank without data shadows the others' exchange (Join)."""
    return int(torch._C._current_graph_task_id()) != -1


def _nothing() -> None:
    """What is called until a session sets something else."""
