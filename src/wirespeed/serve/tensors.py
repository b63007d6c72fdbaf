"""Tensors as the protocol carries them: a datatype, a shape, and row-major bytes.

Rows are the first dimension, so joining requests into a batch is joining bytes, and an answer's rows are a slice: no
array library is needed for either. BYTES elements are a little-endian u32 length and that many bytes each. BF16 has no
numpy type: its arrays are uint16 with the same bits.

Every declared shape is held against the bytes that came, before anything else sees them: a request that claims more
rows than it sent would otherwise be answered from its neighbour's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wirespeed.errors import DataError

if TYPE_CHECKING:
    import numpy as np

Buffer = bytes | bytearray | memoryview

ITEM_BYTES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2,
}  # fmt: skip
_NUMPY = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2",
}  # fmt: skip
DATATYPES = (*ITEM_BYTES, "BYTES")
MAX_DIMENSIONS = 16
MAX_ELEMENTS = 2**40


class Tensor:
    """A named tensor.

    ``data`` is its wire bytes; it is not owned, and may be a view of a request or of shared memory.
    """

    __slots__ = ("data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: str, shape: tuple[int, ...], data: Buffer) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype}, {list(self.shape)}, {len(self.data)} bytes)"


def num_elements(name: str, shape: Sequence[int]) -> int:
    """The product of a shape. Raises DataError where a dimension is negative or the whole is absurd."""
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise DataError(
            f"tensor {name!r} has shape {list(shape)[: MAX_DIMENSIONS + 1]}",
            expected=f"at most {MAX_DIMENSIONS} dimensions, none below zero",
        )
    count = math.prod(shape)
    if count > MAX_ELEMENTS:
        raise DataError(f"tensor {name!r} has {count} elements", expected=f"at most {MAX_ELEMENTS}")
    return count


def check(tensor: Tensor) -> None:
    """Raise DataError where the bytes are not exactly what datatype and shape say."""
    count = num_elements(tensor.name, tensor.shape)
    size = len(tensor.data)
    item_bytes = ITEM_BYTES.get(tensor.datatype)
    if item_bytes is not None:
        if size != count * item_bytes:
            raise DataError(
                f"tensor {tensor.name!r} has {size} bytes",
                expected=f"{count * item_bytes} for {tensor.datatype} of shape {list(tensor.shape)}",
            )
    elif tensor.datatype == "BYTES":
        found = len(element_ends(tensor.name, tensor.data, limit=count + 1))
        if found != count:
            more = "more than " if found > count else ""
            raise DataError(
                f"tensor {tensor.name!r} has {more}{min(found, count)} elements",
                expected=f"{count} for shape {list(tensor.shape)}",
            )
    else:
        raise DataError(f"tensor {tensor.name!r} has datatype {tensor.datatype!r}", expected=", ".join(DATATYPES))


def element_ends(name: str, data: Buffer, *, limit: int | None = None) -> list[int]:
    """Where each BYTES element ends. Raises DataError where a length points beyond the data."""
    ends: list[int] = []
    place, size = 0, len(data)
    while place < size and (limit is None or len(ends) < limit):
        if place + 4 > size:
            raise DataError(f"tensor {name!r} ends within the length of element {len(ends)}")
        place += 4 + int.from_bytes(data[place : place + 4], "little")
        if place > size:
            raise DataError(f"element {len(ends)} of tensor {name!r} is longer than the {size} bytes that came")
        ends.append(place)
    return ends


def split_rows(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """The tensor cut along its first dimension, ``rows[i]`` rows each; the parts are views.

    The sum must be its rows.
    """
    if not tensor.shape or sum(rows) != tensor.shape[0]:
        raise DataError(
            f"output {tensor.name!r} has shape {list(tensor.shape)}",
            expected=f"{sum(rows)} rows, as many as the inputs had",
        )
    view = memoryview(tensor.data)
    rest = tensor.shape[1:]
    per_row = math.prod(rest)
    if tensor.datatype == "BYTES":
        ends = [0, *element_ends(tensor.name, tensor.data)]
        bounds = [ends[sum(rows[:i]) * per_row] for i in range(len(rows) + 1)]
    else:
        size = per_row * ITEM_BYTES[tensor.datatype]
        bounds = [0]
        for count in rows:
            bounds.append(bounds[-1] + count * size)
    return [
        Tensor(tensor.name, tensor.datatype, (count, *rest), view[bounds[i] : bounds[i + 1]])
        for i, count in enumerate(rows)
    ]


def to_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A numpy array: a view of the tensor's data, or for BYTES an array of ``bytes`` objects."""
    import numpy as np

    if tensor.datatype == "BYTES":
        view = memoryview(tensor.data)
        array = np.empty(num_elements(tensor.name, tensor.shape), dtype=object)
        start = 0
        for place, end in enumerate(element_ends(tensor.name, tensor.data)):
            array[place] = bytes(view[start + 4 : end])
            start = end
        return array.reshape(tensor.shape)
    return np.frombuffer(tensor.data, dtype=_NUMPY[tensor.datatype]).reshape(tensor.shape)


def from_array(name: str, array: np.ndarray[Any, Any], *, datatype: str | None = None) -> Tensor:
    """A tensor of a numpy array. ``datatype`` tells BF16 from UINT16; text and objects become BYTES."""
    import numpy as np

    array = np.asarray(array)
    if datatype is None:
        datatype = datatype_of(name, array)
    if datatype == "BYTES":
        parts = []
        for element in array.reshape(-1):
            raw = element.encode() if isinstance(element, str) else bytes(element)
            parts.append(len(raw).to_bytes(4, "little"))
            parts.append(raw)
        return Tensor(name, "BYTES", array.shape, b"".join(parts))
    wanted = np.dtype(_NUMPY[datatype])
    if array.dtype != wanted:
        raise DataError(f"array {name!r} is of {array.dtype}", expected=f"{datatype} ({wanted})")
    flat = np.ascontiguousarray(array)
    return Tensor(name, datatype, array.shape, memoryview(flat.reshape(-1).view(np.uint8).data))


def datatype_of(name: str, array: np.ndarray[Any, Any]) -> str:
    """The protocol's word for an array's type. Raises DataError where it has none."""
    import numpy as np

    if array.dtype.kind in "OSU":
        return "BYTES"
    for datatype, code in _NUMPY.items():
        if array.dtype == np.dtype(code):
            return datatype
    raise DataError(f"array {name!r} is of {array.dtype}", expected=", ".join(DATATYPES))
