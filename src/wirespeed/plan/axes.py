"""A fabric's answers to the simulator: what an exchange along one axis of a layout costs where its ranks are placed.

Ranks are numbered tensor fastest, then context, data and pipeline. All groups of an axis communicate at the same time,
so that NICs and uplinks which they share are shared in the model too. Models are prepared once per axis and operation
and then asked for many sizes.
"""

from __future__ import annotations

import math

import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric.calibrated import cores_of
from wirespeed.fabric.placement import Ints, Placement, stack_groups
from wirespeed.fabric.timing import CollectiveModel, prepare
from wirespeed.fabric.topology import Fabric
from wirespeed.records import Collective
from wirespeed.sim.axes import FREE, AxisCost, Operation
from wirespeed.sim.costs import StageCost, TransferCost
from wirespeed.sim.layout import Axis, Layout
from wirespeed.sim.training import STAGES
from wirespeed.spec.device import Device
from wirespeed.spec.payloads import BYTES_PER_ELEMENT
from wirespeed.spec.strategy import Strategy, Transfer

UNMEASURED = 0.2
"""Relative uncertainty of a collective costed from presets: their efficiencies differ by this much between sites."""
MAX_GROUPS = 64
"""Groups of one axis that are laid on links; of more, runs of neighbours are taken evenly."""
RUN = 16
"""Neighbouring groups that are kept together: those of one host or two share its NICs."""


def axis_groups(layout: Layout, axis: Axis) -> list[Ints]:
    """The groups of ``axis``: arrays of ranks. Pairs of neighbouring stages for ``pipeline``."""
    grid = np.arange(layout.num_ranks, dtype=np.int64).reshape(
        layout.pipeline, layout.data, layout.context, layout.tensor
    )
    match axis:
        case "tensor":
            rows = grid.reshape(-1, layout.tensor)
        case "context":
            rows = grid.transpose(0, 1, 3, 2).reshape(-1, layout.context)
        case "data":
            rows = grid.transpose(0, 3, 1, 2).reshape(-1, layout.data * layout.context)
        case "expert":
            rows = grid.transpose(0, 3, 1, 2).reshape(-1, layout.expert)
        case "pipeline":
            if layout.pipeline == 1:
                return []
            flat = grid.reshape(layout.pipeline, -1)
            rows = np.stack([flat[:-1].ravel(), flat[1:].ravel()], axis=1)
    return list(rows[_sample(len(rows))])


def _signature(layout: Layout, axis: Axis) -> tuple[int, ...]:
    """What the groups of an axis depend on."""
    if axis == "tensor":
        return (layout.tensor,)
    inner = layout.context * layout.tensor
    if axis == "pipeline":
        return (layout.pipeline, layout.num_ranks)
    if axis == "expert":
        return (layout.pipeline, layout.data, layout.context, layout.tensor, layout.expert)
    return (layout.pipeline, layout.data, inner, layout.tensor)


