"""A loaded model: its queue, its instances, and the loop that joins them.

Every request ends exactly once: with its answer, with an error of its own, at its deadline, or cancelled. A request
whose worker died is run once more, alone, where the model is idempotent; a second death is its error. Workers that died
are started again, at growing intervals.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable, Sequence

from wirespeed.errors import WirespeedError
from wirespeed.serve.backends import Batch, Loaded
from wirespeed.serve.batcher import Batcher, Item, QueueFull
from wirespeed.serve.channel import request_parameters
from wirespeed.serve.config import ModelConfig, TensorSpec
from wirespeed.serve.drift import Drift
from wirespeed.serve.executor import Outcome
from wirespeed.serve.instances import Instance, InstanceDied, Joined, make_instance
from wirespeed.serve.padding import cut, pad, sizes_of
from wirespeed.serve.requests import InferRequest, check_outputs, prepare
from wirespeed.serve.statistics import ModelStatistics
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Tensor, split_rows

_RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)


class _Pending:
    __slots__ = ("begin_ns", "future", "item", "num_deaths", "request", "sizes", "start_ns")

    def __init__(self, request: InferRequest, future: asyncio.Future[list[Tensor]]) -> None:
        self.request = request
        self.future = future
        self.item: Item | None = None
        self.begin_ns = time.perf_counter_ns()
        self.start_ns = 0
        self.num_deaths = 0
        self.sizes: dict[str, int] = {}


class Model:
    """One version of one model. Not for several threads."""

    def __init__(self, config: ModelConfig, *, on_news: Callable[[str], None] = lambda _: None) -> None:
        self.config = config
        self.inputs: tuple[TensorSpec, ...] = config.input
        self.outputs: tuple[TensorSpec, ...] = config.output
        self.platform = ""
        self.statistics = ModelStatistics()
        self.origin = ""
        """The version of the repository that it is, where it is one."""
        self.drift: Drift | None = None
        """How its answers differ from those of what it replaced, where it has a reference batch."""
        self.is_stale = False
        """Whether it may be another version than it should be, for longer than is allowed: it is not ready then."""
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._batcher = Batcher(config.policy)
        self._free: list[Instance] = []
        self._instances: list[Instance] = []
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._is_closing = False
        self._restarts: set[asyncio.Task[None]] = set()
        self._num_deaths = 0

    @property
    def is_ready(self) -> bool:
        """Whether requests should come here."""
        return bool(self._instances) and not self._is_closing and not self.is_stale

    @property
    def is_recovering(self) -> bool:
        """Whether no instance is up, but one is being started again: requests wait for it."""
        return not self._instances and bool(self._restarts) and self._num_deaths < len(_RESTART_DELAYS_S)

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return self._batcher.num_queued

    @property
    def num_running(self) -> int:
        """Requests that are being run."""
        return self._running

    @property
    def num_instances(self) -> int:
        """Instances that are up."""
        return len(self._instances)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the instances that are processes."""
        return [instance.pid for instance in self._instances if instance.pid is not None]

    async def load(self) -> None:
        """Start every instance. Raises DataError or PeerFailure where one does not come up; none is left then."""
        results = await asyncio.gather(
            *(self._start() for _ in range(self.config.instances.count)), return_exceptions=True
        )
        faults = [result for result in results if isinstance(result, BaseException)]
        if faults:
            await self.close()
            raise faults[0]
        loaded = results[0]
        assert isinstance(loaded, Loaded)
        self.inputs, self.outputs, self.platform = loaded.input, loaded.output, loaded.platform

    def infer(self, request: InferRequest) -> asyncio.Future[list[Tensor]]:
        """Queue a request: a future of its outputs, in the order asked for.

        Raises RequestFailed at once for what is wrong.

        Cancelling the future takes the request out of the queue, or drops its answer.
        """
        begin_ns = time.perf_counter_ns()
        if self._is_closing or not (self._instances or self.is_recovering):
            raise self._failed(f"model {self.config.name!r} has no running instance", Reason.UNAVAILABLE, begin_ns)
        rows, group = self._check(request, begin_ns)
        now_s = time.monotonic()
        if request.deadline_s == math.inf:
            request.deadline_s = now_s + self.config.queue_timeout_s
        elif request.deadline_s <= now_s:
            raise self._failed("the deadline had passed before the request was read", Reason.DEADLINE, begin_ns)
        future: asyncio.Future[list[Tensor]] = self._loop.create_future()
        pending = _Pending(request, future)
        if self.config.batching.pad:
            pending.sizes = sizes_of(self.config, self.inputs, request.inputs)
        num_bytes = sum(len(tensor.data) for tensor in request.inputs)
        item = Item(
            pending,
            rows=rows,
            num_bytes=num_bytes,
            group=group,
            priority=request.priority,
            deadline_s=request.deadline_s,
        )
        pending.item = item
        try:
            self._batcher.add(item, now_s)
        except QueueFull as full:
            raise self._failed(
                f"the queue of model {self.config.name!r} is full: {full}", Reason.EXHAUSTED, begin_ns
            ) from None
        future.add_done_callback(lambda done: self._forget(pending) if done.cancelled() else None)
        self._drive()
        return future

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Take nothing new, wait up to ``drain_s`` for what is queued and running, then end the instances."""
        end_s = time.monotonic() + drain_s
        while (self.num_queued or self._running) and time.monotonic() < end_s and self._instances:
            await asyncio.sleep(0.005)
        self._is_closing = True
        for task in list(self._restarts):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._fail_all_queued("the model was unloaded")
        instances, self._instances, self._free = self._instances, [], []
        await asyncio.gather(*(instance.close() for instance in instances))

    # --- running

    def _drive(self) -> None:
        now_s = time.monotonic()
        for item in self._batcher.expire(now_s):
            self._fail(
                item.owner,
                f"the request waited {now_s - item.arrived_s:.3g} s in the queue, past its deadline",
                Reason.DEADLINE,
            )
        again_s = math.inf
        while self._free:
            items, again_s = self._batcher.next_batch(now_s)
            if not items:
                break
            self._run(self._free.pop(), items)
        self._set_timer(min(again_s, self._batcher.next_deadline_s))

    def _set_timer(self, when_s: float) -> None:
        if self._timer is not None:
            if self._timer_s == when_s and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        self._timer_s = when_s
        if when_s < math.inf:
            # uvloop's own clock and timers count whole milliseconds, too coarse for the batcher: it gets the real one.
            self._timer = self._loop.call_later(max(0.0, when_s - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self._drive()

    def _run(self, instance: Instance, items: list[Item]) -> None:
        pendings: list[_Pending] = [item.owner for item in items]
        start_ns = time.perf_counter_ns()
        for pending in pendings:
            pending.start_ns = start_ns
        self._running += len(items)
        batch = Batch(
            rows=tuple(item.rows for item in items),
            parameters=request_parameters([pending.request.parameters for pending in pendings]),
        )
        future = instance.run(self._join(pendings), batch)
        future.add_done_callback(lambda done: self._finished(instance, pendings, batch, start_ns, done))

    def _join(self, pendings: Sequence[_Pending]) -> list[Joined]:
        if len(pendings) == 1:
            return [(t.name, t.datatype, t.shape, (t.data,)) for t in pendings[0].request.inputs]
        specs = {spec.name: spec for spec in self.inputs}
        pads = self.config.batching.pad
        largest = {name: max(p.sizes.get(name, 0) for p in pendings) for name in pads}
        joined: list[Joined] = []
        for place, first in enumerate(pendings[0].request.inputs):
            parts = [pending.request.inputs[place] for pending in pendings]
            if pads:
                parts = [pad(self.config, specs[first.name], part, largest) for part in parts]
            shape = (
                parts[0].shape
                if not self.config.batching.max_rows
                else (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
            )
            joined.append((first.name, first.datatype, shape, [part.data for part in parts]))
        return joined

    def _finished(
        self, instance: Instance, pendings: list[_Pending], batch: Batch, start_ns: int, done: asyncio.Future[Outcome]
    ) -> None:
        self._running -= len(pendings)
        fault = None if done.cancelled() else done.exception()
        if done.cancelled() or isinstance(fault, InstanceDied):
            self._retry(pendings, str(fault) if fault is not None else "the run was cancelled")
        elif fault is not None and len(pendings) > 1:
            self._run_apart(pendings)
        elif fault is not None:
            for pending in pendings:
                self._fail(pending, str(fault), Reason.INVALID if isinstance(fault, WirespeedError) else Reason.FAILED)
        else:
            self._answer(pendings, batch, done.result())
            now_s = time.monotonic()
            self._batcher.ran(sum(batch.rows), len(pendings), (time.perf_counter_ns() - start_ns) / 1e9, now_s)
        if instance in self._instances:
            self._free.append(instance)
            self._num_deaths = 0
        self._drive()

    def _answer(self, pendings: list[_Pending], batch: Batch, outcome: Outcome) -> None:
        begin_ns = time.perf_counter_ns()
        rows = sum(batch.rows)
        self.statistics.executed(rows, outcome.compute_ns)
        if outcome.tensors is None and len(outcome.apart) != len(pendings):
            text = next((one for one in outcome.apart if isinstance(one, str)), "the worker gave no answer")
            for pending in pendings:
                self._fail(pending, text, Reason.FAILED)
            return
        if outcome.tensors is not None and len(pendings) > 1:
            cuts = [split_rows(tensor, batch.rows) for tensor in outcome.tensors]
            each: list[list[Tensor] | str] = [[parts[i] for parts in cuts] for i in range(len(pendings))]
        else:
            each = [outcome.tensors] if outcome.tensors is not None else outcome.apart
        for pending, answer in zip(pendings, each, strict=True):
            if isinstance(answer, str):
                self._fail(pending, answer, Reason.FAILED)
                continue
            if pending.future.done():
                continue
            # The bytes are the request's own from here on: the shared memory is used again by the next batch.
            pending.future.set_result(self._chosen(pending, answer))
            now_ns = time.perf_counter_ns()
            self.statistics.succeeded(
                rows=pending.item.rows if pending.item is not None else 1,
                total_ns=now_ns - pending.begin_ns,
                queue_ns=pending.start_ns - pending.begin_ns,
                compute_ns=outcome.compute_ns,
                output_ns=now_ns - begin_ns,
            )

    def _chosen(self, pending: _Pending, answer: list[Tensor]) -> list[Tensor]:
        if pending.sizes:
            specs = {spec.name: spec for spec in self.outputs}
            answer = [cut(specs[tensor.name], tensor, pending.sizes) for tensor in answer]
        asked = pending.request.outputs
        if asked is not None:
            by_name = {tensor.name: tensor for tensor in answer}
            answer = [by_name[name] for name in asked]
        return [Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in answer]

    # --- ends

    def _fail(self, pending: _Pending, text: str, reason: Reason) -> None:
        if not pending.future.done():
            self.statistics.failed(reason, time.perf_counter_ns() - pending.begin_ns)
            pending.future.set_exception(RequestFailed(text, reason=reason))

    def _check(self, request: InferRequest, begin_ns: int) -> tuple[int, Hashable]:
        """A request's rows and group. Raises RequestFailed for what is wrong with it, and counts that."""
        try:
            found = prepare(self.config, self.inputs, request)
            check_outputs(self.outputs, request.outputs, self.config.name)
        except RequestFailed as fault:
            self.statistics.failed(fault.reason, time.perf_counter_ns() - begin_ns)
            raise
        return found

    def _failed(self, text: str, reason: Reason, begin_ns: int) -> RequestFailed:
        self.statistics.failed(reason, time.perf_counter_ns() - begin_ns)
        return RequestFailed(text, reason=reason)

    def _forget(self, pending: _Pending) -> None:
        if pending.item is not None:
            self._batcher.remove(pending.item)
        self.statistics.failed(Reason.CANCELLED, time.perf_counter_ns() - pending.begin_ns)

    def _fail_all_queued(self, text: str) -> None:
        while True:
            items, again_s = self._batcher.next_batch(math.inf)
            if not items:
                assert again_s == math.inf
                return
            for item in items:
                self._fail(item.owner, text, Reason.UNAVAILABLE)

    def _retry(self, pendings: list[_Pending], text: str) -> None:
        now_s = time.monotonic()
        for pending in pendings:
            item = pending.item
            if pending.future.done() or item is None:
                continue
            pending.num_deaths += 1
            if not self.config.idempotent or pending.num_deaths > 1 or self._is_closing:
                self._fail(pending, text, Reason.UNAVAILABLE)
            else:
                item.is_alone = True
                self._batcher.put_back(item, now_s)

    def _run_apart(self, pendings: list[_Pending]) -> None:
        """The batch did not fit: each request by itself, so that only those that are too large fail."""
        now_s = time.monotonic()
        for pending in pendings:
            if not pending.future.done() and pending.item is not None:
                pending.item.is_alone = True
                self._batcher.put_back(pending.item, now_s)

    # --- instances

    async def _start(self) -> Loaded:
        lost: list[str] = []

        def on_death(reason: str) -> None:
            lost.append(reason)
            self._died(instance, reason)

        instance = make_instance(self.config, on_death=on_death)
        loaded = await instance.start()
        if self._is_closing or lost:
            await instance.close()
            return loaded
        self._instances.append(instance)
        self._free.append(instance)
        return loaded

    def _died(self, instance: Instance, reason: str) -> None:
        if instance not in self._instances:
            return
        self._instances.remove(instance)
        if instance in self._free:
            self._free.remove(instance)
        self._on_news(f"a worker of model {self.config.name!r} died: {reason}")
        if not self._is_closing:
            self.statistics.num_restarts += 1
            task = self._loop.create_task(self._restart())
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _restart(self) -> None:
        while not self._is_closing:
            delay_s = _RESTART_DELAYS_S[min(self._num_deaths, len(_RESTART_DELAYS_S) - 1)]
            self._num_deaths += 1
            await asyncio.sleep(delay_s)
            try:
                await self._start()
            except WirespeedError as fault:
                self._on_news(f"a worker of model {self.config.name!r} does not come up again: {fault}")
                continue
            self._on_news(f"a worker of model {self.config.name!r} is up again")
            self._drive()
            return
