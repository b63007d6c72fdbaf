"""Times of one training step on a device, tensor by tensor, for data parallelism: a model becomes a workload.

Each layer takes its operations at the device's matrix rate or its activations at the memory rate, whichever is longer;
transformer layers take ``sim.transformer``'s account. Where a step or a throughput was measured or published, give it:
all times are scaled to it, and only the split between layers is assumed.
"""

from __future__ import annotations

import math

from wirespeed.errors import UsageError
from wirespeed.sim.layout import Layout
from wirespeed.sim.transformer import head_s, key, layer_cost
from wirespeed.spec.device import BYTES_OF, Device
from wirespeed.spec.model import Layer, Model
from wirespeed.spec.workload import GradientTensor, TrainingWorkload

FORWARD_PASSES = 3
"""Times that forward moves a layer's activations: written by a kernel, read by the next, half of an in-place one."""
OPTIMIZER_PASSES = 5
"""fp32 arrays that SGD with momentum reads or writes per parameter: gradient, weight and moment in, weight and moment
out."""


def workload_of(
    model: Model,
    device: Device,
    *,
    batch: int,
    num_ranks: int,
    ranks_per_host: int = 1,
    dtype: str = "fp32",
    samples_per_s: float | None = None,
    forward_share: float | None = None,
    is_fused_attention: bool = False,
) -> TrainingWorkload:
    """One step of ``batch`` samples per rank.

    ``samples_per_s`` is what one device alone trains at (measured or published); None takes the roofline.
    ``forward_share`` is forward over forward and backward, None what the roofline says. Gradients are in reverse
    forward order. Raises UsageError for a batch or a rate that is not positive.
    """
    if batch < 1 or (samples_per_s is not None and not 0 < samples_per_s < math.inf):
        raise UsageError(f"got a batch of {batch} at {samples_per_s} samples/s", expected="both above zero")
    times = layer_times(model, device, batch, dtype, is_fused_attention=is_fused_attention)
    forward_s = sum(forward for forward, _ in times)
    backward_s = sum(backward for _, backward in times)
    optimizer_s = device.stream_s(4.0 * OPTIMIZER_PASSES * model.num_parameters)
    if samples_per_s is not None:
        left_s = batch / samples_per_s - optimizer_s
        if left_s <= 0:
            raise UsageError(
                f"got {samples_per_s:g} samples/s: a step of {batch / samples_per_s:.3g} s is shorter than the "
                f"optimizer's {optimizer_s:.3g} s on {device.name}",
                expected="a rate that the device can reach",
            )
        scale = left_s / (forward_s + backward_s)
        forward_s, backward_s = forward_s * scale, backward_s * scale
        times = [(forward * scale, backward * scale) for forward, backward in times]
    if forward_share is not None:
        if not 0 < forward_share < 1:
            raise UsageError(f"got a forward share of {forward_share:g}", expected="between 0 and 1")
        both_s = forward_s + backward_s
        stretch = both_s * (1 - forward_share) / backward_s
        forward_s, backward_s = both_s * forward_share, both_s * (1 - forward_share)
        times = [(forward, backward * stretch) for forward, backward in times]
    return TrainingWorkload(
        gradients=_gradients(model, [backward for _, backward in times], backward_s),
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        num_ranks=num_ranks,
        ranks_per_host=ranks_per_host,
        origin="assumed" if samples_per_s is None else "declared",
    )


def _gradients(model: Model, backward_s: list[float], total_s: float) -> tuple[GradientTensor, ...]:
    gradients = []
    now_s = 0.0
    for layer, own_s in zip(reversed(model.layers), reversed(backward_s), strict=True):
        # Within a layer the tensors become ready one after another, each after its share of the layer's work.
        elements = max(1, layer.num_elements)
        for tensor in reversed(layer.tensors):
            now_s += own_s * tensor.num_elements / elements
            gradients.append(
                GradientTensor(
                    name=tensor.name,
                    num_elements=tensor.num_elements,
                    ready_s=min(now_s, total_s),
                    shape=tensor.shape,
                )
            )
        if not layer.tensors:
            now_s += own_s
    return tuple(gradients)


def layer_times(
    model: Model, device: Device, batch: int, dtype: str, *, is_fused_attention: bool = True
) -> list[tuple[float, float]]:
    """Forward and backward seconds of every layer, in forward order."""
    shape = model.transformer
    if shape is None:
        return [_simple_times(layer, device, batch, dtype) for layer in model.layers]
    layout = Layout(
        micro_batch=batch,
        global_batch=batch,
        dtype=dtype,
        sequence_parallel=False,
        is_fused_attention=is_fused_attention,
    )
    block = layer_cost(shape, key(device), layout)
    head = head_s(shape, device, layout)
    found = []
    flops = shape.layer_flops()
    for layer in model.layers:
        if layer.flops == flops:
            found.append((block.forward_s, block.backward_s))
        elif shape.vocab and layer.flops >= shape.head_flops() > 0:
            found.append(head)
        else:
            found.append(_simple_times(layer, device, batch, dtype))
    return found


def _simple_times(layer: Layer, device: Device, batch: int, dtype: str) -> tuple[float, float]:
    work_s = batch * layer.flops / (device.peak(dtype) * device.matrix_share)
    moved_s = device.stream_s(FORWARD_PASSES * BYTES_OF[dtype] * batch * layer.activations)
    forward_s = max(work_s, moved_s)
    return forward_s, 2 * forward_s
