"""A batch job: inputs read ahead, scattered over whoever runs them, gathered in order, and written as it goes.

Every input ends as exactly one row: its result, or the error that ``failures`` decides on. The job goes on as long as
somebody runs inputs; when nobody did for ``patience_s``, or the disk is full, it ends with an error that says how to go
on, and what is done stays done.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from wirespeed.errors import PeerFailure, UsageError, WirespeedError
from wirespeed.infer.columns import Row
from wirespeed.infer.crew import Crew, JobModel, Member
from wirespeed.infer.failures import Failures, Verdict, is_full
from wirespeed.infer.inputs import Item
from wirespeed.infer.reading import Loaded, ReadBounds, Reader
from wirespeed.infer.results import Results, identity_of
from wirespeed.infer.schedule import Bounds, Chunk, Schedule
from wirespeed.serve.node import ScatterResult
from wirespeed.serve.status import Reason
from wirespeed.serve.tensors import to_array

_TICK_S = 0.02
_FEW = 64
_FULL_PAUSE_S = 0.05
_WRITE_ROWS = 1024


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``timeout_s``: how long a node may take for one chunk before it is sent elsewhere."""

    encoding: str = "fp32"
    restart: bool = False
    overwrite: bool = False
    timeout_s: float = 120.0
    patience_s: float = 60.0
    """How long nobody may be there to run inputs."""
    write_every_s: float = 0.1
    """Often enough that little is left to write when the last answer comes."""
    reading: ReadBounds = ReadBounds()
    bounds: Bounds = Bounds()


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is. ``eta_s`` None: cannot be told yet."""

    num_done: int
    num_inputs: int
    num_errors: int
    num_nodes: int
    rate_per_s: float
    eta_s: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did. ``num_resumed`` results were there before; ``per_node`` counts answers of this run."""

    out: str
    model: str
    version: str
    features: str
    num_inputs: int
    num_ok: int
    num_errors: int
    num_resumed: int
    num_again: int
    """Inputs that were sent again."""
    num_copies: int
    """Inputs of which an idle node got a copy, because another took unusually long."""
    input_bytes: int
    seconds: float
    per_node: dict[str, int]
    management_bytes: int

    @property
    def rate_per_s(self) -> float:
        """Inputs of this run per second."""
        return (self.num_inputs - self.num_resumed) / self.seconds if self.seconds > 0 else 0.0


