"""One running instance of a model, as the server sees it: a worker process, or a thread of its own.

Both take a batch as tensors in parts (one part per request) and give its outcome. The outputs of a process are views of
the shared memory: whoever gets them copies what it keeps before it runs the next batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from wirespeed.errors import DataError, PeerFailure
from wirespeed.serve.backends import Batch, Loaded, load_backend
from wirespeed.serve.channel import (
    FROM_WORKER,
    MAX_WORD_BYTES,
    Failed,
    Half,
    Load,
    Ran,
    Ready,
    Run,
    encode,
    make_memory,
)
from wirespeed.serve.config import ModelConfig
from wirespeed.serve.executor import Executor, Outcome
from wirespeed.serve.tensors import Buffer, Tensor
from wirespeed.units import MIB

_KEEP_BYTES = 32 * MIB

Joined = tuple[str, str, tuple[int, ...], Sequence[Buffer]]
"""A batch's tensor: name, datatype, shape, and its bytes in parts."""


class InstanceDied(PeerFailure):
    """The process that ran a batch is gone."""


class Instance(Protocol):
    """One running instance. ``run`` is called only when the one before has ended."""

    pid: int | None

    async def start(self) -> Loaded:
        """Load the model. Raises DataError where it cannot be, PeerFailure where it takes too long."""

    def run(self, tensors: Sequence[Joined], batch: Batch) -> asyncio.Future[Outcome]:
        """Run a batch. The future raises InstanceDied where the instance was lost, DataError for what does not fit."""

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """End it; a batch under way is lost."""


