"""Mixed shapes in one batch: named dimensions are filled up to the largest, and answers are cut to their own size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wirespeed.serve.config import ModelConfig, TensorSpec
from wirespeed.serve.tensors import Tensor, from_array, to_array


def sizes_of(config: ModelConfig, specs: Sequence[TensorSpec], inputs: Sequence[Tensor]) -> dict[str, int]:
    """One request's sizes of the dimensions that are padded."""
    found: dict[str, int] = {}
    by_name = {tensor.name: tensor for tensor in inputs}
    for spec in specs:
        tensor = by_name.get(spec.name)
        if tensor is not None:
            pairs = zip(spec.shape, tensor.shape[1:], strict=True)
            found.update({want: size for want, size in pairs if isinstance(want, str) and want in config.batching.pad})
    return found


def pad(config: ModelConfig, spec: TensorSpec, tensor: Tensor, sizes: dict[str, int]) -> Tensor:
    """The tensor with its padded dimensions filled up to ``sizes`` with the model's pad value."""
    import numpy as np

    shape = (
        tensor.shape[0],
        *(sizes.get(w, s) if isinstance(w, str) else s for w, s in zip(spec.shape, tensor.shape[1:], strict=True)),
    )
    if shape == tensor.shape:
        return tensor
    array = to_array(tensor)
    filler: Any = b"" if tensor.datatype == "BYTES" else config.batching.pad_value
    whole = np.full(shape, filler, dtype=array.dtype)
    whole[tuple(slice(0, size) for size in tensor.shape)] = array
    return from_array(tensor.name, whole, datatype=tensor.datatype)


def cut(spec: TensorSpec, tensor: Tensor, sizes: dict[str, int]) -> Tensor:
    """An answer without the padding: dimensions of the output that bear a padded name, cut to the request's sizes."""
    if len(spec.shape) != len(tensor.shape) - 1:
        return tensor
    shape = (
        tensor.shape[0],
        *(sizes.get(w, s) if isinstance(w, str) else s for w, s in zip(spec.shape, tensor.shape[1:], strict=True)),
    )
    if shape == tensor.shape:
        return tensor
    array = to_array(tensor)[tuple(slice(0, size) for size in shape)]
    return from_array(tensor.name, array, datatype=tensor.datatype)
