"""Memory of one device under a layout: weights, gradients, optimizer state, activations; what does not fit is refused.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, written for any MLP and any number of
key-value heads: they reproduce the published 22 B to 1 T figures. The first pipeline stage is counted, which holds the
most micro-batches. Assumes mixed precision with fp32 master weights and two Adam moments; fragmentation and
workspace are a fixed reserve, so a layout within some per cent of the limit may still fail.
"""

from __future__ import annotations

import msgspec

from wirespeed.errors import UsageError
from wirespeed.sim.layout import Layout
from wirespeed.spec.device import BYTES_OF, Device
from wirespeed.spec.model import Transformer
from wirespeed.units import GIB, format_size

RESERVE_BYTES = 2.5 * GIB
"""CUDA context, communication buffers and workspaces of cuBLAS and NCCL."""
FRAGMENTED = 0.04
"""Share of the memory that an allocator loses to fragments."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the fullest device."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    reserve_bytes: float = RESERVE_BYTES

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.reserve_bytes
        )

    def fits(self, device: Device) -> bool:
        """Whether it fits, fragments counted."""
        return self.total_bytes <= device.memory_bytes * (1 - FRAGMENTED)

    def check(self, device: Device, what: str) -> None:
        """Raise UsageError with the largest part and what would lower it."""
        if self.fits(device):
            return
        parts = {
            "weights": (self.weights_bytes, "more tensor or pipeline parallel, or zero = 3"),
            "gradients": (self.gradients_bytes, "more tensor or pipeline parallel, or zero = 2"),
            "optimizer state": (self.optimizer_bytes, "zero = 1, or more tensor or pipeline parallel"),
            "activations": (self.activations_bytes, "a smaller micro-batch, recompute, or sequence parallel"),
        }
        largest = max(parts, key=lambda name: parts[name][0])
        raise UsageError(
            f"{what} needs {format_size(self.total_bytes)} per device, most of it {largest} "
            f"({format_size(parts[largest][0])})",
            expected=f"at most {format_size(device.memory_bytes * (1 - FRAGMENTED))} on {device.name}",
            hint=parts[largest][1],
        )


def stage_parameters(shape: Transformer, layout: Layout) -> tuple[float, float]:
    """Weights of one device of the first stage: ``(dense, experts)``; experts are sharded over the expert group."""
    layers = shape.num_layers / layout.pipeline
    router = shape.hidden * shape.experts if shape.experts > 1 else 0
    experts = layers * shape.experts * shape.expert_parameters / layout.tensor / layout.expert
    dense = layers * (shape.attention_parameters / layout.tensor + router)
    tables = 1 if shape.is_tied or layout.pipeline > 1 else 2
    dense += tables * shape.vocab * shape.hidden / layout.tensor
    return (dense, experts) if shape.experts > 1 else (dense + experts, 0.0)


def layer_activation_bytes(shape: Transformer, layout: Layout) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward."""
    tokens = layout.micro_batch * shape.sequence / layout.context
    tensor = layout.tensor
    spread = tensor if layout.sequence_parallel else 1
    scale = BYTES_OF[layout.dtype] / 2
    if layout.recompute == "full":
        return scale * 2 * tokens * shape.hidden / spread
    masks = 0 if shape.is_gated else 2
    whole = tokens * shape.hidden * (scale * 8 + masks) / spread
    mlp = 2 * shape.ffn * shape.mlp_matrices * shape.experts_per_token
    split = scale * tokens * (4 * shape.hidden + 4 * shape.kv_width + mlp) / tensor
    scores = 0.0
    if not layout.is_fused_attention and layout.recompute == "none":
        heads = shape.num_heads / tensor
        scores = (4 * scale + 1) * layout.micro_batch * heads * shape.sequence**2 / layout.context
    return whole + split + scores


def memory_use(shape: Transformer, layout: Layout) -> MemoryUse:
    """Bytes on a device of the first stage."""
    dense, experts = stage_parameters(shape, layout)
    replicas = layout.data * layout.context
    shards = [(dense, replicas), (experts, max(1, replicas // layout.expert))]
    width = BYTES_OF[layout.dtype]
    state = 12 if width < 4 else 8

    def held(bytes_each: float, level: int) -> float:
        return sum(bytes_each * count / (ranks if layout.zero >= level else 1) for count, ranks in shards)

    per_layer = layer_activation_bytes(shape, layout)
    layers = shape.num_layers / layout.pipeline
    in_flight = float(min(layout.pipeline, layout.num_microbatches))
    if layout.interleave > 1:
        in_flight *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.interleave)
    activations = per_layer * layers * in_flight
    if layout.recompute == "full":
        # One layer is whole while it is computed again.
        activations += layer_activation_bytes(shape, msgspec.structs.replace(layout, recompute="none"))
    if layout.pipeline == 1 and shape.vocab:
        # Logits in fp32 and their gradient in the working type.
        logits = layout.micro_batch * shape.sequence / layout.context * shape.vocab / layout.tensor
        activations += (4 + width) * logits
    weights = held(width, 3)
    if layout.zero == 3:
        # Two layers are gathered whole at a time: the one in use and the next.
        weights += 2 * width * (dense + experts) / layers
    return MemoryUse(
        weights_bytes=weights,
        gradients_bytes=held(layout.gradient_bytes, 2),
        optimizer_bytes=held(state, 1),
        activations_bytes=activations,
    )
