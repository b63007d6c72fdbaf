"""Models that run on other hosts, behind this process's doors: each request goes to the least loaded node.

The doors see models as always. A request is checked here, before it travels; it is batched on the node that runs it.
Loading and unloading are the nodes' own business. What nodes have is looked at whenever one is found (again).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from wirespeed.serve.cluster import Cluster
from wirespeed.serve.model import Model
from wirespeed.serve.node_link import NodeLink
from wirespeed.serve.node_messages import Described
from wirespeed.serve.repository import Listed, ModelRepository
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.router import Router
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Tensor


class RoutedModel(Model):
    """A model of the nodes. Statistics count what went through this process."""

    def __init__(self, described: Described, router: Router) -> None:
        super().__init__(described.config)
        self.platform = described.platform
        self._router = router
        self._num_under_way = 0

    @property
    def is_ready(self) -> bool:
        """Whether some node would run a request."""
        return any(self.config.name in link.models for link in self._router.usable())

    @property
    def is_recovering(self) -> bool:
        """Nodes are reached again by their links: there is nothing to wait for here."""
        return False

    @property
    def num_running(self) -> int:
        """Requests that are with a node."""
        return self._num_under_way

    @property
    def num_instances(self) -> int:
        """Instances of all models on the nodes that have this one."""
        return sum(link.num_instances for link in self._router.usable() if self.config.name in link.models)

    async def load(self) -> None:
        """Nodes load their models themselves."""

    def infer(self, request: InferRequest) -> asyncio.Future[list[Tensor]]:
        """See Model.infer."""
        begin_ns = time.perf_counter_ns()
        rows, _ = self._check(request, begin_ns)
        left_s = request.deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._failed("the deadline had passed before the request was read", Reason.DEADLINE, begin_ns)
        timeout_s = self.config.queue_timeout_s if left_s == math.inf else left_s
        running = self._router.infer(self.config.name, self.config.version, request, timeout_s=timeout_s)
        task = asyncio.get_running_loop().create_task(running)
        self._num_under_way += 1
        task.add_done_callback(lambda done: self._ended(done, rows, begin_ns))
        return task

    async def close(self, *, drain_s: float = 0.0) -> None:
        """See Model.close."""
        end_s = time.monotonic() + drain_s
        while self._num_under_way and time.monotonic() < end_s:
            await asyncio.sleep(0.005)

    def _ended(self, done: asyncio.Future[list[Tensor]], rows: int, begin_ns: int) -> None:
        self._num_under_way -= 1
        self.statistics.ended(done, rows=rows, begin_ns=begin_ns)


class RoutedRepository(ModelRepository):
    """The models of all nodes, under one roof. ``router`` is opened by ``load_all`` and closed by ``close``.

    ``cluster``: who starts the nodes, and starts them again; without one they are those that the router begins with.
    """

    def __init__(
        self, make_router: Callable[[Callable[[NodeLink], None]], Router], *, cluster: Cluster | None = None
    ) -> None:
        super().__init__(None)
        self._cluster = cluster
        self._router = make_router(lambda _: self._look())

    async def load_all(self) -> None:
        """Reach the nodes. Raises PeerFailure where none answers, and what ``Cluster.start`` raises."""
        if self._cluster is not None:
            await self._cluster.start(self._router.add, self._router.drop)
        await self._router.open()
        self._look()

    async def load(self, name: str, *, overrides: dict[str, Any] | None = None) -> None:
        """Not here."""
        raise RequestFailed(f"model {name!r} is on other hosts", reason=Reason.UNIMPLEMENTED, hint="load it there")

    async def unload(self, name: str) -> None:
        """Not here."""
        raise RequestFailed(f"model {name!r} is on other hosts", reason=Reason.UNIMPLEMENTED, hint="unload it there")

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Let go of the nodes."""
        await super().close(drain_s=drain_s)
        await self._router.close()
        if self._cluster is not None:
            await self._cluster.close()

    def _look(self) -> None:
        for link in self._router.usable():
            for name, described in link.models.items():
                if name not in self._models:
                    self._models[name] = RoutedModel(described, self._router)
                    self._states[name] = Listed(name=name, version=described.config.version, state="READY")
