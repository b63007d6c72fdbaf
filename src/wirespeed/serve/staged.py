"""Models in stages: parts of one that is too large for a device, one after another, over hosts.

    backend = "stages"
    micro_rows = 4
    [[stages]]
    model = "layers-1"                  # of this server
    [[stages]]
    model = "layers-2"
    node = "h2:7000"                    # or of another one

A request's rows go through in micro-batches of ``micro_rows``, so that all stages work at the same time; a stage's own
batcher may join those of several requests. Outputs of a stage are the inputs of the next one: by name, or, where a name
is not the next one's, in order. What stages send on comes through here. Where that is too much, let each host's model
name the next: a stage may itself be a model in stages, and then only answers travel back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wirespeed import wire
from wirespeed.errors import DataError, UsageError
from wirespeed.serve.config import ModelConfig, Stage, TensorSpec
from wirespeed.serve.model import Model
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.router import Router
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Tensor, split_rows

if TYPE_CHECKING:
    from wirespeed.serve.repository import ModelRepository

MICRO_PER_STAGE = 2
"""Micro-batches of one request in a stage: one that is run and one that waits for it. More, and the stage's batcher
would join those that wait, and the stages behind it would have nothing to do meanwhile."""
CONNECT_S = 10.0


class StagedModel(Model):
    """A model whose parts are other models: of this server's ``models``, or of nodes."""

    def __init__(
        self,
        config: ModelConfig,
        models: ModelRepository,
        *,
        security: wire.Security,
        on_news: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(config, on_news=on_news)
        self.platform = "stages"
        self._models = models
        addresses = dict.fromkeys(stage.node for stage in config.stages if stage.node)
        self._routers = {address: Router([address], security=security, on_news=on_news) for address in addresses}
        self._tasks: set[asyncio.Task[list[Tensor]]] = set()

    @property
    def is_ready(self) -> bool:
        """Whether every stage is."""
        return (
            not self._is_closing
            and not self.is_stale
            and all(self._is_stage_ready(stage) for stage in self.config.stages)
        )

    @property
    def is_recovering(self) -> bool:
        """Stages recover by themselves."""
        return False

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return len(self._tasks)

    @property
    def num_instances(self) -> int:
        """It has none: its stages have."""
        return 1

    async def load(self) -> None:
        """Reach the nodes; stages of this server may still be loading. Raises PeerFailure, DataError, UsageError."""
        if not self.config.stages:
            raise DataError(f"model {self.config.name!r} has no stages", expected="[[stages]] with model = NAME")
        try:
            for address, router in self._routers.items():
                await router.open(timeout_s=CONNECT_S)
                wanted = [stage.model for stage in self.config.stages if stage.node == address]
                _check_has(address, router, wanted)
        except BaseException:
            await self.close()
            raise
        first, last = self.config.stages[0], self.config.stages[-1]
        self.inputs = self.config.input or self._specs(first)[0]
        self.outputs = self.config.output or self._specs(last)[1]
        if not self.inputs or not self.outputs:
            await self.close()
            raise DataError(
                f"model {self.config.name!r} names no input or output, and its stages are not known yet",
                expected="[[input]] and [[output]]",
            )

    def infer(self, request: InferRequest) -> asyncio.Future[list[Tensor]]:
        """See Model.infer."""
        begin_ns = time.perf_counter_ns()
        if self._is_closing:
            raise self._failed(f"model {self.config.name!r} is being unloaded", Reason.UNAVAILABLE, begin_ns)
        rows, _ = self._check(request, begin_ns)
        if request.deadline_s == math.inf:
            request.deadline_s = time.monotonic() + self.config.queue_timeout_s
        task = self._loop.create_task(self._run_all(request, rows))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, rows, begin_ns))
        return task

    async def close(self, *, drain_s: float = 0.0) -> None:
        """See Model.close."""
        end_s = time.monotonic() + drain_s
        while self._tasks and time.monotonic() < end_s:
            await asyncio.sleep(0.005)
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(router.close() for router in self._routers.values()))

    # --- running

    async def _run_all(self, request: InferRequest, rows: int) -> list[Tensor]:
        micro = self.config.micro_rows
        if not self.config.batching.max_rows or micro == 0 or rows <= micro:
            parts = [request.inputs]
        else:
            counts = [micro] * (rows // micro) + ([rows % micro] if rows % micro else [])
            cuts = [split_rows(tensor, counts) for tensor in request.inputs]
            parts = [[cut[place] for cut in cuts] for place in range(len(counts))]
        limits = [asyncio.Semaphore(MICRO_PER_STAGE) for _ in self.config.stages]

        async def through(tensors: list[Tensor]) -> list[Tensor]:
            for place, limit in enumerate(limits):
                async with limit:
                    tensors = await self._run_stage(place, tensors, request)
            return tensors

        tasks = [self._loop.create_task(through(part)) for part in parts]
        try:
            answers = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        joined = answers[0] if len(answers) == 1 else [_join(tensors) for tensors in zip(*answers, strict=True)]
        by_name = {tensor.name: tensor for tensor in joined}
        wanted = request.outputs or [spec.name for spec in self.outputs]
        missing = [name for name in wanted if name not in by_name]
        if missing:
            raise RequestFailed(f"the last stage gave no output {missing[0]!r}", reason=Reason.FAILED)
        return [by_name[name] for name in wanted]

    async def _run_stage(self, place: int, tensors: list[Tensor], request: InferRequest) -> list[Tensor]:
        stage = self.config.stages[place]
        left_s = request.deadline_s - time.monotonic()
        if left_s <= 0:
            raise RequestFailed(f"the deadline passed before stage {stage.model!r}", reason=Reason.DEADLINE)
        inner = InferRequest(
            tensors if place == 0 else _renamed(tensors, self._specs(stage)[0]),
            parameters=dict(request.parameters),
            priority=request.priority,
            deadline_s=request.deadline_s,
        )
        if stage.node:
            return await self._routers[stage.node].infer(stage.model, "", inner, timeout_s=left_s)
        return await self._models.get(stage.model).infer(inner)

    def _ended(self, done: asyncio.Task[list[Tensor]], rows: int, begin_ns: int) -> None:
        self._tasks.discard(done)
        self.statistics.ended(done, rows=rows, begin_ns=begin_ns)

    def _is_stage_ready(self, stage: Stage) -> bool:
        if stage.node:
            return self._routers[stage.node].described(stage.model) is not None
        held = self._models.models.get(stage.model)
        return held is not None and held is not self and held.is_ready

    def _specs(self, stage: Stage) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        if stage.node:
            described = self._routers[stage.node].described(stage.model)
            return ((), ()) if described is None else (described.config.input, described.config.output)
        held = self._models.models.get(stage.model)
        return ((), ()) if held is None else (held.inputs, held.outputs)


def _check_has(address: str, router: Router, models: Sequence[str]) -> None:
    for model in models:
        if router.described(model) is None:
            raise UsageError(f"node {address} has no model {model!r}")


def _renamed(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """A stage's outputs as the next one's inputs: those of its names, else all of them in order."""
    names = [spec.name for spec in specs if not spec.is_optional]
    by_name = {tensor.name: tensor for tensor in tensors}
    if all(name in by_name for name in names):
        return [by_name[spec.name] for spec in specs if spec.name in by_name]
    if len(names) != len(tensors):
        raise RequestFailed(
            f"a stage gave {', '.join(by_name)}", reason=Reason.FAILED, expected=f"{', '.join(names)} for the next one"
        )
    return [
        Tensor(name, tensor.datatype, tensor.shape, tensor.data) for name, tensor in zip(names, tensors, strict=True)
    ]


def _join(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    rows = sum(tensor.shape[0] for tensor in tensors)
    return Tensor(first.name, first.datatype, (rows, *first.shape[1:]), b"".join(tensor.data for tensor in tensors))


def in_order(configs: dict[str, ModelConfig]) -> list[str]:
    """Models in stages, each after those of this server that it is made of.

    Raises UsageError where they contain each other.
    """
    found: dict[str, None] = {}

    def follow(name: str, above: tuple[str, ...]) -> None:
        config = configs.get(name)
        if config is None:
            return
        if name in above:
            raise UsageError(
                f"got models in stages that contain each other: {' -> '.join((*above, name))}",
                expected="stages that end",
            )
        for stage in config.stages:
            if not stage.node:
                follow(stage.model, (*above, name))
        found[name] = None

    for name in configs:
        follow(name, ())
    return list(found)
