"""The catalogue of models: every one generated from its configuration, its size held against the published count.

``find_model`` takes a catalogue name, optionally with a sequence length (``gpt3-175b@4096``), or a JSON configuration
of a transformer. Models that nobody has published in detail (``fuxi-*``, ``lingbot``) are marked ``assumed``: their
size is what their names or descriptions say, their shape is a guess.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from wirespeed.errors import UsageError
from wirespeed.plan.convnets import mogface, resnet, vgg16
from wirespeed.plan.transformers import bert, gpt, llama, vit
from wirespeed.spec.model import Model

_GPT2 = "Radford et al. 2019; parameters of the released checkpoints"
_GPT3 = "Brown et al. 2020, table 2.1"
_MEGATRON = "Narayanan et al. 2021, table 1"
_LLAMA = "Touvron et al. 2023 (1, 2), Grattafiori et al. 2024 (3); parameters of the released checkpoints"
_FUXI = "assumed: a dense GPT of the size that the name says; no shape is published"

_GPT2_SHAPES = {
    # name: (hidden, layers, heads, parameters)
    "gpt2": (768, 12, 12, 124_439_808),
    "gpt2-medium": (1024, 24, 16, 354_823_168),
    "gpt2-large": (1280, 36, 20, 774_030_080),
    "gpt2-xl": (1600, 48, 25, 1_557_611_200),
}
_GPT3_SHAPES = {
    # name: (hidden, layers, heads, about so many). 13B: the paper's hidden 5140 is not 40 heads of 128, which are 5120.
    "gpt3-125m": (768, 12, 12, 125e6),
    "gpt3-350m": (1024, 24, 16, 350e6),
    "gpt3-760m": (1536, 24, 16, 760e6),
    "gpt3-1.3b": (2048, 24, 16, 1.3e9),
    "gpt3-2.7b": (2560, 32, 32, 2.7e9),
    "gpt3-6.7b": (4096, 32, 32, 6.7e9),
    "gpt3-13b": (5120, 40, 40, 13e9),
    "gpt3-175b": (12288, 96, 96, 175e9),
}
_MEGATRON_SHAPES = {
    "megatron-1.7b": (2304, 24, 24, 1.7e9),
    "megatron-3.6b": (3072, 30, 32, 3.6e9),
    "megatron-7.5b": (4096, 36, 32, 7.5e9),
    "megatron-18b": (6144, 40, 48, 18.4e9),
    "megatron-22b": (6144, 48, 64, 22e9),
    "megatron-39b": (8192, 48, 64, 39.1e9),
    "megatron-76b": (10240, 60, 80, 76.1e9),
    "megatron-145b": (12288, 80, 96, 145.6e9),
    "megatron-310b": (16384, 96, 128, 310.1e9),
    "megatron-530b": (20480, 105, 128, 529.6e9),
    "megatron-1t": (25600, 128, 160, 1008e9),
}
_LLAMA_SHAPES = {
    # name: (hidden, layers, heads, key-value heads, ffn, vocabulary, sequence, parameters)
    "llama-7b": (4096, 32, 32, 32, 11008, 32000, 2048, 6_738_415_616),
    "llama-13b": (5120, 40, 40, 40, 13824, 32000, 2048, 13_015_864_320),
    "llama-33b": (6656, 60, 52, 52, 17920, 32000, 2048, 32_528_943_616),
    "llama-65b": (8192, 80, 64, 64, 22016, 32000, 2048, 65_285_660_672),
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000, 4096, 6_738_415_616),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000, 4096, 13_015_864_320),
    "llama2-70b": (8192, 80, 64, 8, 28672, 32000, 4096, 68_976_648_192),
    "llama3-8b": (4096, 32, 32, 8, 14336, 128256, 8192, 8_030_261_248),
    "llama3-70b": (8192, 80, 64, 8, 28672, 128256, 8192, 70_553_706_496),
    "llama3-405b": (16384, 126, 128, 8, 53248, 128256, 8192, 405_853_388_800),
}


def _builders() -> dict[str, Callable[[int | None], Model]]:
    """Name -> a function of the sequence length (None: the model's own) that makes the model."""
    found: dict[str, Callable[[int | None], Model]] = {
        "resnet50": lambda _: resnet(50),
        "resnet101": lambda _: resnet(101),
        "resnet152": lambda _: resnet(152),
        "vgg16": lambda _: vgg16(),
        "vgg16-bn": lambda _: vgg16(norm=True),
        "mogface-large": lambda _: mogface(),
        "bert-base": lambda s: bert("base", sequence=s or 128, published_parameters=110_106_428),
        "bert-large": lambda s: bert("large", sequence=s or 128, published_parameters=336_226_108),
        "vit-b16": lambda _: vit(
            "vit-b16", hidden=768, num_layers=12, num_heads=12, patch=16, published_parameters=86_567_656
        ),
        "vit-l16": lambda _: vit(
            "vit-l16", hidden=1024, num_layers=24, num_heads=16, patch=16, published_parameters=304_326_632
        ),
        "vit-h14": lambda _: vit(
            "vit-h14", hidden=1280, num_layers=32, num_heads=16, patch=14, published_parameters=632_045_800
        ),
        "lingbot": lambda _: vit(
            "lingbot",
            hidden=1024,
            num_layers=24,
            num_heads=16,
            patch=16,
            origin="assumed",
            source="assumed: a vision transformer like ViT-L/16; no shape is published",
        ),
        "mixtral-8x7b": lambda s: llama(
            "mixtral-8x7b",
            hidden=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            ffn=14336,
            vocab=32000,
            sequence=s or 4096,
            experts=8,
            experts_per_token=2,
            source="Jiang et al. 2024; parameters of the released checkpoint",
            published_parameters=46_702_792_704,
        ),
    }
    for name, (hidden, num_layers, num_heads, parameters) in _GPT2_SHAPES.items():
        # The table of positions has 1024 rows whatever length is trained; so a longer sequence is refused below.
        found[name] = _gpt_builder(name, (hidden, num_layers, num_heads), 1024, 50257, _GPT2, parameters)
    for name, (hidden, num_layers, num_heads, size) in _GPT3_SHAPES.items():
        found[name] = _gpt_builder(name, (hidden, num_layers, num_heads), 2048, 50257, _GPT3, round(size))
    for name, (hidden, num_layers, num_heads, size) in _MEGATRON_SHAPES.items():
        found[name] = _gpt_builder(name, (hidden, num_layers, num_heads), 2048, 51200, _MEGATRON, round(size))
    for name, shape in {"fuxi-100b": (10240, 80, 80), "fuxi-1t": (25600, 128, 160)}.items():
        found[name] = _gpt_builder(name, shape, 2048, 51200, _FUXI, None)
    for name in _LLAMA_SHAPES:
        found[name] = functools.partial(_llama, name)
    return found


def _gpt_builder(  # noqa: PLR0917 - private, called in one place
    name: str, shape: tuple[int, int, int], sequence: int, vocab: int, source: str, parameters: int | None
) -> Callable[[int | None], Model]:
    def build(wanted: int | None) -> Model:
        hidden, num_layers, num_heads = shape
        return gpt(
            name,
            hidden=hidden,
            num_layers=num_layers,
            num_heads=num_heads,
            sequence=sequence if wanted is None else wanted,
            vocab=vocab,
            origin="assumed" if parameters is None else "declared",
            source=source,
            published_parameters=parameters if wanted in (None, sequence) else None,
        )

    return build


def _llama(name: str, wanted: int | None) -> Model:
    hidden, num_layers, num_heads, num_kv_heads, ffn, vocab, sequence, parameters = _LLAMA_SHAPES[name]
    return llama(
        name,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn=ffn,
        vocab=vocab,
        sequence=sequence if wanted is None else wanted,
        source=_LLAMA,
        published_parameters=parameters,
    )


_BUILDERS = _builders()


ALIASES = {"vit": "vit-l16", "vit-base": "vit-b16", "gpt2-small": "gpt2"}
"""Other names of models, among them those under which `bench replay` keeps recorded orders."""


def model_names() -> tuple[str, ...]:
    """Names that ``find_model`` takes, sorted."""
    return tuple(sorted(_BUILDERS))


@functools.lru_cache(maxsize=64)
def find_model(text: str) -> Model:
    """The model of a catalogue name, or ``NAME@TOKENS`` with another sequence length.

    Raises UsageError, naming the names. Convolutional and vision models have no sequence length to choose.
    """
    name, at, tokens = text.strip().lower().partition("@")
    build = _BUILDERS.get(ALIASES.get(name, name))
    if build is None:
        close = _closest(name)
        raise UsageError(
            f"got model {text!r}",
            expected=f"one of {', '.join(model_names())}",
            hint=f"did you mean {close!r}?"
            if close
            else "a file from `wirespeed tune` or `plan.from_module` also serves",
        )
    if not at:
        return build(None)
    if not tokens.isdigit() or not 1 <= int(tokens) <= 2**24:
        raise UsageError(f"got model {text!r}", expected="NAME@TOKENS with tokens per sample, such as gpt3-175b@4096")
    held = build(int(tokens))
    if held.transformer is None or held.transformer.vocab == 0:
        raise UsageError(f"got model {text!r}", expected=f"{name} without a sequence length: its sample is an image")
    return held


def _closest(name: str) -> str | None:
    import difflib

    found = difflib.get_close_matches(name, model_names(), n=1)
    return found[0] if found else None
