"""One step under a layout: parts that add up, laws that any network obeys, layouts that are refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import TwoNumbers

from wirespeed.errors import UsageError
from wirespeed.plan.catalogue import find_model
from wirespeed.plan.devices import find_device
from wirespeed.sim.axes import ScaledAxes
from wirespeed.sim.layout import Layout
from wirespeed.sim.parallelism import least_step_s, predict_layout

GPT = find_model("gpt3-13b").transformer
MIXTRAL = find_model("mixtral-8x7b").transformer
A100 = find_device("a100")
LAYOUT = Layout(tensor=4, pipeline=4, data=4, micro_batch=1, global_batch=64, zero=1)


def predict(layout: Layout = LAYOUT, shape=GPT, costs=None, **more):
    return predict_layout(shape, A100, layout, TwoNumbers() if costs is None else costs, **more)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (GPT, LAYOUT),
        (GPT, Layout(tensor=8, pipeline=1, data=1, global_batch=8)),
        (GPT, Layout(tensor=1, data=64, global_batch=64, zero=3)),
        (GPT, Layout(tensor=2, pipeline=5, data=4, interleave=2, global_batch=60, recompute="full", zero=1)),
        (GPT, Layout(tensor=2, pipeline=4, data=4, context=2, global_batch=64, zero=1)),
        (MIXTRAL, Layout(tensor=2, pipeline=4, data=8, expert=8, global_batch=64, zero=1)),
    ],
)
def test_parts_add_up_to_the_step_and_lie_above_the_bound(shape, layout):
    found = predict(layout, shape, check_memory=False)
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    assert all(part > 0 for part in found.parts_s.values())
    assert 0 < found.lower_bound_s <= found.step_s
    assert found.samples_per_s * found.step_s == pytest.approx(layout.global_batch)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("global_batch", 62, "global_batch 62"),
        ("tensor", 3, "40 heads"),
        ("pipeline", 3, "40 layers"),
        ("zero", 3, "zero = 3 with a pipeline"),
        ("context", 3, "a sequence of 2048"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(field, value, what):
    with pytest.raises(UsageError, match=what):
        predict(msgspec.structs.replace(LAYOUT, **{field: value}))


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(UsageError, match="8 experts"):
        predict(Layout(data=6, expert=3, global_batch=6), MIXTRAL)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"needs .* per device"):
        predict(Layout(data=8, global_batch=8))


def test_a_free_network_leaves_compute_and_the_bubble():
    found = predict(costs=ScaledAxes(costs=TwoNumbers(), wire=0, latency=0))
    assert found.exposed_s == 0
    assert found.binding_link is None
    # 16 micro-batches over 4 stages: a bubble of 3/16 of equal stages; the loss on the last one makes it less.
    bubble = found.parts_s["pipeline bubble and transfers"] / found.compute_s
    assert 0.1 < bubble < 3 / 16


@settings(max_examples=30, deadline=None)
@given(st.floats(1.01, 10), st.sampled_from(["wire", "latency", "slowdown"]))
def test_nothing_gets_faster_on_a_worse_network_or_a_slower_device(factor, what):
    better = predict().step_s
    if what == "slowdown":
        worse = predict(slowdown=factor).step_s
    else:
        worse = predict(costs=ScaledAxes(costs=TwoNumbers(), **{what: factor})).step_s
    assert worse > better


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "selective", "full"]),
    st.booleans(),
)
def test_the_bound_of_a_search_is_never_above_the_prediction(tensor, pipeline, interleave, recompute, is_split):
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=2,
        interleave=interleave if pipeline > 1 and 40 % (pipeline * interleave) == 0 else 1,
        global_batch=64,
        recompute=recompute,
        sequence_parallel=is_split,
        zero=1,
    )
    costs = TwoNumbers()
    for exact in (False, True):
        found = predict(layout, costs=costs, check_memory=False, exact_schedule=exact)
        assert least_step_s(GPT, A100, layout, costs) <= found.step_s * (1 + 1e-9)


def test_one_slow_stage_slows_the_whole_pipeline():
    even = predict().step_s
    one = predict(slowdown=(1.0, 1.5, 1.0, 1.0)).step_s
    every = predict(slowdown=1.5).step_s
    assert even < one <= every
    # 16 micro-batches wait for the slow stage: most of the loss, not a quarter of it.
    assert one - even > 0.5 * (every - even)


@pytest.mark.parametrize("slowdown", [0.5, float("inf"), (1.0, 1.0)])
def test_a_slowdown_that_is_none_is_refused(slowdown):
    with pytest.raises(UsageError, match="slowdowns"):
        predict(slowdown=slowdown)


def test_overlap_hides_gradients_behind_backward():
    shown = predict(msgspec.structs.replace(LAYOUT, overlap=False)).parts_s["gradient exchange"]
    hidden = predict().parts_s["gradient exchange"]
    assert hidden < shown


def test_sequence_parallel_exchanges_halves_of_an_all_reduce_and_saves_memory():
    plain, split = TwoNumbers(), TwoNumbers()
    without = predict(msgspec.structs.replace(LAYOUT, sequence_parallel=False), costs=plain, check_memory=False)
    with_it = predict(costs=split, check_memory=False)
    assert {op for axis, op, _ in plain.asked if axis == "tensor"} == {"all_reduce"}
    assert {op for axis, op, _ in split.asked if axis == "tensor"} == {"all_gather", "reduce_scatter"}
    assert with_it.memory.activations_bytes < without.memory.activations_bytes


def test_gradients_of_one_device_cross_the_network_once_per_step():
    costs = TwoNumbers()
    predict(Layout(tensor=8, data=8, global_batch=64, micro_batch=1, zero=0), costs=costs, check_memory=False)
    sent = [size for axis, op, size in costs.asked if (axis, op) == ("data", "all_reduce")]
    # fp32 gradients of an eighth of the model, in one message per layer; the model costs one of them.
    expected = 4 * (40 * GPT.layer_parameters + GPT.vocab * GPT.hidden) / 8 / 40
    assert sent == [pytest.approx(expected)]


def test_fully_sharded_training_gathers_weights_for_every_micro_batch():
    one = predict(Layout(data=64, global_batch=64, zero=3), check_memory=False)
    four = predict(Layout(data=64, global_batch=256, zero=3), check_memory=False)
    assert four.wire_bytes == pytest.approx(4 * one.wire_bytes)


def test_a_prediction_says_whether_its_exchanges_were_measured():
    assert predict().is_in_range
    assert not predict(costs=TwoNumbers(is_in_range=False)).is_in_range
    assert 0 < predict().uncertainty < 0.2


def test_a_slow_network_binds_and_is_named():
    found = predict(costs=TwoNumbers(bytes_per_s=1e9))
    assert found.binding == "tensor exchange"
    assert found.binding_link == "link of tensor"


def test_names_say_what_differs():
    assert LAYOUT.name == "tp4+sp pp4 dp4 mb1 zero1"
    assert (
        Layout(tensor=2, pipeline=2, interleave=3, recompute="full", global_batch=2).name
        == "tp2+sp pp2x3 dp1 mb1 full-recompute"
    )
