"""The public object: attach a strategy to a DistributedDataParallel model, and see where its steps go.

``attach`` registers a few event hooks and, for anything but dense (``native``), one communication hook; the user's loop
does not change. What happens to a bucket is the schedule's (``schedules/``) and the exchanger's; what is heard of the
loop comes from ``listening``. This module joins them, and undoes everything in ``detach``.
"""

# No postponed annotations here: DDP inspects the hook's annotations as objects.

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from wirespeed.errors import UsageError
from wirespeed.measure.counters import InterfaceCounter, training_interfaces
from wirespeed.measure.steps import StepClock
from wirespeed.spec.strategy import PERIODIC, Strategy
from wirespeed.train.agreement import check_agreement, is_wanted
from wirespeed.train.checkpoint import load_state, state_of
from wirespeed.train.exchanger import Exchanger, finished
from wirespeed.train.listening import LoopEvents, after_backward, is_in_backward
from wirespeed.train.native import NativeReduction, explain_failures
from wirespeed.train.optimizer_state import average_state
from wirespeed.train.rebucket import bucket_bytes_of, rebucket
from wirespeed.train.refusals import check_forward, check_model, check_scaler
from wirespeed.train.report import LossEntry, SessionReport, summarize
from wirespeed.train.scaling import LossScale
from wirespeed.train.schedules import GradientBucket, Schedule, make_schedule
from wirespeed.train.traffic import TrafficMark


