"""Feature vectors in fewer bytes: as fp16, or as int8 with one scale per row.

int8 keeps round(x / s) with s = max|x| / 127 over the row, so an element is off by at most s / 2: for a vector of
length 1 in 512 dimensions that is a cosine of about 0.9999 to the exact one. Boxes and scores are not touched: half a
pixel of a large image is more than fp16 can say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from wirespeed.errors import DataError, UsageError
from wirespeed.serve.config import TensorSpec
from wirespeed.serve.tensors import Tensor, from_array, to_array

Encoding = Literal["fp32", "fp16", "int8"]
ENCODINGS: tuple[str, ...] = get_args(Encoding)
SCALE_SUFFIX = "_scale"


def feature_outputs(outputs: Sequence[TensorSpec], encoding: str) -> tuple[str, ...]:
    """The outputs that ``encoding`` applies to: those called features or embeddings, else the only FP32 one.

    Raises UsageError where that is none, or cannot be told.
    """
    if encoding not in ENCODINGS:
        raise UsageError(f"got features as {encoding!r}", expected=", ".join(ENCODINGS))
    if encoding == "fp32":
        return ()
    floats = [spec.name for spec in outputs if spec.datatype == "FP32"]
    named = [name for name in floats if name.lower().startswith(("feature", "embedding"))]
    chosen = named or floats
    if not named and len(floats) != 1:
        raise UsageError(
            f"cannot tell which output holds features to send as {encoding}: {', '.join(floats) or 'none is FP32'}",
            expected="an FP32 output whose name begins with feature or embedding",
        )
    return tuple(chosen)


def encoded_specs(outputs: Sequence[TensorSpec], encoding: str) -> tuple[TensorSpec, ...]:
    """What comes out once features are encoded: fewer bits, and for int8 an output of scales behind each."""
    names = feature_outputs(outputs, encoding)
    found: list[TensorSpec] = []
    for spec in outputs:
        if spec.name not in names:
            found.append(spec)
        elif encoding == "fp16":
            found.append(TensorSpec(name=spec.name, datatype="FP16", shape=spec.shape))
        else:
            found.append(TensorSpec(name=spec.name, datatype="INT8", shape=spec.shape))
            found.append(TensorSpec(name=spec.name + SCALE_SUFFIX, datatype="FP32", shape=()))
    return tuple(found)


def encode_features(tensors: Sequence[Tensor], names: Sequence[str], encoding: str) -> list[Tensor]:
    """The tensors with the named ones encoded; the first dimension is rows. Raises DataError for int8 of no number."""
    import numpy as np

    found: list[Tensor] = []
    for tensor in tensors:
        if tensor.name not in names:
            found.append(tensor)
            continue
        array = to_array(tensor)
        if encoding == "fp16":
            with np.errstate(over="ignore"):  # beyond 65504 becomes infinite, as IEEE has it
                found.append(from_array(tensor.name, array.astype("<f2")))
            continue
        rows = array.reshape(array.shape[0], -1)
        if not np.isfinite(rows).all():
            raise DataError(f"output {tensor.name!r} holds values that are no numbers", expected="finite ones for int8")
        largest = np.abs(rows).max(axis=1, initial=0.0)
        scale = (largest / np.float32(127)).astype("<f4")
        divisor = np.where(scale > 0, scale, np.float32(1))
        quantized = np.clip(np.rint(rows / divisor[:, None]), -127, 127).astype(np.int8).reshape(array.shape)
        found.append(from_array(tensor.name, quantized))
        found.append(from_array(tensor.name + SCALE_SUFFIX, scale))
    return found
