"""Nodes that Ray places and keeps alive: ``wirespeed serve FOLDER --cluster ADDRESS``.

Ray is launcher and supervisor only. It starts one actor per worker, in a placement group over its hosts; the actor runs
an ordinary ``wirespeed serve --node`` and says where it listens; requests travel over the data plane and never through
Ray. What talks to Ray is a process of its own (``cluster_supervisor``): this one never imports Ray, and goes on with
the nodes that it knows while Ray's head is away. When the supervisor ends, Ray ends what it started.

The two processes speak in lines of JSON: a ``Wanted`` goes in, ``Told`` comes out. The end of the input means: stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Literal

import msgspec

from wirespeed.errors import MissingCapability, PeerFailure, UsageError, WirespeedError

Placement = Literal["spread", "pack"]
START_S = 180.0
"""Until the first worker is up: images are pulled, models loaded."""
STOP_S = 45.0
RETRY_S = (1.0, 2.0, 5.0, 10.0)
_LINE_BYTES = 1 << 20


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor is to place.

    ``command``: the arguments of ``wirespeed serve`` on each host, without doors. ``workers`` 0: one per host of the
    cluster. ``rack_label``: the Ray label that names a host's rack; "pack" puts all workers under one switch, "spread"
    puts them on as many hosts and racks as there are.
    """

    address: str
    command: tuple[str, ...]
    workers: int = 0
    placement: Placement = "spread"
    rack_label: str = "rack"
    cpus: float = 1.0
    gpus: float = 0.0
    token: str = ""
    start_s: float = START_S

    def __post_init__(self) -> None:
        if not self.address or not self.command:
            raise UsageError("got no address or no models for the cluster", expected="--cluster ADDRESS and models")
        if self.workers < 0 or self.cpus < 0 or self.gpus < 0:
            raise UsageError(
                f"got {self.workers} workers of {self.cpus:g} CPUs and {self.gpus:g} GPUs",
                expected="numbers that are not negative",
            )


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor says: a worker listens at ``address``, or is gone, or there is a problem.

    ``failed`` is its last word: ``kind`` is the class of the error, ``text`` and ``hint`` its words.
    """

    event: Literal["placed", "up", "down", "failed"]
    worker: int = -1
    address: str = ""
    host: str = ""
    rack: str = ""
    text: str = ""
    hint: str = ""
    kind: str = ""


_FAILURES: dict[str, type[WirespeedError]] = {
    "MissingCapability": MissingCapability,
    "PeerFailure": PeerFailure,
    "UsageError": UsageError,
}


class Cluster:
    """The workers of one service. ``start``, then ``close``."""

    def __init__(self, wanted: Wanted, *, on_news: Callable[[str], None] = lambda _: None) -> None:
        self._wanted = wanted
        self._on_news = on_news
        self._on_up: Callable[[str], None] = lambda _: None
        self._on_down: Callable[[str], None] = lambda _: None
        self.addresses: dict[int, str] = {}
        """Where each worker listened last, by number."""
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None

    async def start(self, on_up: Callable[[str], None], on_down: Callable[[str], None]) -> None:
        """Place the workers; returns when the first one listens. ``on_down`` is told of addresses that are no more.

        Raises MissingCapability without Ray or room for the workers, PeerFailure where the cluster or the workers do
        not answer in time, UsageError for models that a worker cannot serve.
        """
        self._on_up, self._on_down = on_up, on_down
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._keep())
        try:
            await asyncio.wait_for(asyncio.shield(self._first), self._wanted.start_s + 10.0)
        except TimeoutError:
            await self.close()
            raise PeerFailure(
                f"no worker of the cluster at {self._wanted.address} was up within {self._wanted.start_s:g} s"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Have Ray end the workers, which drain first."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _keep(self) -> None:
        num_failed = 0
        while True:
            try:
                fault = await self._run()
            finally:
                await self._end()
            assert self._first is not None
            if not self._first.done():
                self._first.set_exception(fault)
                return
            # Whoever is up stays up: requests do not pass through Ray.
            wait_s = RETRY_S[min(num_failed, len(RETRY_S) - 1)]
            num_failed += 1
            self._on_news(f"lost the supervisor of the cluster, trying again in {wait_s:g} s: {fault}")
            await asyncio.sleep(wait_s)

    async def _run(self) -> WirespeedError:
        """One supervisor, until it ends. Gives why."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "wirespeed.serve.cluster_supervisor",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES, env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        said = asyncio.get_running_loop().create_task(_last_words(process.stderr))
        fault: WirespeedError | None = None
        try:
            process.stdin.write(msgspec.json.encode(self._wanted) + b"\n")
            await process.stdin.drain()
            while line := await process.stdout.readline():
                fault = self._take(line) or fault
        except (ConnectionError, ValueError) as broken:
            fault = PeerFailure(f"the supervisor of the cluster said something that is no line: {broken}")
        finally:
            if process.returncode is None and fault is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        code = await process.wait()
        words = await said
        return fault or PeerFailure(f"the supervisor of the cluster ended with {code}: {words or 'it said nothing'}")

    async def _end(self) -> None:
        """Ask the supervisor to stop, and see that it does."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _take(self, line: bytes) -> WirespeedError | None:
        try:
            told = msgspec.json.decode(line, type=Told)
        except msgspec.MsgspecError:
            return None  # Ray writes to stdout too
        if told.event == "up":
            before = self.addresses.get(told.worker)
            self.addresses[told.worker] = told.address
            if before is not None and before != told.address:
                self._on_down(before)
            if before != told.address:
                where = f"{told.address} on {told.host}" + (f", rack {told.rack}" if told.rack else "")
                self._on_news(f"worker {told.worker} is up at {where}")
                self._on_up(told.address)
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
        elif told.event == "down":
            self._on_news(f"worker {told.worker} is gone: {told.text}; Ray starts it again")
        elif told.event == "placed":
            self._on_news(told.text)
        elif told.event == "failed":
            return _FAILURES.get(told.kind, PeerFailure)(told.text, hint=told.hint or None)
        return None


async def _last_words(stream: asyncio.StreamReader) -> str:
    """The last lines of stderr; all of it is read, or the process would wait for us."""
    last: list[str] = []
    with contextlib.suppress(ValueError):
        while line := await stream.readline():
            last = [*last[-4:], line.decode(errors="replace").strip()]
    return " | ".join(word for word in last if word)
