"""local_sgd and diloco: each rank trains by itself, and once per period the parameters are brought together.

No gradient is exchanged in between. After ``period`` optimizer steps ``local_sgd`` sets the parameters of all ranks to
their average: with dense by averaging them as they are, with another codec by averaging how far each has moved from
where all last stood (so that the codec has small numbers to encode, and error feedback keeps what it left out).
``diloco`` (arXiv 2311.08105) takes the mean move as the gradient of an outer optimizer, SGD with Nesterov momentum,
that steps from where all last stood. After an exchange parameters are equal on all ranks, byte by byte.

A period counts backwards that synchronise, whether or not a loss scaler lets the optimizer step, because that is what
all ranks count alike: at a step that ends a period, ranks first agree whether any of them has a gradient that is not
finite, and then all have. The optimizer's own state stays with its rank (a session that switches to exchanging
gradients again averages it). Floating-point buffers that belong to the
model's state (running means) are averaged too; DDP's broadcast of buffers before every forward is off meanwhile.

It can be wrong to look between two exchanges: ranks then hold different parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from wirespeed.spec.strategy import OUTER_LEARNING_RATE, OUTER_MOMENTUM
from wirespeed.train.exchanger import Exchanger, finished
from wirespeed.train.schedules.base import GradientBucket
from wirespeed.train.schedules.fragments import (
    Fragment,
    averaged_buffers,
    fill,
    flatten,
    make_fragments,
    write_flat,
)


class Periodic:
    """See ``Schedule``: both schedules that exchange parameters."""

    def __init__(self, ddp: DistributedDataParallel, exchanger: Exchanger) -> None:
        strategy = exchanger.strategy
        assert strategy.period is not None
        self._ddp = ddp
        self._exchanger = exchanger
        self._period = strategy.period
        self._warmup_steps = strategy.warmup_steps
        self._is_outer = strategy.schedule == "diloco"
        self._keeps_base = self._is_outer or not exchanger.is_plain
        self._num_synced = 0
        self._num_apart = 0
        self._is_due = False
        self._is_bad = False
        """Whether a gradient of this backward is not finite; looked at where the backward ends a period."""
        self._fragments: list[Fragment] | None = None
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """Of a loaded state, until the fragments are made."""
        self._synced_buffers = bool(ddp.broadcast_buffers)

    @property
    def sends_gradients(self) -> bool:
        """Only while it warms up."""
        return self._num_synced < self._warmup_steps

    @property
    def num_steps_apart(self) -> int:
        """Steps since the last exchange."""
        return self._num_apart

    @property
    def has_trained_apart(self) -> bool:
        """Whether the local phase has begun."""
        return self._num_synced > self._warmup_steps or self._fragments is not None

    def exchange(self, bucket: GradientBucket) -> torch.futures.Future[Tensor]:
        """While warming up the average over the ranks; afterwards this rank's own gradients."""
        is_local = self._num_synced >= self._warmup_steps
        if is_local and self._fragments is None:
            self._part()
        if is_local and self._ends_period(self._num_synced + 1):
            self._is_bad = self._is_bad or not bool(torch.isfinite(bucket.values).all())
            if bucket.is_last:
                self._agree_on_overflow(bucket.values)
        if bucket.is_last:
            self._num_synced += 1
            if is_local:
                self._num_apart += 1
                self._is_due = self._ends_period(self._num_synced)
        if is_local:
            return finished(bucket.values)
        return self._exchanger.average(bucket.values, bucket=bucket.index, names=bucket.names, shapes=bucket.shapes)

    def is_due(self) -> bool:
        """Whether a period has ended and its exchange has not begun."""
        return self._is_due

    def step_taken(self) -> None:
        """Bring the ranks together where a period has ended."""
        if self._is_due:
            self.synchronize()

    def synchronize(self) -> None:
        """Bring the ranks together now. The next period begins here."""
        self._is_due = False
        if self._num_apart == 0:
            return
        self._num_apart = 0
        self._num_synced = self._warmup_steps
        self._bring_together()

    def close(self) -> None:
        """Let DDP broadcast buffers again. Parameters stay as they are."""
        self._ddp.broadcast_buffers = self._synced_buffers
        self._fragments = None

    def state_dict(self) -> dict[str, Any]:
        """Where in the period it stands, where all ranks last stood, and the outer momentum, by parameter."""
        return {
            "num_synced": self._num_synced,
            "num_apart": self._num_apart,
            "base": self._by_name("base"),
            "momentum": self._by_name("momentum"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. The model's own parameters are loaded by whoever loads the model."""
        self._num_synced, self._num_apart = int(state["num_synced"]), int(state["num_apart"])
        self._is_due = False
        self._waiting = {key: dict(state[key]) for key in ("base", "momentum")}
        self._fragments = None

    # ---------------------------------------------------------------- inside

    def _ends_period(self, num_synced: int) -> bool:
        done = num_synced - self._warmup_steps
        return done > 0 and done % self._period == 0

    def _agree_on_overflow(self, values: Tensor) -> None:
        """A loss scaler must skip on all ranks or on none: where one has inf or nan, all are given nan."""
        flag = torch.tensor([float(self._is_bad)], device=values.device)
        self._is_bad = False
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._exchanger.group)
        except RuntimeError as fault:  # raised from here, it would come out of DDP's reducer as something else
            self._exchanger.fail(fault)
            return
        if values.is_cuda:  # without asking the device
            values.add_(torch.where(flag > 0, torch.nan, 0.0).to(values.dtype))
        elif bool(flag > 0):
            values.fill_(torch.nan)

    def _part(self) -> None:
        """The local phase begins: remember where all ranks stand."""
        # What was held back so far is of gradients; from here on it is of parameters.
        if not any(self._waiting.values()):
            self._exchanger.residuals.clear()
            self._exchanger.forget()
        self._ddp.broadcast_buffers = False
        self._fragments = make_fragments(self._ddp.module, self._exchanger.strategy, keeps_base=self._keeps_base)
        for fragment in self._fragments:
            if self._keeps_base:
                fragment.read()
                fragment.base.copy_(fragment.values)
                fill(fragment, fragment.base, self._waiting.get("base", {}), "base")
            if self._is_outer:
                fill(fragment, fragment.momentum, self._waiting.get("momentum", {}), "outer momentum")
        self._waiting = {}

    @torch.no_grad()
    def _bring_together(self) -> None:
        """One exchange of all fragments: encode, send and decode of neighbours overlap, as buckets do."""
        if self._fragments is None:
            self._part()
        assert self._fragments is not None
        futures = [self._send(fragment) for fragment in self._fragments]
        buffers = averaged_buffers(self._ddp.module)
        buffers_future = self._exchanger.all_reduce(flatten(buffers)) if buffers else None
        for fragment, future in zip(self._fragments, futures, strict=True):
            future.wait()
            self._exchanger.raise_failure()
            self._apply(fragment)
        if buffers_future is not None:
            averaged = buffers_future.wait()
            self._exchanger.raise_failure()
            write_flat(buffers, averaged)

    def _send(self, fragment: Fragment) -> torch.futures.Future[Tensor]:
        fragment.read()
        if self._keeps_base:
            fragment.values.sub_(fragment.base)
        return self._exchanger.average(
            fragment.values, bucket=fragment.index, names=fragment.names, shapes=fragment.shapes
        )

    def _apply(self, fragment: Fragment) -> None:
        """Set the parameters from the average in ``values``."""
        if self._is_outer:
            # torch.optim.SGD(nesterov=True) on ``base`` with the gradient -values.
            outer = fragment.values.neg_()
            fragment.momentum.mul_(OUTER_MOMENTUM).add_(outer)
            outer.add_(fragment.momentum, alpha=OUTER_MOMENTUM)
            fragment.base.add_(outer, alpha=-OUTER_LEARNING_RATE)
            fragment.values.copy_(fragment.base)
        elif self._keeps_base:
            fragment.values.add_(fragment.base)
            fragment.base.copy_(fragment.values)
        fragment.write()

    def _by_name(self, what: str) -> dict[str, Tensor]:
        if self._fragments is None:
            return dict(self._waiting.get(what, {}))
        named: dict[str, Tensor] = {}
        for fragment in self._fragments:
            flat: Tensor = getattr(fragment, what)
            if flat.numel() > 0:
                parts = torch.split(flat, [p.numel() for p in fragment.parameters])
                named |= {name: part.clone() for name, part in zip(fragment.names, parts, strict=True)}
        return named