def _sample(num_groups: int) -> Ints:
    """Indexes of the groups to lay on links: all of them, or whole runs of neighbours spread evenly."""
    if num_groups <= MAX_GROUPS:
        return np.arange(num_groups, dtype=np.int64)
    starts = np.linspace(0, num_groups - RUN, MAX_GROUPS // RUN).astype(np.int64)
    return np.unique((starts[:, None] + np.arange(RUN)).ravel())


class FabricAxes:
    """``sim.AxisCosts`` of a layout whose ranks are placed on a fabric."""

    def __init__(
        self,
        fabric: Fabric,
        placement: Placement,
        layout: Layout,
        *,
        backend: str = "any",
        shared: dict[tuple[object, ...], CollectiveModel | None] | None = None,
    ) -> None:
        if placement.num_ranks != layout.num_ranks:
            raise UsageError(
                f"got {placement.num_ranks} placed ranks for a layout of {layout.num_ranks}", expected="as many of both"
            )
        self.fabric = fabric
        self.placement = placement
        self.layout = layout
        self.backend = backend
        # Layouts on one placement whose groups along an axis are the same share its models.
        self._models = {} if shared is None else shared

    def cost(self, axis: Axis, operation: Operation, size_bytes: float) -> AxisCost:
        """Cost of one operation in every group of the axis at once."""
        key = (axis, operation, *_signature(self.layout, axis))
        if key not in self._models:
            groups = axis_groups(self.layout, axis)
            is_alone = not groups or groups[0].size < 2
            self._models[key] = (
                None
                if is_alone
                else prepare(
                    self.fabric, operation, self.placement, groups=groups, backend=self.backend, dtype="bfloat16"
                )
            )
        model = self._models[key]
        if model is None:
            return FREE
        found = model.cost(size_bytes)
        return AxisCost(
            seconds=found.seconds,
            latency_s=found.latency_s,
            lower_bound_s=min(found.lower_bound_s, found.seconds),
            binding=found.binding,
            is_in_range=found.is_in_range,
            uncertainty=UNMEASURED if found.uncertainty is None else found.uncertainty,
        )


_PASSES: dict[str, dict[str, float]] = {
    # Bytes moved per fp32 element of the bucket by one pass over memory: what a fused kernel reads and writes.
    "dense": {"encode": 0.0, "decode": 0.0},
    "half": {"encode": 6.0, "decode": 6.0},
    "int8": {"encode": 13.0, "reduce": 2.0, "decode": 5.0},
    "lowrank": {"encode": 20.0, "decode": 12.0},
    "topk": {"encode": 24.0, "decode": 8.0},
}


class PlacedCosts:
    """``sim.StepCosts`` of data-parallel ranks placed on a fabric that need not have been measured.

    Codec stages come from the fabric's curves where it holds them; else from ``device``'s memory rate, as a fused
    kernel would take, and out of range. A codec that neither knows is refused by ``DataError``.
    """

    def __init__(
        self,
        fabric: Fabric,
        placement: Placement,
        device: Device | None,
        *,
        backend: str = "any",
    ) -> None:
        self.fabric = fabric
        self.placement = placement
        self.device = device
        self.backend = backend
        self.kind = fabric.hosts[int(placement.host[0])].kind
        cores = cores_of(fabric, placement, stack_groups(placement, None)) / placement.num_ranks
        self._cpus_per_rank = cores if math.isfinite(cores) else None
        self.bindings: dict[Collective, str] = {}
        self._largest: dict[Collective, int] = {}
        self._models: dict[tuple[Collective, str], CollectiveModel] = {}
        self._transfers: dict[Transfer, TransferCost] = {}

    def transfer(self, transfer: Transfer) -> TransferCost:
        """Cost of one collective of all ranks."""
        held = self._transfers.get(transfer)
        if held is None:
            held = self._transfers[transfer] = self._transfer(transfer)
        return held

    def _transfer(self, transfer: Transfer) -> TransferCost:
        key = (transfer.collective, transfer.dtype)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = prepare(
                self.fabric, transfer.collective, self.placement, backend=self.backend, dtype=transfer.dtype
            )
        found = model.cost(transfer.size_bytes)
        if transfer.size_bytes >= self._largest.get(transfer.collective, 0):
            # A step's small last bucket is bound by latency; what matters is what binds the large ones.
            self._largest[transfer.collective] = transfer.size_bytes
            self.bindings[transfer.collective] = found.binding
        return TransferCost(
            seconds=found.seconds,
            latency_s=min(found.latency_s, found.seconds),
            lower_bound_s=min(found.lower_bound_s, found.seconds),
            is_in_range=found.is_in_range,
            residual=UNMEASURED if found.uncertainty is None else found.uncertainty,
        )

    def stage(self, strategy: Strategy, stage: str, size_bytes: int) -> StageCost:
        """Cost of a codec's local stage."""
        from wirespeed.fabric.collectives import codec_stage_cost

        codec = strategy.name.partition("/")[0]
        if codec == "dense":
            # DDP's own path: it divides the bucket in place, a copy where the fabric holds that curve, else free.
            if stage != "encode" or not any(c.codec == "memcpy" and c.kind == self.kind for c in self.fabric.codecs):
                return StageCost(seconds=0.0)
            codec, stage = "memcpy", "copy"
        if any((c.codec, c.stage, c.kind) == (codec, stage, self.kind) for c in self.fabric.codecs):
            cost = codec_stage_cost(
                self.fabric, codec, stage, size_bytes, self.placement.num_ranks, kind=self.kind,
                cpus_per_rank=self._cpus_per_rank,
            )  # fmt: skip
            return StageCost(seconds=cost.seconds, is_in_range=cost.is_in_range)
        moved = _PASSES.get(strategy.codec, {}).get(stage)
        if self.device is None or moved is None or stage not in STAGES[strategy.codec]:
            # Says what to measure.
            cost = codec_stage_cost(self.fabric, codec, stage, size_bytes, self.placement.num_ranks, kind=self.kind)
            return StageCost(seconds=cost.seconds, is_in_range=cost.is_in_range)
        elements = size_bytes / BYTES_PER_ELEMENT
        if strategy.codec == "topk" and stage == "decode" and strategy.ratio is not None:
            moved = 4.0 + 12.0 * strategy.ratio * self.placement.num_ranks
        return StageCost(seconds=self.device.stream_s(moved * elements), is_in_range=moved == 0, residual=UNMEASURED)
