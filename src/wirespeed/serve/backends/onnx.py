"""ONNX models on ONNX Runtime's CPU provider. Inputs and outputs are read from the file where model.toml has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wirespeed.errors import DataError
from wirespeed.serve.backends.base import Batch, Loaded
from wirespeed.serve.config import ModelConfig, TensorSpec

if TYPE_CHECKING:
    from wirespeed.serve.backends.base import Arrays

_DATATYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}  # fmt: skip


class OnnxBackend:
    """See the module."""

    def __init__(self) -> None:
        self._session: Any = None
        self._outputs: list[str] = []

    def load(self, config: ModelConfig) -> Loaded:
        """Read the file (``model.onnx``) and make a session of it."""
        # It would otherwise report to its vendor and write into the home folder.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime

        path = Path(config.folder) / (config.file or "model.onnx")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if config.instances.threads:
            options.intra_op_num_threads = config.instances.threads
            options.inter_op_num_threads = 1
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as fault:
            raise DataError(f"cannot load {path}: {str(fault).splitlines()[0]}") from fault
        self._session = session
        batches = config.batching.max_rows > 0
        found = Loaded(
            input=tuple(_spec(node, batches) for node in session.get_inputs()),
            output=tuple(_spec(node, batches) for node in session.get_outputs()),
            platform="onnxruntime_onnx",
        )
        self._outputs = [spec.name for spec in config.output or found.output]
        return found

    def infer(self, inputs: Arrays, batch: Batch) -> Arrays:
        """See Backend.infer."""
        values = {name: array.astype(str) if array.dtype.kind == "O" else array for name, array in inputs.items()}
        return dict(zip(self._outputs, self._session.run(self._outputs, values), strict=True))

    def close(self) -> None:
        """See Backend.close."""
        self._session = None


def _spec(node: Any, batches: bool) -> TensorSpec:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise DataError(f"tensor {node.name!r} of the model is a {node.type}", expected=", ".join(_DATATYPES))
    shape = tuple(size if isinstance(size, int) and size > 0 else (size or -1) for size in node.shape)
    if batches:
        if not shape or (isinstance(shape[0], int) and shape[0] > 0):
            raise DataError(
                f"tensor {node.name!r} of the model has shape {list(node.shape)}",
                expected="a first dimension that varies, for rows",
                hint="export it with a dynamic batch, or set batching.max_rows = 0",
            )
        shape = shape[1:]
    return TensorSpec(name=node.name, datatype=datatype, shape=shape)
