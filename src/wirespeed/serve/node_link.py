"""A dispatcher's view of one node: its connections, its heartbeats, and what is under way on it.

Data and heartbeats have a connection each, so that a beat never queues behind images. A node whose beat is late is
suspect (nothing new is sent to it while others are well); one that has been silent for ``lost_after_s``, or whose
connection broke, is lost: everything under way on it fails at once, for its caller to send elsewhere, and the link goes
on trying to reach it. Removal within 3 s of a node's death follows: its last beat was sent before it died.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

import msgspec

from wirespeed import wire
from wirespeed.errors import DataError, PeerFailure, UsageError, WirespeedError
from wirespeed.serve.heartbeat import Beat, decode_beat
from wirespeed.serve.node import NODE_LIMITS, ScatterResult
from wirespeed.serve.node_messages import (
    BEAT,
    DESCRIBE,
    INFER,
    SCATTER,
    Described,
    InferAnswer,
    InferHead,
    ScatterHead,
    check_whole,
    cut_tensors,
    decode_meta,
    decode_models,
    encode_meta,
    place_tensors,
    unpack_answer,
)
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Buffer, Tensor

_T = TypeVar("_T")
_BEAT_TIMEOUT_S = 60.0
"""A guard only: a silent node is given up long before, by the time in which this process was awake."""


class NodeState(Enum):
    """What a dispatcher thinks of a node."""

    JOINING = "joining"
    UP = "up"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"


class LinkTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When a silent node is suspected and given up, and how often a lost one is tried again."""

    suspect_after_s: float = 1.6
    lost_after_s: float = 2.7
    """With the tick in which it is noticed, below the promised 3 s."""
    connect_s: float = 3.0
    retry_s: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0, 2.0)

    def __post_init__(self) -> None:
        if not 0 < self.suspect_after_s < self.lost_after_s:
            raise UsageError(
                f"got {self.suspect_after_s} s to suspect and {self.lost_after_s} s to give up",
                expected="two times above zero, the first below the second",
            )


