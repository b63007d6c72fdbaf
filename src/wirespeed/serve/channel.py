"""What the server and a worker process on the same host share: a socket for words, and memory for tensors.

The memory is an anonymous file (memfd) that both map, half for a batch's inputs and half for its outputs. It has no
name that could be left behind, and takes real memory only where it was written. Words are msgpack of the types below,
one per packet, below MAX_WORD_BYTES. One batch is under way at a time; whoever sent last leaves the memory alone.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from wirespeed.errors import DataError
from wirespeed.serve.backends.base import Batch, Loaded
from wirespeed.serve.config import ModelConfig
from wirespeed.serve.tensors import Buffer, Tensor

MAX_WORD_BYTES = 128 * 1024
_ALIGN = 64

Placed = tuple[str, str, tuple[int, ...], int, int]
"""A tensor in shared memory: name, datatype, shape, offset, bytes."""


class Load(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """The server's first word."""

    config: ModelConfig
    half_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The model is loaded."""

    loaded: Loaded


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The model could not be loaded; the worker ends."""

    text: str


class Run(msgspec.Struct, frozen=True, tag="run", array_like=True):
    """Run a batch whose inputs are in memory. Tensors: name, datatype, shape, offset, bytes."""

    number: int
    tensors: list[Placed]
    batch: Batch


class Ran(msgspec.Struct, frozen=True, tag="ran", array_like=True):
    """The batch is done; ``tensors`` lie in the memory for outputs. ``apart``: per request, tensors or an error."""

    number: int
    tensors: list[Placed] | None
    apart: list[list[Placed] | str]
    compute_ns: int
    num_runs: int


ToWorker = Load | Run
FromWorker = Ready | Failed | Ran

_ENCODER = msgspec.msgpack.Encoder()
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(word: ToWorker | FromWorker) -> bytes:
    """A word's packet. Raises DataError where it is too long for one."""
    packet = _ENCODER.encode(word)
    if len(packet) > MAX_WORD_BYTES:
        raise DataError(
            f"the names, shapes and parameters of a batch take {len(packet)} bytes",
            expected=f"at most {MAX_WORD_BYTES}",
        )
    return packet


class Half:
    """One half of the shared memory. Tensors are laid one after another, each at a multiple of 64 bytes."""

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self._view = memoryview(memory)[start : start + size]
        self._memory = memory
        self._start = start
        self._size = size
        self._used = 0
        self._peak = 0

    def begin(self) -> None:
        """Start over; what was there is no longer needed."""
        self._used = 0

    def put(self, name: str, datatype: str, shape: Sequence[int], parts: Sequence[Buffer]) -> Placed:
        """Copy a tensor's bytes, given in parts, and say where they are. Raises DataError where they do not fit."""
        start = place = -(-self._used // _ALIGN) * _ALIGN
        total = sum(len(part) for part in parts)
        if start + total > self._size:
            raise DataError(
                f"the tensors of a batch take more than {self._size} bytes",
                expected="less",
                hint="raise instances.max_batch_size in model.toml, or lower batching.max_rows",
            )
        for part in parts:
            end = place + len(part)
            self._view[place:end] = part
            place = end
        self._used = place
        self._peak = max(self._peak, place)
        return name, datatype, tuple(shape), start, total

    def get(self, placed: Placed) -> Tensor:
        """The tensor there; its data is a view of the memory."""
        name, datatype, shape, start, size = placed
        if start < 0 or size < 0 or start + size > self._size:
            raise DataError(f"tensor {name!r} lies outside the shared memory")
        return Tensor(name, datatype, shape, self._view[start : start + size])

    def give_back(self, keep_bytes: int) -> None:
        """Give memory beyond ``keep_bytes`` back to the kernel, where a large batch took it."""
        if self._peak > keep_bytes:
            page = mmap.PAGESIZE
            first = self._start + -(-keep_bytes // page) * page
            self._memory.madvise(mmap.MADV_REMOVE, first, self._start + self._size - first)
            self._peak = keep_bytes

    def close(self) -> None:
        """Let go of the memory."""
        self._view.release()


def make_memory(half_bytes: int) -> tuple[int, mmap.mmap]:
    """A new memory of two halves: its descriptor, and this process's mapping."""
    descriptor = os.memfd_create("wirespeed-worker", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 2 * half_bytes)
        return descriptor, mmap.mmap(descriptor, 2 * half_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def map_memory(descriptor: int, half_bytes: int) -> mmap.mmap:
    """A mapping of a memory that another process made."""
    return mmap.mmap(descriptor, 2 * half_bytes)


def request_parameters(parameters: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The parameters of a batch's requests; nothing where no request has any."""
    return tuple(parameters) if any(parameters) else ()
