"""A model's layers split into pipeline stages on a device and a fabric: what ``stages.split_stages`` is given."""

from __future__ import annotations

from wirespeed.fabric.placement import place
from wirespeed.fabric.timing import prepare
from wirespeed.fabric.topology import Fabric
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.compute import layer_times
from wirespeed.plan.devices import find_device
from wirespeed.plan.stages import StageSplit, split_stages
from wirespeed.spec.device import BYTES_OF


def split_model(
    model: str, device: str, num_stages: int, batch: int, fabric: Fabric | None = None, *, dtype: str | None = None
) -> StageSplit:
    """The best split of a catalogue model for micro-batches of ``batch``.

    With a ``fabric`` of two hosts or more, sending a stage's activations both ways counts with the stage that ends
    there. Memory: weights, gradients and fp32 optimizer state, and activations of as many micro-batches as stages.
    """
    held = find_model(model)
    where = find_device(device)
    kind = dtype if dtype is not None else "bf16" if "bf16" in where.flop_per_s else "fp32"
    times = layer_times(held, where, batch, kind)
    width = BYTES_OF[kind]
    outputs = [batch * width * _output(held.name, layer.activations, layer.flops) for layer in held.layers]
    transfer_s = None
    if fabric is not None and len(fabric.hosts) > 1:
        placed = place(fabric)
        ranks = [0, int((placed.host != placed.host[0]).argmax())]
        import numpy as np

        link = prepare(fabric, "send", placed, groups=[np.array(ranks)])
        transfer_s = [2 * link.cost(size).seconds for size in outputs]
    return split_stages(
        [forward + backward for forward, backward in times],
        num_stages,
        transfer_s=transfer_s,
        layer_bytes=[
            18.0 * layer.num_elements + num_stages * batch * width * layer.activations for layer in held.layers
        ],
        stage_bytes=0.95 * where.memory_bytes,
    )


def _output(name: str, activations: int, flops: float) -> float:
    """Elements of one sample that leave a layer: its activations; of a transformer block one of the many it keeps."""
    from wirespeed.plan.transformers import ACTIVATIONS_PER_TOKEN

    shape = find_model(name).transformer
    return activations / ACTIVATIONS_PER_TOKEN if shape is not None and flops == shape.layer_flops() else activations
