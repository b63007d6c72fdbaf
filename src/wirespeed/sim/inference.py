"""Transformer inference under tensor and pipeline parallel: time to first token, time per token, tokens per second.

Prefill is the forward roofline of ``sim.transformer``. Decode reads every weight and the cache of every sequence for
one token each, so it is bound by memory until the batch is large; two all-reduces per layer come on top, whose latency,
not bandwidth, is what counts for one token. That latency is the usual reason why a model served over several hosts is
slower than its arithmetic says. Assumes contiguous batching with equal sequence lengths and no speculative decoding.
"""

from __future__ import annotations

import msgspec

from wirespeed.errors import UsageError
from wirespeed.sim.axes import AxisCost, AxisCosts
from wirespeed.sim.layout import Layout
from wirespeed.sim.transformer import key, layer_cost
from wirespeed.spec.device import BYTES_OF, Device
from wirespeed.spec.model import Transformer
from wirespeed.units import GIB, format_size

RESERVE_BYTES = 4 * GIB
DEVICE_UNCERTAINTY = 0.15
"""Serving engines differ more than training frameworks: published predictions of others are 4 to 15 % off."""
DECODE_KERNELS = 10
"""Kernels of one layer for one token, each with its launch (a captured graph shortens them; ``Device.launch_s``)."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: ``tensor`` x ``pipeline`` devices; ``batch`` sequences of ``prompt`` tokens grow by ``answer``."""

    tensor: int = 1
    pipeline: int = 1
    batch: int = 1
    prompt: int = 1024
    answer: int = 256
    dtype: str = "bf16"
    cache_dtype: str = "bf16"

    def __post_init__(self) -> None:
        for field in ("tensor", "pipeline", "batch", "prompt", "answer"):
            if getattr(self, field) < 1:
                raise UsageError(f"got {field} = {getattr(self, field)}", expected="1 or more")


class ServingPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. ``parts_s`` are those of one decode step and sum to ``token_s``."""

    first_token_s: float
    token_s: float
    request_s: float
    tokens_per_s: float
    parts_s: dict[str, float]
    prefill_parts_s: dict[str, float]
    memory_bytes: float
    max_batch: int
    binding: str
    binding_link: str | None
    lower_bound_s: float
    is_in_range: bool
    uncertainty: float


def predict_serving(shape: Transformer, device: Device, serving: Serving, costs: AxisCosts) -> ServingPrediction:
    """Predict one replica. Raises UsageError where sizes do not divide or the memory does not suffice."""
    tensor, pipeline = serving.tensor, serving.pipeline
    _check(shape, serving)
    width, cache_width = BYTES_OF[serving.dtype], BYTES_OF[serving.cache_dtype]
    tables = shape.vocab * shape.hidden * (1 if shape.is_tied else 2)
    weights = (shape.num_layers * shape.layer_parameters / pipeline + tables / pipeline) / tensor * width
    length = serving.prompt + serving.answer
    per_sequence = 2 * shape.kv_width / min(tensor, shape.num_kv_heads) * length * cache_width
    per_sequence *= shape.num_layers / pipeline
    room = device.memory_bytes * 0.96 - RESERVE_BYTES - weights
    # Pipeline stages work on different batches at the same time: each holds the cache of all of them.
    in_flight = serving.batch * pipeline
    if room < per_sequence * in_flight:
        raise UsageError(
            f"a replica of tp{tensor} pp{pipeline} with {in_flight} sequences of {length} tokens needs "
            f"{format_size(weights + RESERVE_BYTES + per_sequence * in_flight)} per device",
            expected=f"at most {format_size(device.memory_bytes * 0.96)} on {device.name}",
            hint="more tensor or pipeline parallel" if room < 0 else "a smaller batch or shorter sequences",
        )
    layers = shape.num_layers
    prefill = _prefill_parts(shape, device, serving, costs)
    first_token_s = sum(seconds for seconds, _ in prefill.values())
    decode = _decode_parts(shape, device, serving, costs, width, cache_width)
    token_s = sum(seconds for seconds, _ in decode.values())
    parts_s = {name: seconds for name, (seconds, _) in decode.items() if seconds > 0}
    # A full pipeline finishes one batch per stage time; a single batch passes all stages.
    stage_s = token_s / pipeline
    exchanges = {name: held for name, held in decode.items() if held[1] is not None}
    worst = max(exchanges, key=lambda name: exchanges[name][0], default=None)
    worst_cost = None if worst is None else exchanges[worst][1]
    moved_s = layers * shape.layer_parameters * width / tensor / (device.memory_bytes_per_s)
    return ServingPrediction(
        first_token_s=first_token_s,
        token_s=token_s,
        request_s=first_token_s + token_s * (serving.answer - 1),
        tokens_per_s=serving.batch / stage_s,
        parts_s=parts_s,
        prefill_parts_s={name: seconds for name, (seconds, _) in prefill.items() if seconds > 0},
        memory_bytes=weights + RESERVE_BYTES + per_sequence * in_flight,
        max_batch=int(room / per_sequence / pipeline),
        binding=max(parts_s, key=lambda name: parts_s[name]),
        binding_link=None if worst_cost is None else worst_cost.binding,
        lower_bound_s=min(moved_s if shape.experts == 1 else 0.0, token_s),
        is_in_range=False,
        uncertainty=DEVICE_UNCERTAINTY,
    )


def _check(shape: Transformer, serving: Serving) -> None:
    for whole, part, what, by in (
        (shape.num_heads, serving.tensor, f"{shape.num_heads} heads", f"tensor = {serving.tensor}"),
        (shape.ffn, serving.tensor, f"an MLP of {shape.ffn}", f"tensor = {serving.tensor}"),
        (shape.num_layers, serving.pipeline, f"{shape.num_layers} layers", f"pipeline = {serving.pipeline}"),
    ):
        if whole % part:
            raise UsageError(f"got {what} and {by}", expected="the first divisible by the second")


_Part = tuple[float, AxisCost | None]


def _prefill_parts(shape: Transformer, device: Device, serving: Serving, costs: AxisCosts) -> dict[str, _Part]:
    """The whole batch's prompts, one after another through the stages."""
    prompts = msgspec.structs.replace(shape, sequence=serving.prompt)
    layout = Layout(
        tensor=serving.tensor,
        micro_batch=serving.batch,
        global_batch=serving.batch,
        dtype=serving.dtype,
        sequence_parallel=False,
    )
    layer = layer_cost(prompts, key(device), layout)
    parts: dict[str, _Part] = {"compute": (shape.num_layers * layer.forward_s, None)}
    if serving.tensor > 1:
        cost = costs.cost("tensor", "all_reduce", layer.tensor_bytes)
        parts["tensor exchange"] = (shape.num_layers * 2 * cost.seconds, cost)
    if serving.pipeline > 1:
        cost = costs.cost("pipeline", "send", layer.tensor_bytes)
        parts["pipeline transfers"] = ((serving.pipeline - 1) * cost.seconds, cost)
    return parts


def _decode_parts(  # noqa: PLR0917 - private, called in one place
    shape: Transformer, device: Device, serving: Serving, costs: AxisCosts, width: float, cache_width: float
) -> dict[str, _Part]:
    """One token of each sequence, through all stages."""
    batch, tensor, layers = serving.batch, serving.tensor, shape.num_layers
    hidden = shape.hidden
    # Experts that at least one of the batch's tokens uses have to be read.
    used = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** batch) if shape.experts > 1 else 1.0
    weights = (shape.attention_parameters + used * shape.expert_parameters) / tensor
    flops = 2 * batch * (shape.attention_parameters + shape.experts_per_token * shape.expert_parameters) / tensor
    rate = device.peak(serving.dtype) * device.matrix_share
    stream = device.memory_bytes_per_s * device.memory_share
    matrices_s = max(flops / rate, weights * width / stream)
    length = serving.prompt + serving.answer / 2
    cached = 2 * shape.kv_width / min(tensor, shape.num_kv_heads) * length * cache_width * batch
    head_s = (
        max(2 * batch * hidden * shape.vocab / tensor / rate, hidden * shape.vocab / tensor * width / stream)
        if shape.vocab
        else 0.0
    )
    parts: dict[str, _Part] = {
        "weights and products": (layers * matrices_s + head_s, None),
        "cache": (layers * cached / stream, None),
        "kernel launches": (layers * DECODE_KERNELS * device.launch_s, None),
    }
    message = batch * hidden * width
    if tensor > 1:
        cost = costs.cost("tensor", "all_reduce", message)
        parts["tensor exchange"] = (layers * 2 * cost.seconds, cost)
    if serving.pipeline > 1:
        cost = costs.cost("pipeline", "send", message)
        parts["pipeline transfers"] = ((serving.pipeline - 1) * cost.seconds, cost)
    return parts
