"""ModelInfer messages to requests and back, without copying large tensors more often than needed.

A large message is not handed to the protobuf library whole, which would copy every tensor while it holds the
interpreter: its top level is walked here, ``raw_input_contents`` become views of the received bytes, and only the rest
is parsed by the library. An answer is built the same way, with one copy of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wirespeed.errors import DataError
from wirespeed.serve import parameters as params
from wirespeed.serve._generated import open_inference_pb2 as pb
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import ITEM_BYTES, Buffer, Tensor, num_elements

if TYPE_CHECKING:
    from wirespeed.serve.shared_memory import SharedMemory

VIEW_BYTES = 64 * 1024
"""From here on a message is walked instead of parsed whole; below, the library is faster."""
_RAW_INPUT_TAG = 7 << 3 | 2
_RAW_OUTPUT_TAG = 6 << 3 | 2
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
_CODES = {
    "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "u1", "UINT16": "<u2",
    "UINT32": "<u4", "UINT64": "<u8", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


class Wanted:
    """What a request asks of its outputs. ``regions``: output -> (region, byte size, offset); ``classes``: -> top k."""

    __slots__ = ("classes", "id", "model", "names", "regions", "version")

    def __init__(self, model: str, version: str, id: str) -> None:  # noqa: A002
        self.model = model
        self.version = version
        self.id = id
        self.names: list[str] | None = None
        self.regions: dict[str, tuple[str, int, int]] = {}
        self.classes: dict[str, int] = {}


def parse(message: bytes) -> tuple[pb.ModelInferRequest, Sequence[Buffer]]:
    """A message and its raw contents. Raises RequestFailed for what is not one."""
    try:
        if len(message) < VIEW_BYTES:
            request = pb.ModelInferRequest.FromString(message)
            return request, request.raw_input_contents
        rest, raw = _walk(message)
        return pb.ModelInferRequest.FromString(rest), raw
    except Exception as fault:
        raise RequestFailed(f"got a message that is not a ModelInferRequest: {fault}", reason=Reason.INVALID) from fault


def _walk(message: bytes) -> tuple[bytes, list[memoryview]]:
    view = memoryview(message)
    raw: list[memoryview] = []
    rest: list[memoryview] = []
    place = start = 0
    size = len(message)
    while place < size:
        begin = place
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 2:
            length, place = _varint(message, place)
            end = place + length
        elif kind == 0:
            _, end = _varint(message, place)
        elif kind in (1, 5):
            end = place + (8 if kind == 1 else 4)
        else:
            raise DataError(f"wire type {kind} at byte {begin}")
        if end > size:
            raise DataError(f"a field at byte {begin} ends beyond the message")
        if tag == _RAW_INPUT_TAG:
            raw.append(view[place:end])
            if begin > start:
                rest.append(view[start:begin])
            start = end
        place = end
    if size > start:
        rest.append(view[start:size])
    return b"".join(rest), raw


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(message) or shift > 63:
            raise DataError(f"a number at byte {place} does not end")
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def value_of(parameter: Any) -> Any:
    """The Python value of an InferParameter."""
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def to_request(
    message: bytes, memory: SharedMemory, *, now_s: float, deadline_s: float = math.inf
) -> tuple[InferRequest, Wanted]:
    """A request and what it wants of its outputs. Raises RequestFailed for whatever breaks the protocol's rules."""
    parsed, raw = parse(message)
    if len(parsed.inputs) > 1024 or len(parsed.outputs) > 1024:
        raise RequestFailed("got more than 1024 inputs or outputs", reason=Reason.INVALID)
    wanted = Wanted(parsed.model_name, parsed.model_version, parsed.id)
    inputs = _inputs(parsed, raw, memory)
    held = {name: value_of(value) for name, value in parsed.parameters.items()}
    timeout_s = params.take_timeout_s(held)
    if timeout_s is not None:
        deadline_s = min(deadline_s, now_s + timeout_s)
    priority = params.take_priority(held)
    if parsed.outputs:
        _take_outputs(wanted, parsed.outputs)
    request = InferRequest(
        inputs,
        id=parsed.id,
        outputs=wanted.names,
        parameters=params.clean(held),
        priority=priority,
        deadline_s=deadline_s,
    )
    return request, wanted


def _inputs(parsed: pb.ModelInferRequest, raw: Sequence[Buffer], memory: SharedMemory) -> list[Tensor]:
    """The inputs, each from raw contents, typed contents or shared memory."""
    inputs: list[Tensor] = []
    next_raw = 0
    for given in parsed.inputs:
        shape = tuple(given.shape)
        region = _region(given)
        has_contents = given.HasField("contents")
        data: Buffer
        if region is not None:
            if has_contents:
                raise _invalid(
                    f"unexpected 'content' provided when using shared memory for input tensor '{given.name}'"
                )
            name, byte_size, offset = region
            data = memory.read(name, offset=offset, byte_size=byte_size)
        elif raw:
            if has_contents:
                raise _invalid(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{given.name}' for model '{parsed.model_name}'"
                )
            if next_raw >= len(raw):
                raise _invalid(
                    f"unable to find data for input tensor '{given.name}' for model '{parsed.model_name}' in request"
                )
            data = raw[next_raw]
            next_raw += 1
        elif has_contents:
            data = _typed(given)
        elif _is_empty(given.name, shape):
            data = b""
        else:
            raise _invalid(
                f"unable to find data for input tensor '{given.name}' for model '{parsed.model_name}' in request"
            )
        inputs.append(Tensor(given.name, given.datatype, shape, data))
    if next_raw < len(raw):
        raise _invalid(f"got {len(raw)} raw_input_contents for {next_raw} inputs that are not in shared memory")
    return inputs


