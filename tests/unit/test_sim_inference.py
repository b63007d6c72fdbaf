"""Transformer inference over devices."""

from __future__ import annotations

import pytest
from parallel_cases import TwoNumbers

from wirespeed.errors import UsageError
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.devices import find_device
from wirespeed.sim.inference import Serving, predict_serving

LLAMA = find_model("llama3-8b").transformer
H100 = find_device("h100")


def predict(costs=None, shape=LLAMA, **serving):
    return predict_serving(shape, H100, Serving(**serving), TwoNumbers() if costs is None else costs)


def test_a_single_token_reads_every_weight_once():
    found = predict(batch=1, prompt=128, answer=2)
    # 8.03 G weights less the table of tokens (0.53 G), in 16 bits, at 80 % of 3.35 TB/s.
    expected_s = 2 * (8.03e9 - 0.53e9) / (0.8 * 3.35e12)
    assert found.parts_s["weights and products"] == pytest.approx(expected_s, rel=0.02)
    assert found.lower_bound_s <= found.token_s


def test_parts_of_a_token_add_up():
    found = predict(tensor=4, pipeline=2, batch=16)
    assert sum(found.parts_s.values()) == pytest.approx(found.token_s)


def test_a_batch_shares_the_weights():
    one, many = (predict(batch=batch) for batch in (1, 64))
    assert many.tokens_per_s > 20 * one.tokens_per_s
    assert many.token_s > one.token_s


def test_latency_of_the_network_binds_small_models_over_hosts():
    # 32 layers with two all-reduces each: 64 times the latency for every token.
    found = predict(costs=TwoNumbers(latency_s=1e-3), tensor=8, batch=1)
    assert found.parts_s["tensor exchange"] == pytest.approx(64e-3, rel=0.01)
    assert found.binding == "tensor exchange"
    assert found.binding_link == "link of tensor"


def test_only_used_experts_are_read():
    mixtral = find_model("mixtral-8x7b").transformer
    one, many = (predict(shape=mixtral, tensor=2, batch=batch) for batch in (1, 64))
    # A token uses 2 of 8 experts; 64 tokens use all of them.
    assert many.parts_s["weights and products"] > 2.5 * one.parts_s["weights and products"]


def test_what_does_not_fit_or_divide_is_refused():
    with pytest.raises(UsageError, match=r"needs .* per device") as caught:
        predict(shape=find_model("llama3-70b").transformer)
    assert "more tensor" in caught.value.hint
    with pytest.raises(UsageError, match="smaller batch"):
        predict(batch=100_000)
    with pytest.raises(UsageError, match="32 heads and tensor = 3"):
        predict(tensor=3)
