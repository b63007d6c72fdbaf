"""Record the models of `wirespeed bench replay`: tensors in backward order and when each is ready. Needs transformers.

A model is built at full size on the meta device, so nothing is computed and no weight is fetched: its configuration is
transformers' own class with the published sizes. A real backward pass runs over the meta tensors, and every operation
is given the time of a roofline: floating-point operations at the accelerator's peak, or bytes moved at its memory
bandwidth, whichever is longer. A hook on every parameter notes how far the backward pass is when its gradient is
accumulated. The order is autograd's own: ``--verify`` runs the same model, narrow but of full depth, for real on the
CPU and compares the order in which its gradients come.

    python benchmarks/record_models.py --verify

What is assumed: kernels that reach the roofline alike, bfloat16 activations, no dropout. Shares matter here, not
seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

MODELS = Path(__file__).parents[1] / "src" / "wirespeed" / "plan" / "models"
PEAK_FLOP_PER_S = 312e12
MEMORY_BYTES_PER_S = 2.039e12
"""NVIDIA A100 80GB SXM data sheet (June 2021): dense BF16 Tensor Core, HBM2e."""
BYTES_PER_ACTIVATION = 2


@dataclass(frozen=True)
class Recipe:
    """How to build one model, wide or narrow, and what goes into it."""

    title: str
    make: Callable[[bool], torch.nn.Module]
    inputs: Callable[[str, bool], dict[str, torch.Tensor]]
    batch: str


_FREE = (torch.ops.aten.detach, torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.empty_like)
"""Operations that move nothing."""


class Roofline(TorchDispatchMode):
    """Adds up the time of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._overloadpacket in _FREE:
            return result
        tensors = [t for t in _flat([args, kwargs or {}, result]) if isinstance(t, torch.Tensor)]
        moved = BYTES_PER_ACTIVATION * sum(t.numel() for t in tensors)
        count = flop_registry.get(func._overloadpacket)
        flop = 0 if count is None else count(*args, **(kwargs or {}), out_val=result)
        self.seconds += max(flop / PEAK_FLOP_PER_S, moved / MEMORY_BYTES_PER_S)
        return result


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in _flat(item)]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [value]


@dataclass
class Order:
    """The order in which gradients are accumulated, with how far the clock is then."""

    clock: Callable[[], float] = field(default=lambda: 0.0)
    ready: list[tuple[str, float]] = field(default_factory=list)

    def watch(self, module: torch.nn.Module) -> None:
        """Hook every parameter."""
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.ready.append((name, self.clock())))


def run(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], order: Order) -> tuple[float, float]:
    """One forward and backward pass: roofline seconds of both."""
    order.watch(module)
    with Roofline() as roofline:
        outputs = module(**inputs)
        loss = getattr(outputs, "logits", None)
        loss = (outputs.last_hidden_state if loss is None else loss).sum()
        forward_s = roofline.seconds
        order.clock = lambda: roofline.seconds - forward_s
        loss.backward()
    return forward_s, roofline.seconds - forward_s


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[str, bool], dict[str, torch.Tensor]]:
    def make(device: str, is_narrow: bool) -> dict[str, torch.Tensor]:
        shape = (1, 8) if is_narrow else (batch, length)
        return {"input_ids": torch.randint(0, min(vocabulary, 50), shape, device=device)}

    return make


def _images(batch: int) -> Callable[[str, bool], dict[str, torch.Tensor]]:
    def make(device: str, is_narrow: bool) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.zeros((2 if is_narrow else batch, 3, 224, 224), device=device)}

    return make


