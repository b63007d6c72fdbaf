"""The catalogue: sizes held against published counts, work against published operations."""

from __future__ import annotations

import pytest

from wirespeed.errors import UsageError
from wirespeed.plan.catalogue import find_model, model_names

# Counts of released checkpoints and of torchvision's and transformers' modules, to the last parameter.
EXACT = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "vgg16-bn": 138_365_992,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", EXACT)
def test_counts_agree_with_released_models_to_the_last_parameter(name):
    assert find_model(name).num_parameters == EXACT[name]


@pytest.mark.parametrize("name", [n for n in model_names() if find_model(n).published_parameters])
def test_every_published_count_is_met_within_the_rounding_of_its_table(name):
    model = find_model(name)
    # Tables round to two or three digits: 350M, 2.7B, 1.7B.
    assert model.num_parameters == pytest.approx(model.published_parameters, rel=0.03)


@pytest.mark.parametrize(
    ("name", "tensors"), {"resnet50": 161, "vgg16-bn": 58, "bert-large": 398, "gpt2-xl": 580}.items()
)
def test_tensors_are_those_of_the_published_modules(name, tensors):
    assert find_model(name).num_tensors == tensors


@pytest.mark.parametrize(
    ("name", "multiply_adds"),
    {
        "resnet50": 4.09e9,
        "resnet101": 7.80e9,
        "vgg16": 15.47e9,
        "vit-b16": 17.56e9,
        "vit-l16": 61.55e9,
        "vit-h14": 167.3e9,
    }.items(),
)
def test_work_agrees_with_torchvisions_table(name, multiply_adds):
    assert find_model(name).flops / 2 == pytest.approx(multiply_adds, rel=0.01)


def test_mogface_counts_what_its_module_holds():
    model = find_model("mogface-large")
    assert model.num_parameters == pytest.approx(85.26e6, rel=1e-3)
    # The side outputs are parameters that forward never uses.
    assert next(layer for layer in model.layers if layer.name == "fpn.side.0").flops == 0


@pytest.mark.parametrize(("name", "size"), {"fuxi-100b": 1e11, "fuxi-1t": 1e12}.items())
def test_unpublished_models_say_that_they_are_assumed(name, size):
    model = find_model(name)
    assert model.origin == "assumed"
    assert "assumed" in model.source
    assert model.num_parameters == pytest.approx(size, rel=0.02)


def test_lingbot_is_an_assumed_vision_transformer():
    assert find_model("lingbot").origin == "assumed"
    assert find_model("lingbot").num_parameters == find_model("vit-l16").num_parameters


def test_a_longer_sequence_adds_positions_and_attention():
    short, long = find_model("gpt3-1.3b"), find_model("gpt3-1.3b@4096")
    # 2048 more rows of the table of positions.
    assert long.num_parameters - short.num_parameters == 2048 * 2048
    assert long.transformer.sequence == 4096
    assert long.flops > 2 * short.flops


def test_the_work_of_a_step_is_narayanans_formula():
    shape = find_model("megatron-145b").transformer
    h, layers, seq, vocab, batch = 12288, 80, 2048, 51200, 2304
    # Narayanan et al. 2021, section 5.1, equation 3: with full recomputation.
    expected = 96 * batch * seq * layers * h**2 * (1 + seq / (6 * h) + vocab / (16 * layers * h))
    assert shape.step_flops(batch, recompute=True) == pytest.approx(expected, rel=1e-12)
    plain = 72 * batch * seq * layers * h**2 * (1 + seq / (6 * h) + vocab / (12 * layers * h))
    assert shape.step_flops(batch) == pytest.approx(plain, rel=1e-12)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(UsageError, match="gpt3-175b") as caught:
        find_model("gpt3-175")
    assert "did you mean 'gpt3-175b'" in caught.value.hint


@pytest.mark.parametrize("text", ["resnet50@128", "vit-b16@64", "gpt2@", "gpt2@0", "gpt2@many", ""])
def test_wrong_sequences_and_names_are_refused(text):
    with pytest.raises(UsageError):
        find_model(text)
