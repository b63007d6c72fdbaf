"""The gRPC door: ``inference.GRPCInferenceService`` (Open Inference Protocol v2) and ``wirespeed.v1.Inference``.

Inference methods take and give raw bytes, which infer_codec.py reads without copying large tensors; all others are
plain protobuf. A call's deadline becomes the request's, and a cancelled call takes its request out of the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio

from wirespeed.serve import describe
from wirespeed.serve._generated import open_inference_pb2 as pb
from wirespeed.serve.doors import Desk, as_failure, deadline_of
from wirespeed.serve.infer_codec import to_request, to_response
from wirespeed.serve.predict import predict
from wirespeed.serve.repository import parse_overrides
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.stream_window import StreamWindow
from wirespeed.units import MIB

SERVICE = "inference.GRPCInferenceService"
PREDICT_SERVICE = "wirespeed.v1.Inference"
STREAM_DEPTH = 64
"""Requests of one stream that may be under way; beyond it the stream is not read, and its client has to wait."""
STREAM_BYTES = 64 * MIB
"""The same for their bytes and those of answers that wait to be read; one message of any size is always taken."""

_UNARY = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics",
    "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
)  # fmt: skip

Context = Any


class GrpcDoor:
    """Handlers of both services."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._loop = asyncio.get_running_loop()

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """What a grpc.aio server is given."""
        methods: dict[str, grpc.RpcMethodHandler] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._plain(getattr(self, _snake(name))),
                request_deserializer=getattr(pb, f"{name}Request").FromString,
                response_serializer=getattr(pb, f"{name}Response").SerializeToString,
            )
            for name in _UNARY
        }
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._model_infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._model_stream_infer)
        predictions = {"Predict": grpc.unary_unary_rpc_method_handler(self._predict)}
        return [
            grpc.method_handlers_generic_handler(SERVICE, methods),
            grpc.method_handlers_generic_handler(PREDICT_SERVICE, predictions),
        ]

    # --- inference

    async def _model_infer(self, message: bytes, context: Context) -> bytes:
        try:
            self._check_entry(context)
            return await self._infer(message, context)
        except Exception as fault:
            await _abort(context, fault)
            raise

    async def _infer(self, message: bytes, context: Context, *, is_final: bool | None = None) -> bytes:
        desk = self._desk
        request, wanted = to_request(
            message, desk.memory, now_s=self._loop.time(), deadline_s=deadline_of(context.time_remaining())
        )
        outputs = await desk.infer(wanted.model, wanted.version, request)
        model = desk.models.models.get(wanted.model)
        version = "1" if model is None else model.config.version
        is_batching = model is not None and model.config.batching.max_rows > 0
        return to_response(wanted, version, outputs, desk.memory, is_batching=is_batching, is_final=is_final)

    async def _model_stream_infer(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Answers in the order of the requests; an error is a message of the stream, which goes on."""
        try:
            self._check_entry(context)
        except RequestFailed as fault:
            await _abort(context, fault)
        metadata = dict(context.invocation_metadata() or ())
        ends_on_error = str(metadata.get("triton_grpc_error", "")).lower() == "true"
        queue: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(STREAM_DEPTH)
        tasks: set[asyncio.Task[bytes]] = set()
        window = StreamWindow(STREAM_BYTES)

        async def one(message: bytes) -> bytes:
            answer = b""
            try:
                answer = await self._stream_one(message, context, ends_on_error=ends_on_error)
            finally:
                window.turn(len(message), len(answer))
            return answer

        async def read() -> None:
            try:
                async for message in messages:
                    await window.enter(len(message))
                    task = self._loop.create_task(one(message))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    await queue.put(task)
            finally:
                await queue.put(None)

        reader = self._loop.create_task(read())
        try:
            while (task := await queue.get()) is not None:
                answer = await task
                await context.write(answer)
                window.leave(len(answer))
        except RequestFailed as fault:
            await _abort(context, fault)
        finally:
            reader.cancel()
            for left in list(tasks):
                left.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reader

    async def _stream_one(self, message: bytes, context: Context, *, ends_on_error: bool) -> bytes:
        try:
            inner = await self._infer(message, context, is_final=True)
        except Exception as fault:
            failure = as_failure(fault)
            if ends_on_error:
                raise failure from fault
            response = pb.ModelStreamInferResponse(error_message=str(failure))
            with contextlib.suppress(Exception):
                response.infer_response.id = pb.ModelInferRequest.FromString(message).id
            return cast(bytes, response.SerializeToString())
        # Field 2, length-delimited: the answer's bytes as they are, not parsed and copied once more.
        return b"\x12" + _length(len(inner)) + inner

    async def _predict(self, message: bytes, context: Context) -> bytes:
        try:
            self._check_entry(context)
            return await predict(self._desk, message, deadline_s=deadline_of(context.time_remaining()))
        except Exception as fault:
            await _abort(context, fault)
            raise

    # --- everything else

    async def server_live(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """The process answers."""
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Requests are taken."""
        return pb.ServerReadyResponse(ready=self._desk.is_ready)

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """One model takes requests. An unknown one is not ready, which is no error."""
        try:
            model = self._desk.models.get(request.name, request.version)
        except RequestFailed:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=model.is_ready and not self._desk.is_draining)

    async def server_metadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """See describe."""
        return describe.server_metadata(self._desk.server_name, has_shared_memory=self._desk.memory.is_allowed)

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """See describe."""
        return describe.model_metadata(self._desk.models.get(request.name, request.version))

    async def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """See describe."""
        return pb.ModelConfigResponse(
            config=describe.model_config(self._desk.models.get(request.name, request.version))
        )

    async def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Of one model, or of all."""
        models = self._desk.models
        chosen = [models.get(request.name, request.version)] if request.name else list(models.models.values())
        return pb.ModelStatisticsResponse(model_stats=[describe.model_statistics(model) for model in chosen])

    async def repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """What the repository holds."""
        listed = [held for held in self._desk.models.index() if held.state == "READY" or not request.ready]
        index = pb.RepositoryIndexResponse.ModelIndex
        return pb.RepositoryIndexResponse(
            models=[
                index(name=held.name, version=held.version, state=held.state, reason=held.reason) for held in listed
            ]
        )

    async def repository_model_load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load, or load again, with what the ``config`` parameter changes."""
        overrides = None
        for name, value in request.parameters.items():
            if name == "config":
                overrides = parse_overrides(value.string_param)
            elif name.startswith("file:"):
                raise RequestFailed(
                    "failed to load: this server takes no model files from clients", reason=Reason.UNIMPLEMENTED
                )
        await self._desk.models.load(request.model_name, overrides=overrides)
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(
        self, request: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload; what is under way is finished."""
        await self._desk.models.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def system_shared_memory_status(
        self, request: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Registered regions."""
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._desk.memory.status(request.name):
            held = response.regions[region.name]
            held.name, held.key, held.offset, held.byte_size = region.name, region.key, region.offset, region.byte_size
        return response

    async def system_shared_memory_register(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Register a region."""
        self._desk.memory.register(request.name, request.key, offset=request.offset, byte_size=request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forget a region, or all."""
        self._desk.memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def _plain(self, method: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def handle(request: Any, context: Context) -> Any:
            try:
                self._check_entry(context)
                return await method(request)
            except Exception as fault:
                await _abort(context, fault)
                raise

        return handle

    def _check_entry(self, context: Context) -> None:
        if not self._desk.asks_token:
            return
        metadata = dict(context.invocation_metadata() or ())
        given = metadata.get("authorization")
        self._desk.check_entry(given if isinstance(given, str) or given is None else given.decode(errors="replace"))


async def _abort(context: Context, fault: BaseException) -> None:
    failure = as_failure(fault)
    await context.abort(getattr(grpc.StatusCode, failure.reason.value), str(failure))


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def _length(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
