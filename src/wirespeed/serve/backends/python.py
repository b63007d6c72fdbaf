"""A model written in Python: a class ``Model`` in the model's ``model.py``.

    class Model:
        def __init__(self, config): ...                  # a ModelConfig
        def infer(self, inputs):                         # dict of name -> array
            return {"y": inputs["x"] * 2}

``infer`` may take a second parameter, ``batch``, with the rows and parameters of each request. ``close`` is called at
the end where there is one. The file is code: it runs with the rights of the server.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wirespeed.errors import DataError
from wirespeed.serve.backends.base import Batch, Loaded
from wirespeed.serve.config import ModelConfig

if TYPE_CHECKING:
    from wirespeed.serve.backends.base import Arrays


class PythonBackend:
    """See the module."""

    def __init__(self) -> None:
        self._model: Any = None
        self._infer: Callable[..., Any] | None = None
        self._takes_batch = False

    def load(self, config: ModelConfig) -> Loaded:
        """Import the file and make its Model."""
        path = Path(config.folder) / (config.file or "model.py")
        name = f"wirespeed_model_{config.name.replace('-', '_').replace('.', '_')}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise DataError(f"model {config.name!r} has no file {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # for pickle, dataclasses and the like inside the model
        spec.loader.exec_module(module)
        model_class = getattr(module, "Model", None)
        if model_class is None:
            raise DataError(f"{path} defines no class Model", hint="see docs/guides/serve.md")
        self._model = model_class(config) if inspect.signature(model_class).parameters else model_class()
        infer = getattr(self._model, "infer", None)
        if infer is None:
            raise DataError(f"class Model of {path} has no method infer(inputs)")
        self._infer = infer
        self._takes_batch = len(inspect.signature(infer).parameters) > 1
        return Loaded(platform="python")

    def infer(self, inputs: Arrays, batch: Batch) -> Arrays:
        """See Backend.infer."""
        assert self._infer is not None
        outputs = self._infer(inputs, batch) if self._takes_batch else self._infer(inputs)
        if not isinstance(outputs, Mapping):
            raise DataError(f"Model.infer gave {type(outputs).__name__}", expected="a dict of name -> array")
        return outputs

    def close(self) -> None:
        """See Backend.close."""
        close = getattr(self._model, "close", None)
        if close is not None:
            close()
        self._model = None
