"""Costs from a fabric, the space of strategies, ranking and the choice."""

from __future__ import annotations

import msgspec
import pytest
from plan_cases import MIB, gigabit_fabric, gigabit_workload, linear_curve

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.topology import CodecCurve
from wirespeed.plan import choose, costs_of, legal_strategies, predict, rank, search
from wirespeed.sim import simulate_step
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import Strategy, Transfer


def prediction(name: str, step_s: float) -> Prediction:
    return Prediction(
        strategy=Strategy.parse(name),
        step_s=step_s,
        compute_s=0.1,
        codec_s=0.0,
        wire_s=0.0,
        exposed_s=step_s - 0.1,
        wire_bytes=0,
        lower_bound_s=0.1,
        binding="bandwidth",
        is_in_range=True,
    )


class TestCosts:
    def test_a_transfer_is_that_of_the_curve_split_at_its_floor(self):
        # at 1 MiB: 1 ms + 1.5 * 2^20 * 8 / 0.95e9; the smallest message, 1 KiB, takes 1 ms + 12.9 us
        cost = costs_of(gigabit_workload(), gigabit_fabric()).transfer(
            Transfer(collective="all_reduce", size_bytes=MIB, dtype="float32")
        )
        wire_s = 1.5 * MIB * 8 / 0.95e9
        assert cost.seconds == pytest.approx(1e-3 + wire_s)
        assert cost.latency_s == pytest.approx(1e-3 + wire_s / 1024, abs=cost.seconds - cost.lower_bound_s)
        assert cost.lower_bound_s == pytest.approx(1.5 * MIB * 8 / 1e9)
        assert cost.latency_s + cost.lower_bound_s <= cost.seconds
        assert (cost.cpu, cost.residual, cost.is_in_range) == (pytest.approx(0.1), 0.04, True)

    def test_sizes_outside_the_curve_are_marked(self):
        costs = costs_of(gigabit_workload(), gigabit_fabric())
        assert not costs.transfer(Transfer(collective="all_reduce", size_bytes=2**30, dtype="float32")).is_in_range
        assert not costs.stage(Strategy(codec="half"), "encode", 2**30).is_in_range

    def test_a_codec_is_found_by_its_name_without_bucket_size(self):
        costs = costs_of(gigabit_workload(), gigabit_fabric())
        assert costs.stage(Strategy.parse("topk@1%/8MiB"), "encode", MIB).seconds == pytest.approx(1e-5 + MIB * 5e-10)

    def test_an_unmeasured_codec_is_not_guessed(self):
        costs = costs_of(gigabit_workload(), gigabit_fabric(codecs=("half",)))
        with pytest.raises(DataError, match="bench codecs"):
            costs.stage(Strategy(codec="int8"), "encode", MIB)

    def test_dense_costs_a_copy_where_that_was_measured(self):
        copy = CodecCurve(codec="memcpy", stage="copy", kind="default", num_ranks=4, curve=linear_curve(1e-6, 1e-10))
        plain = gigabit_fabric()
        with_copy = msgspec.structs.replace(plain, codecs=(*plain.codecs, copy))
        assert costs_of(gigabit_workload(), plain).stage(Strategy(), "encode", MIB).seconds == 0.0
        costs = costs_of(gigabit_workload(), with_copy)
        assert costs.stage(Strategy(), "encode", MIB).seconds == pytest.approx(1e-6 + MIB * 1e-10)
        assert costs.stage(Strategy(), "decode", MIB).seconds == 0.0