class ProcessInstance:
    """An instance in a worker process."""

    def __init__(self, config: ModelConfig, *, on_death: Callable[[str], None]) -> None:
        self.pid: int | None = None
        self._config = config
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._half_bytes = config.max_batch_bytes
        self._inputs: Half | None = None
        self._outputs: Half | None = None
        self._number = 0
        self._started: asyncio.Future[Loaded] = self._loop.create_future()
        self._running: asyncio.Future[Outcome] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._is_closing = False

    async def start(self) -> Loaded:
        """See Instance.start."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory_fd, memory = make_memory(self._half_bytes)
        self._inputs = Half(memory, 0, self._half_bytes)
        self._outputs = Half(memory, self._half_bytes, self._half_bytes)
        try:
            fds = (theirs.fileno(), memory_fd)
            command = [sys.executable, "-m", "wirespeed.serve.worker", *map(str, fds)]
            self._process = subprocess.Popen(
                command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory_fd)
        self.pid = self._process.pid
        ours.setblocking(False)
        self._channel = ours
        self._loop.add_reader(ours.fileno(), self._readable)
        ours.send(encode(Load(config=self._config, half_bytes=self._half_bytes)))
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                return await self._started
        except TimeoutError:
            await self.close()
            raise PeerFailure(
                f"model {self._config.name!r} did not load within {self._config.start_timeout_s:g} s",
                hint="raise instances.start_timeout in model.toml",
            ) from None
        except BaseException:
            await self.close()
            raise

    def run(self, tensors: Sequence[Joined], batch: Batch) -> asyncio.Future[Outcome]:
        """See Instance.run."""
        assert self._running is None
        future: asyncio.Future[Outcome] = self._loop.create_future()
        if self._channel is None or self._inputs is None:
            future.set_exception(InstanceDied("the worker is gone"))
            return future
        self._number += 1
        try:
            self._inputs.begin()
            placed = [self._inputs.put(*tensor) for tensor in tensors]
            packet = encode(Run(number=self._number, tensors=placed, batch=batch))
            self._channel.send(packet)
        except DataError as fault:
            future.set_exception(fault)
            return future
        except OSError as fault:
            future.set_exception(InstanceDied(f"the worker cannot be told anything: {fault.strerror}"))
            return future
        self._running = future
        self._late = self._loop.call_later(self._config.run_timeout_s, self._hung)
        return future

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """See Instance.close."""
        self._is_closing = True
        self._lose("the model was unloaded")
        process = self._process
        if process is None:
            return
        self._process = None
        end_s = self._loop.time() + timeout_s
        while process.poll() is None and self._loop.time() < end_s:
            await asyncio.sleep(0.01)
        if process.poll() is None:
            process.kill()
        await self._loop.run_in_executor(None, process.wait)

    def _readable(self) -> None:
        assert self._channel is not None
        try:
            packet = self._channel.recv(MAX_WORD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._died()
            return
        word = FROM_WORKER.decode(packet)
        if isinstance(word, Ran):
            self._take(word)
        elif self._started.done():
            return
        elif isinstance(word, Ready):
            self._started.set_result(word.loaded)
        elif isinstance(word, Failed):
            self._is_closing = True
            self._started.set_exception(DataError(f"model {self._config.name!r} failed to load: {word.text}"))

    def _take(self, word: Ran) -> None:
        future, self._running = self._running, None
        if self._late is not None:
            self._late.cancel()
        assert self._outputs is not None
        assert self._inputs is not None
        if future is None or future.done() or word.number != self._number:
            return
        get = self._outputs.get
        apart: list[list[Tensor] | str] = [one if isinstance(one, str) else [get(p) for p in one] for one in word.apart]
        tensors = None if word.tensors is None else [get(placed) for placed in word.tensors]
        future.set_result(Outcome(tensors, apart, word.compute_ns, word.num_runs))
        self._inputs.give_back(_KEEP_BYTES)

    def _hung(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._died(
            f"a batch took longer than {self._config.run_timeout_s:g} s (instances.run_timeout), so it was killed"
        )

    def _died(self, reason: str | None = None) -> None:
        process, self._process = self._process, None
        if process is not None:
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                # Its socket closes a moment before it has ended, and how it ended is worth that moment.
                status = process.wait(0.05)
            if status is None:
                process.kill()
                self._loop.run_in_executor(None, process.wait)
            elif reason is None:
                reason = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self._lose("it ended" if reason is None else reason)
        if not self._is_closing:
            self._on_death("it ended" if reason is None else reason)

    def _lose(self, reason: str) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._loop.remove_reader(channel.fileno())
            channel.close()
        if self._late is not None:
            self._late.cancel()
        future, self._running = self._running, None
        if future is not None and not future.done():
            future.set_exception(InstanceDied(f"the worker of model {self._config.name!r} died: {reason}"))
        if not self._started.done():
            self._started.set_exception(
                PeerFailure(f"the worker of model {self._config.name!r} died while loading: {reason}")
            )


class ThreadInstance:
    """An instance in a thread of this process: no copies, no protection."""

    def __init__(self, config: ModelConfig, *, on_death: Callable[[str], None]) -> None:
        self.pid: int | None = None
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"model-{config.name}")
        self._executor: Executor | None = None

    async def start(self) -> Loaded:
        """See Instance.start."""
        config = self._config

        def load() -> Loaded:
            self._executor = Executor(config, load_backend(config.backend))
            return self._executor.load()

        try:
            async with asyncio.timeout(config.start_timeout_s):
                return await self._loop.run_in_executor(self._threads, load)
        except TimeoutError:
            raise PeerFailure(f"model {config.name!r} did not load within {config.start_timeout_s:g} s") from None
        except Exception as fault:
            self._threads.shutdown(wait=False)
            raise DataError(f"model {config.name!r} failed to load: {fault}") from fault

    def run(self, tensors: Sequence[Joined], batch: Batch) -> asyncio.Future[Outcome]:
        """See Instance.run."""
        assert self._executor is not None
        whole = [
            Tensor(name, datatype, shape, parts[0] if len(parts) == 1 else b"".join(parts))
            for name, datatype, shape, parts in tensors
        ]
        return self._loop.run_in_executor(self._threads, self._executor.run, whole, batch)

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """See Instance.close."""
        executor, self._executor = self._executor, None
        if executor is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._loop.run_in_executor(self._threads, executor.close), timeout_s)
        self._threads.shutdown(wait=False)


def make_instance(config: ModelConfig, *, on_death: Callable[[str], None]) -> Instance:
    """An instance of the kind that the configuration names, not yet started."""
    kind = ProcessInstance if config.instances.isolation == "process" else ThreadInstance
    return kind(config, on_death=on_death)
