"""One inference request, held against its model's configuration before it is queued."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from wirespeed.errors import DataError
from wirespeed.serve.config import ModelConfig, TensorSpec
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import Tensor, check


class InferRequest:
    """What any door hands in. ``deadline_s`` is on the event loop's clock; ``outputs`` None asks for all."""

    __slots__ = ("deadline_s", "id", "inputs", "outputs", "parameters", "priority")

    def __init__(
        self,
        inputs: list[Tensor],
        *,
        id: str = "",  # noqa: A002 - the protocol's word
        outputs: Sequence[str] | None = None,
        parameters: dict[str, Any] | None = None,
        priority: int = 0,
        deadline_s: float = math.inf,
    ) -> None:
        self.inputs = inputs
        self.id = id
        self.outputs = outputs
        self.parameters = {} if parameters is None else parameters
        self.priority = priority
        self.deadline_s = deadline_s


def prepare(config: ModelConfig, inputs: Sequence[TensorSpec], request: InferRequest) -> tuple[int, Hashable]:
    """Check a request and put its inputs in the model's order: its rows, and the group it may share a batch with.

    Raises RequestFailed (INVALID) for anything that does not fit: names, datatypes, shapes, sizes.
    """
    given: dict[str, Tensor] = {}
    for tensor in request.inputs:
        if tensor.name in given:
            raise _invalid(f"input {tensor.name!r} is given twice")
        given[tensor.name] = tensor
    ordered: list[Tensor] = []
    rows: int | None = None
    batches = config.batching.max_rows > 0
    bound: dict[str, int] = {}
    key: list[Hashable] = []
    pad = config.batching.pad
    for spec in inputs:
        tensor_or_none = given.pop(spec.name, None)
        if tensor_or_none is None:
            if spec.is_optional:
                key.append(None)
                continue
            raise _invalid(
                f"unable to find data for input tensor {spec.name!r} of model {config.name!r}",
                expected=", ".join(s.name for s in inputs),
            )
        tensor = tensor_or_none
        if tensor.datatype != spec.datatype:
            raise _invalid(f"input {spec.name!r} is {tensor.datatype}", expected=spec.datatype)
        try:
            check(tensor)
        except DataError as fault:
            raise _invalid(fault.problem, expected=fault.expected) from fault
        shape = tensor.shape
        if batches:
            if not shape or shape[0] < 1:
                raise _invalid(
                    f"input {spec.name!r} has shape {list(shape)}", expected="a first dimension of 1 or more rows"
                )
            if rows is not None and shape[0] != rows:
                raise _invalid(
                    f"input {spec.name!r} has {shape[0]} rows", expected=f"{rows}, as many as the other inputs"
                )
            rows = shape[0]
            shape = shape[1:]
        _fit(spec, shape, bound, has_rows=batches)
        padded = tuple(
            -1 if isinstance(want, str) and want in pad else size for want, size in zip(spec.shape, shape, strict=True)
        )
        key.append(padded)
        ordered.append(tensor)
    if given:
        names = ", ".join(repr(name) for name in given)
        raise _invalid(
            f"unexpected inference input {names} for model {config.name!r}", expected=", ".join(s.name for s in inputs)
        )
    if batches and rows is not None and rows > config.batching.max_rows:
        raise _invalid(
            f"inference request batch-size of {rows} rows",
            expected=f"at most {config.batching.max_rows} for {config.name!r}",
        )
    request.inputs = ordered
    return (rows or 1), tuple(key)


def _fit(spec: TensorSpec, shape: tuple[int, ...], bound: dict[str, int], *, has_rows: bool) -> None:
    is_fit = len(shape) == len(spec.shape)
    if is_fit:
        for want, size in zip(spec.shape, shape, strict=True):
            if isinstance(want, str):
                is_fit = is_fit and bound.setdefault(want, size) == size
            elif want != -1:
                is_fit = is_fit and want == size
    if not is_fit:
        rest = list(spec.shape)
        want_all = ["rows", *rest] if has_rows else rest
        got = ["rows", *shape] if has_rows else list(shape)
        raise _invalid(f"unexpected shape for input {spec.name!r}: {got}", expected=f"{want_all}")


def check_outputs(outputs: Sequence[TensorSpec], asked: Sequence[str] | None, model: str) -> None:
    """Raise RequestFailed (INVALID) for an output that the model has not, or one asked for twice."""
    if asked is None:
        return
    names = {spec.name for spec in outputs}
    seen: set[str] = set()
    for name in asked:
        if name not in names:
            raise _invalid(
                f"unexpected inference output {name!r} for model {model!r}", expected=", ".join(sorted(names))
            )
        if name in seen:
            raise _invalid(f"output {name!r} already exists in request")
        seen.add(name)


def _invalid(problem: str, *, expected: str | None = None) -> RequestFailed:
    return RequestFailed(problem, reason=Reason.INVALID, expected=expected)