class NodeLink:
    """See the module. ``start``, then ``close``. ``on_change`` is called after every change of ``state``."""

    def __init__(
        self,
        address: str,
        *,
        security: wire.Security,
        limits: wire.Limits = NODE_LIMITS,
        times: LinkTimes | None = None,
        on_change: Callable[[NodeLink, str], None] = lambda _link, _reason: None,
    ) -> None:
        self.address = address
        self.state = NodeState.JOINING
        self.models: dict[str, Described] = {}
        self.beat: Beat | None = None
        self.num_under_way = 0
        """Inputs or requests of ours that it has not answered."""
        self.num_joins = 0
        self.num_beats = 0
        self.reason = "not yet connected"
        """Why it is not up."""
        self.was_silent = False
        """Whether it was lost by silence (its host or the way to it), not by the end of its process."""
        self._management_bytes = 0
        self._security = security
        self._limits = limits
        self._times = LinkTimes() if times is None else times
        self._on_change = on_change
        self._data: wire.Connection | None = None
        self._beats: wire.Connection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a new call has a chance: it is up, and so are its models."""
        return (
            self.state in (NodeState.UP, NodeState.SUSPECT)
            and self._data is not None
            and self._data.is_usable
            and self.beat is not None
            and self.beat.is_ready
        )

    @property
    def management_bytes(self) -> int:
        """Bytes of heartbeats and of their connection's handshakes, both ways, as the data plane counts them."""
        held = self._beats
        return self._management_bytes + (0 if held is None else held.received_bytes + held.sent_bytes)

    @property
    def is_started(self) -> bool:
        """Whether it is being reached, or was."""
        return self._task is not None

    @property
    def num_instances(self) -> int:
        """Model instances that it runs; 1 where it has not said."""
        return 1 if self.beat is None else max(1, self.beat.instances)

    def start(self) -> None:
        """Begin to reach the node, and keep at it."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Let go of the node; calls under way are cancelled."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._drop(None)

    def describe(self) -> dict[str, str]:
        """The data connection's socket options, as the kernel holds them."""
        return {} if self._data is None else self._data.describe()

    # --- calls

    def scatter(
        self, model: str, version: str, encoding: str, blobs: Sequence[bytes], *, timeout_s: float
    ) -> asyncio.Future[ScatterResult]:
        """Send blobs (encoded images) to be run, each as a request of its own.

        The future raises CallFailed: UNAVAILABLE where the node was lost while it may have run them, EXHAUSTED where it
        never had them; and UsageError for what can never be sent.
        """
        parts: list[Buffer] = []
        for blob in blobs:
            parts.append(len(blob).to_bytes(4, "little"))
            parts.append(blob)
        meta = encode_meta(ScatterHead(model, version, encoding, [len(blob) for blob in blobs]))
        return self._call(SCATTER, parts, meta, timeout_s, len(blobs), lambda reply: _scatter_result(reply, len(blobs)))

    def infer(
        self, model: str, version: str, request: InferRequest, *, timeout_s: float
    ) -> asyncio.Future[list[Tensor]]:
        """Send one request. The future raises RequestFailed with the node's reason, or CallFailed as ``scatter``."""
        placed, parts = place_tensors(request.inputs)
        outputs = None if request.outputs is None else list(request.outputs)
        meta = encode_meta(InferHead(model, version, placed, outputs, request.parameters, request.priority))
        return self._call(INFER, parts, meta, timeout_s, 1, _infer_result)

    def _call(  # noqa: PLR0917 - private
        self,
        method: str,
        parts: list[Buffer],
        meta: bytes,
        timeout_s: float,
        weight: int,
        read: Callable[[wire.Reply], _T],
    ) -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        if self._data is None:
            problem = f"{self.address} is {self.state.value}: {self.reason}"
            future.set_exception(wire.CallFailed(problem, status=wire.Status.EXHAUSTED))
            return future
        try:
            call = self._data.call_soon(method, parts, meta=meta, timeout_s=timeout_s)
        except wire.CallFailed as fault:
            # Nothing was sent: not as where it was lost under way.
            status = wire.Status.EXHAUSTED if fault.status is wire.Status.UNAVAILABLE else fault.status
            future.set_exception(wire.CallFailed(str(fault), status=status))
            return future
        except UsageError as fault:
            future.set_exception(fault)
            return future
        self.num_under_way += weight

        def finished(done: asyncio.Future[wire.Reply]) -> None:
            self.num_under_way -= weight
            if future.done():
                return
            if done.cancelled():
                future.cancel()
                return
            fault = done.exception()
            if fault is not None:
                future.set_exception(fault)
                return
            try:
                future.set_result(read(done.result()))
            except WirespeedError as wrong:
                future.set_exception(wrong)

        call.add_done_callback(finished)
        future.add_done_callback(lambda done: call.cancel() if done.cancelled() else None)
        return future

    # --- the node's life

    async def _keep(self) -> None:
        num_failed = 0
        while True:
            try:
                await self._join()
                num_failed = 0
                await self._follow()
            except (WirespeedError, OSError) as fault:
                self._drop(fault)
            delays = self._times.retry_s
            await asyncio.sleep(delays[min(num_failed, len(delays) - 1)])
            num_failed += 1

    async def _join(self) -> None:
        within = self._times.connect_s
        opening = [
            wire.connect(self.address, security=self._security, limits=self._limits, timeout_s=within) for _ in range(2)
        ]
        opened = await asyncio.gather(*opening, return_exceptions=True)
        for held in opened:
            if isinstance(held, BaseException):
                for other in opened:
                    if isinstance(other, wire.Connection):
                        other.abort()
                raise held
        data, beats = opened
        assert isinstance(data, wire.Connection)
        assert isinstance(beats, wire.Connection)
        self._data, self._beats = data, beats
        asked = beats.call_soon(BEAT, (0).to_bytes(4, "little"), timeout_s=within)
        try:
            reply = await data.call(DESCRIBE, timeout_s=within)
        except BaseException:
            asked.cancel()
            raise
        self.models = {held.config.name: held for held in decode_models(reply.payload)}
        self._take(decode_beat((await asked).payload))
        self.num_joins += 1
        self.was_silent = False
        self._become(NodeState.DRAINING if self.beat is not None and self.beat.is_draining else NodeState.UP, "")

    async def _follow(self) -> None:
        """Ask for beat after beat. Raises PeerFailure when the node is lost."""
        loop = asyncio.get_running_loop()
        times = self._times
        data, beats = self._data, self._beats
        assert data is not None
        assert beats is not None
        heard_s = loop.time()
        while True:
            number = 0 if self.beat is None else self.beat.number
            asked = beats.call_soon(BEAT, number.to_bytes(4, "little"), timeout_s=_BEAT_TIMEOUT_S)
            try:
                while not asked.done():
                    silent_s = loop.time() - heard_s
                    is_late = silent_s >= times.suspect_after_s
                    if silent_s >= times.lost_after_s:
                        self.was_silent = True
                        raise PeerFailure(f"lost {self.address}: no heartbeat for {silent_s:.1f} s")
                    if is_late and self.state is NodeState.UP:
                        self._become(NodeState.SUSPECT, f"its heartbeat is {silent_s:.1f} s late")
                    wait_s = (times.lost_after_s if is_late else times.suspect_after_s) - silent_s
                    ends = (asked, data.closed, beats.closed)
                    due_s = loop.time() + max(0.01, wait_s)
                    await asyncio.wait(ends, timeout=max(0.01, wait_s), return_when=asyncio.FIRST_COMPLETED)
                    # So long this process slept: the beat may lie unread, and the node is not to blame.
                    heard_s += max(0.0, loop.time() - due_s)
                    if data.closed.done() or beats.closed.done():
                        gone = data if data.closed.done() else beats
                        raise gone.closed.result() or PeerFailure(f"lost {self.address}: its connection is closed")
            finally:
                if not asked.done():
                    asked.cancel()
                elif not asked.cancelled():
                    asked.exception()  # seen, whatever else ends this
            self._take(decode_beat(asked.result().payload))
            heard_s = loop.time()
            assert self.beat is not None
            if self.beat.is_draining:
                self._become(NodeState.DRAINING, "it is shutting down")
            elif self.state is not NodeState.UP:
                self._become(NodeState.UP, "")

    def _take(self, beat: Beat) -> None:
        if self.beat is not None and beat.boot != self.beat.boot:
            self.models = dict(self.models)  # a new process: described anew when it was joined
        self.beat = beat
        self.num_beats += 1

    def _drop(self, fault: BaseException | None) -> None:
        data, beats = self._data, self._beats
        self._data = self._beats = None
        if beats is not None:
            self._management_bytes += beats.received_bytes + beats.sent_bytes
        for connection in (data, beats):
            if connection is not None:
                reason = wire.CallFailed(str(fault)) if fault is not None else None
                connection.abort(reason)
        if fault is not None:
            self._become(NodeState.LOST, str(fault))

    def _become(self, state: NodeState, reason: str) -> None:
        if state is self.state:
            self.reason = reason
            return
        self.state, self.reason = state, reason
        self._on_change(self, reason)


