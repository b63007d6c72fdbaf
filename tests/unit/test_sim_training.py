"""The step simulator against closed forms that can be worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.sim import ScaledCosts, StageCost, TransferCost, fill_buckets, predict_step, simulate_step
from wirespeed.sim.flow import Exchange, fair_level, run_step
from wirespeed.sim.training import STAGES
from wirespeed.spec.payloads import CODECS
from wirespeed.spec.strategy import Strategy, Transfer
from wirespeed.spec.workload import GradientTensor, TrainingWorkload

MIB_ELEMENTS = 262_144
"""Elements of fp32 in 1 MiB."""


@dataclass(frozen=True)
class FixedCosts:
    """Every transfer and every stage costs the same, whatever its size."""

    latency_s: float = 0.0
    wire_s: float = 0.0
    stage_s: float = 0.0
    cpu: float = 0.0
    bound_s: float = 0.0
    residual: float = 0.0
    is_in_range: bool = True
    slowdown: float = 1.0

    def transfer(self, transfer: Transfer) -> TransferCost:
        return TransferCost(
            seconds=self.latency_s + self.wire_s,
            latency_s=self.latency_s,
            lower_bound_s=self.bound_s,
            cpu=self.cpu,
            residual=self.residual,
            is_in_range=self.is_in_range,
            slowdown=self.slowdown,
        )

    def stage(self, strategy: Strategy, stage: str, size_bytes: int) -> StageCost:
        return StageCost(seconds=0.0 if strategy.codec == "dense" else self.stage_s, residual=self.residual)


def workload(
    ready_s: list[float], *, backward_s: float = 1.0, num_elements: int = MIB_ELEMENTS, cpus: float | None = None
) -> TrainingWorkload:
    """One gradient of 1 MiB, hence one bucket with a strategy of 1 MiB buckets, per ready time."""
    return TrainingWorkload(
        gradients=tuple(
            GradientTensor(name=f"g{i}", num_elements=num_elements, ready_s=at) for i, at in enumerate(ready_s)
        ),
        forward_s=0.5,
        backward_s=backward_s,
        optimizer_s=0.25,
        data_s=0.125,
        other_s=0.125,
        num_ranks=4,
        cpus_per_rank=cpus,
    )


def strategy(codec: str) -> Strategy:
    return Strategy.parse(f"{codec}/1MiB")


class TestBuckets:
    def sizes(self, num_elements: list[int], bucket_bytes: int, first: int | None = None) -> list[int]:
        gradients = [GradientTensor(name=str(i), num_elements=n, ready_s=float(i)) for i, n in enumerate(num_elements)]
        return [b.num_elements for b in fill_buckets(gradients, bucket_bytes, first_bucket_bytes=first)]

    def test_a_bucket_closes_with_the_tensor_that_reaches_its_limit(self):
        # limit 4096 B = 1024 elements: 1000 stays open, +100 closes; 1024 alone closes; 5 remains
        assert self.sizes([1000, 100, 1024, 5], 4096) == [1100, 1024, 5]

    def test_a_tensor_is_never_split(self):
        assert self.sizes([1_000_000], 1024) == [1_000_000]

    def test_the_first_bucket_is_limited_to_1_mib(self):
        assert self.sizes([MIB_ELEMENTS] * 5, 3 * 2**20) == [MIB_ELEMENTS, 3 * MIB_ELEMENTS, MIB_ELEMENTS]

    def test_the_first_bucket_keeps_a_limit_that_is_given(self):
        assert self.sizes([MIB_ELEMENTS] * 5, 3 * 2**20, first=3 * 2**20) == [3 * MIB_ELEMENTS, 2 * MIB_ELEMENTS]

    def test_a_bucket_is_ready_with_its_last_gradient(self):
        gradients = [GradientTensor(name=str(i), num_elements=600, ready_s=i / 10) for i in range(3)]
        assert [b.ready_s for b in fill_buckets(gradients, 4096)] == [0.1, 0.2]

    @pytest.mark.torch
    @pytest.mark.parametrize("first", [1024, 2**20])
    def test_buckets_are_those_of_torch(self, first):
        torch = pytest.importorskip("torch")
        import torch.distributed as dist

        sizes = [(7 * i * i * 31) % 90_001 + 1 for i in range(80)]
        tensors = [torch.empty(n) for n in sizes]
        indices, _ = dist._compute_bucket_assignment_by_size(tensors, [first, 300_000], [False] * 80, list(range(80)))
        assert self.sizes(sizes, 300_000, first) == [sum(sizes[i] for i in bucket) for bucket in indices]


class TestClosedForms:
    @pytest.mark.parametrize("codec", CODECS)
    def test_a_network_and_codec_that_cost_nothing_leave_compute(self, codec):
        step = simulate_step(workload([0.2, 0.4, 1.0]), strategy(codec), FixedCosts())
        assert step.step_s == 2.0
        assert step.exposed_s == 0.0

    def test_one_rank_exchanges_nothing(self):
        import msgspec

        alone = msgspec.structs.replace(workload([0.5, 1.0]), num_ranks=1)
        step = simulate_step(alone, strategy("int8"), FixedCosts(wire_s=9.0, stage_s=9.0))
        assert (step.step_s, step.wire_s, step.codec_s, step.spans) == (2.0, 0.0, 0.0, ())

    def test_one_bucket_without_overlap_adds_its_whole_exchange(self):
        # int8: encode 0.1, all_to_all 0.3 + 0.05, reduce 0.1, all_gather 0.35, decode 0.1
        step = simulate_step(workload([1.0]), strategy("int8"), FixedCosts(latency_s=0.05, wire_s=0.3, stage_s=0.1))
        assert step.exposed_s == pytest.approx(1.0)
        assert step.step_s == pytest.approx(3.0)
        assert step.codec_s == pytest.approx(0.3)
        assert step.wire_s == pytest.approx(0.7)

    def test_an_exchange_within_backward_is_hidden(self):
        step = simulate_step(workload([0.2, 0.5]), strategy("dense"), FixedCosts(wire_s=0.2))
        assert step.exchange_end_s == pytest.approx(0.7)
        assert step.exposed_s == 0.0

    def test_dense_buckets_queue_for_the_wire(self):
        # ready 0.2, 0.4, 0.6; 0.5 s of wire each, never idle: 0.2 + 1.5 = 1.7
        step = simulate_step(workload([0.2, 0.4, 0.6]), strategy("dense"), FixedCosts(wire_s=0.5))
        assert step.exchange_end_s == pytest.approx(1.7)
        assert step.exposed_s == pytest.approx(0.7)

    def test_dense_has_two_collectives_in_flight(self):
        # three buckets of latency only, ready at 0: two at once, then the third
        step = simulate_step(workload([0.0, 0.0, 0.0]), strategy("dense"), FixedCosts(latency_s=0.75))
        assert step.exchange_end_s == pytest.approx(1.5)

    def test_half_serialises_encoding_and_its_collective(self):
        # one lane does encode 0.1 + all_reduce 0.4 per bucket; the last decode 0.1 follows: 4 * 0.5 + 0.1
        step = simulate_step(workload([0.0] * 4), strategy("half"), FixedCosts(wire_s=0.4, stage_s=0.1))
        assert step.exchange_end_s == pytest.approx(2.1)

    def test_two_lanes_are_a_pipeline_when_cores_and_wire_are_free(self):
        # lanes of 0.1 + 0.3, 0.1 + 0.3 and 0.1 s; 5 buckets: first through all (0.9), then 4 of the slowest lane
        step = simulate_step(workload([0.0] * 5), strategy("int8"), FixedCosts(latency_s=0.3, stage_s=0.1))
        assert step.exchange_end_s == pytest.approx(0.9 + 4 * 0.4)

    def test_two_collectives_in_flight_share_the_wire(self):
        # bucket 0: all_to_all 0-0.4, then its all_gather shares with bucket 1's all_to_all from 0.4: both end at 1.2;
        # bucket 1's all_gather has the wire alone: 1.2-1.6
        step = simulate_step(workload([0.0, 0.0]), strategy("int8"), FixedCosts(wire_s=0.4))
        ends = {(s.bucket, s.lane): s.end_s for s in step.spans}
        assert ends == pytest.approx({(0, 0): 0.4, (0, 1): 1.2, (1, 0): 1.2, (1, 1): 1.6})

    def test_a_bucket_that_is_ready_late_waits_for_nobody(self):
        step = simulate_step(workload([0.0, 0.9]), strategy("topk"), FixedCosts(wire_s=0.1, stage_s=0.05))
        assert step.exchange_end_s == pytest.approx(0.9 + 0.05 + 0.1 + 0.05)

    def test_a_gradient_noted_after_backward_counts_as_ready_at_its_end(self):
        step = simulate_step(workload([1.5], backward_s=1.0), strategy("dense"), FixedCosts(wire_s=0.25))
        assert step.exposed_s == pytest.approx(0.25)

    def test_without_gradients_a_step_is_compute(self):
        assert simulate_step(workload([]), strategy("half"), FixedCosts(wire_s=1.0)).step_s == 2.0


class TestCores:
    @pytest.mark.parametrize("cpus", [0.5, 1.0])
    def test_a_codec_stage_takes_half_of_the_core_from_backward(self, cpus):
        # stages of 0.2 and transfers of 0: encode from 0.4 runs at half speed beside backward until 0.8, decode the
        # same until 1.2; then 0.2 of backward is left: it ends at 1.4, having lost the 0.4 s that the codec needed
        step = simulate_step(workload([0.4], cpus=cpus), strategy("topk"), FixedCosts(stage_s=0.2))
        assert step.exchange_end_s == pytest.approx(1.2)
        assert step.backward_end_s == pytest.approx(1.4)
        assert step.exposed_s == pytest.approx(0.4)

    def test_cores_enough_for_all_threads_slow_nothing_down(self):
        step = simulate_step(workload([0.4], cpus=2.0), strategy("topk"), FixedCosts(stage_s=0.2))
        assert step.exposed_s == 0.0

    def test_an_accelerator_computes_beside_the_codec(self):
        step = simulate_step(workload([0.4], cpus=None), strategy("topk"), FixedCosts(stage_s=0.2))
        assert (step.backward_end_s, step.exposed_s) == (1.0, 0.0)

    def test_a_collective_takes_the_cores_it_uses_from_backward(self):
        # one core; the collective wants 0.25 of it and gets that, backward gets 0.75: from 0.5 on the collective takes
        # 0.4 s while backward does 0.3; the rest, 0.2, follows: 0.5 + 0.4 + 0.2 = 1.1
        step = simulate_step(workload([0.5], cpus=1.0), strategy("dense"), FixedCosts(wire_s=0.4, cpu=0.25))
        assert step.exchange_end_s == pytest.approx(0.9)
        assert step.backward_end_s == pytest.approx(1.1)

    def test_a_collective_that_needs_all_cores_gains_nothing_by_overlap(self):
        # half a core per rank and a collective that fills it: both run at half speed, the sum stays
        step = simulate_step(workload([0.5], cpus=0.5), strategy("dense"), FixedCosts(wire_s=0.5, cpu=0.5))
        assert step.backward_end_s == pytest.approx(1.5)
        assert step.exchange_end_s == pytest.approx(1.5)
        assert step.exposed_s == pytest.approx(0.5)

    def test_latency_is_not_shared_but_costs_cores_too(self):
        # as above, with latency in place of wire work
        step = simulate_step(workload([0.5], cpus=0.5), strategy("dense"), FixedCosts(latency_s=0.5, cpu=0.5))
        assert step.exchange_end_s == pytest.approx(1.5)

    def test_fair_shares_satisfy_small_wants_first(self):
        # 1 core for 0.2, 0.6 and 0.7: 0.2 is met, the others share 0.8
        assert fair_level([0.7, 0.2, 0.6], 1.0) == pytest.approx(0.4)

    def test_no_limit_where_all_wants_fit(self):
        assert fair_level([0.5, 0.5], 1.0) == float("inf")
        assert fair_level([], 1.0) == float("inf")


class TestSpans:
    def test_lanes_run_one_thing_at_a_time_in_bucket_order(self):
        step = simulate_step(
            workload([0.1, 0.15, 0.5, 0.7], cpus=0.5), strategy("int8"), FixedCosts(0.02, 0.1, 0.05, cpu=0.2)
        )
        for lane in range(3):
            spans = [s for s in step.spans if s.lane == lane]
            assert [s.bucket for s in spans] == sorted(s.bucket for s in spans)
            assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(spans))

    def test_every_stage_and_transfer_of_every_bucket_appears_once(self):
        step = simulate_step(workload([0.1, 0.2, 0.3]), strategy("int8"), FixedCosts(0.02, 0.1, 0.05))
        seen = sorted((s.bucket, s.lane, s.activity) for s in step.spans)
        per_bucket = [(0, "stage"), (0, "transfer"), (1, "stage"), (1, "transfer"), (2, "stage")]
        assert seen == sorted((bucket, *what) for bucket in range(3) for what in per_bucket)

    def test_the_engine_ends_with_the_last_bucket_not_with_the_last_started(self):
        # two workers: a long collective and a short one behind it
        exchanges = [Exchange((0.0, 0.0), ((3.0, 0.0, 0.0, 1.0),)), Exchange((0.0, 0.0), ((1.0, 0.0, 0.0, 1.0),))]
        _, end_s, _ = run_step(0.5, [0.0, 0.0], exchanges, cpus=None, first_lane_width=2)
        assert end_s == 3.0


class TestSlowdownBesideCompute:
    def test_a_transfer_goes_on_at_its_own_pace_when_backward_ends(self):
        # Ready at 0.5 of a backward of 1: 0.5 s at a quarter of the pace do 0.125 s of its 1 s, the rest takes 0.875.
        step = simulate_step(workload([0.5], cpus=1.0), strategy("dense"), FixedCosts(wire_s=1.0, slowdown=4.0))
        assert step.exposed_s == pytest.approx(0.875)

    def test_an_accelerator_has_cores_to_spare(self):
        step = simulate_step(workload([0.5], cpus=None), strategy("dense"), FixedCosts(wire_s=1.0, slowdown=4.0))
        assert step.exposed_s == pytest.approx(0.5)


class TestPrediction:
    def test_the_binding_resource_is_the_one_that_helps_most(self):
        def binding(costs: FixedCosts, codec: str = "int8") -> str:
            return predict_step(workload([0.9, 1.0]), strategy(codec), costs).binding

        assert binding(FixedCosts(wire_s=5.0)) == "bandwidth"
        assert binding(FixedCosts(latency_s=5.0)) == "latency"
        assert binding(FixedCosts(stage_s=5.0)) == "codec"
        assert binding(FixedCosts(wire_s=0.01)) == "compute"
        assert binding(FixedCosts(), "dense") == "compute"

    def test_uncertainty_is_that_of_the_exposed_part(self):
        # exposed: one transfer of 1 s, known to 10 %, in a step of 3 s
        prediction = predict_step(workload([1.0]), strategy("dense"), FixedCosts(wire_s=1.0, residual=0.1))
        assert prediction.uncertainty == pytest.approx(0.1 / 3)

    def test_bytes_are_those_that_the_strategy_states(self):
        # two buckets of 1 MiB among 4 ranks: dense sends 2 * 3/4 of each
        prediction = predict_step(workload([0.5, 1.0]), strategy("dense"), FixedCosts())
        assert prediction.wire_bytes == 2 * 1_572_864

    def test_the_lower_bound_counts_the_wire_from_the_first_bucket_on(self):
        # rest 1.0 s, first bucket at 0.5, two transfers of at least 0.75 s
        costs = FixedCosts(wire_s=1.0, bound_s=0.75)
        prediction = predict_step(workload([0.5, 1.0]), strategy("dense"), costs)
        assert prediction.lower_bound_s == pytest.approx(1.0 + 0.5 + 1.5)
        assert prediction.step_s == pytest.approx(1.0 + 0.5 + 2.0)

    def test_an_extrapolated_curve_marks_the_prediction(self):
        assert not predict_step(workload([1.0]), strategy("half"), FixedCosts(is_in_range=False)).is_in_range
        assert predict_step(workload([1.0]), strategy("half"), FixedCosts()).is_in_range

    def test_scaled_costs_scale_one_part_each(self):
        costs = FixedCosts(latency_s=0.2, wire_s=0.4, stage_s=0.6, bound_s=0.3, residual=0.5)
        transfer = ScaledCosts(costs=costs, wire=0.5).transfer(Transfer(collective="all_reduce", size_bytes=4))
        assert (transfer.seconds, transfer.latency_s, transfer.lower_bound_s) == pytest.approx((0.4, 0.2, 0.15))
        assert ScaledCosts(costs=costs, latency=0.0).transfer(
            Transfer(collective="all_reduce", size_bytes=4)
        ).seconds == pytest.approx(0.4)
        assert ScaledCosts(costs=costs, codec=2.0).stage(strategy("half"), "encode", 4).seconds == pytest.approx(1.2)
        assert ScaledCosts(costs=costs, spread=-1.0).stage(strategy("half"), "encode", 4).seconds == pytest.approx(0.3)

    def test_impossible_costs_are_refused(self):
        with pytest.raises(UsageError):
            TransferCost(seconds=1.0, latency_s=2.0)
        with pytest.raises(UsageError):
            TransferCost(seconds=1.0, lower_bound_s=1.5)
        with pytest.raises(UsageError):
            StageCost(seconds=-1.0)


def test_every_codec_has_one_stage_more_than_transfers():
    for codec in CODECS:
        assert len(STAGES[codec]) == len(Strategy(codec=codec).transfers(1000, 4)) + 1


class TestSchedules:
    """Compute takes 2 s: 1 s of backward and 1 s of all the rest. One bucket, ready at the end of backward."""

    def step(self, text: str, **costs: float):
        return simulate_step(workload([1.0]), Strategy.parse(text), FixedCosts(**costs))

    def test_a_period_shares_one_exchange_that_nothing_hides(self):
        step = self.step("dense/1MiB/local_sgd@4", wire_s=0.8)
        assert step.step_s == pytest.approx(2.0 + 0.8 / 4)
        assert step.exposed_s == pytest.approx(0.2)
        assert step.wire_s == pytest.approx(0.2)
        assert step.lower_bound_s <= step.step_s
        # encode 0.1, all_to_all 0.3 + 0.05, reduce 0.1, all_gather 0.35, decode 0.1
        assert self.step("int8/1MiB/diloco@10", latency_s=0.05, wire_s=0.3, stage_s=0.1).step_s == pytest.approx(2.1)

    def test_a_delayed_exchange_hides_behind_the_whole_next_step(self):
        assert self.step("dense/1MiB", wire_s=1.5).step_s == pytest.approx(3.5)
        assert self.step("dense/1MiB/delayed", wire_s=1.5).step_s == pytest.approx(2.0)

    def test_what_is_longer_than_a_step_shows_under_delayed(self):
        step = self.step("dense/1MiB/delayed", wire_s=3.0)
        assert step.step_s == pytest.approx(3.0)
        assert step.exposed_s == pytest.approx(1.0)

    def test_a_delayed_codec_slows_compute_where_they_share_a_core(self):
        # Three stages of 0.2 s beside 2 s of compute, and one core for both.
        step = simulate_step(
            workload([1.0], cpus=1.0), Strategy.parse("int8/1MiB/delayed"), FixedCosts(stage_s=0.2, wire_s=0.1)
        )
        assert step.step_s == pytest.approx(2.6)

    def test_async_hides_what_delayed_hides(self):
        for wire_s in (1.5, 3.0):
            steps = [self.step(f"dense/1MiB/{name}", wire_s=wire_s) for name in ("async", "delayed")]
            assert steps[0].step_s == steps[1].step_s
            assert steps[0].lower_bound_s == steps[1].lower_bound_s

    def test_bytes_per_step_are_those_of_an_exchange_over_the_period(self):
        costs = FixedCosts(wire_s=0.1)
        once = predict_step(workload([1.0]), Strategy.parse("int8"), costs).wire_bytes
        assert predict_step(workload([1.0]), Strategy.parse("int8/diloco@4"), costs).wire_bytes == round(once / 4)
        assert predict_step(workload([1.0]), Strategy.parse("int8/delayed"), costs).wire_bytes == once


class TestHierarchical:
    def step(self, name: str, *, num_ranks: int = 4, ranks_per_host: int = 2):
        import msgspec

        spread = msgspec.structs.replace(workload([1.0]), num_ranks=num_ranks, ranks_per_host=ranks_per_host)
        return simulate_step(spread, Strategy.parse(name), FixedCosts(wire_s=0.25, stage_s=0.1))

    def test_a_bucket_takes_its_hops_in_turn(self):
        # Inside, two hops between, inside: 4 x 0.25. Encode, reduce and decode; split and join cost what dense's do: 0.
        assert self.step("int8/1MiB/hierarchical").exposed_s == pytest.approx(1.0 + 0.3)
        assert self.step("dense/1MiB/hierarchical").exposed_s == pytest.approx(0.75)

    def test_one_rank_per_host_is_flat(self):
        assert self.step("int8/1MiB/hierarchical", ranks_per_host=1).step_s == self.step("int8/1MiB").step_s

    @pytest.mark.parametrize(("num_ranks", "ranks_per_host"), [(4, 4), (6, 4)])
    def test_ranks_that_do_not_fill_two_hosts_are_refused(self, num_ranks: int, ranks_per_host: int):
        with pytest.raises(DataError, match="two hosts or more"):
            self.step("int8/1MiB/hierarchical", num_ranks=num_ranks, ranks_per_host=ranks_per_host)
