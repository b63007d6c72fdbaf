"""How often gradients are exchanged, and what waiting for the slowest costs."""

from __future__ import annotations

import msgspec
import pytest
from plan_cases import gigabit_fabric, gigabit_workload

from wirespeed.errors import UsageError
from wirespeed.plan import FabricCosts
from wirespeed.sim.cadence import Cadence, expected_maximum, predict_cadence
from wirespeed.sim.training import simulate_step
from wirespeed.spec.strategy import Strategy

WORKLOAD = msgspec.structs.replace(gigabit_workload(), cpus_per_rank=None)
COSTS = FabricCosts(gigabit_fabric(), 4)
DENSE = Strategy()


def predict(cadence: Cadence, **more):
    return predict_cadence(WORKLOAD, DENSE, COSTS, cadence, **more)


def test_every_step_is_the_recurrence_itself():
    assert predict(Cadence()).step_s == pytest.approx(simulate_step(WORKLOAD, DENSE, COSTS).step_s)


def test_accumulation_pays_the_exchange_once():
    one, four = predict(Cadence()), predict(Cadence(accumulation=4))
    micro_s = WORKLOAD.forward_s + WORKLOAD.backward_s
    assert four.step_s == pytest.approx(one.step_s + 3 * micro_s)
    assert four.exposed_s == pytest.approx(one.exposed_s)


def test_a_delayed_exchange_shows_only_what_is_longer_than_a_step():
    found = predict(Cadence(name="delayed"))
    timeline = simulate_step(WORKLOAD, DENSE, COSTS)
    whole_s = timeline.wire_s + timeline.codec_s
    assert found.step_s == pytest.approx(max(WORKLOAD.compute_s, whole_s))


def test_local_sgd_divides_the_exchange_by_its_period():
    timeline = simulate_step(WORKLOAD, DENSE, COSTS)
    found = predict(Cadence(name="local_sgd", period=8))
    assert found.exposed_s == pytest.approx((timeline.wire_s + timeline.codec_s) / 8)


def test_streamed_fragments_hide():
    whole, streamed = (predict(Cadence(name="diloco", period=8, fragments=n)) for n in (1, 4))
    assert streamed.exposed_s < whole.exposed_s


def test_waiting_for_the_latest_grows_with_ranks_and_shrinks_with_the_period():
    # The expected largest of N standard normals: 1.03 of 4, 2.51 of 100 (tables of order statistics).
    assert expected_maximum(4) == pytest.approx(1.03, abs=0.02)
    assert expected_maximum(100) == pytest.approx(2.51, abs=0.02)
    often, seldom = (predict(cadence, jitter=0.1) for cadence in (Cadence(), Cadence(name="local_sgd", period=16)))
    assert often.straggler_s == pytest.approx(1.03 * 0.1 * WORKLOAD.compute_s, rel=0.02)
    assert seldom.straggler_s == pytest.approx(often.straggler_s / 4)


def test_all_wait_for_a_slow_rank_but_those_that_do_not_wait():
    plain, slow = (predict(Cadence(name="async"), slowdown=s) for s in (1.0, 3.0))
    assert slow.step_s == plain.step_s
    assert predict(Cadence(), slowdown=3.0).compute_s == pytest.approx(
        3 * (WORKLOAD.compute_s - WORKLOAD.data_s - WORKLOAD.other_s) + WORKLOAD.data_s + WORKLOAD.other_s
    )


@pytest.mark.parametrize("name", ["every_step", "delayed", "async", "local_sgd", "diloco"])
def test_nothing_is_below_its_bound(name):
    period = 4 if name in ("local_sgd", "diloco") else 1
    found = predict(Cadence(name=name, period=period))
    assert found.lower_bound_s <= found.step_s * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [{"period": 4}, {"accumulation": 0}, {"name": "local_sgd", "fragments": 2}])
def test_cadences_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError):
        Cadence(**wrong)


def test_a_jitter_or_slowdown_out_of_range_is_refused():
    with pytest.raises(UsageError):
        predict(Cadence(), slowdown=0.5)
