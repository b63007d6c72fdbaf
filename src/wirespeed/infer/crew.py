"""Who runs a job's inputs: nodes reached over the data plane, or one model in this process. Jobs know only this.

Nodes count as long as they have the model in the version, and with the outputs, that the job began with: a node that
was given another version meanwhile is left out, and named, rather than mixed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from wirespeed import wire
from wirespeed.errors import UsageError
from wirespeed.serve.cluster import Cluster
from wirespeed.serve.config import ModelConfig, TensorSpec, read_config
from wirespeed.serve.features import encoded_specs
from wirespeed.serve.model import Model
from wirespeed.serve.node import ScatterResult, scatter
from wirespeed.serve.node_link import LinkTimes, NodeLink
from wirespeed.serve.node_messages import Described, blob_input
from wirespeed.serve.router import Router


class JobModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the job sees it. ``outputs`` are those that come back, features encoded."""

    name: str
    version: str
    outputs: tuple[TensorSpec, ...]
    max_rows: int


class Member(Protocol):
    """One of those who run inputs."""

    @property
    def name(self) -> str:
        """How it is called in reports: a node's address, or "this process"."""

    @property
    def was_silent(self) -> bool:
        """Whether it was lost without a sign that its process ended: the way to it may be at fault."""

    def scatter(self, blobs: Sequence[bytes], *, timeout_s: float) -> asyncio.Future[ScatterResult]:
        """Run inputs, each as a request of its own. The future raises CallFailed as NodeLink.scatter."""


class Crew(Protocol):
    """All who run inputs. ``open``, then ``close``."""

    async def open(self, on_change: Callable[[], None]) -> JobModel:
        """Reach whoever is there. ``on_change`` is called when that changes. Raises PeerFailure, UsageError."""

    def members(self) -> Sequence[Member]:
        """Who takes inputs now."""

    def problem(self) -> str:
        """Why nobody does."""

    @property
    def management_bytes(self) -> int:
        """Bytes of heartbeats, both ways."""

    async def close(self) -> None:
        """Let go of everybody."""


class _RemoteMember:
    def __init__(self, link: NodeLink, model: JobModel, encoding: str) -> None:
        self.link = link
        self.name = link.address
        self._model = model
        self._encoding = encoding

    @property
    def was_silent(self) -> bool:
        return self.link.was_silent

    def scatter(self, blobs: Sequence[bytes], *, timeout_s: float) -> asyncio.Future[ScatterResult]:
        return self.link.scatter(self._model.name, self._model.version, self._encoding, blobs, timeout_s=timeout_s)


