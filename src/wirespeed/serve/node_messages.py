"""What dispatchers and nodes say over the data plane: each call's meta, as msgpack arrays; bytes of tensors follow.

    describe  ->  every model of the node, with its configuration
    beat      ->  heartbeat.py
    infer     one request of any model: its tensors' bytes one after another, and the same for the answer
    scatter   many inputs of one model that takes one blob each (an encoded image): each as a BYTES element, u32 length
              and bytes; every one is a request of its own on the node, so that one that fails fails alone

Sizes are held against the payload before anything is cut from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.serve.config import ModelConfig, TensorSpec
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Buffer, Tensor

DESCRIBE, BEAT, INFER, SCATTER = "describe", "beat", "infer", "scatter"
MAX_SCATTER_ITEMS = 1024
Placed = tuple[str, str, tuple[int, ...], int]
"""A tensor: name, datatype, shape, bytes."""
Failure = tuple[str, str]
"""A reason's name and a text."""

_T = TypeVar("_T")


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A model of a node. ``config`` has the inputs and outputs that were found when it was loaded."""

    config: ModelConfig
    platform: str


class InferHead(msgspec.Struct, frozen=True, array_like=True):
    """The meta of ``infer``."""

    model: str
    version: str
    tensors: list[Placed]
    outputs: list[str] | None = None
    parameters: dict[str, Any] = {}
    priority: int = 0


class InferAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The meta of its reply: tensors, or why there are none."""

    tensors: list[Placed]
    failure: Failure | None = None


class ScatterHead(msgspec.Struct, frozen=True, array_like=True):
    """The meta of ``scatter``. ``sizes``: of each blob, without its length field."""

    model: str
    version: str
    encoding: str
    sizes: list[int]


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Results of equal shapes, joined along their rows; ``places`` are those of the blobs they belong to."""

    places: list[int]
    tensors: list[Placed]


class ScatterAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The head of its reply, which lies in the payload, behind its length: results of many shapes outgrow a meta.

    Every place is in a group or in ``failures``.
    """

    groups: list[Group]
    failures: list[tuple[int, str, str]]


_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (InferHead, InferAnswer, ScatterHead, ScatterAnswer)
}
_LIST = msgspec.msgpack.Decoder(list[Described])


def encode_meta(said: InferHead | InferAnswer | ScatterHead) -> bytes:
    """The bytes of a call's meta."""
    return _ENCODER.encode(said)


def decode_meta(meta: bytes, kind: type[_T]) -> _T:
    """Raises DataError for anything else."""
    try:
        said: _T = _DECODERS[kind].decode(meta)
    except msgspec.MsgspecError as fault:
        raise DataError(f"got a call's meta that is not understood: {fault}") from fault
    return said


def pack_answer(answer: ScatterAnswer, parts: Sequence[Buffer]) -> list[Buffer]:
    """The payload of a scatter's reply: u32 length of the head, the head, the tensors' bytes."""
    head = _ENCODER.encode(answer)
    return [len(head).to_bytes(4, "little"), head, *parts]


def unpack_answer(payload: Buffer) -> tuple[ScatterAnswer, int]:
    """A scatter's head, and where its tensors begin. Raises DataError."""
    view = memoryview(payload)
    end = 4 + int.from_bytes(view[:4], "little")
    if len(view) < 4 or end > len(view):
        raise DataError(f"got an answer of {len(view)} bytes whose head ends at {end}")
    return decode_meta(bytes(view[4:end]), ScatterAnswer), end


def encode_models(models: Sequence[Described]) -> bytes:
    """The answer of ``describe``."""
    return _ENCODER.encode(models)


def decode_models(payload: Buffer) -> list[Described]:
    """Raises DataError for anything else."""
    try:
        return _LIST.decode(payload)
    except (msgspec.MsgspecError, UsageError, DataError) as fault:
        raise DataError(f"got a list of models that is not understood: {fault}") from fault


def place_tensors(tensors: Sequence[Tensor]) -> tuple[list[Placed], list[Buffer]]:
    """Tensors as meta and as the parts of a payload."""
    return [(t.name, t.datatype, t.shape, len(t.data)) for t in tensors], [t.data for t in tensors]


def cut_tensors(placed: Sequence[Placed], payload: Buffer, start: int = 0) -> tuple[list[Tensor], int]:
    """Tensors that lie one after another from ``start``, and where they end; their data are views. Raises DataError."""
    view = memoryview(payload)
    tensors = []
    for name, datatype, shape, size in placed:
        end = start + size
        if size < 0 or end > len(view):
            raise DataError(f"tensor {name!r} of {size} bytes lies beyond the {len(view)} bytes that came")
        tensors.append(Tensor(name, datatype, shape, view[start:end]))
        start = end
    return tensors, start


def check_whole(end: int, payload: Buffer) -> None:
    """Raise DataError where a payload holds more than its meta says."""
    if end != len(payload):
        raise DataError(f"got {len(payload)} bytes", expected=f"the {end} that the meta names")


def cut_blobs(sizes: Sequence[int], payload: Buffer) -> list[memoryview]:
    """The BYTES elements (length fields included) of a scatter's payload. Raises DataError."""
    if not 0 < len(sizes) <= MAX_SCATTER_ITEMS:
        raise DataError(f"got {len(sizes)} blobs in a call", expected=f"1 to {MAX_SCATTER_ITEMS}")
    view = memoryview(payload)
    blobs, start = [], 0
    for place, size in enumerate(sizes):
        end = start + 4 + size
        if size < 0 or end > len(view) or int.from_bytes(view[start : start + 4], "little") != size:
            raise DataError(f"blob {place} of {size} bytes does not fit the {len(view)} bytes that came")
        blobs.append(view[start:end])
        start = end
    check_whole(start, payload)
    return blobs


def blob_input(config: ModelConfig, inputs: Sequence[TensorSpec]) -> tuple[str, tuple[int, ...]]:
    """The name and the whole shape of the one BYTES input that a model of encoded images has.

    Raises RequestFailed (INVALID) where the model takes something else.
    """
    needed = [spec for spec in inputs if not spec.is_optional]
    if len(needed) == 1 and needed[0].datatype == "BYTES" and all(size in (1, -1) for size in needed[0].shape):
        lead = (1,) if config.batching.max_rows else ()
        return needed[0].name, (*lead, *(1 for _ in needed[0].shape))
    takes = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in needed)
    raise RequestFailed(
        f"model {config.name!r} takes {takes or 'nothing'}",
        reason=Reason.INVALID,
        expected="one input of BYTES, shape [] or [1]: an encoded image per row",
        hint="decode in the model's own code; see docs/guides/infer.md",
    )