def recipes() -> dict[str, Recipe]:
    """The catalogue. Sizes are the published ones of each model."""
    import transformers as t

    def bert(width: int, depth: int, heads: int) -> Callable[[bool], torch.nn.Module]:
        def make(is_narrow: bool) -> torch.nn.Module:
            wide = 32 if is_narrow else width
            config = t.BertConfig(
                hidden_size=wide, num_hidden_layers=depth, num_attention_heads=2 if is_narrow else heads,
                intermediate_size=4 * wide, vocab_size=64 if is_narrow else 30522,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip
            return t.BertForMaskedLM(config)

        return make

    def gpt2(width: int, depth: int, heads: int) -> Callable[[bool], torch.nn.Module]:
        def make(is_narrow: bool) -> torch.nn.Module:
            config = t.GPT2Config(
                n_embd=32 if is_narrow else width, n_layer=depth, n_head=2 if is_narrow else heads,
                vocab_size=64 if is_narrow else 50257, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
            )  # fmt: skip
            return t.GPT2LMHeadModel(config)

        return make

    def vit(width: int, depth: int, heads: int) -> Callable[[bool], torch.nn.Module]:
        def make(is_narrow: bool) -> torch.nn.Module:
            wide = 32 if is_narrow else width
            config = t.ViTConfig(
                hidden_size=wide, num_hidden_layers=depth, num_attention_heads=2 if is_narrow else heads,
                intermediate_size=4 * wide, num_labels=1000,
            )  # fmt: skip
            return t.ViTForImageClassification(config)

        return make

    def resnet(is_narrow: bool) -> torch.nn.Module:
        scale = 32 if is_narrow else 1
        config = t.ResNetConfig(
            embedding_size=64 // scale, hidden_sizes=[size // scale for size in (256, 512, 1024, 2048)],
            depths=[3, 4, 6, 3], num_labels=1000,
        )  # fmt: skip
        return t.ResNetForImageClassification(config)

    def llama(is_narrow: bool) -> torch.nn.Module:
        scale = 64 if is_narrow else 1
        config = t.LlamaConfig(
            hidden_size=2048 // scale, intermediate_size=8192 // scale, num_hidden_layers=16,
            num_attention_heads=32 // (16 if is_narrow else 1), num_key_value_heads=8 // (8 if is_narrow else 1),
            head_dim=64 // (4 if is_narrow else 1), vocab_size=64 if is_narrow else 128256, tie_word_embeddings=True,
        )  # fmt: skip
        return t.LlamaForCausalLM(config)

    return {
        "resnet50": Recipe("ResNet-50", resnet, _images(128), "128 images of 224 x 224"),
        "bert-base": Recipe("BERT-Base", bert(768, 12, 12), _tokens(32, 128, 30522), "32 sequences of 128 tokens"),
        "bert-large": Recipe("BERT-Large", bert(1024, 24, 16), _tokens(32, 128, 30522), "32 sequences of 128 tokens"),
        "vit": Recipe("ViT-L/16", vit(1024, 24, 16), _images(64), "64 images of 224 x 224"),
        "vit-base": Recipe("ViT-B/16", vit(768, 12, 12), _images(128), "128 images of 224 x 224"),
        "gpt2": Recipe("GPT-2 (124M)", gpt2(768, 12, 12), _tokens(8, 1024, 50257), "8 sequences of 1024 tokens"),
        "gpt2-xl": Recipe("GPT-2 XL", gpt2(1600, 48, 25), _tokens(4, 1024, 50257), "4 sequences of 1024 tokens"),
        "llama-1b": Recipe("Llama 3.2 1B", llama, _tokens(4, 2048, 128256), "4 sequences of 2048 tokens"),
    }


def record(name: str, recipe: Recipe) -> dict[str, Any]:
    """The model as data."""
    with torch.device("meta"):
        module = recipe.make(False)
    module.train()
    shapes = {key: list(p.shape) for key, p in module.named_parameters()}
    order = Order()
    forward_s, backward_s = run(module, recipe.inputs("meta", False), order)
    unused = sorted(set(shapes) - {key for key, _ in order.ready})
    if unused:
        print(f"{name}: no gradient for {', '.join(unused)}", file=sys.stderr)
    return {
        "schema": 1,
        "kind": "replay_model",
        "name": name,
        "title": recipe.title,
        "batch": recipe.batch,
        "source": f"transformers {version('transformers')} configuration, torch {version('torch')} autograd order, "
        "roofline of an A100 80GB (312 TFLOP/s BF16, 2.04 TB/s)",
        "roofline_s": round(forward_s + backward_s, 6),
        "forward_share": round(forward_s / (forward_s + backward_s), 4),
        "tensors": [[key, shapes[key], round(at / backward_s, 6)] for key, at in order.ready],
    }


def verify(name: str, recipe: Recipe, recorded: Mapping[str, Any]) -> bool:
    """Whether a narrow model of full depth, run for real, gives its gradients in the recorded order."""
    torch.manual_seed(0)
    module = recipe.make(True)
    module.train()
    order = Order()
    run(module, recipe.inputs("cpu", True), order)
    real = [key for key, _ in order.ready]
    told = [key for key, _, _ in recorded["tensors"]]
    moved = sum(a != b for a, b in zip(real, told, strict=True)) if len(real) == len(told) else -1
    reversed_ = [key for key, _ in module.named_parameters()][::-1]
    plain = sum(a != b for a, b in zip(real, reversed_, strict=False))
    print(f"{name}: {len(told)} tensors, {moved} out of the real order ({plain} would be in reversed order)")
    return moved == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="default: all")
    parser.add_argument("--verify", action="store_true", help="also run a narrow model and compare the order")
    args = parser.parse_args()
    is_fine = True
    for name, recipe in recipes().items():
        if args.models and name not in args.models:
            continue
        held = record(name, recipe)
        rows = ",\n".join(json.dumps(row) for row in held.pop("tensors"))
        head = json.dumps(held, indent=0)[:-2]
        (MODELS / f"{name}.json").write_text(f'{head},\n"tensors": [\n{rows}\n]\n}}\n')
        held = json.loads((MODELS / f"{name}.json").read_text())
        total = sum(torch.Size(shape).numel() for _, shape, _ in held["tensors"])
        print(f"{name}: {len(held['tensors'])} tensors, {total} parameters, {held['roofline_s']} s at the roofline")
        if args.verify:
            is_fine = verify(name, recipe, held) and is_fine
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
