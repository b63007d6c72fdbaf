"""REST inference messages: JSON, and the binary extension in which tensors follow the JSON as raw bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from wirespeed.serve import parameters as params
from wirespeed.serve.infer_codec import Wanted, classify
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.shared_memory import SharedMemory
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Buffer, Tensor, from_array, to_array

JSON_LENGTH_HEADER = "inference-header-content-length"
_CODES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any = None
    parameters: dict[str, Any] = {}


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Body(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] = {}


class RestWanted(Wanted):
    """What a REST request asks of its outputs: beside Wanted, which of them are to be binary."""

    __slots__ = ("binary", "is_binary_default")

    def __init__(self, model: str, version: str, id: str) -> None:  # noqa: A002
        super().__init__(model, version, id)
        self.binary: dict[str, bool] = {}
        self.is_binary_default = False


def decompress(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body without its content encoding. Raises RequestFailed where it grows beyond ``limit_bytes``."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise RequestFailed(f"got content encoding {encoding!r}", reason=Reason.INVALID, expected="gzip or deflate")
    unpacker = zlib.decompressobj(wbits=31 if encoding == "gzip" else 15)
    try:
        plain = unpacker.decompress(body, limit_bytes + 1)
    except zlib.error as fault:
        raise RequestFailed(f"the body is not {encoding}: {fault}", reason=Reason.INVALID) from fault
    if len(plain) > limit_bytes:
        raise RequestFailed(f"the body unpacks to more than {limit_bytes} bytes", reason=Reason.EXHAUSTED)
    return plain


def to_request(
    model: str,
    version: str,
    body: bytes,
    json_length: str | None,
    memory: SharedMemory,
    *,
    now_s: float,
    deadline_s: float,
) -> tuple[InferRequest, RestWanted]:
    """A request and what it wants. Raises RequestFailed."""
    size = len(body)
    if json_length is not None:
        if not (json_length.isascii() and json_length.isdigit()) or int(json_length) > size:
            raise _invalid(f"got {JSON_LENGTH_HEADER} of {json_length!r}", expected=f"at most the body's {size}")
        size = int(json_length)
    try:
        parsed = msgspec.json.decode(memoryview(body)[:size], type=_Body)
    except msgspec.MsgspecError as fault:
        raise _invalid(f"the request is not understood: {fault}") from fault
    wanted = RestWanted(model, version, parsed.id)
    inputs = _inputs(parsed.inputs, memoryview(body), size, memory)
    held = dict(parsed.parameters)
    wanted.is_binary_default = bool(held.get("binary_data_output", False))
    timeout_s = params.take_timeout_s(held)
    priority = params.take_priority(held)
    _take_outputs(wanted, parsed.outputs or [])
    request = InferRequest(
        inputs,
        id=parsed.id,
        outputs=wanted.names,
        parameters=params.clean(held),
        priority=priority,
        deadline_s=deadline_s if timeout_s is None else min(deadline_s, now_s + timeout_s),
    )
    return request, wanted


def _inputs(given_inputs: Sequence[_Input], body: memoryview, place: int, memory: SharedMemory) -> list[Tensor]:
    """The inputs; raw ones lie one after another in ``body`` from ``place``."""
    inputs: list[Tensor] = []
    for given in given_inputs:
        binary_size = given.parameters.get("binary_data_size")
        region = _region(given.name, given.parameters)
        data: Buffer
        if region is not None:
            data = memory.read(region[0], offset=region[2], byte_size=region[1])
        elif binary_size is not None:
            if not isinstance(binary_size, int) or binary_size < 0 or place + binary_size > len(body):
                raise _invalid(
                    f"binary_data_size {binary_size} of input {given.name!r}", expected=f"at most {len(body) - place}"
                )
            data = body[place : place + binary_size]
            place += binary_size
        elif given.data is None:
            raise _invalid(f"unable to find data for input tensor {given.name!r}")
        else:
            inputs.append(_from_json(given))
            continue
        inputs.append(Tensor(given.name, given.datatype, given.shape, data))
    if place != len(body):
        raise _invalid(f"{len(body) - place} bytes follow the last input")
    return inputs


def _take_outputs(wanted: RestWanted, outputs: Sequence[_Output]) -> None:
    if not outputs:
        return
    wanted.names = [output.name for output in outputs]
    for output in outputs:
        region = _region(output.name, output.parameters)
        if region is not None:
            wanted.regions[output.name] = region
        if "binary_data" in output.parameters:
            wanted.binary[output.name] = bool(output.parameters["binary_data"])
        classes = output.parameters.get("classification", 0)
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 0:
            raise _invalid(f"wrong 'classification' of output {output.name!r}")
        if classes:
            wanted.classes[output.name] = classes


def to_response(
    wanted: RestWanted, version: str, outputs: Sequence[Tensor], memory: SharedMemory, *, is_batching: bool
) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON where tensors follow it."""
    described = []
    raw: list[bytes] = []
    has_binary = False
    for held in outputs:
        tensor = (
            classify(held, wanted.classes[held.name], has_rows=is_batching) if held.name in wanted.classes else held
        )
        one: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        region = wanted.regions.get(tensor.name)
        if region is not None:
            memory.write(region[0], memoryview(tensor.data), offset=region[2], byte_size=region[1])
            one["parameters"] = {"shared_memory_region": region[0], "shared_memory_byte_size": len(tensor.data)}
        elif wanted.binary.get(tensor.name, wanted.is_binary_default):
            has_binary = True
            one["parameters"] = {"binary_data_size": len(tensor.data)}
            raw.append(bytes(tensor.data))
        else:
            one["data"] = _to_json(tensor)
        described.append(one)
    document = {"model_name": wanted.model, "model_version": version, "outputs": described}
    if wanted.id:
        document["id"] = wanted.id
    head = msgspec.json.encode(document)
    return (b"".join((head, *raw)), len(head)) if has_binary else (head, None)


