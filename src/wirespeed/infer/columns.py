"""Results as Arrow columns: what a model's outputs become in the file, and null where an input has none.

A fixed shape becomes nested fixed-size lists, [512] a list of 512; a shape whose first dimension varies a list of
those; any other varying shape a flat list beside a column of its shape. BF16 is written as FP32, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from wirespeed.serve.config import TensorSpec

KEY, ERROR = "key", "error"
_TYPES = {
    "BOOL": pa.bool_(), "UINT8": pa.uint8(), "UINT16": pa.uint16(), "UINT32": pa.uint32(), "UINT64": pa.uint64(),
    "INT8": pa.int8(), "INT16": pa.int16(), "INT32": pa.int32(), "INT64": pa.int64(), "FP16": pa.float16(),
    "FP32": pa.float32(), "FP64": pa.float64(), "BF16": pa.float32(), "BYTES": pa.binary(),
}  # fmt: skip
_SHAPE_SUFFIX = "_shape"


class Row(NamedTuple):
    """One input's result: an array per output, each without the rows' dimension; or ``error``."""

    key: str
    arrays: tuple[np.ndarray[Any, Any], ...] | None
    error: str | None = None


def schema_of(outputs: Sequence[TensorSpec]) -> pa.Schema:
    """The file's columns: key, error, then the outputs."""
    fields = [pa.field(KEY, pa.string(), nullable=False), pa.field(ERROR, pa.string())]
    for spec in outputs:
        fields.append(pa.field(spec.name, _type_of(spec)))
        if _is_loose(spec):
            fields.append(pa.field(spec.name + _SHAPE_SUFFIX, pa.list_(pa.int32())))
    return pa.schema(fields)


def make_batch(rows: Sequence[Row], outputs: Sequence[TensorSpec], schema: pa.Schema) -> pa.RecordBatch:
    """The rows as one record batch."""
    columns: list[pa.Array] = [
        pa.array([_text(row.key) for row in rows], pa.string()),
        pa.array([None if row.error is None else _text(row.error) for row in rows], pa.string()),
    ]
    is_null = np.array([row.arrays is None for row in rows])
    for place, spec in enumerate(outputs):
        arrays = [None if row.arrays is None else _values(spec, row.arrays[place]) for row in rows]
        columns.append(_column(spec, arrays, is_null))
        if _is_loose(spec):
            shapes = [None if array is None else list(array.shape) for array in arrays]
            columns.append(pa.array(shapes, pa.list_(pa.int32())))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def zero_row(outputs: Sequence[TensorSpec]) -> Row:
    """A row of zeros, 1 long where a dimension varies."""
    return Row("", tuple(_zeros(spec) for spec in outputs))


def _zeros(spec: TensorSpec) -> np.ndarray[Any, Any]:
    shape = [size if size >= 0 else 1 for size in _sizes(spec)]
    if spec.datatype == "BYTES":
        return np.full(shape, b"", object)
    return np.zeros(shape, np.uint16 if spec.datatype == "BF16" else _TYPES[spec.datatype].to_pandas_dtype())


def _sizes(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in spec.shape)


def _is_loose(spec: TensorSpec) -> bool:
    return any(size < 0 for size in _sizes(spec)[1:])


def _type_of(spec: TensorSpec) -> pa.DataType:
    sizes = _sizes(spec)
    kind = _TYPES[spec.datatype]
    if _is_loose(spec):
        return pa.list_(kind)
    for size in reversed(sizes):
        kind = pa.list_(kind, size) if size >= 0 else pa.list_(kind)
    return kind


def _values(spec: TensorSpec, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if spec.datatype == "BF16":
        widened: np.ndarray[Any, Any] = (array.astype(np.uint32) << 16).view(np.float32)
        return widened
    return array


def _column(spec: TensorSpec, arrays: Sequence[np.ndarray[Any, Any] | None], is_null: np.ndarray[Any, Any]) -> pa.Array:
    sizes = _sizes(spec)
    kind = _TYPES[spec.datatype]
    mask = pa.array(is_null)
    if sizes and (sizes[0] < 0 or _is_loose(spec)):
        held = [array.reshape(-1) for array in arrays if array is not None]
        flat = _flat(np.concatenate(held) if held else np.empty(0, _numpy(kind)), kind)
        inner_sizes = () if _is_loose(spec) else sizes[1:]
        per_element = math.prod(inner_sizes)
        lengths = [0 if array is None else array.size // max(1, per_element) for array in arrays]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), _nest(flat, inner_sizes), mask=mask)
    filler = next((array for array in arrays if array is not None), None)
    if filler is None:
        return pa.nulls(len(arrays), _type_of(spec))
    zero = np.zeros_like(filler) if kind != pa.binary() else np.full_like(filler, b"")
    stacked = np.stack([zero if array is None else array for array in arrays])
    if not sizes:
        return pa.array(stacked.reshape(-1), kind, mask=is_null)
    inner = _nest(_flat(stacked.reshape(-1), kind), sizes[1:])
    return pa.FixedSizeListArray.from_arrays(inner, sizes[0], mask=mask)


def _flat(values: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values if values.dtype.kind == "O" else np.ascontiguousarray(values), kind)


def _nest(flat: pa.Array, sizes: Sequence[int]) -> pa.Array:
    for size in reversed(sizes):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _numpy(kind: pa.DataType) -> Any:
    return object if kind == pa.binary() else kind.to_pandas_dtype()


def _text(text: str) -> str:
    """A file name may hold bytes that are no text; they are kept apart from each other, readably."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