class Session:
    """A strategy at work on one DDP model of one rank. Made by ``attach``."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        strategy: Strategy,
        *,
        scaler: Any = None,
        is_silent: bool = False,
        is_inert: bool = False,
    ) -> None:
        self._ddp = ddp
        self._has_optimizer = optimizer is not None
        self._is_silent = is_silent
        """A probe: no gradient is exchanged, ranks train apart and only meet once per step, as an exchange makes them.
        For measuring compute without a network."""
        self._meets = True  # until a probe's rank has ended
        self.group: dist.ProcessGroup = ddp.process_group
        self.num_ranks = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        self.device = next(ddp.module.parameters()).device
        self.clock = StepClock(self.device)
        self._counter = self._open_counter()
        self._exchanger = Exchanger(self.group, self.device)
        self._schedule: Schedule = make_schedule(ddp, self._exchanger)
        self._scale = LossScale(scaler)
        self._hook_reducer: object = None
        self._native: NativeReduction | None = None
        """Under dense: DDP reduces by itself, without a hook."""
        self._is_in_backward = False
        self._checks = is_wanted()
        self._num_backwards = 0
        """Synchronising backwards since residuals were empty or loaded."""
        self._losses: list[LossEntry] = []
        self._wire: list[tuple[int, int]] = []
        self._mark: TrafficMark | None = None
        self._begin_listeners: list[Any] = []
        self._step_listeners: list[Any] = []
        self._is_attached = True
        self.on_detached: Callable[[], object] = lambda: None
        """Called when the session lets go of the model."""
        self.is_choosing = False
        """While ``auto`` may still switch: ranks then have to take every step together."""
        self.notes: list[str] = []
        """Why the strategy is what it is, in the order in which that was decided."""
        self.strategy = strategy
        self._events = LoopEvents(ddp.module, optimizer, self.clock)
        if not is_inert:  # WIRESPEED_OFF=1: the object is there, and nothing of it touches the training
            self._events.on_forward = self._forward_begins
            self._events.on_optimizer = self._optimizer_begins
            self._events.on_stepped = self._optimizer_stepped
            self._events.on_second_optimizer = self._second_optimizer_stepped
            self._events.on_step = self._step_ended
            self.switch(strategy)
            self._events.listen()

    # ---------------------------------------------------------------- what the user calls

    def record(self, *, loss: float | None = None, eval_loss: float | None = None, step: int | None = None) -> None:
        """Note a training or held-out loss for the comparison. ``step`` defaults to the steps done so far."""
        self.clock.extend_evaluation()
        at = self.clock.num_steps if step is None else step
        if loss is not None:
            self._losses.append(LossEntry(step=at, loss=float(loss), is_held_out=False))
        if eval_loss is not None:
            self._losses.append(LossEntry(step=at, loss=float(eval_loss), is_held_out=True))

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        """``with session.evaluation(): ...`` takes what runs inside out of the training time."""
        return self.clock.evaluation()

    def report(self) -> SessionReport:
        """Where the steps so far went, what was sent, and what is held back. ``print`` it for a table."""
        return summarize(
            strategy=self.strategy,
            num_ranks=self.num_ranks,
            steps=self.clock.steps(),
            buckets=list(self._exchanger.bucket_times),
            stated_bytes=self._exchanger.stated_bytes,
            wire=self._wire,
            residual_norm=self._exchanger.residuals.norm() / self._residual_scale,
            residual_bytes=self._exchanger.residuals.num_bytes,
            nic_share=self._exchanger.nic_share,
            notes=[*self.notes, *([] if self._mark is None else [self._mark.text])],
        )

    def synchronize(self) -> None:
        """Make the parameters of all ranks equal now, where the strategy lets them differ between two exchanges.

        All ranks must call it between the same two steps; before a checkpoint or an evaluation that is to stand for
        all.
        """
        self._schedule.synchronize()
        self._exchanger.raise_failure()

    def check_agreement(self) -> None:
        """Raise DataError where ranks hold different parameters; all ranks call it together.

        With WIRESPEED_CHECK=1 in the environment it is done after every step at which they should be equal.
        """
        check_agreement(self._ddp.module, self.group, self.device)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for a checkpoint: tensors, numbers and text only; no process group, no pickle needed.

        Residuals are kept as without a loss scaler. Under ``local_sgd`` and ``diloco`` ranks hold different parameters
        between two exchanges: save each rank's own model beside its state, or call ``synchronize`` first. Under
        ``async`` ``synchronize`` has to come first, else UsageError.
        """
        return state_of(self._exchanger, self._schedule, scale=self._residual_scale, num_steps=self.clock.num_steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of the same rank in a group of the same size. Raises DataError where it does not fit."""
        load_state(state, self._exchanger, self._schedule)
        self._scale.held = 1.0
        self._num_backwards = 0

    def mark_traffic(self, dscp: int) -> int:
        """Put a DSCP on the TCP connections to other hosts' ranks, now and as they appear; 0 takes it away.

        A collective. Gives how many connections carry it; the report says so too.
        """
        self._mark = TrafficMark(dscp, self.group, self.device)
        return self._mark.num_marked

    def detach(self) -> None:
        """Stop everything; the model goes on with plain dense averaging (DDP keeps a communication hook that it has).

        Nothing is sent: where ranks have trained apart they keep what differs, and a warning says so. To go on training
        without a session, ``switch(Strategy())`` first.
        """
        if not self._is_attached:
            return
        name, num_apart = self.strategy.name, self._schedule.num_steps_apart
        has_trained_apart = self._schedule.has_trained_apart
        self._let_go()
        if has_trained_apart:
            differs = f"parameters ({num_apart} steps after the last exchange) and " if num_apart > 0 else ""
            warnings.warn(
                f"wirespeed: detached from {name!r}: ranks hold different {differs}optimizer state; "
                "session.synchronize() makes parameters equal, session.switch(Strategy()) both",
                stacklevel=2,
            )

    def release(self) -> None:
        """Detach, and let go of the model and its process groups: nothing can be done with the session afterwards.

        DDP's reducer holds its hook, the hook its session, and the session would hold DDP and its groups for ever; a
        group that lives until the interpreter is taken down can abort there, when one of gloo's threads wants the GIL.
        """
        self._let_go()
        self._exchanger.release()
        released: Any = self
        released._ddp = released.group = released._events = released._hook_reducer = released._schedule = None
        self._begin_listeners.clear()
        self._step_listeners.clear()

    # ---------------------------------------------------------------- switching

    def switch(self, strategy: Strategy) -> None:
        """Exchange with ``strategy`` from the next step on. All ranks must call this between the same two steps."""
        check_model(self._ddp, strategy)
        check_scaler(self._scale, strategy)
        before = self._schedule
        before.synchronize()
        self._exchanger.raise_failure()
        if before.has_trained_apart:
            average_state(self._events.optimizers, self._ddp.module, self._exchanger)
        if not before.sends_gradients:  # what was held back is of parameters
            self._exchanger.residuals.clear()
        before.close()
        self.strategy = strategy
        self._exchanger.use(strategy)
        self._schedule = make_schedule(self._ddp, self._exchanger)
        self._watch_overflow()
        has_size = bucket_bytes_of(self._ddp) == strategy.bucket_bytes
        # A reducer keeps its hook for good: to have none again, DDP gets a new one.
        if (not has_size or (self._is_native and self._has_hook)) and not self._rebucket() and not has_size:
            self._exchanger.warn_once(
                "bucket",
                f"the bucket size of this DDP model stays {bucket_bytes_of(self._ddp)} bytes: this version of torch "
                f"cannot change it; pass bucket_cap_mb={strategy.bucket_bytes / 2**20:g} to DistributedDataParallel",
            )
        self._take_part()
        if self._mark is not None:  # of groups that this strategy has made
            self._mark.apply()

    def _rebucket(self) -> bool:
        """Give DDP another reducer, without a hook; False, with nothing changed, where it cannot have one."""
        # Held from here the old one would go on hearing of gradients.
        held, self._hook_reducer = self._hook_reducer, None
        is_new = rebucket(self._ddp, self.strategy.bucket_bytes)
        if not is_new:
            self._hook_reducer = held
        return is_new

    @property
    def _is_native(self) -> bool:
        """Whether the strategy leaves every gradient to DDP."""
        return self._exchanger.is_plain and self.strategy.schedule == "every_step" and not self._is_silent

    @property
    def _has_hook(self) -> bool:
        return self._hook_reducer is not None and self._hook_reducer is self._ddp.reducer

    def _take_part(self) -> None:
        """Hear of DDP's own reduction, or do the exchange in a hook."""
        if self._is_native and not self._has_hook:
            if self._native is None:
                self._native = NativeReduction(
                    self._ddp, on_computed=self._native_computed, on_reduced=self._native_reduced
                )
                explain_failures()
            return
        if self._native is not None:
            self._native.remove()
            self._native = None
        if not self._has_hook:
            self._ddp.register_comm_hook(self, exchange_bucket)
            self._hook_reducer = self._ddp.reducer

    def note(self, text: str) -> None:
        """Keep a reason for the report."""
        self.notes.append(text)

    def on_step(self, listener: Any) -> None:
        """Call ``listener(session)`` after every optimizer step."""
        self._step_listeners.append(listener)

    def on_begin(self, listener: Any) -> None:
        """Call ``listener(session)`` when a training forward begins, before it counts as begun."""
        self._begin_listeners.append(listener)

    @property
    def losses(self) -> list[LossEntry]:
        """What ``record`` was given."""
        return self._losses

    @property
    def wire(self) -> list[tuple[int, int]]:
        """``(bytes stated, bytes counted at the interface)`` since the start, after every step."""
        return self._wire

    @property
    def residual_bytes(self) -> int:
        """Memory that error feedback holds."""
        return self._exchanger.residuals.num_bytes

    @property
    def num_steps_apart(self) -> int:
        """Own steps since all ranks last held equal parameters: 0 unless ranks train apart between exchanges."""
        return self._schedule.num_steps_apart

    # ---------------------------------------------------------------- inside

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What becomes of one bucket: the body of the communication hook, called in bucket order from backward."""
        values = bucket.buffer()
        is_last = bucket.is_last()
        if is_in_backward():
            self.clock.mark("last_bucket_ready" if is_last else "bucket_ready")
            if is_last:
                after_backward(self._backward_ended)
        else:  # a rank without data takes part with zeros (Join): nothing tells it when the exchange has ended
            self._exchanger.raise_failure()
            self._is_in_backward = self._is_in_backward and bucket.index() > 0
        if self._is_silent:
            return self._meet(values, is_last=is_last)
        if self._exchanger.is_plain and self.strategy.schedule == "every_step":
            return self._exchanger.all_reduce(values)
        if not self._is_in_backward:
            self._is_in_backward = True
            self._backward_begins()
        parameters = bucket.parameters()
        return self._schedule.exchange(
            GradientBucket(
                index=bucket.index(),
                is_last=is_last,
                names=tuple(self._names[id(p)] for p in parameters),
                shapes=tuple(tuple(p.shape) for p in parameters),
                values=values,
            )
        )

    def _native_computed(self) -> None:
        assert self._native is not None
        self.clock.mark("last_bucket_ready")
        self._exchanger.count_dense(self._native.num_bytes)

    def _native_reduced(self) -> None:
        self.clock.mark("backward_end")

    def _meet(self, values: torch.Tensor, *, is_last: bool) -> torch.futures.Future[torch.Tensor]:
        if is_last and self._meets:
            try:
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            except RuntimeError:  # a rank has ended; how, its own end tells better than this rank's error would
                self._meets = False
        return finished(values)

    def _forward_begins(self) -> None:
        for listener in self._begin_listeners:
            listener(self)
        if self._native is not None:
            self._native.forward_begins()
        check_forward(self._ddp, self.strategy, is_choosing=self.is_choosing)
        if self._schedule.is_due():  # the loss scaler let no rank step
            self._schedule.step_taken()

    def _backward_begins(self) -> None:
        self._num_backwards += 1
        self._exchanger.undo.backward_ended()  # where nothing told of the last one's end
        if self._scale.is_known and self._schedule.sends_gradients:
            factor = self._scale.change()
            if factor != 1:
                self._exchanger.residuals.multiply(factor)

    def _backward_ended(self) -> None:
        self._is_in_backward = False
        self.clock.mark("backward_end")
        self._exchanger.raise_failure()
        self._exchanger.undo.backward_ended()

    def _optimizer_begins(self) -> None:
        if self._scale.look_for_scaler():
            check_scaler(self._scale, self.strategy)
            self._scale.held = self._scale.current()
            if self._num_backwards > 1:  # the scaler skipped those before: they were not finite
                self._exchanger.residuals.clear()
                self._exchanger.drop_buffers()
            self._watch_overflow()

    def _optimizer_stepped(self) -> None:
        if self._schedule.is_due():
            self.clock.mark("exchange_begin")
        self._schedule.step_taken()

    def _second_optimizer_stepped(self) -> None:
        if self.strategy.schedule in ("async", *PERIODIC) and not self._has_optimizer:
            raise UsageError(
                f"several optimizers step this model, and {self.strategy.schedule} has to know which one ends the step",
                hint="pass the last of them: wirespeed.train.attach(ddp, optimizer)",
            )

    def _step_ended(self) -> None:
        if self._checks and self._schedule.num_steps_apart == 0 and not self._is_silent:
            with self.clock.evaluation():
                self.check_agreement()
        if self._mark is not None:
            self._mark.step_ended()
        self._wire.append((self._exchanger.stated_bytes, -1 if self._counter is None else self._counter.tx_bytes()))
        for listener in self._step_listeners:
            listener(self)

    def _watch_overflow(self) -> None:
        """While a loss scaler may skip steps, residuals can be taken back."""
        # Under async residuals change beside backward, and are of what a step has moved: a skipped one moves nothing.
        is_beside = self.strategy.schedule == "async"
        self._exchanger.undo.is_on = self._scale.is_known and not self._exchanger.is_plain and not is_beside

    @property
    def _residual_scale(self) -> float:
        return self._scale.held if self._schedule.sends_gradients else 1.0

    def _let_go(self) -> None:
        if not self._is_attached:
            return
        self._is_attached = False
        if self._native is not None:
            self._native.remove()
            self._native = None
        self._schedule.close()
        self._exchanger.use(Strategy())
        self._schedule = make_schedule(self._ddp, self._exchanger)
        self._events.remove()
        self._is_silent = False
        if self._counter is not None:
            self._counter.close()
            self._counter = None
        self.on_detached()

    @staticmethod
    def _open_counter() -> InterfaceCounter | None:
        try:
            return InterfaceCounter(training_interfaces(dict(os.environ)))
        except Exception as fault:
            warnings.warn(f"wirespeed: bytes on the wire are not counted: {fault}", stacklevel=3)
            return None


def exchange_bucket(state: Session, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook that every session registers."""
    return state.exchange(bucket)