def _from_json(given: _Input) -> Tensor:
    import numpy as np

    flat = list(_flatten(given.data))
    if given.datatype == "BYTES":
        if not all(isinstance(value, str) for value in flat):
            raise _invalid(f"input {given.name!r} of BYTES has data that is not text", expected="texts, or binary data")
        array = np.array([value.encode() for value in flat], dtype=object)
        tensor = from_array(given.name, array, datatype="BYTES")
        return Tensor(given.name, "BYTES", given.shape, tensor.data)
    code = _CODES.get(given.datatype)
    if code is None:
        raise _invalid(f"input {given.name!r} of {given.datatype} has JSON data", expected="binary data")
    try:
        array = np.array(flat, dtype=code) if flat else np.empty(0, dtype=code)
    except (OverflowError, ValueError, TypeError) as fault:
        raise _invalid(f"input {given.name!r} has values that are not {given.datatype}: {fault}") from fault
    if array.dtype.kind in "iub" and any(
        isinstance(v, float) or a != v for a, v in zip(array.tolist(), flat, strict=True)
    ):
        raise _invalid(f"input {given.name!r} has values that do not fit {given.datatype}")
    return Tensor(given.name, given.datatype, given.shape, array.tobytes())


def _flatten(data: Any) -> Sequence[Any]:
    if not isinstance(data, list):
        return [data]
    flat: list[Any] = []
    stack = [iter(data)]
    while stack:
        if len(stack) > 32:
            raise _invalid("got data nested deeper than 32")
        for value in stack[-1]:
            if isinstance(value, list):
                stack.append(iter(value))
                break
            flat.append(value)
        else:
            stack.pop()
    return flat


def _to_json(tensor: Tensor) -> list[Any]:
    if tensor.datatype in ("FP16", "BF16"):
        raise _invalid(f"output {tensor.name!r} of {tensor.datatype} has no JSON form", expected="binary_data true")
    array = to_array(tensor).reshape(-1)
    if tensor.datatype == "BYTES":
        try:
            return [value.decode() for value in array]
        except UnicodeDecodeError:
            raise _invalid(
                f"output {tensor.name!r} holds bytes that are not UTF-8", expected="binary_data true"
            ) from None
    values: list[Any] = array.tolist()
    return values


def _region(name: str, given: dict[str, Any]) -> tuple[str, int, int] | None:
    if "shared_memory_region" not in given:
        return None
    region, size, offset = (
        given["shared_memory_region"],
        given.get("shared_memory_byte_size"),
        given.get("shared_memory_offset", 0),
    )
    if not isinstance(region, str) or not isinstance(size, int) or not isinstance(offset, int):
        raise _invalid(f"wrong shared memory parameters of tensor {name!r}")
    return region, size, offset


def _invalid(problem: str, *, expected: str | None = None) -> RequestFailed:
    return RequestFailed(problem, reason=Reason.INVALID, expected=expected)