class TestSpace:
    def test_only_what_the_fidelity_allows_is_offered(self):
        workload = gigabit_workload()
        assert {s.codec for s in legal_strategies(workload, "exact")} == {"dense"}
        assert {s.codec for s in legal_strategies(workload, "half")} == {"dense", "half"}
        assert {s.codec for s in legal_strategies(workload, "compressed")} == {"dense", "half", "int8", "lowrank"}
        assert {s.ratio for s in legal_strategies(workload, "lossy")} == {None, 0.01, 0.02, 0.05, 0.1}

    def test_other_schedules_are_tried_only_when_asked_for_and_allowed(self):
        workload = gigabit_workload()
        asked = {"schedules": ("every_step", "delayed", "local_sgd"), "periods": (4, 16)}
        assert {s.schedule for s in legal_strategies(workload, "lossy")} == {"every_step"}
        assert {s.schedule for s in legal_strategies(workload, "compressed", **asked)} == {"every_step"}
        found = {(s.schedule, s.period) for s in legal_strategies(workload, "lossy", **asked)}
        assert found == {("every_step", None), ("delayed", None), ("local_sgd", 4), ("local_sgd", 16)}

    def test_shares_of_a_host_cross_its_nic_together(self):
        workload = msgspec.structs.replace(gigabit_workload(), num_ranks=8, ranks_per_host=2)
        costs = costs_of(workload, gigabit_fabric())
        among_hosts = costs_of(msgspec.structs.replace(workload, num_ranks=4, ranks_per_host=1), gigabit_fabric())
        one, both = (Transfer(collective="all_to_all", size_bytes=size) for size in (MIB, 2 * MIB))
        between = msgspec.structs.replace(one, scope="between")
        assert costs.transfer(between).seconds == among_hosts.transfer(both).seconds
        hierarchical = legal_strategies(workload, "compressed", topologies=("flat", "hierarchical"))
        assert {s.codec for s in hierarchical if s.topology == "hierarchical"} == {"dense", "half", "int8"}

    def test_a_period_makes_the_baseline_no_other(self):
        fabric, workload = gigabit_fabric(), gigabit_workload()
        names = ["dense", "dense/local_sgd@16", "int8/diloco@4", "dense/delayed"]
        found = search(workload, fabric, "lossy", strategies=[Strategy.parse(name) for name in names])
        choice = choose(found.predictions, "lossy")
        assert choice.baseline.strategy == Strategy()
        assert choice.strategy.name == "dense/local_sgd@16"
        assert choose(found.predictions, "compressed").strategy == Strategy()

    def test_the_default_strategy_comes_first_and_none_twice(self):
        found = legal_strategies(gigabit_workload(), "lossy")
        assert found[0] == Strategy()
        assert len(found) == len(set(found))

    def test_bucket_sizes_that_fill_the_same_buckets_are_one(self):
        # 5 gradients of 1 MiB: first bucket 1, the rest 4: every size of 4 MiB or more is the same
        found = legal_strategies(gigabit_workload(num_gradients=5), "exact")
        assert [s.bucket_bytes // MIB for s in found] == [25, 1, 2]

    def test_an_unknown_fidelity_is_refused(self):
        with pytest.raises(UsageError, match="exact, half, compressed, lossy"):
            legal_strategies(gigabit_workload(), "best")  # type: ignore[arg-type]


class TestSearch:
    def test_a_prediction_is_the_simulation_of_the_fabric(self):
        workload, fabric, strategy = gigabit_workload(), gigabit_fabric(), Strategy.parse("int8/4MiB")
        found = predict(workload, strategy, fabric)
        assert found.step_s == simulate_step(workload, strategy, costs_of(workload, fabric)).step_s
        assert found.is_in_range

    def test_a_slow_network_wants_fewer_bytes_and_a_fast_one_none(self):
        slow = search(gigabit_workload(), gigabit_fabric(rate_bit_per_s=1e8), "lossy").predictions
        assert slow[0].strategy.codec == "topk"
        fast = search(gigabit_workload(), gigabit_fabric(rate_bit_per_s=1e11), "lossy").predictions
        assert choose(fast, "lossy").strategy.codec == "dense"

    def test_what_cannot_be_predicted_is_named_with_the_reason(self):
        found = search(gigabit_workload(), gigabit_fabric(codecs=("half",)), "compressed")
        assert {p.strategy.codec for p in found.predictions} == {"dense", "half"}
        assert {name.partition("/")[0] for name in found.skipped} == {"int8", "lowrank@32"}
        assert all("bench codecs" in why for name, why in found.skipped.items())
        assert found.skipped

    def test_nothing_predictable_is_an_error(self):
        with pytest.raises(DataError, match="none of 1"):
            search(gigabit_workload(), gigabit_fabric(codecs=()), strategies=[Strategy(codec="half")])

    def test_equal_steps_rank_by_fidelity_then_by_simplicity(self):
        names = ["topk@1%", "int8", "half/4MiB", "half", "dense/4MiB", "dense"]
        ranked = rank([prediction(name, 0.5) for name in names])
        assert [p.strategy.name for p in ranked] == [
            "dense", "dense/4MiB", "half", "half/4MiB", "int8", "topk@1%",
        ]  # fmt: skip


class TestChoice:
    def chosen(self, steps_s: dict[str, float], fidelity: str = "lossy") -> str:
        return choose([prediction(name, s) for name, s in steps_s.items()], fidelity).strategy.name  # type: ignore[arg-type]

    def test_a_gain_of_five_percent_is_no_reason_to_change(self):
        assert self.chosen({"dense": 1.0, "half": 0.951}) == "dense"
        assert self.chosen({"dense": 1.0, "half": 0.949}) == "half"

    def test_the_more_faithful_of_two_alike_is_taken(self):
        assert self.chosen({"dense": 1.0, "half": 0.52, "int8": 0.5, "topk@1%": 0.495}) == "half"
        assert self.chosen({"dense": 1.0, "half": 0.6, "int8": 0.5, "topk@1%": 0.49}) == "int8"

    def test_nothing_below_the_allowed_fidelity_is_taken(self):
        assert self.chosen({"dense": 1.0, "half": 0.8, "topk@1%": 0.2}, "half") == "half"
        assert self.chosen({"dense": 1.0, "half": 0.8, "topk@1%": 0.2}, "exact") == "dense"

    def test_another_bucket_size_alone_can_be_the_answer(self):
        assert self.chosen({"dense": 1.0, "dense/4MiB": 0.8, "half": 0.79}) == "dense/4MiB"

    def test_the_reason_gives_the_numbers(self):
        choice = choose([prediction("dense", 1.0), prediction("half", 0.5)])
        assert choice.reason == "half takes 500 ms per step, 50 % less than dense (1 s)"
        assert (choice.speedup, choice.changes_nothing) == (2.0, False)

    def test_without_dense_there_is_nothing_to_compare_with(self):
        with pytest.raises(UsageError, match="dense"):
            choose([prediction("half", 1.0)])
