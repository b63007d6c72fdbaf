"""Runs batches on one backend, in whatever process or thread it lives: tensors in, tensors out, faults sorted.

When a batch of several requests fails by an exception, its requests are run one by one, so that data of one request
cannot fail another's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wirespeed.errors import DataError, WirespeedError
from wirespeed.serve.backends.base import Backend, Batch, Loaded
from wirespeed.serve.config import ModelConfig, TensorSpec
from wirespeed.serve.tensors import Tensor, from_array, split_rows, to_array

if TYPE_CHECKING:
    import numpy as np


class Outcome:
    """What a batch gave: ``tensors`` for all rows, or per request tensors or an error's text."""

    __slots__ = ("apart", "compute_ns", "num_runs", "tensors")

    def __init__(
        self, tensors: list[Tensor] | None, apart: list[list[Tensor] | str], compute_ns: int, num_runs: int
    ) -> None:
        self.tensors = tensors
        self.apart = apart
        self.compute_ns = compute_ns
        self.num_runs = num_runs


class Executor:
    """One loaded model. ``load`` first; then ``run``, one call at a time."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._outputs: dict[str, TensorSpec] = {}
        self._is_batching = config.batching.max_rows > 0

    def load(self) -> Loaded:
        """Load the model; what it takes and gives, with what model.toml says ranking first."""
        import numpy  # noqa: F401 - the first request would wait for it

        found = self._backend.load(self._config)
        specs = self._config.output or found.output
        self._outputs = {spec.name: spec for spec in specs}
        if not specs or not (self._config.input or found.input):
            raise DataError(
                f"model {self._config.name!r} names no input or output",
                expected="[[input]] and [[output]] in model.toml",
            )
        return Loaded(input=self._config.input or found.input, output=specs, platform=found.platform)

    def run(self, inputs: Sequence[Tensor], batch: Batch) -> Outcome:
        """Run a batch. Exceptions of the model come back as text, never as exceptions."""
        begin_ns = time.perf_counter_ns()
        try:
            tensors = self._infer(inputs, batch)
            return Outcome(tensors, [], time.perf_counter_ns() - begin_ns, 1)
        except Exception as fault:
            if len(batch.rows) <= 1:
                return Outcome(None, [_text(fault)], time.perf_counter_ns() - begin_ns, 1)
        apart: list[list[Tensor] | str] = []
        cut = [split_rows(tensor, batch.rows) for tensor in inputs]
        for place, rows in enumerate(batch.rows):
            alone = Batch(rows=(rows,), parameters=batch.parameters[place : place + 1])
            try:
                apart.append(self._infer([parts[place] for parts in cut], alone))
            except Exception as fault:
                apart.append(_text(fault))
        return Outcome(None, apart, time.perf_counter_ns() - begin_ns, 1 + len(apart))

    def _infer(self, inputs: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        arrays: dict[str, np.ndarray[Any, Any]] = {tensor.name: to_array(tensor) for tensor in inputs}
        for array in arrays.values():
            array.flags.writeable = False
        given = self._backend.infer(arrays, batch)
        outputs = []
        rows = sum(batch.rows)
        for name, spec in self._outputs.items():
            if name not in given:
                raise DataError(f"the model gave no output {name!r}", expected=", ".join(self._outputs))
            tensor = from_array(name, given[name], datatype=spec.datatype)
            if self._is_batching and (not tensor.shape or tensor.shape[0] != rows):
                raise DataError(
                    f"output {name!r} has shape {list(tensor.shape)}", expected=f"{rows} rows, as many as the inputs"
                )
            outputs.append(tensor)
        return outputs

    def close(self) -> None:
        """Let the backend go."""
        self._backend.close()


def _text(fault: Exception) -> str:
    return (str(fault) if isinstance(fault, WirespeedError) else f"{type(fault).__name__}: {fault}")[:4096]
