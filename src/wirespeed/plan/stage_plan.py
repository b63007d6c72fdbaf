"""A model's layers split into pipeline stages on a device and a fabric: what ``stages.split_stages`` is given."""

from __future__ import annotations

from wirespeed.errors import UsageError
from wirespeed.fabric.placement import Placement, place
from wirespeed.fabric.timing import prepare
from wirespeed.fabric.topology import Fabric
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.compute import layer_times
from wirespeed.plan.devices import find_device
from wirespeed.plan.stages import StageSplit, split_stages
from wirespeed.spec.device import BYTES_OF


def split_model(
    model: str,
    device: str,
    num_stages: int,
    batch: int,
    fabric: Fabric | None = None,
    *,
    dtype: str | None = None,
    is_inference: bool = False,
) -> StageSplit:
    """The best split of a catalogue model for micro-batches of ``batch``, for training or for inference.

    With a ``fabric`` of two hosts or more, sending a stage's activations (in training their gradients come back)
    counts with the stage that ends there. Memory in training: weights, gradients and fp32 optimizer state, and
    activations of as many micro-batches as stages; in inference: weights, and one micro-batch's of one layer.
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
        transfer_s = [(1 if is_inference else 2) * link.cost(size).seconds for size in outputs]
    stage_bytes = 0.95 * where.memory_bytes
    if is_inference:
        layer_bytes = [width * layer.num_elements for layer in held.layers]
        stage_bytes -= batch * width * max(layer.activations for layer in held.layers)
    else:
        layer_bytes = [
            18.0 * layer.num_elements + num_stages * batch * width * layer.activations for layer in held.layers
        ]
    return split_stages(
        [forward if is_inference else forward + backward for forward, backward in times],
        num_stages,
        transfer_s=transfer_s,
        layer_bytes=layer_bytes,
        stage_bytes=max(0.0, stage_bytes),
    )


def stages_config(model: str, split: StageSplit, fabric: Fabric, placement: Placement, *, batch: int, port: int) -> str:
    """A ``model.toml`` for `wirespeed serve`: stage i on the i-th device in the order of ``placement``.

    Each stage is a model ``NAME-I`` that its host serves with `wirespeed serve FOLDER --node`; comments say which
    layers it holds. Raises UsageError where there are fewer devices than stages.
    """
    if placement.num_ranks < len(split.bounds):
        raise UsageError(
            f"got {len(split.bounds)} stages for {placement.num_ranks} devices", expected="a device for every stage"
        )
    found = find_model(model)
    layers, stem = found.layers, found.name.partition("@")[0]
    parts = [f'schema = 1\nbackend = "stages"\nmicro_rows = {batch}\n']
    for stage, (start, count) in enumerate(zip(split.bounds, split.sizes, strict=True)):
        host = fabric.hosts[int(placement.host[stage])].name
        held = layers[start].name if count == 1 else f"{layers[start].name} to {layers[start + count - 1].name}"
        parts.append(f'# {held}\n[[stages]]\nmodel = "{stem}-{stage + 1}"\nnode = "{host}:{port}"\n')
    return "\n".join(parts)


def _output(name: str, activations: int, flops: float) -> float:
    """Elements of one sample that leave a layer: its activations; of a transformer block one of the many it keeps."""
    from wirespeed.plan.transformers import ACTIVATIONS_PER_TOKEN

    shape = find_model(name).transformer
    return activations / ACTIVATIONS_PER_TOKEN if shape is not None and flops == shape.layer_flops() else activations