def _scatter_result(reply: wire.Reply, num_blobs: int) -> ScatterResult:
    answer, start = unpack_answer(reply.payload)
    groups = []
    places: list[int] = []
    for group in answer.groups:
        tensors, start = cut_tensors(group.tensors, reply.payload, start)
        if any(not tensor.shape or tensor.shape[0] != len(group.places) for tensor in tensors):
            raise DataError("got results whose rows are not those of the inputs")
        groups.append((group.places, tensors))
        places += group.places
    check_whole(start, reply.payload)
    failures = [(place, _reason(name), text) for place, name, text in answer.failures]
    places += [place for place, _, _ in failures]
    if sorted(places) != list(range(num_blobs)):
        raise DataError(f"got results for {len(places)} inputs of {num_blobs}", hint="the node is broken")
    return ScatterResult(groups, failures)


def _infer_result(reply: wire.Reply) -> list[Tensor]:
    answer = decode_meta(reply.meta, InferAnswer)
    if answer.failure is not None:
        name, text = answer.failure
        raise RequestFailed(text, reason=_reason(name))
    tensors, end = cut_tensors(answer.tensors, reply.payload)
    check_whole(end, reply.payload)
    return tensors


def _reason(name: str) -> Reason:
    try:
        return Reason[name]
    except KeyError:
        raise DataError(f"got a failure of kind {name!r}", expected=", ".join(Reason.__members__)) from None
