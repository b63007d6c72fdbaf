"""The daemon on every host: has versions on order, and gives what it has to its neighbours.

It serves from the cache of the user it runs as, to whoever holds the token; it never gives a byte that it did not
verify in this process, but for the pieces of a chunk under way (see board). It holds no state of its own: what it has
is in the cache, what it was told to fetch is told again.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from wirespeed import wire
from wirespeed.errors import DataError, PeerFailure, WirespeedError
from wirespeed.repo import names, signing
from wirespeed.repo.cache import Cache
from wirespeed.repo.manifest import Manifest, decode
from wirespeed.repo.repository import Repository
from wirespeed.repo.swarm.announcing import Announcer
from wirespeed.repo.swarm.board import Board
from wirespeed.repo.swarm.follow import join
from wirespeed.repo.swarm.job import Job
from wirespeed.repo.swarm.messages import (
    PART_BYTES,
    ManifestPart,
    Pieces,
    Plan,
    Progress,
    Status,
    check_digest,
    pack,
    unpack,
)
from wirespeed.repo.swarm.neighbours import Neighbours
from wirespeed.repo.swarm.pace import Pace
from wirespeed.units import MIB

REST_AFTER_S = 20.0
"""A version that nobody asked for in so long gives its memory back."""
KEEP_JOBS = 64
_LIMITS = wire.Limits(max_message_bytes=32 * MIB, credit_bytes=64 * MIB, keepalive_s=1.0)


def _quiet(news: str) -> None:
    pass


class Peer:
    """One peer. Make it, and ``await start(address)``, on a running event loop; ``close`` ends it."""

    def __init__(
        self,
        cache: Cache,
        *,
        repository: Repository | None = None,
        rack: str = "",
        security: wire.Security | None = None,
        rate_bit_per_s: float | None = None,
        trackers: tuple[str, ...] = (),
        advertise: str | None = None,
        on_news: Callable[[str], None] = _quiet,
    ) -> None:
        self.cache = cache
        self.repository = repository
        self.trusted = signing.trusted_from(None) if repository is None else repository.trusted
        self.rack = rack
        self.address = ""
        self.on_news = on_news
        self.neighbours = Neighbours(wire.Security() if security is None else security)
        self.jobs: dict[bytes, Job] = {}
        self._loop = asyncio.get_running_loop()
        self.executor = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="wirespeed-verify")
        self.threads = ThreadPoolExecutor(64, thread_name_prefix="wirespeed-job")
        self.pace_in = Pace(rate_bit_per_s, self._loop.time)
        self._pace_out = Pace(rate_bit_per_s, self._loop.time)
        self._boards: dict[bytes, Board] = {}
        self._served: dict[bytes, int] = {}
        self._seeding: dict[bytes, asyncio.Lock] = {}
        self._pool = wire.BufferPool(max_pooled_bytes=256 * MIB)
        self._server: wire.Server | None = None
        self._advertise = advertise
        self._sweeper: asyncio.TimerHandle | None = None
        self.announcer = Announcer(self, trackers)

    # --- life

    async def start(self, address: str) -> None:
        """Listen. ``self.address`` is what others reach it by."""
        handlers: dict[str, wire.Handler] = {
            "pieces": self._pieces,
            "progress": self._progress,
            "manifest": self._manifest,
            "warm": self._warm,
            "join": self._join,
            "wait": self._wait,
            "cancel": self._cancel,
            "status": self._status,
            "have": self._have,
        }
        self._server = await wire.listen(
            address, handlers, security=self.neighbours.security, limits=_LIMITS, on_error=self._report
        )
        host, _, port = self._server.address.rpartition(":")
        if self._advertise is not None:
            self.address = self._advertise
        elif host in {"0.0.0.0", "[::]"}:  # noqa: S104 - compared, not listened on
            self.address = f"{socket.gethostname()}:{port}"
        else:
            self.address = self._server.address
        self._sweeper = self._loop.call_later(REST_AFTER_S / 2, self._rest)
        self.announcer.start()

    async def close(self) -> None:
        """Stop serving and fetching. What is under way is gone on with by the next peer on this cache."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.announcer.close()
        for job in self.jobs.values():
            if job.task is not None and not job.done.done():
                job.task.cancel()
        for job in self.jobs.values():
            await job.done
        if self._server is not None:
            await self._server.close()
        await self.neighbours.close()
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.threads.shutdown(wait=False, cancel_futures=True)

    def order(self, plan: Plan) -> Job:
        """Fetch a version, unless that is under way already. Raises SignatureMissing where one is required."""
        # Both become parts of paths.
        names.check_name(plan.version.name)
        if plan.alias is not None:
            names.check_alias(plan.alias)
        signing.check(plan.version, self.trusted)
        digest = check_digest(plan.digest)
        job = self.jobs.get(digest)
        if job is not None and not job.done.done():
            return job
        job = Job(self, plan)
        self.jobs.pop(digest, None)
        self.jobs[digest] = job
        self._boards.pop(digest, None)  # what is on disk may have changed: the pull will tell
        for old in [at for at, held in self.jobs.items() if held.done.done()][:-KEEP_JOBS]:
            del self.jobs[old]
            self._boards.pop(old, None)
            self._served.pop(old, None)
        job.task = asyncio.create_task(job.run())
        return job

    def _rest(self) -> None:
        self._sweeper = self._loop.call_later(REST_AFTER_S / 2, self._rest)
        for board in self._boards.values():
            if board.used_s < self._loop.time() - REST_AFTER_S:
                board.rest()

    def _report(self, request: wire.Request, fault: BaseException) -> None:
        self.on_news(f"{request.method} for {request.peer} failed: {type(fault).__name__}: {fault}")

    # --- for jobs

    def board(self, digest: bytes, manifest: Manifest) -> Board:
        """The one board of this version."""
        found = self._boards.get(digest)
        if found is None:
            found = self._boards[digest] = Board(manifest, self.cache, pool=self._pool, executor=self.executor)
        return found

    def served_of(self, digest: bytes) -> int:
        """Bytes given to others of this version."""
        return self._served.get(digest, 0)

    def cached_manifest(self, digest: bytes) -> bytes | None:
        """From the cache; verified."""
        try:
            return self.cache.manifest(digest.hex(), _none)
        except _NotCached:
            return None

    # --- what others ask

    async def _held(self, digest: bytes) -> Board | None:
        """What this host has of a version that nobody ordered since it began: from its cache."""
        job = self.jobs.get(check_digest(digest))
        if job is not None and not job.done.done():
            await _ready(job)
        found = self._boards.get(digest)
        if found is not None:
            return found
        async with self._seeding.setdefault(digest, asyncio.Lock()):
            if digest in self._boards:
                return self._boards[digest]
            seeded = await self._loop.run_in_executor(self.threads, self._look_for, digest)
            if seeded is None:
                self._seeding.pop(digest, None)
                return None
            manifest, held = seeded
            board = self.board(digest, manifest)
            board.keep(held)
            return board

    def _look_for(self, digest: bytes) -> tuple[Manifest, list[int]] | None:
        content = self.cached_manifest(digest)
        if content is None:
            return None
        try:
            manifest = decode(content, source=f"manifest {digest.hex()[:16]}...")
        except DataError:
            return None
        here = [file for file in manifest.files if self.cache.find(manifest, file) is not None]
        if not here and manifest.files:
            return None
        return manifest, [index for file in here for index in file.chunks]

    def _pieces(self, request: wire.Request) -> object:
        wanted = unpack(request.payload, Pieces)
        board = self._boards.get(wanted.digest)
        if board is None or self._pace_out.rate_bit_per_s is not None:
            return self._pieces_later(wanted)
        self._count(wanted)
        return board.give(wanted.asks)

    async def _pieces_later(self, wanted: Pieces) -> wire.Answer:
        board = await self._held(wanted.digest)
        if board is None:
            raise wire.CallFailed("it does not have this version", status=wire.Status.UNAVAILABLE)
        answer = board.give(wanted.asks)
        if isinstance(answer, asyncio.Future):
            answer = await answer
        delay_s = self._pace_out.delay_s(self._count(wanted))
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        return answer

    def _count(self, wanted: Pieces) -> int:
        num_bytes = sum(ask.length for ask in wanted.asks)
        self._served[wanted.digest] = self._served.get(wanted.digest, 0) + num_bytes
        return num_bytes

    async def _progress(self, request: wire.Request) -> bytes:
        digest = check_digest(bytes(request.payload))
        job = self.jobs.get(digest)
        if job is not None:
            return pack(job.progress())
        board = await self._held(digest)
        if board is None:
            return pack(Progress(state="unknown"))
        return pack(
            Progress(
                state="whole" if board.is_whole else "partial", held_bytes=board.held_bytes,
                total_bytes=board.total_bytes, served_bytes=self.served_of(digest),
            )
        )  # fmt: skip

    async def _have(self, request: wire.Request) -> bytes:
        board = await self._held(bytes(request.payload))
        return b"" if board is None else board.bitmap()

    async def _manifest(self, request: wire.Request) -> wire.Answer:
        wanted = unpack(request.payload, ManifestPart)
        job = self.jobs.get(check_digest(wanted.digest))
        if job is not None and not job.done.done():
            content: bytes | None = await _ready(job)
        else:
            content = await self._loop.run_in_executor(self.threads, self.cached_manifest, wanted.digest)
        if content is None or not 0 <= wanted.offset <= len(content):
            raise wire.CallFailed("it does not have this manifest", status=wire.Status.UNAVAILABLE)
        part = content[wanted.offset : wanted.offset + PART_BYTES]
        return wire.Answer(part, meta=len(content).to_bytes(8, "little"))

    async def _warm(self, request: wire.Request) -> bytes:
        return pack(self.order(unpack(request.payload, Plan)).progress())

    async def _join(self, request: wire.Request) -> bytes:
        plan = unpack(request.payload, Plan)
        return pack((await join(self, plan.version, alias=plan.alias, deadline_s=plan.deadline_s)).progress())

    async def _wait(self, request: wire.Request) -> bytes:
        job = self.jobs.get(check_digest(bytes(request.payload)))
        if job is None:
            return await self._progress(request)
        await asyncio.shield(job.done)
        return pack(job.progress())

    async def _cancel(self, request: wire.Request) -> bytes:
        job = self.jobs.get(check_digest(bytes(request.payload)))
        if job is not None and job.task is not None and not job.done.done():
            job.task.cancel()
            await asyncio.shield(job.done)
        return await self._progress(request)

    def _status(self, request: wire.Request) -> bytes:
        times = os.times()
        return pack(
            Status(
                host=socket.gethostname(), rack=self.rack, has_store=self.repository is not None,
                versions=tuple((job.plan.version.label, job.progress()) for job in self.jobs.values()),
                cpu_s=times.user + times.system, served_bytes=sum(self._served.values()),
                received_bytes=sum(job.progress().peer_bytes for job in self.jobs.values()),
            )
        )  # fmt: skip


async def _ready(job: Job) -> bytes:
    try:
        return await asyncio.shield(job.ready)
    except PeerFailure as fault:
        raise wire.CallFailed(f"it gave up: {fault}", status=wire.Status.UNAVAILABLE) from fault


class _NotCached(WirespeedError):  # noqa: N818 - never leaves this module
    pass


def _none() -> bytes:
    raise _NotCached("not in the cache")
