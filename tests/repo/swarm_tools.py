"""Peers and trackers as real processes on loopback, with faults put between them by signals and by a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from wirespeed import wire
from wirespeed.repo.aliases import set_alias
from wirespeed.repo.repository import Repository
from wirespeed.repo.store import open_store
from wirespeed.repo.swarm.messages import Progress, Status, unpack
from wirespeed.repo.swarm.warm import ask_status, warm

NUM_HOSTS = 8


class Daemon:
    """`wirespeed repo peer` or `tracker`, with its own cache."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        *arguments: str,
        listen: str = "127.0.0.1:0",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.cache = folder / "cache"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wirespeed", "repo", kind, "--listen", listen, "--json", *arguments],
                env={**os.environ, "WIRESPEED_CACHE": str(self.cache), **(environment or {})},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        text = b""
        while not text.endswith(b"}\n"):
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
            text += line
        self.address = str(json.loads(text)["address"])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(timeout=60)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def end(self) -> int:
        """As an operator ends it."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        code = self.process.wait(timeout=60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def status(self) -> Status:
        return wire.run(ask_status(self.address))

    def progress(self, digest: bytes) -> Progress:
        async def ask() -> Progress:
            async with await wire.connect(self.address) as connection:
                return unpack((await connection.call("progress", digest, timeout_s=60)).payload, Progress)

        return wire.run(ask())

    def news(self) -> str:
        return self.log.read_text()


def wait_until(test: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not test():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


class Relay:
    """TCP to a peer, at most ``rate`` bytes per second each way, flipping one bit after ``flip_after`` bytes of answers."""

    def __init__(self, target: str, *, rate: float | None = None, flip_after: int | None = None) -> None:
        self._target = target
        self.rate = rate
        self._flip_after = flip_after
        self.answered = 0
        self.num_flipped = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def _run(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.split(":")
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(self._copy(reader, up_writer, False), self._copy(up_reader, writer, True))
        finally:
            for side in (writer, up_writer):
                side.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if is_answer and self._flip_after is not None and len(data) > 4096:
                    self.answered += len(data)
                    if self.answered > self._flip_after and not self.num_flipped:
                        # In the middle of a large read: the payload of a piece, not a header.
                        self.num_flipped += 1
                        broken = bytearray(data)
                        broken[len(broken) // 2] ^= 0x10
                        data = bytes(broken)
                writer.write(data)
                await writer.drain()
                if self.rate is not None:
                    await asyncio.sleep(len(data) / self.rate)
        writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=60)


def warm_hosts(store_url: str, model: Path, name: str, folder: Path, peers: list[Daemon]) -> None:
    """Push a model as ``name@prod``, and bring it to NUM_HOSTS peers, of which one reads the store.

    ``peers`` is filled as they start, for whoever has to end them.
    """
    repository = Repository(open_store(store_url))
    repository.push(model, name)
    set_alias(repository.store, name, "prod", 1)
    version = repository.version(f"{name}@prod")
    peers += [Daemon("peer", folder / f"p{at}", "-r", store_url) for at in range(NUM_HOSTS)]
    warmed = wire.run(warm(version, [peer.address for peer in peers], alias="prod", deadline_s=180))
    assert [host.progress.state for host in warmed.hosts] == ["whole"] * NUM_HOSTS
    assert sum(host.progress.store_bytes > 0 for host in warmed.hosts) == 1
