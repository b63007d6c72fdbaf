"""One transformer layer on one device of a layout: matrix products, attention, streaming kernels, and bytes exchanged.

Roofline per kernel (``spec.device``): a product takes its operations or its bytes, everything else its bytes. Unfused
attention writes and reads the matrix of scores several times, which is why small models are slow without flash
attention; the counts of passes are those of Megatron-LM's kernels (Korthikanti et al. 2022, section 4). Assumes equal
work on every device of a tensor group and evenly loaded experts.
"""

from __future__ import annotations

import functools

import msgspec

from wirespeed.sim.layout import Layout
from wirespeed.spec.device import BYTES_OF, Device
from wirespeed.spec.model import Transformer

SCORE_BYTES_FORWARD = 9
"""Per attention score of 16 bits, forward: softmax reads and writes, dropout reads, writes and keeps a byte of mask."""
SCORE_BYTES_BACKWARD = 11
LOSS_BYTES_FORWARD = 38
"""Per logit, unfused softmax: to fp32 (6), maximum (4), subtraction (8), exponential (8), sum (4), division (8)."""
LOSS_BYTES_BACKWARD = 18
"""Per logit: scaling in fp32 (8), to the working type (6), clearing (4)."""
FLASH_FORWARD_SHARE = 0.65
"""Of the rate of large products: fused attention waits for its exponentials (FlashAttention-2, Dao 2023, table 1)."""
FLASH_BACKWARD_SHARE = 0.55
SPLIT_BYTES = 28
"""Bytes per token and hidden unit of streaming kernels that tensor parallel divides: GeLU (16), transposes (12)."""
WHOLE_BYTES = 22
"""The same, of those that only sequence parallel divides: two norms (8) and two dropouts with residuals (14)."""


class LayerCost(msgspec.Struct, frozen=True, kw_only=True):
    """One layer for one micro-batch on one device. Bytes follow the convention of ``records``."""

    forward_s: float
    backward_s: float
    recompute_s: float
    tensor_exchanges: int
    """All-reduces (or pairs of all-gather and reduce-scatter) of ``tensor_bytes``, forward; as many backward."""
    tensor_bytes: float
    expert_bytes: float
    """Whole send buffer of one device in one all-to-all of the mixture; two forward, two backward."""
    context_bytes: float
    """Keys and values that one device receives in one pass of ring attention, forward."""


@functools.lru_cache(maxsize=4096)
def layer_cost(shape: Transformer, device: _Key, layout: Layout) -> LayerCost:
    """Cost of one layer. ``device`` is ``key(Device)``: devices hold dicts and cannot be hashed."""
    held = device.device
    dtype = layout.dtype
    width = BYTES_OF[dtype]
    tokens = layout.micro_batch * shape.sequence / layout.context
    tensor = layout.tensor
    hidden = shape.hidden
    local = hidden / tensor
    queries = hidden + 2 * shape.kv_width
    # Attention projections: query-key-value and output. Backward of a product is two of the same size.
    products = [(tokens, queries / tensor, hidden, 1.0), (tokens, hidden, local, 1.0)]
    per_expert = tokens * shape.experts_per_token / shape.experts * layout.expert
    num_experts = shape.experts / layout.expert
    inward = shape.ffn * (shape.mlp_matrices - 1) / tensor
    products += [(per_expert, inward, hidden, num_experts), (per_expert, hidden, shape.ffn / tensor, num_experts)]
    matrices_s = sum(held.matrix_s(m, n, k, dtype=dtype, count=c) for m, n, k, c in products)
    matrices_back_s = sum(
        held.matrix_s(m, k, n, dtype=dtype, count=c) + held.matrix_s(n, k, m, dtype=dtype, count=c)
        for m, n, k, c in products
    )
    attention_s, attention_back_s = _attention_s(shape, held, layout, tokens)
    streamed = tokens * hidden
    whole = WHOLE_BYTES / (tensor if layout.sequence_parallel else 1)
    split = (SPLIT_BYTES - 16) + 16 * inward * tensor * shape.experts_per_token / (4 * hidden)
    kernels = 12
    scale = width / 2
    stream_s = held.stream_s(scale * streamed * (whole + split / tensor)) + (kernels - 1) * held.launch_s
    forward_s = matrices_s + attention_s + stream_s
    backward_s = matrices_back_s + attention_back_s + 2 * stream_s
    recompute_s = {"none": 0.0, "selective": attention_s, "full": forward_s}[layout.recompute]
    if layout.is_fused_attention and layout.recompute == "selective":
        recompute_s = 0.0  # flash attention's backward already computes the scores again
    return LayerCost(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=recompute_s,
        tensor_exchanges=2 if tensor > 1 else 0,
        tensor_bytes=width * streamed,
        expert_bytes=width * streamed * shape.experts_per_token if layout.expert > 1 else 0.0,
        context_bytes=width * 2 * layout.micro_batch * shape.sequence * shape.kv_width / tensor
        if layout.context > 1
        else 0.0,
    )


def head_s(shape: Transformer, device: Device, layout: Layout) -> tuple[float, float]:
    """Forward and backward of the output projection and the loss for one micro-batch, on the last stage."""
    if shape.vocab == 0:
        return 0.0, 0.0
    tokens = layout.micro_batch * shape.sequence / layout.context
    vocab = shape.vocab / layout.tensor
    product_s = device.matrix_s(tokens, vocab, shape.hidden, dtype=layout.dtype)
    return (
        product_s + device.stream_s(LOSS_BYTES_FORWARD * tokens * vocab),
        2 * product_s + device.stream_s(LOSS_BYTES_BACKWARD * tokens * vocab),
    )


def _attention_s(shape: Transformer, device: Device, layout: Layout, tokens: float) -> tuple[float, float]:
    heads = shape.num_heads / layout.tensor
    depth = shape.hidden / shape.num_heads
    scores = layout.micro_batch * heads * shape.sequence * shape.sequence / layout.context
    if layout.is_fused_attention:
        # A causal kernel skips the upper half; 4 operations per score and unit of depth forward, 10 backward.
        half = 0.5 if shape.is_causal else 1.0
        rate = device.peak(layout.dtype) * device.matrix_share
        forward_s = 4 * half * scores * depth / (rate * FLASH_FORWARD_SHARE) + device.launch_s
        return forward_s, 10 * half * scores * depth / (rate * FLASH_BACKWARD_SHARE) + 2 * device.launch_s
    rows = shape.sequence / layout.context
    count = layout.micro_batch * heads
    scale = BYTES_OF[layout.dtype] / 2
    into_s = device.matrix_s(rows, shape.sequence, depth, dtype=layout.dtype, count=count)
    out_s = device.matrix_s(rows, depth, shape.sequence, dtype=layout.dtype, count=count)
    forward_s = into_s + out_s + device.stream_s(SCORE_BYTES_FORWARD * scale * scores)
    return forward_s, 2 * (into_s + out_s) + device.stream_s(SCORE_BYTES_BACKWARD * scale * scores)


class _Key:
    """A device as a key of the cache: hashed by its JSON."""

    __slots__ = ("device", "text")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.text = msgspec.json.encode(device)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.text == self.text


def key(device: Device) -> _Key:
    """``device`` as ``layer_cost`` takes it."""
    return _Key(device)