class Job:
    """One run of one job. ``run`` once."""

    def __init__(
        self,
        items: Sequence[Item],
        crew: Crew,
        out: Path,
        options: JobOptions,
        *,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._items = items
        self._crew = crew
        self._out = out
        self._options = options
        self._on_progress = on_progress
        self._blobs: dict[int, bytes] = {}
        self._failures = Failures()
        self._per_node: dict[str, int] = {}
        self._calls: set[asyncio.Future[ScatterResult]] = set()
        self._num_settled = 0
        self._num_errors = 0
        self._num_again = 0
        self._input_bytes = 0
        self._fault: BaseException | None = None
        self._wake = asyncio.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-results")
        self._is_writing = False
        self._is_warm = False
        self._written_s = 0.0

    async def run(self) -> Summary:
        """Do the job to its end.

        Raises UsageError (the output exists, or belongs to another job), PeerFailure (nobody runs inputs),
        MissingCapability (the disk is full). Cancelling it writes what is done and lets the rest go.
        """
        if self._out.exists() and not self._options.overwrite:
            raise UsageError(
                f"{self._out} exists", expected="a new file", hint="say --overwrite, or name another --out"
            )
        try:
            model = await self._crew.open(self._pump_soon)
            try:
                return await self._run(model)
            finally:
                for call in list(self._calls):
                    call.cancel()
                await self._crew.close()
        finally:
            self._writer.shutdown(wait=True)

    async def _run(self, model: JobModel) -> Summary:
        options = self._options
        self._loop = asyncio.get_running_loop()
        self._results = results = Results(self._out, model.outputs)
        identity = identity_of(
            self._items, model=model.name, version=model.version, encoding=options.encoding, outputs=model.outputs
        )
        first = results.open(identity, restart=options.restart)
        begin_s = time.monotonic()
        self._first, self._begin_s = first, begin_s
        self._written_s = begin_s
        self._num_errors = results.num_errors_written
        max_rows = min(options.bounds.max_rows, model.max_rows)
        self._schedule = Schedule(
            len(self._items), start=first, bounds=msgspec.structs.replace(options.bounds, max_rows=max_rows)
        )
        self._reader = Reader(self._items, start=first, bounds=options.reading, deliver=self._deliver)
        try:
            try:
                self._reader.start()
                await self._until_settled(len(self._items) - first)
            finally:
                await self._loop.run_in_executor(None, self._reader.stop)
                await self._write_rest()
            await self._in_writer(results.finish)
        finally:
            results.close()
        return Summary(
            out=str(self._out),
            model=model.name,
            version=model.version,
            features=options.encoding,
            num_inputs=len(self._items),
            num_ok=len(self._items) - self._num_errors,
            num_errors=self._num_errors,
            num_resumed=first,
            num_again=self._num_again,
            num_copies=self._schedule.num_copies,
            input_bytes=self._input_bytes,
            seconds=time.monotonic() - begin_s,
            per_node=dict(sorted(self._per_node.items())),
            management_bytes=self._crew.management_bytes,
        )

    async def _until_settled(self, num_wanted: int) -> None:
        alone_since_s: float | None = None
        told_s = 0.0
        while self._num_settled < num_wanted and self._fault is None:
            self._wake.clear()
            self._pump()
            now_s = time.monotonic()
            if self._crew.members():
                alone_since_s = None
            else:
                alone_since_s = now_s if alone_since_s is None else alone_since_s
                if now_s - alone_since_s > self._options.patience_s:
                    raise PeerFailure(
                        f"nobody has run inputs for {self._options.patience_s:g} s: {self._crew.problem()}",
                        hint=f"{self._results.num_taken_up} results are safe: mend the nodes and run the same command "
                        "again to go on",
                    )
            if now_s - told_s >= 0.5:
                told_s = now_s
                self._on_progress(self._progress(now_s))
            self._write_if_due(now_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _TICK_S)
        if self._fault is not None:
            raise self._fault
        self._on_progress(self._progress(time.monotonic()))

    def _progress(self, now_s: float) -> Progress:
        took_s = now_s - self._begin_s
        rate = self._num_settled / took_s if took_s > 0 else 0.0
        left = len(self._items) - self._first - self._num_settled
        return Progress(
            num_done=self._first + self._num_settled,
            num_inputs=len(self._items),
            num_errors=self._num_errors,
            num_nodes=len(self._crew.members()),
            rate_per_s=rate,
            eta_s=left / rate if rate > 0 else None,
        )

    # --- reading

    def _deliver(self, batch: list[Loaded]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
            self._loop.call_soon_threadsafe(self._take_in, batch)

    def _take_in(self, batch: list[Loaded]) -> None:
        for index, data, error in batch:
            self._input_bytes += len(data)
            if error is not None:
                self._reader.release(len(data))
                self._schedule.skip()
                self._put(index, Row(self._items[index].key, None, error))
            else:
                self._blobs[index] = data
                self._schedule.offer(index, len(data))
        self._pump()

    # --- scattering

    def _pump_soon(self) -> None:
        self._wake.set()

    def _pump(self) -> None:
        if self._fault is not None:
            return
        now_s = time.monotonic()
        members = self._crew.members()
        self._schedule.set_nodes(member.name for member in members)
        # In turn, so that the first of them does not take everything there is.
        open_members = list(members)
        while open_members:
            left = []
            for member in open_members:
                chunk = self._schedule.next_chunk(member.name, now_s)
                if chunk is not None:
                    self._send(member, chunk)
                    left.append(member)
            open_members = left

    def _pump_one(self, member: Member) -> None:
        now_s = time.monotonic()
        while (chunk := self._schedule.next_chunk(member.name, now_s)) is not None:
            self._send(member, chunk)

    def _send(self, member: Member, chunk: Chunk) -> None:
        blobs = [self._blobs[index] for index in chunk.indices]
        call = member.scatter(blobs, timeout_s=self._options.timeout_s)
        self._calls.add(call)
        call.add_done_callback(lambda done: self._answered(member, chunk, done))

    def _answered(self, member: Member, chunk: Chunk, done: asyncio.Future[ScatterResult]) -> None:
        self._calls.discard(done)
        fault = asyncio.CancelledError() if done.cancelled() else done.exception()
        now_s = time.monotonic()
        if fault is None and not self._is_warm:
            # Not sooner: until the first nodes have work, nothing is to be done beside reading and sending.
            self._is_warm = True
            self._in_writer(self._results.warm_up).add_done_callback(self._worked)
        self._schedule.finished(chunk, now_s, has_answer=fault is None)
        if fault is None:
            self._gather(member, chunk, done.result())
        elif not done.cancelled():
            self._lost(member, chunk, fault, now_s)
        if self._num_settled >= len(self._items) - self._first or self._fault is not None:
            self._wake.set()
        elif fault is None and self._schedule.num_left > _FEW * len(chunk.indices):
            self._pump_one(member)
        elif fault is None:
            self._pump()  # near the end it may be another node's turn
        else:
            self._wake.set()

    def _gather(self, member: Member, chunk: Chunk, result: ScatterResult) -> None:
        for places, tensors in result.groups:
            arrays = [to_array(tensor) for tensor in tensors]
            for row, place in enumerate(places):
                index = chunk.indices[place]
                key = self._items[index].key
                if self._settle(index, Row(key, tuple(array[row] for array in arrays))):
                    self._per_node[member.name] = self._per_node.get(member.name, 0) + 1
        num_nodes = len(self._crew.members()) if result.failures else 0
        for place, reason, text in result.failures:
            if reason is Reason.EXHAUSTED:
                self._schedule.pause(member.name, time.monotonic() + _FULL_PAUSE_S)
            self._follow(self._failures.of_input(chunk.indices[place], reason, text, num_nodes=num_nodes))

    def _lost(self, member: Member, chunk: Chunk, fault: BaseException, now_s: float) -> None:
        """A chunk's call has no answer."""
        if is_full(fault):
            self._schedule.pause(member.name, now_s + _FULL_PAUSE_S)
        num_nodes = len(self._crew.members())
        for verdict in self._failures.of_chunk(chunk, fault, was_silent=member.was_silent, num_nodes=num_nodes):
            self._follow(verdict)

    def _follow(self, verdict: Verdict) -> None:
        index = verdict.place
        if verdict.error is not None:
            self._settle(index, Row(self._items[index].key, None, verdict.error))
        elif index in self._blobs:
            self._num_again += 1
            self._schedule.put_back(index, is_suspect=verdict.is_suspect)

    # --- gathering

    def _settle(self, index: int, row: Row) -> bool:
        """The first result of an input counts. False: it had one."""
        if not self._schedule.settle(index):
            return False
        self._failures.forget(index)
        self._reader.release(len(self._blobs.pop(index)))
        self._put(index, row)
        return True

    def _put(self, index: int, row: Row) -> None:
        self._num_settled += 1
        self._num_errors += row.error is not None
        self._results.put(index, row)
        if self._results.num_rows_held >= _WRITE_ROWS:
            self._write_if_due(time.monotonic())

    def _write_if_due(self, now_s: float) -> None:
        held = self._results.num_rows_held
        is_due = held >= _WRITE_ROWS or (held and now_s - self._written_s >= self._options.write_every_s)
        if self._is_writing or not is_due:
            return
        self._is_writing, self._written_s = True, now_s
        first, rows = self._results.take()
        place = self._results.num_taken_up

        def written(done: asyncio.Future[None]) -> None:
            self._is_writing = False
            if self._worked(done):
                self._reader.written(place)

        self._in_writer(lambda: self._results.write(first, rows)).add_done_callback(written)

    def _worked(self, done: asyncio.Future[None]) -> bool:
        """Whether the writing thread did it; else the job ends with its fault."""
        fault = None if done.cancelled() else done.exception()
        if fault is not None:
            self._fault = self._fault or fault
            self._wake.set()
        return fault is None

    def _in_writer(self, work: Callable[[], None]) -> asyncio.Future[None]:
        return self._loop.run_in_executor(self._writer, work)

    async def _write_rest(self) -> None:
        """What is in order and not yet written. A disk that is full has been told of already."""
        first, rows = self._results.take()
        try:
            await self._in_writer(lambda: self._results.write(first, rows))
        except WirespeedError as fault:
            self._fault = self._fault or fault
            raise