class RemoteCrew:
    """Nodes at ``addresses``, or those that ``cluster`` starts. ``model`` "" stands for the only one they have."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        model: str,
        encoding: str,
        security: wire.Security,
        times: LinkTimes | None = None,
        connect_s: float = 10.0,
        cluster: Cluster | None = None,
        on_news: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._cluster = cluster
        self._name = model
        self._encoding = encoding
        self._connect_s = connect_s
        self._on_news = on_news
        self._on_change: Callable[[], None] = lambda: None
        self._members: dict[NodeLink, _RemoteMember] = {}
        self._strangers: set[str] = set()
        self._judged: dict[NodeLink, tuple[Described | None, bool]] = {}
        """What each node said of the model last, and whether that is the job's."""
        self._model: JobModel | None = None
        self.router = Router(
            addresses,
            security=security,
            times=times,
            can_grow=cluster is not None,
            on_news=on_news,
            on_change=lambda _: self._on_change(),
        )

    @property
    def management_bytes(self) -> int:
        """See Crew."""
        return sum(link.management_bytes for link in self.router.links)

    async def open(self, on_change: Callable[[], None]) -> JobModel:
        """See Crew."""
        if self._cluster is not None:
            await self._cluster.start(self.router.add, self.router.drop)
        try:
            await self.router.open(timeout_s=self._connect_s)
            name = self._name or self._only_name()
            self._model = _job_model(self._found(name), self._encoding)
        except BaseException:
            await self._let_go()
            raise
        for link in self.router.links:
            if not link.is_usable:
                self._on_news(f"going on without node {link.address} for now: {link.reason}")
        self._on_change = on_change
        return self._model

    def members(self) -> Sequence[Member]:
        """See Crew."""
        return [self._member(link) for link in self.router.usable() if self._is_right(link)]

    def problem(self) -> str:
        """See Crew."""
        return "; ".join(f"{link.address}: {link.reason or link.state.value}" for link in self.router.links)

    async def close(self) -> None:
        """See Crew."""
        self._on_change = lambda: None
        await self._let_go()

    async def _let_go(self) -> None:
        await self.router.close()
        if self._cluster is not None:
            await self._cluster.close()

    def _member(self, link: NodeLink) -> _RemoteMember:
        found = self._members.get(link)
        if found is None:
            assert self._model is not None
            found = self._members[link] = _RemoteMember(link, self._model, self._encoding)
        return found

    def _found(self, name: str) -> ModelConfig:
        found = self.router.described(name)
        if found is None:
            names = sorted({held for link in self.router.usable() for held in link.models})
            raise UsageError(f"no node has a model {name!r}", expected=", ".join(names) or "a model on the nodes")
        return found.config

    def _only_name(self) -> str:
        names = sorted({held for link in self.router.usable() for held in link.models})
        if len(names) != 1:
            raise UsageError("got no --model", expected=f"one of {', '.join(names) or 'the models on the nodes'}")
        return names[0]

    def _is_right(self, link: NodeLink) -> bool:
        assert self._model is not None
        held = link.models.get(self._model.name)
        judged = self._judged.get(link)
        if judged is not None and judged[0] is held:
            return judged[1]  # asked for every answer, and rarely anything new
        is_right = held is not None and _same(held.config, self._model, self._encoding)
        self._judged[link] = (held, is_right)
        if is_right:
            return True
        if link.address not in self._strangers:
            self._strangers.add(link.address)
            what = "no such model" if held is None else f"version {held.config.version}, or other outputs"
            self._on_news(f"node {link.address} is left out: it has {what} (the job began with {self._model.version})")
        return False


class LocalCrew:
    """One model, loaded from its folder, run on this host; no network."""

    name = "this host"
    was_silent = False

    def __init__(self, folder: Path, *, encoding: str, on_news: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._encoding = encoding
        self._on_news = on_news
        self._model: Model | None = None
        self._tasks: set[asyncio.Task[ScatterResult]] = set()

    @property
    def management_bytes(self) -> int:
        """See Crew."""
        return 0

    async def open(self, on_change: Callable[[], None]) -> JobModel:
        """See Crew."""
        model = Model(read_config(self._folder), on_news=self._on_news)
        await model.load()
        self._model = model
        try:
            config = msgspec.structs.replace(model.config, input=model.inputs, output=model.outputs)
            return _job_model(config, self._encoding)
        except BaseException:
            await model.close()
            raise

    def members(self) -> Sequence[Member]:
        """See Crew."""
        return [self] if self._model is not None and (self._model.is_ready or self._model.is_recovering) else []

    def problem(self) -> str:
        """See Crew."""
        return "the model's workers do not stay up"

    def scatter(self, blobs: Sequence[bytes], *, timeout_s: float) -> asyncio.Future[ScatterResult]:
        """See Member."""
        assert self._model is not None
        elements = [len(blob).to_bytes(4, "little") + blob for blob in blobs]
        loop = asyncio.get_running_loop()
        task = loop.create_task(
            scatter(self._model, elements, encoding=self._encoding, deadline_s=loop.time() + timeout_s)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """See Crew."""
        if self._model is not None:
            await self._model.close()


def _job_model(config: ModelConfig, encoding: str) -> JobModel:
    blob_input(config, config.input)
    return JobModel(
        name=config.name,
        version=config.version,
        outputs=encoded_specs(config.output, encoding),
        max_rows=max(1, config.batching.max_rows),
    )


def _same(config: ModelConfig, model: JobModel, encoding: str) -> bool:
    return config.version == model.version and encoded_specs(config.output, encoding) == model.outputs
