"""A node: this process's models behind the data plane, for dispatchers on other hosts.

What a dispatcher may call stands in ``node_messages``. Every input of a ``scatter`` is a request of its own: the
batcher joins what comes from all dispatchers, a wrong image fails alone, and a cancelled call leaves the queue.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from wirespeed import wire
from wirespeed.errors import DataError, WirespeedError
from wirespeed.serve.features import encode_features, feature_outputs
from wirespeed.serve.heartbeat import Pulse
from wirespeed.serve.model import Model
from wirespeed.serve.node_messages import (
    BEAT,
    DESCRIBE,
    INFER,
    SCATTER,
    Described,
    Group,
    InferAnswer,
    InferHead,
    ScatterAnswer,
    ScatterHead,
    blob_input,
    check_whole,
    cut_blobs,
    cut_tensors,
    decode_meta,
    encode_meta,
    encode_models,
    pack_answer,
    place_tensors,
)
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Buffer, Tensor

if TYPE_CHECKING:
    from wirespeed.serve.repository import ModelRepository

NODE_LIMITS = wire.Limits(keepalive_s=10.0)
"""Heartbeats watch over a node more closely than the data plane's own pings, which are therefore rare."""
_MAX_TEXT = 1000


class ScatterResult(msgspec.Struct, frozen=True):
    """What became of the blobs of one scatter: per group of equal shapes the places and their joined tensors."""

    groups: list[tuple[list[int], list[Tensor]]]
    failures: list[tuple[int, Reason, str]]


async def scatter(
    model: Model, blobs: Sequence[Buffer], *, encoding: str = "fp32", deadline_s: float = math.inf
) -> ScatterResult:
    """Run every blob (a BYTES element: u32 length and bytes) as a request of its own.

    Raises RequestFailed (INVALID) for a model that takes something else, UsageError for an encoding that does not fit
    it; what is wrong with a blob is that blob's failure. Cancelling takes the requests back.
    """
    name, shape = blob_input(model.config, model.inputs)
    encoded = feature_outputs(model.outputs, encoding)
    futures: list[asyncio.Future[list[Tensor]] | None] = []
    failures: list[tuple[int, Reason, str]] = []
    try:
        for place, blob in enumerate(blobs):
            request = InferRequest([Tensor(name, "BYTES", shape, blob)], deadline_s=deadline_s)
            try:
                futures.append(model.infer(request))
            except RequestFailed as fault:
                futures.append(None)
                failures.append((place, _not_run(fault), str(fault)))
        running = [future for future in futures if future is not None]
        if running:
            await asyncio.wait(running)
    except asyncio.CancelledError:
        for future in futures:
            if future is not None:
                future.cancel()
        raise
    by_shape: dict[tuple[tuple[int, ...], ...], tuple[list[int], list[list[Tensor]]]] = {}
    for place, future in enumerate(futures):
        if future is None:
            continue
        fault_or_none = None if future.cancelled() else future.exception()
        if future.cancelled() or fault_or_none is not None:
            reason = fault_or_none.reason if isinstance(fault_or_none, RequestFailed) else Reason.UNAVAILABLE
            failures.append((place, reason, str(fault_or_none or "the request was cancelled")))
            continue
        tensors = future.result()
        places, rows = by_shape.setdefault(tuple(t.shape for t in tensors), ([], []))
        places.append(place)
        rows.append(tensors)
    is_batching = model.config.batching.max_rows > 0
    groups = []
    for places, rows in by_shape.values():
        joined = [_join([row[i] for row in rows], is_batching=is_batching) for i in range(len(rows[0]))]
        try:
            groups.append((places, encode_features(joined, encoded, encoding) if encoded else joined))
        except DataError as fault:
            failures += [(place, Reason.FAILED, str(fault)) for place in places]
    return ScatterResult(groups, failures)


def _not_run(fault: RequestFailed) -> Reason:
    """The reason of a refusal at once: a model that is not up did not run the request, so that it may go elsewhere."""
    return Reason.EXHAUSTED if fault.reason is Reason.UNAVAILABLE else fault.reason


def _join(tensors: Sequence[Tensor], *, is_batching: bool) -> Tensor:
    first = tensors[0]
    shape = first.shape[1:] if is_batching else first.shape
    data = first.data if len(tensors) == 1 else b"".join(tensor.data for tensor in tensors)
    return Tensor(first.name, first.datatype, (len(tensors), *shape), data)


