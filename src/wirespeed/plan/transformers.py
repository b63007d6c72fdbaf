"""Transformers from their configurations: GPT, Llama and mixtures of experts, BERT and vision transformers.

Tensors are those of the published implementations (fused or separate query, key and value, biases, norms), so that
counts can be held against them to the last parameter. Work counts matrix products only; norms, softmax and the like are
memory traffic and are costed by ``sim.transformer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from wirespeed.spec.model import Layer, Model, Tensor, Transformer
from wirespeed.spec.workload import Origin

_Shape = tuple[int, ...]
ACTIVATIONS_PER_TOKEN = 17
"""Elements of 16 bits that a layer keeps per token and hidden unit: 34 bytes (Korthikanti et al. 2022, eq. 1)."""


def gpt(
    name: str,
    *,
    hidden: int,
    num_layers: int,
    num_heads: int,
    sequence: int,
    vocab: int = 50257,
    origin: Origin = "declared",
    source: str = "",
    published_parameters: int | None = None,
) -> Model:
    """A GPT-2 or GPT-3: learned positions, fused query-key-value, biases, tied output projection."""
    shape = Transformer(
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn=4 * hidden,
        vocab=vocab,
        sequence=sequence,
    )
    layers = [_layer("embedding", {"wte": (vocab, hidden), "wpe": (sequence, hidden)}, 0.0, sequence * hidden)]
    for index in range(num_layers):
        tensors: dict[str, _Shape] = {
            **_norm("ln_1", hidden),
            **_dense("attn.c_attn", hidden, 3 * hidden),
            **_dense("attn.c_proj", hidden, hidden),
            **_norm("ln_2", hidden),
            **_dense("mlp.c_fc", hidden, 4 * hidden),
            **_dense("mlp.c_proj", 4 * hidden, hidden),
        }
        layers.append(_block(f"h.{index}", tensors, shape))
    layers.append(_layer("ln_f", _norm("ln_f", hidden), shape.head_flops(), sequence * vocab))
    return _model(name, shape, layers, origin, source, published_parameters)


def llama(
    name: str,
    *,
    hidden: int,
    num_layers: int,
    num_heads: int,
    ffn: int,
    vocab: int,
    sequence: int,
    num_kv_heads: int | None = None,
    experts: int = 1,
    experts_per_token: int = 1,
    origin: Origin = "declared",
    source: str = "",
    published_parameters: int | None = None,
) -> Model:
    """A Llama (rotary positions, gated MLP, RMS norms, no biases), or with ``experts`` a mixture of them (Mixtral)."""
    shape = Transformer(
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        ffn=ffn,
        vocab=vocab,
        sequence=sequence,
        is_gated=True,
        is_tied=False,
        experts=experts,
        experts_per_token=experts_per_token,
    )
    layers = [_layer("embedding", {"embed_tokens": (vocab, hidden)}, 0.0, sequence * hidden)]
    for index in range(num_layers):
        tensors: dict[str, _Shape] = {
            "q_proj": (hidden, hidden),
            "k_proj": (shape.kv_width, hidden),
            "v_proj": (shape.kv_width, hidden),
            "o_proj": (hidden, hidden),
        }
        if experts > 1:
            tensors["gate"] = (experts, hidden)
        for expert in range(experts):
            prefix = f"experts.{expert}." if experts > 1 else ""
            tensors |= {
                f"{prefix}gate_proj": (ffn, hidden),
                f"{prefix}up_proj": (ffn, hidden),
                f"{prefix}down_proj": (hidden, ffn),
            }
        tensors |= {"input_norm": (hidden,), "post_attention_norm": (hidden,)}
        layers.append(_block(f"layers.{index}", tensors, shape))
    head: dict[str, _Shape] = {"norm": (hidden,), "lm_head": (vocab, hidden)}
    layers.append(_layer("head", head, shape.head_flops(), sequence * vocab))
    return _model(name, shape, layers, origin, source, published_parameters)


def bert(
    size: Literal["base", "large"],
    *,
    sequence: int = 128,
    published_parameters: int | None = None,
) -> Model:
    """BERT for pre-training: encoder, pooler, masked-word head (tied decoder) and next-sentence head."""
    hidden, num_layers, num_heads = {"base": (768, 12, 12), "large": (1024, 24, 16)}[size]
    vocab = 30522
    shape = Transformer(
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn=4 * hidden,
        vocab=vocab,
        sequence=sequence,
        is_causal=False,
    )
    embeddings: dict[str, _Shape] = {
        "word": (vocab, hidden),
        "position": (512, hidden),
        "token_type": (2, hidden),
        **_norm("norm", hidden),
    }
    layers = [_layer("embeddings", embeddings, 0.0, sequence * hidden)]
    for index in range(num_layers):
        tensors: dict[str, _Shape] = {
            **_dense("query", hidden, hidden),
            **_dense("key", hidden, hidden),
            **_dense("value", hidden, hidden),
            **_dense("output", hidden, hidden),
            **_norm("attention_norm", hidden),
            **_dense("intermediate", hidden, 4 * hidden),
            **_dense("dense", 4 * hidden, hidden),
            **_norm("norm", hidden),
        }
        layers.append(_block(f"layer.{index}", tensors, shape))
    layers.append(_layer("pooler", _dense("pooler", hidden, hidden), 2.0 * hidden * hidden, hidden))
    head: dict[str, _Shape] = {"decoder_bias": (vocab,), **_dense("transform", hidden, hidden), **_norm("norm", hidden)}
    transform_flops = 2.0 * sequence * hidden * hidden
    layers.append(_layer("masked_words", head, shape.head_flops() + transform_flops, sequence * vocab))
    layers.append(_layer("next_sentence", _dense("next_sentence", hidden, 2), 4.0 * hidden, 2))
    source = "Devlin et al. 2018; transformers BertForPreTraining"
    return _model(f"bert-{size}", shape, layers, "declared", source, published_parameters)


def vit(
    name: str,
    *,
    hidden: int,
    num_layers: int,
    num_heads: int,
    patch: int,
    side: int = 224,
    num_classes: int = 1000,
    origin: Origin = "declared",
    source: str = "Dosovitskiy et al. 2020; torchvision vit",
    published_parameters: int | None = None,
) -> Model:
    """A vision transformer with a class token."""
    num_patches = (side // patch) ** 2
    shape = Transformer(
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn=4 * hidden,
        vocab=0,
        sequence=num_patches + 1,
        is_causal=False,
    )
    patches: dict[str, _Shape] = {
        "class_token": (1, 1, hidden),
        "conv_proj.weight": (hidden, 3, patch, patch),
        "conv_proj.bias": (hidden,),
        "positions": (1, num_patches + 1, hidden),
    }
    patch_flops = 2.0 * num_patches * hidden * 3 * patch * patch
    layers = [_layer("patches", patches, patch_flops, shape.sequence * hidden)]
    for index in range(num_layers):
        tensors: dict[str, _Shape] = {
            **_norm("ln_1", hidden),
            "in_proj.weight": (3 * hidden, hidden),
            "in_proj.bias": (3 * hidden,),
            **_dense("out_proj", hidden, hidden),
            **_norm("ln_2", hidden),
            **_dense("mlp.0", hidden, 4 * hidden),
            **_dense("mlp.3", 4 * hidden, hidden),
        }
        layers.append(_block(f"layers.{index}", tensors, shape))
    head = {**_norm("ln", hidden), **_dense("head", hidden, num_classes)}
    layers.append(_layer("head", head, 2.0 * hidden * num_classes, num_classes))
    return Model(
        name=name,
        sample=f"image of {side}x{side}",
        layers=tuple(layers),
        transformer=shape,
        origin=origin,
        source=source,
        published_parameters=published_parameters,
    )


def _model(  # noqa: PLR0917 - private, called in one place
    name: str, shape: Transformer, layers: Sequence[Layer], origin: Origin, source: str, published: int | None
) -> Model:
    return Model(
        name=name,
        sample=f"sequence of {shape.sequence} tokens",
        layers=tuple(layers),
        transformer=shape,
        origin=origin,
        source=source,
        published_parameters=published,
    )


def _block(name: str, tensors: dict[str, _Shape], shape: Transformer) -> Layer:
    return _layer(name, tensors, shape.layer_flops(), ACTIVATIONS_PER_TOKEN * shape.sequence * shape.hidden)


def _layer(name: str, tensors: dict[str, _Shape], flops: float, activations: int) -> Layer:
    held = tuple(Tensor(name=f"{name}.{key}", shape=shape) for key, shape in tensors.items())
    return Layer(name=name, tensors=held, flops=flops, activations=activations)


def _dense(name: str, inward: int, outward: int) -> dict[str, _Shape]:
    return {f"{name}.weight": (outward, inward), f"{name}.bias": (outward,)}


def _norm(name: str, hidden: int) -> dict[str, _Shape]:
    return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
