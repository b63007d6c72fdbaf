"""Workloads as files: read and write a TrainingWorkload as JSON, take one from a record, or assume one from sizes.

A workload of a real module is measured where torch is (`wirespeed tune`, `train`). ``from_parameters`` knows only sizes
and one backward time; it assumes that a gradient's time is proportional to its elements, which holds for matrices of
one batch size and is wrong for convolutions (many operations per element) and embeddings (few), and says ``assumed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.records import MAX_RECORD_BYTES, write_bytes
from wirespeed.spec.comparison import TuneRecord
from wirespeed.spec.workload import GradientTensor, TrainingWorkload

SCHEMA = 1


class WorkloadFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="training_workload"):
    """A workload on disk. ``schema`` counts up when a reader of the old form would be wrong."""

    schema: int = SCHEMA
    workload: TrainingWorkload


def write_workload(path: str | Path, workload: TrainingWorkload) -> Path:
    """Write as indented JSON, atomically."""
    content = msgspec.json.encode(WorkloadFile(workload=workload))
    return write_bytes(path, msgspec.json.format(content, indent=2) + b"\n")


def read_workload(path: str | Path) -> TrainingWorkload:
    """Read what ``write_workload`` wrote, or the workload inside a `tune` record. Raises DataError naming the file."""
    source = Path(path)
    try:
        if source.stat().st_size > MAX_RECORD_BYTES:
            raise DataError(f"{source} is over {MAX_RECORD_BYTES} bytes", expected="a workload file")
        content = source.read_bytes()
    except OSError as fault:
        raise DataError(f"cannot read {source}: {fault.strerror or fault}") from fault
    return workload_from_json(content, source=str(source))


class _Head(msgspec.Struct):
    kind: str
    schema: int


def workload_from_json(content: bytes, *, source: str = "input") -> TrainingWorkload:
    """Decode and check a workload file or a `tune` record. ``source`` names the origin in errors."""
    kinds: dict[str, type[WorkloadFile] | type[TuneRecord]] = {"training_workload": WorkloadFile, "tune": TuneRecord}
    try:
        head = msgspec.json.decode(content, type=_Head)
    except msgspec.MsgspecError as fault:
        raise DataError(f"{source} is not a workload: {fault}", expected="JSON with kind and schema") from fault
    kind = kinds.get(head.kind)
    if kind is None:
        raise DataError(f"{source} is of kind {head.kind!r}", expected=f"one of {', '.join(kinds)}")
    limit = SCHEMA if kind is WorkloadFile else TuneRecord.SCHEMA
    if head.schema > limit:
        raise DataError(
            f"{source} has schema {head.schema} of {head.kind!r}",
            expected=f"schema {limit} or lower",
            hint="it was written by a newer wirespeed: upgrade to read it",
        )
    try:
        held = msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, DataError) as fault:
        raise DataError(f"{source} is damaged: {fault}", expected=f"a {head.kind!r} of schema {limit}") from fault
    if held.workload is None:
        raise DataError(f"{source} holds no workload", hint="make one with `wirespeed tune`")
    return held.workload


def from_parameters(
    parameters: Sequence[tuple[str, int]],
    *,
    backward_s: float,
    num_ranks: int,
    forward_s: float | None = None,
    optimizer_s: float = 0.0,
    data_s: float = 0.0,
    other_s: float = 0.0,
    ranks_per_host: int = 1,
    cpus_per_rank: float | None = None,
) -> TrainingWorkload:
    """A workload from ``(name, number of elements)`` in forward order, as ``named_parameters`` gives them.

    Backward visits them in reverse, each taking time in proportion to its elements; forward is assumed to take half of
    backward where it is not given (a matrix product forward, two backward).
    """
    if not parameters or any(num_elements < 1 for _, num_elements in parameters):
        raise UsageError("got no parameter, or an empty one", expected="(name, number of elements), one or more")
    if backward_s < 0:
        raise UsageError(f"got a backward of {backward_s:g} s", expected="0 s or more")
    total = sum(num_elements for _, num_elements in parameters)
    gradients = []
    done = 0
    for name, num_elements in reversed(parameters):
        done += num_elements
        gradients.append(
            GradientTensor(name=name, num_elements=num_elements, ready_s=min(backward_s * done / total, backward_s))
        )
    return TrainingWorkload(
        gradients=tuple(gradients),
        forward_s=backward_s / 2 if forward_s is None else forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        data_s=data_s,
        other_s=other_s,
        num_ranks=num_ranks,
        ranks_per_host=ranks_per_host,
        cpus_per_rank=cpus_per_rank,
        origin="assumed",
    )
