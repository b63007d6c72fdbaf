"""Gradients into messages, and the queue that sends them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.sim.fusion import all_at_once, drain, fuse_by_cycle, merge_to_save, one_by_one
from wirespeed.spec.workload import GradientTensor

GRADIENTS = tuple(GradientTensor(name=f"g{i}", num_elements=1000, ready_s=0.001 * (i + 1)) for i in range(10))


def cost_s(num_bytes: int) -> float:
    return 5e-4 + num_bytes * 1e-9


def test_a_message_starts_when_it_is_ready_and_the_last_one_is_done():
    # Each takes 504 us and comes every ms: the last is ready at 10 ms and alone.
    assert drain(one_by_one(GRADIENTS), cost_s) == pytest.approx(0.010504)
    # Costs of 1.5 ms pile up behind the first, which is ready at 1 ms.
    assert drain(one_by_one(GRADIENTS), lambda _: 1.5e-3) == pytest.approx(0.001 + 10 * 1.5e-3)


def test_a_cycle_closes_by_time_and_a_buffer_by_size():
    by_time = fuse_by_cycle(GRADIENTS, cycle_s=3e-3)
    assert [message.num_elements for message in by_time] == [3000, 3000, 3000, 1000]
    by_size = fuse_by_cycle(GRADIENTS, cycle_s=1.0, limit_bytes=16_000)
    assert [message.num_elements for message in by_size] == [4000, 4000, 2000]


def test_merging_never_takes_longer_than_one_by_one_or_all_at_once():
    slow = 4e-3
    merged = drain(merge_to_save(GRADIENTS, lambda n: slow + n * 1e-9), lambda n: slow + n * 1e-9)
    for other in (one_by_one(GRADIENTS), all_at_once(GRADIENTS)):
        assert merged <= drain(other, lambda n: slow + n * 1e-9)


@given(
    st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 0.01)), min_size=1, max_size=40),
    st.floats(0, 0.02),
    st.integers(1, 10**8),
)
def test_fusion_loses_no_element_and_sends_nothing_early(layers, cycle_s, limit_bytes):
    now_s, gradients = 0.0, []
    for place, (size, gap_s) in enumerate(layers):
        now_s += gap_s
        gradients.append(GradientTensor(name=str(place), num_elements=size, ready_s=now_s))
    total = sum(size for size, _ in layers)
    for messages in (
        fuse_by_cycle(gradients, cycle_s=cycle_s, limit_bytes=limit_bytes),
        merge_to_save(gradients, cost_s),
        all_at_once(gradients),
        one_by_one(gradients),
    ):
        assert sum(message.num_elements for message in messages) == total
        assert messages[-1].ready_s == now_s
        assert drain(messages, cost_s) >= now_s + cost_s(4)


def test_an_empty_model_sends_nothing():
    assert all_at_once(()) == fuse_by_cycle(()) == merge_to_save((), cost_s) == ()


def test_a_cycle_below_zero_is_refused():
    with pytest.raises(UsageError):
        fuse_by_cycle(GRADIENTS, cycle_s=-1)
