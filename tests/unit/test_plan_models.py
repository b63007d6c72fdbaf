from __future__ import annotations

import math

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.plan.bounds import GoodputCosts, bound_step_s, rate_for_exposed
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.compute import workload_of
from wirespeed.plan.devices import find_device
from wirespeed.plan.models import ModelTensor, ReplayModel, load_model, model_names, replay_workload, scaled_workload
from wirespeed.sim.training import fill_buckets
from wirespeed.spec.strategy import Strategy, Transfer
from wirespeed.spec.workload import GradientTensor, TrainingWorkload
from wirespeed.units import MIB

# Parameters of the published models, tied embeddings counted once (transformers' own counts; BERT with its MLM head).
PARAMETERS = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "resnet50": 25_557_032,
    "vit": 304_326_632,
    "vit-base": 86_567_656,
}


def test_the_catalogue_holds_the_published_models():
    assert {name: load_model(name).num_parameters for name in model_names()} == PARAMETERS


def test_an_unknown_model_names_those_that_exist():
    with pytest.raises(UsageError, match="bert-base, bert-large, gpt2"):
        load_model("resnet-50")


def test_a_model_without_a_recorded_order_comes_from_the_planners_catalogue():
    held = load_model("vgg16")
    assert held.num_parameters == 138_357_544
    assert held.tensors[0].name.startswith("classifier")
    assert held.tensors[-1].ready_share == pytest.approx(1.0)
    assert "reverse forward order" in held.source
    # What a replay assumes of it is what the planner assumes of it.
    workload = workload_of(
        find_model("vgg16"), find_device("a100"), batch=64, num_ranks=2, dtype="bf16", is_fused_attention=True
    )
    assert held.assumed_compute_s == pytest.approx(workload.forward_s + workload.backward_s)


@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - {"llama-1b"}))
def test_recorded_models_are_models_of_the_catalogue(name: str):
    # BERT's catalogue counts the pooler, the recording leaves it out: masked language modelling has no use for it.
    assert find_model(name).num_parameters == pytest.approx(load_model(name).num_parameters, rel=0.006)


def test_backward_ends_with_the_layers_that_forward_begins_with():
    names = [tensor.name for tensor in load_model("resnet50").tensors]
    assert names[:2] == ["classifier.1.weight", "classifier.1.bias"] or set(names[:2]) == {
        "classifier.1.weight",
        "classifier.1.bias",
    }
    assert "embedder" in names[-1]
    assert "embeddings" in load_model("bert-large").tensors[-1].name


def test_times_are_shares_of_the_compute_that_was_asked_for():
    workload = replay_workload(load_model("vit"), num_ranks=4, compute_s=2.0)
    assert workload.compute_s == pytest.approx(2.0)
    assert 0.55 < workload.backward_s / workload.compute_s < 0.7
    assert workload.gradients[-1].ready_s <= workload.backward_s
    assert workload.origin == "assumed"
    with pytest.raises(UsageError, match="above zero"):
        replay_workload(load_model("vit"), num_ranks=4, compute_s=0.0)


@pytest.mark.parametrize("name", ["resnet50", "bert-large", "gpt2-xl"])
@pytest.mark.parametrize("scale", [2, 8, 64])
def test_a_scale_keeps_every_buckets_share_and_its_time(name, scale):
    full = replay_workload(load_model(name), num_ranks=2, compute_s=1.0)
    small = scaled_workload(full, scale)
    assert small.num_elements == pytest.approx(full.num_elements / scale, rel=0.01)
    assert all(g.shape and math.prod(g.shape) == g.num_elements for g in small.gradients)
    big_buckets = fill_buckets(full.gradients, 25 * MIB, first_bucket_bytes=MIB)
    small_buckets = fill_buckets(small.gradients, 25 * MIB // scale, first_bucket_bytes=MIB // scale)
    # A bucket closes with the tensor that fills it, and rounding may shift that by a tensor: the number may differ by 1.
    assert abs(len(big_buckets) - len(small_buckets)) <= 1
    assert max(b.num_elements for b in small_buckets) == pytest.approx(
        max(b.num_elements for b in big_buckets) / scale, rel=0.1
    )


def test_a_scale_of_one_changes_nothing_and_one_below_is_refused():
    workload = replay_workload(load_model("resnet50"), num_ranks=2)
    assert scaled_workload(workload, 1) == workload
    with pytest.raises(UsageError, match="1 \\(as it is\\) or more"):
        scaled_workload(workload, 0.5)


def test_a_model_out_of_order_is_refused():
    with pytest.raises(DataError, match="backward order"):
        ReplayModel(
            schema=1, name="x", title="X", batch="", source="", roofline_s=1.0, forward_share=0.3,
            tensors=(ModelTensor("a", (2,), 0.9), ModelTensor("b", (2,), 0.1)),
        )  # fmt: skip


def one_gradient(num_elements: int = 1_000_000, *, num_ranks: int = 2) -> TrainingWorkload:
    return TrainingWorkload(
        gradients=(GradientTensor(name="w", num_elements=num_elements, ready_s=0.2),),
        forward_s=0.1, backward_s=0.2, optimizer_s=0.0, num_ranks=num_ranks, cpus_per_rank=0.5,
    )  # fmt: skip


def test_the_bound_of_one_bucket_is_compute_and_its_bytes_at_the_goodput():
    # Ready at the end of backward: 0.3 s, then 4 MB * 2 * 1/2 * 8 bit at 100 Mbit/s = 0.32 s.
    assert bound_step_s(one_gradient(), Strategy(), 100e6) == pytest.approx(0.62)
    # Stages of 10 ms each, before and after.
    assert bound_step_s(one_gradient(), Strategy(codec="half"), 100e6, stage_s=lambda *_: 0.01) == pytest.approx(0.48)


def test_a_bound_without_a_rate_is_refused():
    with pytest.raises(UsageError, match="above zero"):
        GoodputCosts(0.0, 2)


def test_goodput_costs_count_what_a_rank_sends():
    cost = GoodputCosts(8e6, 4).transfer(Transfer(collective="all_gather", size_bytes=1_000_000))
    assert cost.seconds == pytest.approx(0.75)
    assert cost.lower_bound_s == cost.seconds


@pytest.mark.parametrize("share", [0.05, 0.35, 0.5, 0.9])
def test_the_rate_for_a_share_gives_that_share(share):
    workload = replay_workload(load_model("resnet50"), num_ranks=2, compute_s=0.3)
    rate = rate_for_exposed(workload, share)
    assert 1 - workload.compute_s / bound_step_s(workload, Strategy(), rate) == pytest.approx(share, abs=1e-6)


def test_no_rate_exposes_all_or_nothing():
    with pytest.raises(UsageError, match="above 0 and below 1"):
        rate_for_exposed(one_gradient(), 1.0)
    with pytest.raises(UsageError, match="two ranks"):
        rate_for_exposed(one_gradient(num_ranks=1), 0.5)
