"""Explanations: numbers that come from simulations, and the advice that follows from them."""

from __future__ import annotations

import msgspec
import pytest
from plan_cases import gigabit_fabric, gigabit_workload

from wirespeed.plan import Explanation, best_of_each_codec, choose, costs_of, explain, predict, search
from wirespeed.spec.strategy import Fidelity, Strategy


def told(name: str = "dense", *, rate_bit_per_s: float = 1e9, fidelity: Fidelity = "half") -> Explanation:
    workload, fabric = gigabit_workload(), gigabit_fabric(rate_bit_per_s=rate_bit_per_s)
    choice = choose(search(workload, fabric, fidelity).predictions, fidelity)
    prediction = predict(workload, Strategy.parse(name), fabric)
    return explain(workload, prediction, costs_of(workload, fabric), choice=choice)


def test_the_parts_sum_to_the_step():
    prediction = predict(gigabit_workload(), Strategy(), gigabit_fabric())
    assert sum(told().parts_s.values()) == pytest.approx(prediction.step_s)


def test_a_free_network_leaves_compute_and_no_change_beats_it():
    found = told()
    free = next(one for one in found.what_ifs if one.change == "a network that costs nothing")
    assert free.step_s == pytest.approx(0.32)
    assert all(one.step_s >= free.step_s - 1e-12 for one in found.what_ifs)


def test_the_limit_is_amdahls():
    step_s = predict(gigabit_workload(), Strategy(), gigabit_fabric()).step_s
    assert told().best_speedup == pytest.approx(step_s / 0.32)
    assert any("nothing done to the network can give more" in line for line in told().lines)


def test_a_slow_network_is_named_and_a_strategy_advised():
    lines = told(rate_bit_per_s=1e8, fidelity="lossy").lines
    assert any(line.startswith("bandwidth binds") for line in lines)
    assert any(line.startswith("use topk@1%") for line in lines)


def test_a_fast_network_gets_the_advice_to_change_nothing():
    lines = told(rate_bit_per_s=1e11).lines
    assert any(line.startswith("compute binds") for line in lines)
    assert any(line.startswith("change nothing") for line in lines)


def test_a_codec_is_offered_a_faster_one_and_dense_is_not():
    assert "a codec twice as fast" in [one.change for one in told("int8").what_ifs]
    assert "a codec twice as fast" not in [one.change for one in told("dense").what_ifs]


def test_what_is_not_known_is_said():
    workload = msgspec.structs.replace(gigabit_workload(num_gradients=2, elements=2**28), origin="assumed")
    fabric = gigabit_fabric()
    lines = explain(workload, predict(workload, Strategy(), fabric), costs_of(workload, fabric)).lines
    assert any("assumed, not measured" in line for line in lines)
    assert any("extrapolated" in line for line in lines)


def test_of_each_codec_the_best_bucket_size_remains():
    predictions = search(gigabit_workload(), gigabit_fabric(), "compressed").predictions
    best = best_of_each_codec(predictions)
    assert sorted(p.strategy.codec for p in best) == ["dense", "half", "int8"]
    assert best[0] == predictions[0]
