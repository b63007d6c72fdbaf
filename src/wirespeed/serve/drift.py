"""How much the answers of a model change with an update: the same batch through what is live and what is to be.

    [reference]
    file = "reference.npz"      # arrays by input name: rows that stand for what the model is asked
    max_drift = 0.02            # an update that changes an output by more is not served

Drift of an output is the norm of the difference over the norm of what is live; of BYTES, the share of elements that
differ. Without a limit it is reported only.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from wirespeed.errors import DataError
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.tensors import Tensor, from_array, to_array
from wirespeed.units import format_percent

if TYPE_CHECKING:
    from wirespeed.serve.config import ModelConfig
    from wirespeed.serve.model import Model


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """By output. ``rows`` of the reference batch; 0 where the model takes no rows."""

    outputs: dict[str, float]
    rows: int

    @property
    def worst(self) -> float:
        """Of the output that changes most."""
        return max(self.outputs.values(), default=0.0)

    def __str__(self) -> str:
        told = ", ".join(f"{name} {format_percent(value)}" for name, value in self.outputs.items())
        return f"drift on the reference batch: {told}"


async def measure_drift(live: Model, coming: Model) -> Drift | None:
    """Between two loaded models, on the reference batch of the one that comes. None where it has none.

    Raises DataError where the file is not what the model takes, or the outputs are not the same ones.
    """
    inputs = _read(coming.config, coming)
    if inputs is None:
        return None
    before, after = [
        {tensor.name: tensor for tensor in await model.infer(InferRequest(list(inputs)))} for model in (live, coming)
    ]
    if before.keys() != after.keys():
        raise DataError(
            f"the update of {coming.config.name!r} gives {', '.join(after)}", expected=f"{', '.join(before)}, as before"
        )
    rows = inputs[0].shape[0] if coming.config.batching.max_rows and inputs else 0
    return Drift(outputs={name: _change(before[name], after[name]) for name in before}, rows=rows)


def _read(config: ModelConfig, model: Model) -> list[Tensor] | None:
    if not config.reference.file:
        return None
    import numpy as np

    path = Path(config.folder) / config.reference.file
    try:
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except (OSError, ValueError, zipfile.BadZipFile) as fault:
        raise DataError(
            f"cannot read the reference batch {path}: {fault}", expected="an .npz of arrays by input name"
        ) from fault
    types = {spec.name: spec.datatype for spec in model.inputs}
    unknown = [name for name in arrays if name not in types]
    if unknown or not arrays:
        raise DataError(f"the reference batch {path} holds {', '.join(arrays) or 'nothing'}", expected=", ".join(types))
    return [from_array(name, array, datatype=types[name]) for name, array in arrays.items()]


def _change(before: Tensor, after: Tensor) -> float:
    if before.shape != after.shape or before.datatype != after.datatype:
        return float("inf")
    import numpy as np

    one, other = to_array(before), to_array(after)
    if before.datatype == "BYTES":
        return float(np.mean(one != other)) if one.size else 0.0
    if before.datatype == "BF16":
        one, other = ((array.astype(np.uint32) << 16).view(np.float32) for array in (one, other))
    one, other = one.astype(np.float64), other.astype(np.float64)
    size = float(np.linalg.norm(one))
    change = float(np.linalg.norm(other - one))
    if not np.isfinite(change):
        return float("inf")
    return change / size if size else (0.0 if change == 0 else float("inf"))
