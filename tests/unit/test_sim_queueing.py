"""Queues with dynamic batching against queueing theory and against simple cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.sim.queueing import Service, predict_queue


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_single_requests_wait_as_pollaczek_and_khinchin_say(load):
    found = predict_queue(Service(fixed_s=1e-3, per_item_s=0), arrivals_per_s=1000 * load, num_requests=200_000)
    # M/D/1: mean time in the system is s (1 + rho / (2 (1 - rho))).
    assert found.mean_s == pytest.approx(1e-3 * (1 + load / (2 * (1 - load))), rel=0.04)
    assert found.utilization == pytest.approx(load, rel=0.03)


def test_one_client_waits_for_its_own_request_and_the_batchers_patience():
    found = predict_queue(Service(fixed_s=5e-3, per_item_s=1e-4, max_batch=32, max_wait_s=2e-3), clients=1)
    assert found.p50_s == pytest.approx(5e-3 + 1e-4 + 2e-3)
    assert found.throughput_per_s == pytest.approx(1 / 7.1e-3, rel=0.01)


def test_as_many_clients_as_a_batch_holds_fill_it():
    found = predict_queue(Service(fixed_s=5e-3, per_item_s=1e-4, max_batch=8), clients=8)
    assert found.mean_batch == pytest.approx(8, rel=0.02)
    assert found.throughput_per_s == pytest.approx(found.capacity_per_s, rel=0.02)


def test_batches_grow_with_the_load_and_raise_the_capacity():
    single = Service(fixed_s=5e-3, per_item_s=1e-4)
    batched = Service(fixed_s=5e-3, per_item_s=1e-4, max_batch=32)
    assert batched.capacity_per_s == pytest.approx(32 / 8.2e-3)
    assert not predict_queue(single, arrivals_per_s=1000).is_stable
    low, high = (predict_queue(batched, arrivals_per_s=rate) for rate in (200, 3000))
    assert low.mean_batch < high.mean_batch
    assert low.p50_s < high.p50_s < high.p99_s


def test_an_overloaded_queue_has_no_latency():
    found = predict_queue(Service(fixed_s=1e-2, per_item_s=0), arrivals_per_s=200)
    assert not found.is_stable
    assert found.p99_s is None
    assert found.throughput_per_s == pytest.approx(100)


def test_replicas_share_one_queue():
    one = predict_queue(Service(fixed_s=1e-3, per_item_s=0), arrivals_per_s=800)
    four = predict_queue(Service(fixed_s=1e-3, per_item_s=0, replicas=4), arrivals_per_s=3200)
    assert four.p99_s < one.p99_s


@settings(max_examples=25, deadline=None)
@given(
    st.floats(1e-4, 1e-2),
    st.floats(0, 1e-3),
    st.integers(1, 16),
    st.integers(1, 4),
    st.floats(0.05, 0.95),
    st.integers(0, 3),
)
def test_what_arrives_is_served_and_never_faster_than_alone(fixed_s, per_item_s, max_batch, replicas, load, seed):
    service = Service(fixed_s=fixed_s, per_item_s=per_item_s, max_batch=max_batch, replicas=replicas)
    rate = load * service.capacity_per_s
    found = predict_queue(service, arrivals_per_s=rate, num_requests=4000, seed=seed)
    assert found.throughput_per_s == pytest.approx(rate, rel=0.15)
    assert found.lower_bound_s * (1 - 1e-9) <= found.p50_s <= found.p99_s
    assert 1 <= found.mean_batch <= max_batch


def test_the_same_question_has_the_same_answer():
    service = Service(fixed_s=1e-3, per_item_s=1e-4, max_batch=8, jitter=0.2)
    assert predict_queue(service, arrivals_per_s=900) == predict_queue(service, arrivals_per_s=900)


@pytest.mark.parametrize("load", [{}, {"arrivals_per_s": 1.0, "clients": 1}, {"arrivals_per_s": 0.0}, {"clients": 0}])
def test_a_load_that_is_none_is_refused(load):
    with pytest.raises(UsageError):
        predict_queue(Service(fixed_s=1e-3, per_item_s=0), **load)
