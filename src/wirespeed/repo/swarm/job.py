"""One version on its way to one peer: its manifest, then its chunks, then its files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from wirespeed import wire
from wirespeed.errors import DataError, PeerFailure, WirespeedError
from wirespeed.repo.gc import read_manifest_bytes
from wirespeed.repo.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from wirespeed.repo.pull import pull_to_cache
from wirespeed.repo.swarm.board import Board
from wirespeed.repo.swarm.download import Download
from wirespeed.repo.swarm.messages import PART_BYTES, ManifestPart, Plan, Progress, State, pack
from wirespeed.repo.swarm.source import SwarmSource
from wirespeed.repo.swarm.watch import CONNECT_S

if TYPE_CHECKING:
    from wirespeed.repo.swarm.peer import Peer

MANIFEST_S = 30.0
_T = TypeVar("_T")


class Job:
    """A plan that is carried out. ``done`` resolves at its end, whatever that is."""

    def __init__(self, peer: Peer, plan: Plan) -> None:
        self.peer = peer
        self.plan = plan
        self.board: Board | None = None
        self.state: State = "running"
        self.problem = ""
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[bytes] = self._loop.create_future()
        """The manifest's bytes, once they and the board are there; an exception where they never will be."""
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.task: asyncio.Task[None] | None = None
        self._download: Download | None = None
        self._source: SwarmSource | None = None
        self._began_s = self._loop.time()
        self._seconds = 0.0

    def progress(self) -> Progress:
        """Where it stands."""
        board, download, source = self.board, self._download, self._source
        return Progress(
            state=self.state,
            held_bytes=0 if board is None else board.held_bytes,
            total_bytes=self.plan.version.num_bytes if board is None else board.total_bytes,
            upstream="" if download is None or self.state != "running" else download.upstream,
            idle_s=0.0 if download is None else download.idle_s,
            peer_bytes=0 if download is None else download.peer_bytes,
            store_bytes=0 if source is None else source.counts.store_bytes,
            served_bytes=self.peer.served_of(self.plan.digest),
            num_damaged=0 if download is None else download.num_damaged,
            passed_over=() if download is None else tuple(download.passed_over),
            problem=self.problem,
            seconds=self._seconds if self.done.done() else self._loop.time() - self._began_s,
        )

    async def run(self) -> None:
        """Carry it out. Raises nothing: how it ended is in ``state`` and ``problem``."""
        try:
            await self._fetch()
            self.state = "whole"
        except asyncio.CancelledError:
            self.state, self.problem = "failed", "it was ended"
            if self._download is not None:
                self._download.stop()
        except Exception as fault:
            self.state = "failed"
            self.problem = str(fault) if isinstance(fault, WirespeedError) else f"{type(fault).__name__}: {fault}"
            self.peer.on_news(f"{self.plan.version.label}: {self.problem}")
        self._seconds = self._loop.time() - self._began_s
        if not self.ready.done():
            self.ready.set_exception(PeerFailure(self.problem))
            self.ready.exception()  # seen: nobody may be waiting
        if self.board is not None:
            self.board.end(f"it gave up: {self.problem}" if self.problem else "")
        self.done.set_result(None)

    async def _fetch(self) -> None:
        peer, plan = self.peer, self.plan
        content = await self._manifest()
        manifest = await self._in_thread(self._decode, content)
        board = self.board = peer.board(plan.digest, manifest)
        board.begin()
        self.ready.set_result(content)
        store = None if peer.repository is None else peer.repository.store
        source = self._source = SwarmSource(
            store, board, loop=self._loop, local=await self._in_thread(peer.cache.index),
            hot=None if peer.repository is None else peer.repository.hot, label=plan.version.label,
        )  # fmt: skip
        download = self._download = Download(
            board, plan, neighbours=peer.neighbours, executor=peer.executor, threads=peer.threads,
            pace=peer.pace_in,
            from_store=None if store is None else source.from_store, on_news=peer.on_news, decode=source.decode,
        )  # fmt: skip
        source.download = download
        await self._in_thread(pull_to_cache, source, plan.version, peer.cache)
        board.keep(list(board.places))
        peer.cache.remember(plan.version, plan.alias)

    def _decode(self, content: bytes) -> Manifest:
        return decode(content, source=f"the manifest of {self.plan.version.label}")

    async def _in_thread(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await self._loop.run_in_executor(self.peer.threads, function, *arguments)

    async def _manifest(self) -> bytes:
        """From the cache or the order, else from the first upstream that has it, else from the store. Verified."""
        cached = await self._in_thread(self.peer.cached_manifest, self.plan.digest)
        if cached is not None:
            return cached
        if self.plan.manifest:
            try:
                return await self._in_thread(self._keep_manifest, _verified(self.plan.manifest, self.plan))
            except DataError as fault:
                self.peer.on_news(f"{self.plan.version.label}: {fault}")
        faults = []
        for address in self.plan.upstreams:
            try:
                content = await self._manifest_from(address)
            except (PeerFailure, DataError, TimeoutError) as fault:
                faults.append(f"{address}: {fault or 'it did not answer in time'}")
                continue
            return await self._in_thread(self._keep_manifest, content)
        if self.peer.repository is None:
            raise PeerFailure(
                f"nobody gave the manifest of {self.plan.version.label}",
                expected="an upstream that has it, or a store",
                hint="; ".join(faults) or "start the peer with --repo",
            )
        store = self.peer.repository.store
        return await self._in_thread(
            lambda: self.peer.cache.manifest(
                self.plan.version.manifest_digest, lambda: read_manifest_bytes(store, self.plan.version)
            ),
        )

    def _keep_manifest(self, content: bytes) -> bytes:
        return self.peer.cache.manifest(self.plan.version.manifest_digest, lambda: content)

    async def _manifest_from(self, address: str) -> bytes:
        parts = bytearray()
        async with asyncio.timeout(MANIFEST_S):
            connection = await wire.connect(address, timeout_s=CONNECT_S, security=self.peer.neighbours.security)
            async with connection:
                while True:
                    asked = pack(ManifestPart(self.plan.digest, len(parts)))
                    reply = await connection.call("manifest", asked, timeout_s=MANIFEST_S)
                    parts += reply.payload
                    total = int.from_bytes(reply.meta, "little")
                    if total > MAX_MANIFEST_BYTES or len(reply.payload) > PART_BYTES:
                        raise DataError(f"{address} says that a manifest has {total} bytes")
                    if len(parts) >= total or not reply.payload:
                        break
        return _verified(bytes(parts), self.plan, address)


def _verified(content: bytes, plan: Plan, sender: str = "the order") -> bytes:
    from blake3 import blake3

    if blake3(content).digest() != plan.digest:
        raise DataError(f"{sender} gave a manifest that is not the one of {plan.version.label}")
    return content