class NodeDoor:
    """The data-plane door of one process. ``open``, then ``close``; the models are somebody else's."""

    def __init__(self, models: ModelRepository, *, is_draining: asyncio.Event | None = None) -> None:
        self._models = models
        self._is_draining = asyncio.Event() if is_draining is None else is_draining
        self._server: wire.Server | None = None
        self.pulse = Pulse(self._every_model, self._state)

    @property
    def address(self) -> str:
        """Where it listens, with the port that the kernel chose; empty while it is closed."""
        return "" if self._server is None else self._server.address

    @property
    def num_running(self) -> int:
        """Calls without an answer, other than dispatchers that wait for a heartbeat."""
        if self._server is None:
            return 0
        return max(0, self._server.num_running - self.pulse.num_waiting)

    async def open(
        self, address: str, *, security: wire.Security, limits: wire.Limits | None = None, reuse_port: bool = False
    ) -> None:
        """Listen. Raises UsageError where the address cannot be used, or is open to anyone."""
        self._server = await wire.listen(
            address,
            {DESCRIBE: self._describe, BEAT: self._beat, INFER: self._infer, SCATTER: self._scatter},
            security=security,
            limits=NODE_LIMITS if limits is None else limits,
            sockets=wire.SocketSettings(reuse_port=reuse_port),
        )

    async def close(self) -> None:
        """Stop listening; calls under way are cancelled."""
        self.pulse.close()
        if self._server is not None:
            await self._server.close()

    def begin_drain(self) -> None:
        """Say with the next heartbeat, and to every new call, that no new work is taken."""
        self._is_draining.set()

    def _every_model(self) -> list[Model]:
        return list(self._models.models.values())

    def _state(self) -> tuple[bool, bool]:
        models = self._models.models.values()
        return bool(models) and all(model.is_ready for model in models), self._is_draining.is_set()

    # --- calls

    def _describe(self, _: wire.Request) -> bytes:
        return encode_models([described(model) for model in self._models.models.values()])

    async def _beat(self, request: wire.Request) -> bytes:
        if len(request.payload) != 4:
            raise DataError(f"got {len(request.payload)} bytes", expected="4: the number of the last heartbeat")
        return await self.pulse.after(int.from_bytes(request.payload, "little"))

    async def _infer(self, request: wire.Request) -> wire.Answer:
        try:
            head = decode_meta(request.meta, InferHead)
            tensors, end = cut_tensors(head.tensors, request.payload)
            check_whole(end, request.payload)
            self._check_open()
            wanted = InferRequest(
                tensors,
                outputs=head.outputs,
                parameters=head.parameters,
                priority=head.priority,
                deadline_s=request.deadline_s,
            )
            running = self._models.get(head.model, head.version).infer(wanted)
        except RequestFailed as fault:
            return wire.Answer(meta=encode_meta(InferAnswer([], (_not_run(fault).name, str(fault)[:_MAX_TEXT]))))
        try:
            answer = await running
        except RequestFailed as fault:
            return wire.Answer(meta=encode_meta(InferAnswer([], (fault.reason.name, str(fault)[:_MAX_TEXT]))))
        placed, parts = place_tensors(answer)
        return wire.Answer(parts, meta=encode_meta(InferAnswer(placed)))

    async def _scatter(self, request: wire.Request) -> wire.Answer:
        head = decode_meta(request.meta, ScatterHead)
        blobs = cut_blobs(head.sizes, request.payload)
        try:
            self._check_open()
            model = self._models.get(head.model, head.version)
            result = await scatter(model, blobs, encoding=head.encoding, deadline_s=request.deadline_s)
        except RequestFailed as fault:
            result = ScatterResult([], [(place, _not_run(fault), str(fault)) for place in range(len(blobs))])
        except WirespeedError as fault:
            result = ScatterResult([], [(place, Reason.INVALID, str(fault)) for place in range(len(blobs))])
        groups: list[Group] = []
        parts: list[Buffer] = []
        for places, tensors in result.groups:
            placed, data = place_tensors(tensors)
            groups.append(Group(places, placed))
            parts += data
        failures = [(place, reason.name, text[:_MAX_TEXT]) for place, reason, text in result.failures]
        return wire.Answer(pack_answer(ScatterAnswer(groups, failures), parts))

    def _check_open(self) -> None:
        if self._is_draining.is_set():
            raise RequestFailed("the node is shutting down and takes no new requests", reason=Reason.UNAVAILABLE)


def described(model: Model) -> Described:
    """A model as dispatchers see it. Where its files are, and its own parameters, are nobody else's business."""
    config = msgspec.structs.replace(
        model.config, input=model.inputs, output=model.outputs, folder="", file="", parameters={}
    )
    return Described(config, model.platform)
