"""Model: what a network is, before any device or fabric: its layers in forward order, their tensors and operations.

A layer's ``flops`` count two per multiply-add, forward, for one sample; backward is taken as twice that where it is
needed. ``activations`` are the elements that forward writes per sample and backward reads again. Counts are exact for
what the configuration says; they say nothing about how fast a device is.
"""

from __future__ import annotations

import math

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.spec.workload import Origin


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not all(size >= 1 for size in self.shape):
            raise DataError(f"tensor {self.name!r} has shape {self.shape}", expected="sizes of 1 or more")

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors whose gradients backward makes together, with the forward work of one sample."""

    name: str
    tensors: tuple[Tensor, ...]
    flops: float = 0.0
    activations: int = 0

    @property
    def num_elements(self) -> int:
        """Parameters of the layer."""
        return sum(tensor.num_elements for tensor in self.tensors)


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a transformer, from which parallel plans follow.

    ``num_kv_heads`` below ``num_heads`` is grouped-query attention. ``experts`` above 1 makes every layer's MLP a
    mixture, of which a token uses ``experts_per_token``. ``sequence`` is tokens per sample.
    """

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    is_gated: bool = False
    is_tied: bool = True
    is_causal: bool = True
    experts: int = 1
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        fields = ("hidden", "num_layers", "num_heads", "num_kv_heads", "ffn", "sequence", "experts")
        for field in fields:
            if getattr(self, field) < 1:
                raise UsageError(f"got {field} = {getattr(self, field)}", expected="1 or more")
        if self.vocab < 0:
            raise UsageError(f"got vocab = {self.vocab}", expected="0 (no token embedding) or more")
        if self.hidden % self.num_heads or self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"got hidden {self.hidden}, {self.num_heads} heads, {self.num_kv_heads} key-value heads",
                expected="hidden divisible by heads, and heads by key-value heads",
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise UsageError(
                f"got {self.experts_per_token} experts per token of {self.experts}",
                expected="from 1 to the number of experts",
            )

    @property
    def kv_width(self) -> int:
        """Elements of the key (or value) of one token."""
        return self.hidden // self.num_heads * self.num_kv_heads

    @property
    def mlp_matrices(self) -> int:
        """Matrices of hidden x ffn in one MLP: three where it is gated."""
        return 3 if self.is_gated else 2

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention, without biases: query, key, value and output."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_width

    @property
    def expert_parameters(self) -> int:
        """Weights of one MLP (one expert), without biases."""
        return self.mlp_matrices * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, without biases and norms (together below 0.1 % at sizes that need a plan)."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_parameters + self.experts * self.expert_parameters + router

    def layer_flops(self) -> float:
        """Forward operations of one layer for one sample, attention counted in full (not halved by a causal mask)."""
        matrices = self.attention_parameters + self.experts_per_token * self.expert_parameters
        return 2.0 * self.sequence * matrices + 4.0 * self.sequence * self.sequence * self.hidden

    def head_flops(self) -> float:
        """Forward operations of the output projection onto the vocabulary for one sample."""
        return 2.0 * self.sequence * self.hidden * self.vocab

    def step_flops(self, num_samples: float, *, recompute: bool = False) -> float:
        """Operations of one training step: forward, backward of twice that, and forward again with ``recompute``.

        Narayanan et al. 2021 (arXiv 2104.04473), eq. 3, for any shape: 96 B s l h^2 (1 + s/6h + V/16lh) with full
        recomputation, 72 B s l h^2 (1 + s/6h + V/12lh) without.
        """
        passes = 4 if recompute else 3
        return num_samples * (passes * self.num_layers * self.layer_flops() + 3 * self.head_flops())


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A network. ``transformer`` is None for other kinds, which only data parallelism and stage splits apply to."""

    name: str
    sample: str
    layers: tuple[Layer, ...]
    transformer: Transformer | None = None
    origin: Origin = "declared"
    source: str = ""
    published_parameters: int | None = None

    def __post_init__(self) -> None:
        if not self.layers or self.num_parameters == 0:
            raise DataError(f"model {self.name!r} has no parameters", expected="at least one layer with a tensor")

    @property
    def num_parameters(self) -> int:
        """All elements of all tensors."""
        return sum(layer.num_elements for layer in self.layers)

    @property
    def num_tensors(self) -> int:
        """Tensors, each of which has one gradient."""
        return sum(len(layer.tensors) for layer in self.layers)

    @property
    def flops(self) -> float:
        """Forward operations of one sample."""
        return sum(layer.flops for layer in self.layers)
