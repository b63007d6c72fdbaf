"""TorchScript files (``model.pt``) and exported programs (``model.pt2``), on the CPU.

The files hold code in a form that torch restricts, not pickles of arbitrary objects: TorchScript is loaded by
``torch.jit.load``, exported programs by ``torch.export.load``. Inputs are passed in the order of model.toml, and
outputs are named in its order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wirespeed.errors import DataError
from wirespeed.serve.backends.base import Batch, Loaded
from wirespeed.serve.config import ModelConfig

if TYPE_CHECKING:
    from wirespeed.serve.backends.base import Arrays


class TorchBackend:
    """See the module."""

    def __init__(self) -> None:
        self._module: Any = None
        self._inputs: list[tuple[str, str]] = []
        self._outputs: list[str] = []

    def load(self, config: ModelConfig) -> Loaded:
        """Load the file. model.toml must name inputs and outputs: the file does not."""
        import torch

        if not config.input or not config.output:
            raise DataError(f"model {config.name!r} names no input or output", expected="[[input]] and [[output]]")
        path = Path(config.folder) / (config.file or "model.pt")
        if config.instances.threads:
            torch.set_num_threads(config.instances.threads)
        try:
            if path.suffix == ".pt2":
                self._module = torch.export.load(str(path)).module()
            else:
                loaded = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
                self._module = loaded.eval()
        except Exception as fault:
            raise DataError(f"cannot load {path}: {str(fault).splitlines()[0]}") from fault
        self._inputs = [(spec.name, spec.datatype) for spec in config.input]
        self._outputs = [spec.name for spec in config.output]
        return Loaded(platform="pytorch")

    def infer(self, inputs: Arrays, batch: Batch) -> Arrays:
        """See Backend.infer."""
        import numpy as np
        import torch

        values = []
        for name, datatype in self._inputs:
            # torch has no read-only tensors, and the arrays are read-only views.
            value = torch.from_numpy(np.array(inputs[name]))
            values.append(value.view(torch.bfloat16) if datatype == "BF16" else value)
        with torch.inference_mode():
            results = self._module(*values)
        results = results if isinstance(results, tuple | list) else (results,)
        if len(results) != len(self._outputs):
            raise DataError(f"the model gave {len(results)} outputs", expected=f"{len(self._outputs)}")
        return {
            name: (result.view(torch.uint16) if result.dtype == torch.bfloat16 else result).numpy()
            for name, result in zip(self._outputs, results, strict=True)
        }

    def close(self) -> None:
        """See Backend.close."""
        self._module = None
