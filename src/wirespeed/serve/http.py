"""The REST door: ``/v2/...`` of the Open Inference Protocol, ``/metrics``, and health for load balancers.

The same answers as over gRPC, for curl and for clients without gRPC. A client that goes away cancels its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from wirespeed.serve import describe, http_codec, metrics
from wirespeed.serve.doors import Desk, as_failure, deadline_of
from wirespeed.serve.repository import parse_overrides
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.units import format_size

_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"


class HttpDoor:
    """Handlers of the REST door."""

    def __init__(self, desk: Desk, *, max_body_bytes: int) -> None:
        self._desk = desk
        self._max_body_bytes = max_body_bytes

    def application(self) -> Starlette:
        """What uvicorn is given."""
        routes = [
            self._route("/v2/health/live", self._live, is_open=True),
            self._route("/v2/health/ready", self._ready, is_open=True),
            self._route("/healthz", self._live, is_open=True),
            self._route("/readyz", self._ready, is_open=True),
            self._route("/metrics", self._metrics),
            self._route("/v2", self._server),
            self._route("/v2/models/stats", self._statistics),
            self._route("/v2/repository/index", self._index, method="POST"),
            self._route("/v2/repository/models/{model}/load", self._load, method="POST"),
            self._route("/v2/repository/models/{model}/unload", self._unload, method="POST"),
            self._route("/v2/systemsharedmemory/status", self._region_status),
            self._route("/v2/systemsharedmemory/unregister", self._region_unregister, method="POST"),
            self._route("/v2/systemsharedmemory/region/{region}/status", self._region_status),
            self._route("/v2/systemsharedmemory/region/{region}/register", self._region_register, method="POST"),
            self._route("/v2/systemsharedmemory/region/{region}/unregister", self._region_unregister, method="POST"),
        ]
        for base in (_MODEL, _VERSION):
            routes += [
                self._route(base, self._model),
                self._route(f"{base}/ready", self._model_ready),
                self._route(f"{base}/config", self._config),
                self._route(f"{base}/stats", self._statistics),
                self._route(f"{base}/infer", self._infer, method="POST"),
            ]
        return Starlette(routes=routes)

    def _route(
        self,
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        *,
        method: str = "GET",
        is_open: bool = False,
    ) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                if not is_open:
                    self._desk.check_entry(request.headers.get("authorization"))
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=Reason.CANCELLED.http_status)
            except Exception as fault:
                failure = as_failure(fault)
                return JSONResponse({"error": str(failure)}, status_code=failure.reason.http_status)

        return Route(path, guarded, methods=[method])

    async def _live(self, _: Request) -> Response:
        return Response(status_code=200)

    async def _ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._desk.is_ready else 503)

    async def _metrics(self, _: Request) -> Response:
        content = metrics.render(self._desk.models, staleness_s=self._desk.staleness_s)
        return Response(content, headers={"content-type": metrics.CONTENT_TYPE})

    async def _server(self, _: Request) -> Response:
        return _json(describe.server_metadata(self._desk.server_name, has_shared_memory=self._desk.memory.is_allowed))

    async def _model(self, request: Request) -> Response:
        return _json(describe.model_metadata(self._named(request)))

    async def _model_ready(self, request: Request) -> Response:
        try:
            is_ready = self._named(request).is_ready and not self._desk.is_draining
        except RequestFailed:
            is_ready = False
        return Response(status_code=200 if is_ready else 400)

    async def _config(self, request: Request) -> Response:
        return _json(describe.model_config(self._named(request)))

    async def _statistics(self, request: Request) -> Response:
        models = [self._named(request)] if "model" in request.path_params else list(self._desk.models.models.values())
        return JSONResponse({"model_stats": [_plain(describe.model_statistics(model)) for model in models]})

    async def _index(self, request: Request) -> Response:
        body = await self._body(request)
        only_ready = b'"ready":true' in body.replace(b" ", b"")
        listed = [held for held in self._desk.models.index() if held.state == "READY" or not only_ready]
        return JSONResponse(
            [{"name": h.name, "version": h.version, "state": h.state, "reason": h.reason} for h in listed]
        )

    async def _load(self, request: Request) -> Response:
        body = await self._body(request)
        given = await _as_json(body)
        held = given.get("parameters", {}) if isinstance(given, dict) else {}
        if any(name.startswith("file:") for name in held):
            raise RequestFailed(
                "failed to load: this server takes no model files from clients", reason=Reason.UNIMPLEMENTED
            )
        overrides = parse_overrides(held["config"]) if "config" in held else None
        await self._desk.models.load(request.path_params["model"], overrides=overrides)
        return Response(status_code=200)

    async def _unload(self, request: Request) -> Response:
        await self._desk.models.unload(request.path_params["model"])
        return Response(status_code=200)

    async def _region_status(self, request: Request) -> Response:
        regions = self._desk.memory.status(request.path_params.get("region", ""))
        return JSONResponse(
            [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size} for r in regions]
        )

    async def _region_register(self, request: Request) -> Response:
        given = await _as_json(await self._body(request))
        key, offset, size = given.get("key"), given.get("offset", 0), given.get("byte_size")
        if not isinstance(key, str) or not isinstance(offset, int) or not isinstance(size, int):
            raise RequestFailed(
                "the request is not understood", reason=Reason.INVALID, expected="key, offset and byte_size"
            )
        self._desk.memory.register(request.path_params["region"], key, offset=offset, byte_size=size)
        return Response(status_code=200)

    async def _region_unregister(self, request: Request) -> Response:
        self._desk.memory.unregister(request.path_params.get("region", ""))
        return Response(status_code=200)

    async def _infer(self, request: Request) -> Response:
        desk = self._desk
        body = await self._body(request)
        body = http_codec.decompress(body, request.headers.get("content-encoding", ""), self._max_body_bytes)
        name, version = request.path_params["model"], request.path_params.get("version", "")
        loop = asyncio.get_running_loop()
        parsed, wanted = http_codec.to_request(
            name,
            version,
            body,
            request.headers.get(http_codec.JSON_LENGTH_HEADER),
            desk.memory,
            now_s=loop.time(),
            deadline_s=deadline_of(None),
        )
        running = loop.create_task(desk.infer(name, version, parsed))
        gone = loop.create_task(_disconnected(request))
        try:
            await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ClientDisconnect
            outputs = running.result()
        finally:
            running.cancel()
            gone.cancel()
        model = desk.models.models.get(name)
        is_batching = model is not None and model.config.batching.max_rows > 0
        answered = "1" if model is None else model.config.version
        content, json_length = http_codec.to_response(wanted, answered, outputs, desk.memory, is_batching=is_batching)
        headers = {"content-type": "application/json"}
        if json_length is not None:
            headers = {"content-type": "application/octet-stream", http_codec.JSON_LENGTH_HEADER: str(json_length)}
        return Response(content, headers=headers)

    def _named(self, request: Request) -> Any:
        return self._desk.models.get(request.path_params["model"], request.path_params.get("version", ""))

    async def _body(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        stated = request.headers.get("content-length", "0")
        parts: list[bytes] = []
        size = 0
        too_large = stated.isascii() and stated.isdigit() and int(stated) > limit
        if not too_large:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limit:
                    too_large = True
                    break
        if too_large:
            raise RequestFailed(
                f"the body is larger than {format_size(limit)}",
                reason=Reason.EXHAUSTED,
                hint="raise --max-message on the server",
            )
        return b"".join(parts)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _as_json(body: bytes) -> Any:
    import msgspec

    if not body:
        return {}
    try:
        return msgspec.json.decode(body)
    except msgspec.MsgspecError as fault:
        raise RequestFailed(f"the body is not JSON: {fault}", reason=Reason.INVALID) from fault


def _plain(message: Any) -> dict[str, Any]:
    held: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    plain: dict[str, Any] = _numbers(held)
    return plain


def _numbers(held: Any) -> Any:
    # protobuf's JSON writes 64-bit integers as text; this protocol's JSON has numbers.
    if isinstance(held, dict):
        return {
            key: value if key in ("name", "version", "string_value") else _numbers(value) for key, value in held.items()
        }
    if isinstance(held, list):
        return [_numbers(value) for value in held]
    return int(held) if isinstance(held, str) and held.lstrip("-").isdigit() else held


def _json(message: Any) -> Response:
    return JSONResponse(_plain(message))