def _take_outputs(wanted: Wanted, outputs: Sequence[Any]) -> None:
    wanted.names = []
    for output in outputs:
        wanted.names.append(output.name)
        region = _region(output)
        if region is not None:
            wanted.regions[output.name] = region
        classes = value_of(output.parameters["classification"]) if "classification" in output.parameters else 0
        if classes:
            if isinstance(classes, bool) or not isinstance(classes, int) or classes < 0 or region is not None:
                raise _invalid(f"wrong 'classification' of output '{output.name}'")
            wanted.classes[output.name] = classes


def _is_empty(name: str, shape: tuple[int, ...]) -> bool:
    try:
        return num_elements(name, shape) == 0
    except DataError as fault:
        raise _invalid(fault.problem) from fault


def _region(tensor: Any) -> tuple[str, int, int] | None:
    held = tensor.parameters
    if "shared_memory_region" not in held:
        return None
    name = value_of(held["shared_memory_region"])
    size = value_of(held["shared_memory_byte_size"]) if "shared_memory_byte_size" in held else None
    offset = value_of(held["shared_memory_offset"]) if "shared_memory_offset" in held else 0
    if not isinstance(name, str) or not isinstance(size, int) or not isinstance(offset, int):
        raise _invalid(f"wrong shared memory parameters of tensor '{tensor.name}'")
    return name, size, offset


def _typed(given: Any) -> Buffer:
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise _invalid(f"input '{given.name}' of {given.datatype} has typed contents", expected="raw_input_contents")
    for other in given.contents.DESCRIPTOR.fields:
        if other.name != field and len(getattr(given.contents, other.name)):
            raise _invalid(f"input '{given.name}' of {given.datatype} has {other.name}", expected=field)
    values = getattr(given.contents, field)
    if given.datatype == "BYTES":
        return b"".join(part for value in values for part in (len(value).to_bytes(4, "little"), value))
    import numpy as np

    wide = np.array(
        values, dtype=_CODES[given.datatype] if ITEM_BYTES[given.datatype] >= 4 or given.datatype == "BOOL" else "<i8"
    )
    narrow = wide.astype(_CODES[given.datatype])
    if not np.array_equal(narrow, wide, equal_nan=wide.dtype.kind == "f"):
        raise _invalid(f"input '{given.name}' has values that do not fit {given.datatype}")
    return narrow.tobytes()


def classify(tensor: Tensor, top: int, *, has_rows: bool) -> Tensor:
    """The ``top`` largest values of each row as ``value:index`` texts, as the classification extension has it."""
    import numpy as np

    from wirespeed.serve.tensors import from_array, to_array

    if tensor.datatype in ("BYTES", "BOOL", "BF16"):
        raise _invalid(f"output '{tensor.name}' of {tensor.datatype} cannot be classified")
    array = to_array(tensor)
    rows = array.reshape(array.shape[0], -1) if has_rows else array.reshape(1, -1)
    best = np.argsort(-rows, axis=1, kind="stable")[:, :top]
    texts = np.array(
        [[f"{row[i]:f}:{i}".encode() for i in order] for row, order in zip(rows, best, strict=True)], dtype=object
    )
    return from_array(tensor.name, texts if has_rows else texts[0])


def to_response(
    wanted: Wanted,
    version: str,
    outputs: Sequence[Tensor],
    memory: SharedMemory,
    *,
    is_batching: bool,
    is_final: bool | None = None,
) -> bytes:
    """The message that answers a request. Outputs for shared memory are written there; their raw contents are empty."""
    response = pb.ModelInferResponse(model_name=wanted.model, model_version=version, id=wanted.id)
    if is_final is not None:
        response.parameters["triton_final_response"].bool_param = is_final
    raw: list[Buffer] = []
    for held in outputs:
        tensor = (
            classify(held, wanted.classes[held.name], has_rows=is_batching) if held.name in wanted.classes else held
        )
        described = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        region = wanted.regions.get(tensor.name)
        if region is None:
            raw.append(tensor.data)
            continue
        name, byte_size, offset = region
        memory.write(name, memoryview(tensor.data), offset=offset, byte_size=byte_size)
        described.parameters["shared_memory_region"].string_param = name
        described.parameters["shared_memory_byte_size"].int64_param = len(tensor.data)
        if offset:
            described.parameters["shared_memory_offset"].int64_param = offset
        raw.append(b"")
    parts: list[Buffer] = [response.SerializeToString()]
    for data in raw:
        parts.append(bytes((_RAW_OUTPUT_TAG,)) + _write_varint(len(data)))
        parts.append(data)
    return b"".join(parts)


def _invalid(problem: str, *, expected: str | None = None) -> RequestFailed:
    return RequestFailed(problem, reason=Reason.INVALID, expected=expected)
