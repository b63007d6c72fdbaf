"""The public object: attach a strategy to a DistributedDataParallel model, and see where its steps go.

``attach`` registers one communication hook and a few event hooks; the user's loop does not change. Exact strategies go
straight to the process group as DDP itself would; the others go through ``Lanes``. Everything is undone by ``detach``.
"""

# No postponed annotations here: DDP inspects the hook's annotations as objects.

import atexit
import contextlib
import gc
import os
import warnings
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from wirespeed.errors import DataError, UsageError
from wirespeed.measure.counters import InterfaceCounter, training_interfaces
from wirespeed.measure.steps import StepClock
from wirespeed.spec.strategy import Strategy
from wirespeed.train import ranges
from wirespeed.train.codecs import make_codec, warm_up
from wirespeed.train.codecs.base import Codec
from wirespeed.train.lanes import Exchange, Lanes
from wirespeed.train.rebucket import bucket_bytes_of, rebucket
from wirespeed.train.report import BucketTimes, LossEntry, SessionReport, summarize
from wirespeed.train.residuals import Residuals

STATE_SCHEMA = 1
KEPT_BUCKET_TIMES = 4096


class Session:
    """A strategy at work on one DDP model of one rank. Made by ``attach``."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        strategy: Strategy,
        *,
        is_silent: bool = False,
        is_inert: bool = False,
    ) -> None:
        self._ddp = ddp
        self._optimizer = optimizer
        self._is_silent = is_silent
        """A probe: no gradient is exchanged, ranks train apart and only meet once per step, as an exchange makes them.
        For measuring compute without a network."""
        self._meets = True
        """While a probe's ranks still meet once per step."""
        self.group: dist.ProcessGroup = ddp.process_group
        self.num_ranks = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        self.device = next(ddp.module.parameters()).device
        self.clock = StepClock(self.device)
        self._counter = self._open_counter()
        self._residuals = Residuals()
        self._learned = Residuals("codec state")
        self._buffers: dict[tuple[str, ...], Any] = {}
        self._hop_groups: list[dist.ProcessGroup] = []
        self._lanes: Lanes | None = None
        self._codec: Codec | None = None
        self._hook_reducer: object = None
        self._stated_bytes = 0
        self._warned: set[str] = set()
        self._bucket_times: deque[BucketTimes] = deque(maxlen=KEPT_BUCKET_TIMES)
        self._losses: list[LossEntry] = []
        self._wire: list[tuple[int, int]] = []
        self._begin_listeners: list[Any] = []
        self._step_listeners: list[Any] = []
        self._handles: list[Any] = []
        self._is_attached = True
        self._has_forward = False
        """Whether a training forward pass has run since the last step: several optimizers may share one step."""
        self.notes: list[str] = []
        """Why the strategy is what it is, in the order in which that was decided."""
        self.strategy = strategy
        if not is_inert:  # WIRESPEED_OFF=1: the object is there, and nothing of it touches the training
            self._listen()
            self.switch(strategy)

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
            buckets=list(self._bucket_times),
            stated_bytes=self._stated_bytes,
            wire=self._wire,
            residual_norm=self._residuals.norm(),
            residual_bytes=self._residuals.num_bytes,
            notes=self.notes,
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for a checkpoint: tensors, numbers and text only; no process group, no pickle needed."""
        return {
            "schema": STATE_SCHEMA,
            "strategy": self.strategy.name,
            "num_ranks": self.num_ranks,
            "rank": self.rank,
            "num_steps": self.clock.num_steps,
            "residuals": self._residuals.state_dict(),
            "learned": self._learned.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of the same rank in a group of the same size. Raises DataError where it does not fit."""
        if state.get("schema") != STATE_SCHEMA:
            raise DataError(f"got a session state of schema {state.get('schema')!r}", expected=f"schema {STATE_SCHEMA}")
        if (state["num_ranks"], state["rank"]) != (self.num_ranks, self.rank):
            raise DataError(
                f"got the state of rank {state['rank']} of {state['num_ranks']}",
                expected=f"the state of rank {self.rank} of {self.num_ranks}",
                hint="residuals belong to a rank: load each rank's own state, with the same number of ranks",
            )
        self._residuals.load_state_dict(state["residuals"])
        # What one codec has learned (low-rank's factors, half's scales) means nothing to another.
        is_same_codec = state["strategy"].partition("/")[0] == self.strategy.name.partition("/")[0]
        self._learned.load_state_dict(state.get("learned", {}) if is_same_codec else {})
        self._buffers.clear()

    def detach(self) -> None:
        """Stop everything; the model goes on with plain dense averaging (DDP keeps its one communication hook)."""
        if not self._is_attached:
            return
        self._is_attached = False
        self._stop_lanes()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._codec = None
        self._is_silent = False
        self._residuals.clear()
        self._learned.clear()
        self._buffers.clear()
        if self._counter is not None:
            self._counter.close()
            self._counter = None
        _SESSIONS.pop(id(self._ddp), None)

    def release(self) -> None:
        """Detach, and let go of the model and its process groups: nothing can be done with the session afterwards.

        DDP's reducer holds its hook, the hook its session, and the session would hold DDP and its groups for ever; a
        group that lives until the interpreter is taken down can abort there, when one of gloo's threads wants the GIL.
        """
        self.detach()
        released: Any = self
        released._ddp = released.group = released._optimizer = released._hook_reducer = None
        self._hop_groups.clear()
        self._begin_listeners.clear()
        self._step_listeners.clear()

    # ---------------------------------------------------------------- switching

    def switch(self, strategy: Strategy) -> None:
        """Exchange with ``strategy`` from the next step on. All ranks must call this between the same two steps."""
        self._stop_lanes()
        self.strategy = strategy
        codec = None if strategy.codec == "dense" or self.num_ranks == 1 else make_codec(strategy)
        if codec is None or not codec.has_residual:
            self._residuals.clear()
        self._codec = codec
        self._learned.clear()
        self._buffers.clear()
        if bucket_bytes_of(self._ddp) != strategy.bucket_bytes and not rebucket(self._ddp, strategy.bucket_bytes):
            self._warn_once(
                "bucket",
                f"the bucket size of this DDP model stays {bucket_bytes_of(self._ddp)} bytes: this version of torch "
                f"cannot change it; pass bucket_cap_mb={strategy.bucket_bytes / 2**20:g} to DistributedDataParallel",
            )
        if self._hook_reducer is not self._ddp.reducer:
            self._ddp.register_comm_hook(self, exchange_bucket)
            self._hook_reducer = self._ddp.reducer
        if codec is not None:
            warm_up(device=self.device)
            num_hops = len(codec.stages) - 1
            while len(self._hop_groups) < num_hops:
                self._hop_groups.append(_new_group(self.group))
            self._lanes = Lanes(self._hop_groups[:num_hops], on_done=self._bucket_done)

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
        return self._residuals.num_bytes

    # ---------------------------------------------------------------- inside

    def _listen(self) -> None:
        module = self._ddp.module
        self._handles += [
            module.register_forward_pre_hook(lambda *_: self._forward_begins()),
            module.register_forward_hook(lambda *_: self._forward_ended()),
        ]
        if self._optimizer is not None:
            self._handles += [
                self._optimizer.register_step_pre_hook(lambda *_: self.clock.mark("optimizer_begin")),
                self._optimizer.register_step_post_hook(lambda *_: self._step_ended()),
            ]
        else:
            mine = {id(p) for p in module.parameters()}

            def is_mine(optimizer: torch.optim.Optimizer) -> bool:
                return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

            from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

            self._handles += [
                register_optimizer_step_pre_hook(
                    lambda optimizer, *_: self.clock.mark("optimizer_begin") if is_mine(optimizer) else None
                ),
                register_optimizer_step_post_hook(
                    lambda optimizer, *_: self._step_ended() if is_mine(optimizer) else None
                ),
            ]

    def _is_training(self) -> bool:
        return torch.is_grad_enabled() and self._ddp.module.training

    def _forward_begins(self) -> None:
        if self.clock.is_evaluating:
            return
        if not self._is_training():
            self.clock.begin_evaluation()
            return
        for listener in self._begin_listeners:
            listener(self)
        if not self.clock.has_begun:
            self.clock.begin()
        self.clock.mark("forward_begin")

    def _forward_ended(self) -> None:
        if self.clock.is_evaluating:
            return
        if self._is_training():
            self._has_forward = True
            self.clock.mark("forward_end")
        else:
            self.clock.end_evaluation()

    def _step_ended(self) -> None:
        if not self.clock.has_begun:
            return
        self.clock.mark("optimizer_end")
        if not self._has_forward:  # a second optimizer's part of the step that the first one ended
            self.clock.extend_step()
            return
        self._has_forward = False
        self.clock.end_step()
        self._wire.append((self._stated_bytes, -1 if self._counter is None else self._counter.tx_bytes()))
        for listener in self._step_listeners:
            listener(self)

    def _backward_ended(self) -> None:
        self.clock.mark("backward_end")
        if self._lanes is not None and self._lanes.failure is not None:
            raise self._lanes.failure

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket: the body of the communication hook, called in bucket order from backward."""
        buffer = bucket.buffer()
        if bucket.is_last():
            self.clock.mark("last_bucket_ready")
            _after_backward(self._backward_ended)
        else:
            self.clock.mark("bucket_ready")
        if self._is_silent:
            if bucket.is_last() and self._meets:
                try:
                    dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
                except RuntimeError:  # a rank has ended; how, its own end tells better than this rank's error would
                    self._meets = False
            return _finished(buffer)
        codec = self._codec
        if codec is not None and buffer.dtype != torch.float32:
            self._warn_once(
                "dtype",
                f"gradients of {buffer.dtype} are averaged as they are: {self.strategy.name!r} takes fp32 only",
            )
            codec = None
        num_elements = buffer.numel()
        if codec is None or self._lanes is None:
            self._stated_bytes += Strategy().wire_bytes(num_elements, self.num_ranks) * buffer.element_size() // 4
            return self._all_reduce(buffer)
        parameters = bucket.parameters()
        names = tuple(self._names[id(p)] for p in parameters)
        shapes = tuple(tuple(p.shape) for p in parameters)
        self._stated_bytes += self.strategy.wire_bytes(num_elements, self.num_ranks, shapes)
        residual = (
            self._residuals.for_bucket(names, tuple(p.numel() for p in parameters), self.device)
            if codec.has_residual
            else None
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        buffers = self._buffers.get(names)
        if buffers is None:
            learned = self._learned.for_bucket(names, codec.state_sizes(shapes), self.device)
            buffers = self._buffers[names] = codec.make_buffers(
                num_elements, self.num_ranks, buffer.device, shapes=shapes, state_s=learned
            )
        self._lanes.submit(
            Exchange(
                bucket=bucket.index(),
                steps=codec.exchange(buffer, residual, buffers, rank=self.rank, num_ranks=self.num_ranks),
                result=buffer,
                future=future,
            )
        )
        return future

    def _all_reduce(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        buffer.div_(self.num_ranks)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    def _bucket_done(self, exchange: Exchange) -> None:
        assert self._codec is not None
        self._bucket_times.append(
            BucketTimes(
                bucket=exchange.bucket,
                num_bytes=exchange.result.numel() * 4,
                stages=self._codec.stages,
                queued_s=exchange.queued_s,
                spans_s=tuple(exchange.spans_s),
            )
        )

    def _stop_lanes(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"wirespeed: {text}", stacklevel=3)

    @staticmethod
    def _open_counter() -> InterfaceCounter | None:
        try:
            return InterfaceCounter(training_interfaces(dict(os.environ)))
        except Exception as fault:
            warnings.warn(f"wirespeed: bytes on the wire are not counted: {fault}", stacklevel=3)
            return None


_SESSIONS: dict[int, Session] = {}


def session_of(ddp: DistributedDataParallel) -> Session | None:
    """The session attached to this model, or None."""
    return _SESSIONS.get(id(ddp))


def start_session(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None,
    strategy: Strategy,
    *,
    is_silent: bool = False,
    is_inert: bool = False,
) -> Session:
    """Make and register a session. Raises UsageError where the model cannot take one."""
    if not isinstance(ddp, DistributedDataParallel):
        raise UsageError(
            f"got a {type(ddp).__name__}",
            expected="a torch.nn.parallel.DistributedDataParallel",
            hint="wrap the model first: ddp = DistributedDataParallel(model)",
        )
    if session_of(ddp) is not None:
        raise UsageError("this model has a session already", hint="call session.detach() before attaching again")
    if getattr(ddp, "_comm_hooks", None):
        raise UsageError(
            "this model has a communication hook already",
            expected="a DDP model without one",
            hint="remove its register_comm_hook(...) call: the strategy takes its place",
        )
    session = Session(ddp, optimizer, strategy, is_silent=is_silent, is_inert=is_inert)
    if ranges.are_wanted():
        session.clock.on_event = ranges.StepRanges(ranges.open_backend()).on_event
    if not _SESSIONS:
        atexit.register(_release_all)
    _SESSIONS[id(ddp)] = session
    return session


def _release_all() -> None:
    for session in list(_SESSIONS.values()):
        session.release()
    gc.collect()


def exchange_bucket(state: Session, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook that every session registers."""
    return state.exchange(bucket)


def _finished(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    future.set_result(buffer)
    return future


def _after_backward(callback: Any) -> None:
    """Call back when this backward has ended, DDP's own finalisation included.

    The engine runs its final callbacks in order and takes up new ones while it does. DDP queues its finalisation just
    after this hook returns, so a callback queued by our callback comes after it.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))


def _new_group(like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks, backend and time-out, for collectives of our own."""
    ranks = dist.get_process_group_ranks(like)
    is_world = len(ranks) == dist.get_world_size()
    group: dist.ProcessGroup = dist.new_group(
        ranks, backend=dist.get_backend(like), use_local_synchronization=not is_world
    )
    return group
