"""A client of any Open Inference Protocol v2 server over gRPC, with a pool of connections.

    async with InferenceClient("127.0.0.1:8001") as client:
        outputs = await client.infer("simple", {"INPUT0": a, "INPUT1": b}, timeout_s=2)

Calls are spread over ``num_connections`` HTTP/2 connections, since one connection is one TCP stream and one server
process. A call that failed before the server took it (UNAVAILABLE, RESOURCE_EXHAUSTED) is tried again on another
connection within its deadline, ``num_retries`` times.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from wirespeed.errors import UsageError
from wirespeed.serve._generated import open_inference_pb2 as pb
from wirespeed.serve._generated import predict_pb2
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Tensor, from_array, to_array
from wirespeed.wire.security import Security

if TYPE_CHECKING:
    import numpy as np

_SERVICE = "/inference.GRPCInferenceService"
_RETRIED = frozenset((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED))


class InferenceClient:
    """See the module. Made inside a running event loop; not for several threads."""

    def __init__(
        self,
        address: str,
        *,
        security: Security | None = None,
        num_connections: int = 2,
        num_retries: int = 1,
        keepalive_s: float = 30.0,
    ) -> None:
        if num_connections < 1:
            raise UsageError(f"got {num_connections} connections", expected="1 or more")
        security = Security() if security is None else security
        self._num_retries = num_retries
        self._metadata = () if security.token is None else (("authorization", f"Bearer {security.token}"),)
        self._channels = [_channel(address, security, place, keepalive_s) for place in range(num_connections)]
        self._infer = itertools.cycle([channel.unary_unary(f"{_SERVICE}/ModelInfer") for channel in self._channels])

    async def __aenter__(self) -> InferenceClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; calls under way are cancelled."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def infer(
        self,
        model: str,
        inputs: dict[str, np.ndarray[Any, Any]],
        *,
        outputs: list[str] | None = None,
        parameters: dict[str, bool | int | str | float] | None = None,
        timeout_s: float = 30.0,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Outputs by name. Raises RequestFailed with the server's reason."""
        message = encode_request(
            model, [from_array(name, array) for name, array in inputs.items()], outputs, parameters
        )
        answer = await self.infer_raw(message, timeout_s=timeout_s)
        return {tensor.name: to_array(tensor) for tensor in decode_response(answer)}

    async def infer_raw(self, message: bytes, *, timeout_s: float = 30.0) -> bytes:
        """A ModelInferRequest's bytes for a ModelInferResponse's. Raises RequestFailed."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        for attempt in itertools.count():
            try:
                return cast(
                    bytes, await next(self._infer)(message, timeout=end_s - loop.time(), metadata=self._metadata)
                )
            except grpc.aio.AioRpcError as fault:
                if fault.code() not in _RETRIED or attempt >= self._num_retries or loop.time() >= end_s:
                    raise _failure(fault) from fault
        raise AssertionError

    async def metadata(self, model: str, *, timeout_s: float = 10.0) -> pb.ModelMetadataResponse:
        """What a model takes and gives."""
        answer = await self._call("ModelMetadata", pb.ModelMetadataRequest(name=model), timeout_s)
        return cast(pb.ModelMetadataResponse, pb.ModelMetadataResponse.FromString(answer))

    async def is_ready(self, model: str = "", *, timeout_s: float = 5.0) -> bool:
        """Whether the server, or one model of it, takes requests."""
        if not model:
            return bool(
                pb.ServerReadyResponse.FromString(
                    await self._call("ServerReady", pb.ServerReadyRequest(), timeout_s)
                ).ready
            )
        answer = await self._call("ModelReady", pb.ModelReadyRequest(name=model), timeout_s)
        return bool(pb.ModelReadyResponse.FromString(answer).ready)

    async def predict(
        self, data: bytes, *, model: str = "", parameters: dict[str, str] | None = None, timeout_s: float = 30.0
    ) -> bytes:
        """One blob for another, through ``wirespeed.v1.Inference``. Raises RequestFailed with the answer's error."""
        held = dict(parameters or {})
        if model:
            held["model"] = model
        message = predict_pb2.PredictRequest(input_data=data, parameters=held).SerializeToString()
        call = self._channels[0].unary_unary("/wirespeed.v1.Inference/Predict")
        try:
            answer = predict_pb2.PredictResponse.FromString(
                await call(message, timeout=timeout_s, metadata=self._metadata)
            )
        except grpc.aio.AioRpcError as fault:
            raise _failure(fault) from fault
        if not answer.success:
            raise RequestFailed(answer.error_message, reason=Reason.FAILED)
        return bytes(answer.output_data)

    async def _call(self, method: str, request: Any, timeout_s: float) -> bytes:
        call = self._channels[0].unary_unary(f"{_SERVICE}/{method}")
        try:
            return cast(bytes, await call(request.SerializeToString(), timeout=timeout_s, metadata=self._metadata))
        except grpc.aio.AioRpcError as fault:
            raise _failure(fault) from fault


def encode_request(
    model: str,
    inputs: list[Tensor],
    outputs: list[str] | None = None,
    parameters: dict[str, bool | int | str | float] | None = None,
) -> bytes:
    """The bytes of a ModelInferRequest with raw contents."""
    request = pb.ModelInferRequest(model_name=model)
    for tensor in inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(bytes(tensor.data))
    for name in outputs or []:
        request.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return cast(bytes, request.SerializeToString())


def decode_response(message: bytes) -> list[Tensor]:
    """The outputs of a ModelInferResponse with raw contents."""
    response = pb.ModelInferResponse.FromString(message)
    return [
        Tensor(output.name, output.datatype, tuple(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    ]


def _channel(address: str, security: Security, place: int, keepalive_s: float) -> Any:
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Channels of equal arguments would share one connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("wirespeed.connection", place),
    ]
    if security.authority is None:
        return grpc.aio.insecure_channel(address, options=options)
    certificate = None if security.certificate is None else security.certificate.read_bytes()
    key = None if security.key is None else security.key.read_bytes()
    credentials = grpc.ssl_channel_credentials(security.authority.read_bytes(), key, certificate)
    if security.server_name is not None:
        options.append(("grpc.ssl_target_name_override", security.server_name))  # type: ignore[arg-type]
    return grpc.aio.secure_channel(address, credentials, options=options)


def _failure(fault: grpc.aio.AioRpcError) -> RequestFailed:
    name = fault.code().name
    reason = next((reason for reason in Reason if reason.value == name), Reason.FAILED)
    return RequestFailed(f"{name}: {fault.details()}", reason=reason)
