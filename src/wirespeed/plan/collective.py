"""Predict one collective on a fabric: how long it takes, what binds it, and what no algorithm could beat.

A thin question around ``fabric.timing``, with the ranks on named hosts in a given order, so that a prediction can be
held against a run that used the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

import msgspec

from wirespeed.errors import UsageError
from wirespeed.fabric.patterns import Operation
from wirespeed.fabric.placement import Placement, place, place_on
from wirespeed.fabric.schedules import OPERATIONS
from wirespeed.fabric.timing import CORES, Cost, prepare
from wirespeed.fabric.topology import Fabric
from wirespeed.records import Collective
from wirespeed.spec.payloads import bus_factor

BindingKind = Literal["host NIC", "uplink", "inside a host", "latency", "cores", "nothing"]


class CollectivePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of ``size_bytes`` (the convention of ``records``) over ``num_ranks``.

    ``binding`` is the link or resource by name, ``binding_kind`` what sort of thing it is; ``busy_s`` how long the link
    that takes the longest carries bytes. ``busbw_bit_per_s`` is None
    for operations that have no bus bandwidth.
    """

    operation: str
    size_bytes: int
    num_ranks: int
    order: tuple[str, ...]
    seconds: float
    latency_s: float
    lower_bound_s: float
    binding: str
    binding_kind: BindingKind
    algorithm: str
    origin: str
    is_in_range: bool
    uncertainty: float
    wire_bytes: float
    busy_s: float
    busbw_bit_per_s: float | None


def predict_collective(
    fabric: Fabric,
    operation: str,
    size_bytes: int,
    *,
    order: Sequence[str] | None = None,
    num_ranks: int | None = None,
    ranks_per_host: int | None = None,
    algorithm: str = "auto",
    backend: str = "any",
    dtype: str = "float32",
) -> CollectivePrediction:
    """Predict it over ranks on the hosts named in ``order`` (None: rack by rack, on as many as ``num_ranks`` needs).

    Raises UsageError for what cannot be asked, DataError where the fabric tells neither rates nor a curve.
    """
    if operation not in OPERATIONS:
        raise UsageError(f"got operation {operation!r}", expected=", ".join(OPERATIONS))
    if order is None:
        placement = place(fabric, num_ranks, ranks_per_host)
    else:
        placement = place_on(fabric, order, ranks_per_host=1 if ranks_per_host is None else ranks_per_host)
        if num_ranks not in (None, placement.num_ranks):
            raise UsageError(f"got {num_ranks} ranks and an order of {placement.num_ranks}", expected="one of them")
    held = cast(Operation, operation)
    cost = prepare(fabric, held, placement, algorithm=algorithm, backend=backend, dtype=dtype).cost(size_bytes)
    return _answer(fabric, placement, operation, size_bytes, cost)


def _answer(fabric: Fabric, placement: Placement, operation: str, size_bytes: int, cost: Cost) -> CollectivePrediction:
    busbw = None
    if operation in get_args(Collective) and cost.seconds > 0:
        factor = bus_factor(cast(Collective, operation), placement.num_ranks)
        busbw = 8 * size_bytes * factor / cost.seconds
    return CollectivePrediction(
        operation=operation,
        size_bytes=size_bytes,
        num_ranks=placement.num_ranks,
        order=tuple(dict.fromkeys(fabric.hosts[index].name for index in placement.host.tolist())),
        seconds=cost.seconds,
        latency_s=cost.latency_s,
        lower_bound_s=cost.lower_bound_s,
        binding=cost.binding,
        binding_kind=binding_kind(cost.binding),
        algorithm=cost.algorithm,
        origin=cost.origin,
        is_in_range=cost.is_in_range,
        uncertainty=cost.uncertainty,
        wire_bytes=cost.wire_bytes,
        busy_s=cost.busy_s,
        busbw_bit_per_s=busbw,
    )


def binding_kind(binding: str) -> BindingKind:
    """What sort of thing a ``Cost.binding`` names."""
    if binding == "latency":
        return "latency"
    if binding == CORES:
        return "cores"
    if binding == "nothing":
        return "nothing"
    if binding.startswith("NIC") or binding == "what one connection reaches":
        return "host NIC"
    if binding.startswith(("uplink", "link")):
        return "uplink"
    return "inside a host"
