"""One training step of a transformer under a layout: tensor, pipeline, data, context and expert parallel together.

The step is the pipeline schedule of stages (layers with their exposed tensor, context and expert exchanges), then what
of the gradient exchange does not hide behind the last micro-batch's backward, then the optimizer. Parts add up to the
step. Assumes equal devices but for ``slowdown``, evenly loaded experts, and exchanges that do not slow compute down by
more than ``INTERFERENCE``. Wrong where the framework serialises what could overlap: set ``Layout.overlap`` to False.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from wirespeed.errors import UsageError
from wirespeed.sim.axes import AxisCost, AxisCosts, Operation
from wirespeed.sim.layout import Layout
from wirespeed.sim.memory import MemoryUse, memory_use, stage_parameters
from wirespeed.sim.pipeline import run_pipeline, uniform_pipeline_s
from wirespeed.sim.transformer import LayerCost, head_s, key, layer_cost
from wirespeed.spec.device import BYTES_OF, Device
from wirespeed.spec.model import Transformer

INTERFERENCE = 0.02
"""Compute that a collective over NICs takes from a device while it runs (Calculon's systems: 2 % of the processor)."""
OPTIMIZER_BYTES = 46
"""Bytes moved per parameter by Adam in mixed precision: gradient scaling and clipping 12, update of fp32 state 28,
weights written in 16 bits and gradients cleared 6."""
COMPUTE_UNCERTAINTY = 0.08
"""Of device times from a roofline: the error on published runs that were not used to calibrate (docs/validation)."""
NETWORK_UNCERTAINTY = 0.25
"""Of exchanges whose cost states none."""


class LayoutPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``parts_s`` sum to ``step_s``; ``binding`` is the resource that takes most of it, in words.

    ``binding_link`` is the link behind the largest exposed exchange, None where none is exposed. ``lower_bound_s``: no
    schedule of this layout on these devices is faster. ``flop_per_s``: model operations per second and device, counted
    as published tables count them (recomputation included where it is full).
    """

    layout: Layout
    step_s: float
    parts_s: dict[str, float]
    binding: str
    binding_link: str | None
    lower_bound_s: float
    is_in_range: bool
    uncertainty: float
    memory: MemoryUse
    flop_per_s: float
    samples_per_s: float
    wire_bytes: float
    """Bytes that one device hands to its groups per step."""

    @property
    def compute_s(self) -> float:
        """What is not waiting for a network or a pipeline."""
        return sum(part_s for name, part_s in self.parts_s.items() if name in COMPUTE_PARTS)

    @property
    def exposed_s(self) -> float:
        """Communication that lengthens the step."""
        return sum(part_s for name, part_s in self.parts_s.items() if name.endswith("exchange"))


COMPUTE_PARTS = ("forward", "backward", "recompute", "loss", "optimizer")


class _Parts:
    """Sums by name, with the link behind each exchange."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.costs: dict[str, list[tuple[float, AxisCost]]] = {}
        self.bytes = 0.0

    def add(self, name: str, seconds: float) -> None:
        if seconds > 0:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def note(self, name: str, seconds: float, cost: AxisCost) -> None:
        self.costs.setdefault(name, []).append((seconds, cost))


def predict_layout(
    shape: Transformer,
    device: Device,
    layout: Layout,
    costs: AxisCosts,
    *,
    slowdown: float | Sequence[float] = 1.0,
    exact_schedule: bool = True,
    check_memory: bool = True,
) -> LayoutPrediction:
    """Predict one step of ``layout``.

    ``slowdown``: how much slower than ``device`` the slowest device of each pipeline stage is (1 and above), one number
    or one per stage; synchronous training waits for it. ``exact_schedule`` False takes the closed form of equal stages,
    which is what a search over thousands of layouts wants. Raises UsageError for sizes that do not divide and for
    memory that does not suffice.
    """
    layout.check(shape)
    memory = memory_use(shape, layout)
    if check_memory:
        memory.check(device, layout.name)
    slow = _slowdowns(slowdown, layout.pipeline)
    parts = _Parts()
    micro = layout.num_microbatches
    layers = shape.num_layers / layout.pipeline
    layer = layer_cost(shape, key(device), layout)
    forward_x, backward_x = _layer_exchanges(shape, layout, layer, costs, parts)
    forward_head_s, backward_head_s = head_s(shape, device, layout)
    recompute_s = layer.recompute_s
    if layout.recompute == "full" and layout.tensor > 1:
        backward_x += forward_x  # the recomputed forward exchanges again
    last = layout.pipeline - 1
    forward_s = tuple(
        (layers * layer.forward_s + (forward_head_s if stage == last else 0.0)) * slow[stage] + layers * forward_x
        for stage in range(layout.pipeline)
    )
    backward_s = tuple(
        (layers * (layer.backward_s + recompute_s) + (backward_head_s if stage == last else 0.0)) * slow[stage]
        + layers * backward_x
        for stage in range(layout.pipeline)
    )
    pipeline_s, ideal_s = _pipeline(layout, shape, costs, forward_s, backward_s, parts, exact=exact_schedule)
    busiest = max(range(layout.pipeline), key=lambda stage: forward_s[stage] + backward_s[stage])
    factor = slow[busiest] * micro
    parts.add("forward", layers * layer.forward_s * factor)
    parts.add("backward", layers * layer.backward_s * factor)
    parts.add("recompute", layers * recompute_s * factor)
    if busiest == last:
        parts.add("loss", (forward_head_s + backward_head_s) * factor)
    _scale_exchanges(parts, layers * micro, forward_x + backward_x)
    parts.add("pipeline bubble and transfers", pipeline_s - ideal_s)
    window_s = (forward_s[0], backward_s[0])
    bound_s = _gradient_exchange(shape, layout, costs, parts, layers, window_s)
    optimizer_s = _optimizer_s(shape, device, layout) * max(slow)
    parts.add("optimizer", optimizer_s)
    step_s = sum(parts.seconds.values())
    compute_s = sum(parts.seconds.get(name, 0.0) for name in COMPUTE_PARTS)
    lower_s = max(
        micro * (layers * (layer.forward_s + layer.backward_s)) * min(slow) + optimizer_s, min(bound_s, step_s)
    )
    return LayoutPrediction(
        layout=layout,
        step_s=step_s,
        parts_s=parts.seconds,
        binding=_binding(parts),
        binding_link=_binding_link(parts),
        lower_bound_s=min(lower_s, step_s),
        is_in_range=all(cost.is_in_range for held in parts.costs.values() for _, cost in held),
        uncertainty=_uncertainty(parts, compute_s + max(0.0, pipeline_s - ideal_s), step_s),
        memory=memory,
        flop_per_s=shape.step_flops(layout.global_batch, recompute=layout.recompute == "full")
        / (step_s * layout.num_ranks),
        samples_per_s=layout.global_batch / step_s,
        wire_bytes=parts.bytes,
    )


def least_step_s(shape: Transformer, device: Device, layout: Layout, costs: AxisCosts) -> float:
    """Compute, filling of the pipeline and tensor exchanges, by the closed form: never more than ``predict_layout``.

    A search sorts by it and stops where it passes the best answer so far: what is left out (gradients, transfers,
    experts) differs from layout to layout and takes longer to cost.
    """
    layer = layer_cost(shape, key(device), layout)
    forward_x, backward_x = 0.0, 0.0
    if layout.tensor > 1:
        forward_x = _tensor_exchange(layout, layer, costs)[0]
        backward_x = forward_x * (2 if layout.recompute == "full" else 1)
    layer_s = layer.forward_s + layer.backward_s + layer.recompute_s + forward_x + backward_x
    stage_s = shape.num_layers / layout.pipeline * layer_s
    head = sum(head_s(shape, device, layout))
    # The last stage sets the pace, the others fill the pipeline.
    fill_s = (layout.pipeline - 1) / layout.interleave * stage_s
    return layout.num_microbatches * (stage_s + head) + fill_s + _optimizer_s(shape, device, layout)


def _tensor_exchange(layout: Layout, layer: LayerCost, costs: AxisCosts) -> tuple[float, float, AxisCost]:
    """Exposed seconds of one layer's forward, those of one exchange, and the cost behind it."""
    if layout.sequence_parallel:
        gather = costs.cost("tensor", "all_gather", layer.tensor_bytes)
        scatter = costs.cost("tensor", "reduce_scatter", layer.tensor_bytes)
        # Backward gathers the input once more for the weights' gradient, beside the product: it hides.
        one_s = gather.seconds + scatter.seconds
        worst = max(gather, scatter, key=lambda cost: cost.seconds)
    else:
        worst = costs.cost("tensor", "all_reduce", layer.tensor_bytes)
        one_s = worst.seconds
    return layer.tensor_exchanges * one_s * (1 - layout.tensor_overlap), one_s, worst


def _slowdowns(slowdown: float | Sequence[float], stages: int) -> tuple[float, ...]:
    held = (float(slowdown),) * stages if isinstance(slowdown, int | float) else tuple(slowdown)
    if len(held) != stages or not all(1 <= one < math.inf for one in held):
        raise UsageError(f"got slowdowns {held}", expected=f"1 or more for each of {stages} stages")
    return held


def _layer_exchanges(
    shape: Transformer, layout: Layout, layer: LayerCost, costs: AxisCosts, parts: _Parts
) -> tuple[float, float]:
    """Exposed seconds of one layer's exchanges for one micro-batch, forward and backward."""
    forward_s = backward_s = 0.0
    if layout.tensor > 1:
        exposed_s, one_s, worst = _tensor_exchange(layout, layer, costs)
        parts.note("tensor exchange", one_s, worst)
        forward_s += exposed_s
        backward_s += exposed_s
    if layout.expert > 1:
        swap = costs.cost("expert", "all_to_all", layer.expert_bytes)
        parts.note("expert exchange", 2 * swap.seconds, swap)
        forward_s += 2 * swap.seconds
        backward_s += 2 * swap.seconds
    if layout.context > 1:
        ring = costs.cost("context", "all_gather", layer.context_bytes)
        parts.note("context exchange", ring.seconds, ring)
        # Ring attention passes keys and values on while it computes: the share of attention in the layer hides it.
        share = 4 * shape.sequence * shape.sequence * shape.hidden / shape.layer_flops()
        forward_s += max(0.0, ring.seconds - share * layer.forward_s)
        backward_s += max(0.0, 2 * ring.seconds - share * layer.backward_s)
    return forward_s, backward_s


def _scale_exchanges(parts: _Parts, times: float, per_layer_s: float) -> None:
    """Spread a layer's exposed exchange over its axes in proportion to their full times."""
    names = [name for name in ("tensor exchange", "expert exchange", "context exchange") if name in parts.costs]
    whole = sum(seconds for name in names for seconds, _ in parts.costs[name])
    for name in names:
        own = sum(seconds for seconds, _ in parts.costs[name])
        if whole > 0:
            parts.add(name, times * per_layer_s * own / whole)


def _pipeline(  # noqa: PLR0917 - private, called in one place
    layout: Layout,
    shape: Transformer,
    costs: AxisCosts,
    forward_s: tuple[float, ...],
    backward_s: tuple[float, ...],
    parts: _Parts,
    *,
    exact: bool,
) -> tuple[float, float]:
    micro = layout.num_microbatches
    ideal_s = micro * max(f + b for f, b in zip(forward_s, backward_s, strict=True))
    if layout.pipeline == 1:
        return ideal_s, ideal_s
    tokens = layout.micro_batch * shape.sequence / layout.context
    # Scatter-gather (Narayanan et al. 2021, section 4.1): every rank of the tensor group sends its share.
    message = BYTES_OF[layout.dtype] * tokens * shape.hidden / layout.tensor
    send = costs.cost("pipeline", "send", message)
    parts.note("pipeline bubble and transfers", send.seconds, send)
    parts.bytes += 2 * message * micro * layout.interleave
    if exact:
        run = run_pipeline(
            forward_s,
            backward_s,
            num_microbatches=micro,
            transfer_s=send.seconds,
            interleave=layout.interleave,
        )
        total_s = run.total_s
    else:
        slowest_s = ideal_s / micro
        total_s = uniform_pipeline_s(
            slowest_s,
            stages=layout.pipeline,
            num_microbatches=micro,
            transfer_s=send.seconds,
            interleave=layout.interleave,
        )
    if shape.is_tied and shape.vocab:
        # First and last stage hold the same table: its gradient is summed over the two of them.
        table = costs.cost("pipeline", "send", layout.gradient_bytes * shape.vocab * shape.hidden / layout.tensor)
        parts.note("table exchange", table.seconds, table)
        parts.add("table exchange", table.seconds)
    return total_s, ideal_s


def _gradient_exchange(  # noqa: PLR0917 - private, called in one place
    shape: Transformer,
    layout: Layout,
    costs: AxisCosts,
    parts: _Parts,
    layers: float,
    window_s: tuple[float, float],
) -> float:
    """Add the exposed gradient (and weight) exchange; gives its lower bound."""
    replicas = layout.data * layout.context
    if replicas == 1:
        return 0.0
    dense, experts = stage_parameters(shape, layout)
    width = BYTES_OF[layout.dtype]
    forward_s, backward_s = window_s
    micro = layout.num_microbatches
    exposed_s = bound_s = 0.0
    # Expert weights have only replicas / expert copies; their ring is shorter, their bytes count alike.
    count = dense + (experts if replicas > layout.expert else 0.0)
    num_buckets = max(1.0, layers)

    def exchange(operation: Operation, bytes_each: float, hiding_s: float) -> None:
        nonlocal exposed_s, bound_s
        times = micro if layout.zero == 3 else 1
        cost = costs.cost("data", operation, bytes_each * count / num_buckets)
        whole_s = cost.seconds * num_buckets
        parts.bytes += bytes_each * count * times
        parts.note("gradient exchange", whole_s * times, cost)
        bound_s += cost.lower_bound_s * num_buckets * times
        if layout.overlap:
            # One bucket per layer becomes ready at even steps of the window: the queue drains no sooner than either.
            tail_s = max(whole_s - hiding_s * (1 - 1 / num_buckets), whole_s / num_buckets)
            exposed_s += times * (tail_s + INTERFERENCE * min(hiding_s, whole_s))
        else:
            exposed_s += times * whole_s

    if layout.zero == 0:
        exchange("all_reduce", layout.gradient_bytes, backward_s)
    elif layout.zero == 3:
        # Weights are gathered for forward and again for backward of every micro-batch, gradients scattered each time;
        # gathers and scatters share the wire, so each hides behind half of backward.
        exchange("all_gather", width, forward_s)
        exchange("all_gather", width, backward_s / 2)
        exchange("reduce_scatter", layout.gradient_bytes, backward_s / 2)
    else:
        exchange("reduce_scatter", layout.gradient_bytes, backward_s)
        exchange("all_gather", width, forward_s)
    parts.add("gradient exchange", exposed_s)
    return bound_s


def _optimizer_s(shape: Transformer, device: Device, layout: Layout) -> float:
    dense, experts = stage_parameters(shape, layout)
    replicas = layout.data * layout.context if layout.zero else 1
    return device.stream_s(OPTIMIZER_BYTES * (dense / replicas + experts / max(1, replicas // layout.expert)))


def _binding(parts: _Parts) -> str:
    groups = {"compute": 0.0}
    for name, seconds in parts.seconds.items():
        group = "compute" if name in COMPUTE_PARTS else name
        groups[group] = groups.get(group, 0.0) + seconds
    return max(groups, key=lambda group: groups[group])


def _binding_link(parts: _Parts) -> str | None:
    exposed = {name: parts.seconds.get(name, 0.0) for name in parts.costs}
    exposed = {name: s for name, s in exposed.items() if s > 0 and any(own_s > 0 for own_s, _ in parts.costs[name])}
    if not exposed:
        return None
    worst = max(exposed, key=lambda name: exposed[name])
    return max(parts.costs[worst], key=lambda held: held[0])[1].binding


def _uncertainty(parts: _Parts, compute_s: float, step_s: float) -> float:
    if step_s <= 0:
        return 0.0
    squared = (COMPUTE_UNCERTAINTY * compute_s) ** 2
    for name, held in parts.costs.items():
        worst = max(held, key=lambda one: one[0])[1]
        share = NETWORK_UNCERTAINTY if worst.uncertainty is None else worst.uncertainty
        if name != "pipeline bubble and transfers":
            squared += (share * parts.seconds.get(name, 0.0)) ** 2
    return math.sqrt(squared) / step_s
