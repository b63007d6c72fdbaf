"""NVTX ranges of a session, so that Nsight Systems (and `wirespeed profile --trace`) sees its steps and its stages.

WIRESPEED_NVTX=1 asks for them. On CUDA they go through torch's own NVTX, elsewhere through the ``nvtx`` package. On the
training thread there is ``step N`` and within it ``data``, ``forward``, ``backward``, ``exposed`` and ``optimizer``; on
the lanes ``stage K of bucket B`` and the collective, such as ``all_to_all of bucket B``. Ranges are those of the host:
on an accelerator its work runs on after the range that launched it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

import torch

from wirespeed.errors import MissingCapability

VARIABLE = "WIRESPEED_NVTX"


class RangeBackend(Protocol):
    """Where ranges go. Ranges of one thread are nested: what was pushed last is popped first."""

    def push(self, name: str) -> None:
        """A range begins on this thread."""
        ...

    def pop(self) -> None:
        """The newest open range of this thread ends."""
        ...


class _TorchRanges:
    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class _PackageRanges:
    def __init__(self) -> None:
        import nvtx  # type: ignore[import-not-found, unused-ignore]

        self._nvtx = nvtx

    def push(self, name: str) -> None:
        self._nvtx.push_range(name, domain="wirespeed")

    def pop(self) -> None:
        self._nvtx.pop_range(domain="wirespeed")


def span(backend: RangeBackend | None, name: str) -> contextlib.AbstractContextManager[None]:
    """``with span(backend, name)``: a range around what runs inside, or nothing without a backend."""
    return contextlib.nullcontext() if backend is None else _span(backend, name)


@contextlib.contextmanager
def _span(backend: RangeBackend, name: str) -> Iterator[None]:
    backend.push(name)
    try:
        yield
    finally:
        backend.pop()


def are_wanted() -> bool:
    """Whether the environment asks for ranges."""
    return os.environ.get(VARIABLE) == "1"


def open_backend() -> RangeBackend:
    """Where ranges can go on this host. Raises MissingCapability where nowhere."""
    if torch.cuda.is_available():
        return _TorchRanges()
    try:
        return _PackageRanges()
    except ImportError:
        raise MissingCapability(
            "NVTX ranges need CUDA or the nvtx package", hint=f"pip install nvtx, or leave {VARIABLE} unset"
        ) from None


class StepRanges:
    """Turns a step clock's events into ranges: the step, and within it the part that runs."""

    def __init__(self, backend: RangeBackend) -> None:
        self._backend = backend
        self._has_step = self._has_part = False
        self._num_steps = 0

    def on_event(self, event: str) -> None:
        """An event of ``measure.steps.StepClock``, as it happens."""
        part = _PARTS.get(event)
        if part is None:
            return
        self._end_part()
        if not self._has_step:
            self._backend.push(f"step {self._num_steps}")
            self._has_step = True
        if event == "optimizer_end":
            self._backend.pop()
            self._num_steps += 1
            self._backend.push(f"step {self._num_steps}")
        self._backend.push(part)
        self._has_part = True

    def close(self) -> None:
        """End what is open."""
        self._end_part()
        if self._has_step:
            self._backend.pop()
            self._has_step = False

    def _end_part(self) -> None:
        if self._has_part:
            self._backend.pop()
            self._has_part = False


_PARTS = {
    "step_begin": "data",
    "forward_begin": "forward",
    "forward_end": "backward",
    "last_bucket_ready": "exposed",
    "backward_end": "other",
    "optimizer_begin": "optimizer",
    "exchange_begin": "exposed",
    "optimizer_end": "data",
    "evaluation_begin": "evaluation",
    "evaluation_end": "data",
}
