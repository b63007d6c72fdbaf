"""What ``wirespeed load`` sends: a request to each kind of door, made once from the model's own description.

The answer of every request is held against the first: the same request gives the same bytes, or counts as failed.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from wirespeed.errors import UsageError
from wirespeed.measure.load import Target
from wirespeed.serve.client import InferenceClient, decode_response, encode_request
from wirespeed.serve.http_client import HttpClient
from wirespeed.serve.http_codec import JSON_LENGTH_HEADER
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import ITEM_BYTES, Tensor
from wirespeed.wire.security import Security

SCHEMES = ("grpc", "http", "predict")


def parse_url(url: str) -> tuple[str, str, str]:
    """Scheme, address and model of ``grpc://host:port/model``. Raises UsageError."""
    parts = urlsplit(url)
    model = parts.path.strip("/")
    if parts.scheme not in SCHEMES or not parts.netloc or not model or "/" in model:
        raise UsageError(f"got {url!r}", expected="grpc://HOST:PORT/MODEL, http://... or predict://...")
    return parts.scheme, parts.netloc, model


def make_input(name: str, datatype: str, shape: list[int], given: dict[str, tuple[int, ...]], *, seed: int) -> Tensor:
    """A tensor of pseudo-random content.

    Open dimensions come from ``given`` (by input name), the first one may be 1.
    """
    import numpy as np

    sizes = list(given.get(name, shape))
    if sizes and sizes[0] == -1:
        sizes[0] = 1
    if -1 in sizes:
        raise UsageError(f"input {name!r} has the open shape {shape}", expected=f"--shape {name}:SIZE,SIZE,...")
    count = math.prod(sizes)
    rng = np.random.default_rng(seed)
    if datatype == "BYTES":
        data = b"".join((16).to_bytes(4, "little") + rng.bytes(16) for _ in range(count))
    elif datatype in ("FP32", "FP64", "FP16"):
        # Not raw bytes: some of those are not numbers.
        data = rng.random(count).astype({"FP32": "<f4", "FP64": "<f8", "FP16": "<f2"}[datatype]).tobytes()
    elif datatype in ("BOOL", "BF16"):
        data = bytes(count * ITEM_BYTES[datatype])
    else:
        data = (
            rng.integers(0, 100, count)
            .astype(f"{'<u' if datatype.startswith('U') else '<i'}{ITEM_BYTES[datatype]}")
            .tobytes()
        )
    return Tensor(name, datatype, tuple(sizes), data)


@asynccontextmanager
async def open_target(
    url: str,
    *,
    shapes: dict[str, tuple[int, ...]],
    num_connections: int,
    security: Security,
    seed: int = 0,
    timeout_s: float = 30.0,
) -> AsyncIterator[Target]:
    """A target for measure.load. Raises RequestFailed or PeerFailure where the first request fails."""
    scheme, address, model = parse_url(url)
    if scheme == "http":
        async with HttpClient(address, token=security.token) as http:
            yield await _http_target(http, model, shapes, seed)
        return
    async with InferenceClient(address, security=security, num_connections=num_connections, num_retries=0) as client:
        described = await client.metadata(model)
        inputs = [make_input(i.name, i.datatype, list(i.shape), shapes, seed=seed) for i in described.inputs]
        if scheme == "predict":
            data = bytes(inputs[0].data)
            is_text = inputs[0].datatype == "BYTES"
            sent = data[4:20] if is_text else data
            shape = {} if is_text else {"shape": ",".join(map(str, inputs[0].shape))}
            expected = await client.predict(sent, model=model, parameters=shape, timeout_s=timeout_s)

            async def predict() -> None:
                _same(await client.predict(sent, model=model, parameters=shape, timeout_s=timeout_s) == expected)

            yield predict
            return
        message = encode_request(model, inputs)
        first = [bytes(t.data) for t in decode_response(await client.infer_raw(message, timeout_s=timeout_s))]

        async def infer() -> None:
            answer = await client.infer_raw(message, timeout_s=timeout_s)
            _same([t.data for t in decode_response(answer)] == first)

        yield infer


async def _http_target(http: HttpClient, model: str, shapes: dict[str, tuple[int, ...]], seed: int) -> Target:
    import msgspec

    status, _, body = await http.request("GET", f"/v2/models/{model}")
    _check(status, body)
    described = msgspec.json.decode(body)
    inputs = [make_input(i["name"], i["datatype"], i["shape"], shapes, seed=seed) for i in described["inputs"]]
    document = {
        "parameters": {"binary_data_output": True},
        "inputs": [
            {"name": t.name, "datatype": t.datatype, "shape": t.shape, "parameters": {"binary_data_size": len(t.data)}}
            for t in inputs
        ],
    }
    head = msgspec.json.encode(document)
    message = b"".join((head, *(bytes(t.data) for t in inputs)))
    headers = {JSON_LENGTH_HEADER: str(len(head))}
    path = f"/v2/models/{model}/infer"

    async def send() -> bytes:
        status, _, body = await http.request("POST", path, message, headers=headers)
        _check(status, body)
        return body

    expected = await send()

    async def infer() -> None:
        _same(await send() == expected)

    return infer


def _check(status: int, body: bytes) -> None:
    if status != 200:
        reason = next((reason for reason in Reason if reason.http_status == status), Reason.FAILED)
        raise RequestFailed(f"HTTP {status}: {body[:500].decode(errors='replace')}", reason=reason)


def _same(is_same: bool) -> None:
    if not is_same:
        raise RequestFailed("an answer differs from the first one to the same request", reason=Reason.FAILED)
