from __future__ import annotations

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.collectives import (
    algbw_bit_per_s,
    busbw_bit_per_s,
    codec_stage_cost,
    collective_cost,
    lower_bound_s,
    nic_factor,
    slowdown_beside_compute,
)
from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Curve, Fabric, Figure, Host
from wirespeed.records import Collective

KIB, MIB = 1024, 1024**2


def hosts(*rates_bit_per_s: float | None) -> tuple[Host, ...]:
    return tuple(
        Host(name=f"h{i}", rate_bit_per_s=None if rate is None else Figure(value=rate, origin="measured"))
        for i, rate in enumerate(rates_bit_per_s)
    )


def curve(points: dict[int, float], cpu: tuple[float, ...] = ()) -> Curve:
    return Curve(sizes_bytes=tuple(points), times_s=tuple(points.values()), residual=0.0, cpu=cpu)


def measured(
    points: dict[int, float], collective: Collective = "all_reduce", *, num_ranks: int = 4, ranks_per_host: int = 1,
    dtype: str = "float32", cpu: tuple[float, ...] = (), beside_compute: bool = False,
) -> CollectiveCurve:  # fmt: skip
    return CollectiveCurve(
        collective=collective,
        backend="gloo",
        num_ranks=num_ranks,
        ranks_per_host=ranks_per_host,
        dtype=dtype,
        curve=curve(points, cpu),
        beside_compute=beside_compute,
    )


def test_compute_slows_a_collective_by_the_measured_ratio_and_never_speeds_it_up() -> None:
    curves = (
        measured({KIB: 1e-3, MIB: 10e-3}),
        measured({KIB: 4e-3, MIB: 8e-3}, beside_compute=True),
        measured({KIB: 9e-3}, beside_compute=True, dtype="float16"),
    )
    fabric = Fabric(hosts=hosts(1e12), collectives=curves)
    assert slowdown_beside_compute(fabric, "all_reduce", KIB, 4) == pytest.approx(4.0)
    assert slowdown_beside_compute(fabric, "all_reduce", 1, 4) == pytest.approx(4.0)  # that of the smallest size
    assert slowdown_beside_compute(fabric, "all_reduce", 16 * MIB, 4) == 1.0  # 0.8 at the largest
    assert slowdown_beside_compute(fabric, "all_reduce", KIB, 8) == 1.0  # other layouts were not measured
    assert slowdown_beside_compute(fabric, "all_gather", KIB, 4) == 1.0
    assert collective_cost(fabric, "all_reduce", KIB, 4).seconds == 1e-3  # alone it is what it was


def test_between_two_sizes_the_time_is_their_geometric_mean_half_way() -> None:
    fabric = Fabric(hosts=hosts(1e12), collectives=(measured({KIB: 1e-3, MIB: 16e-3}, cpu=(0.8, 0.2)),))
    cost = collective_cost(fabric, "all_reduce", 32 * KIB, 4)  # 32 KiB is half way from 1 KiB to 1 MiB in log2
    assert cost.seconds == pytest.approx(4e-3)
    assert cost.cpu == pytest.approx(0.5)
    assert (cost.origin, cost.is_in_range) == ("measured", True)


def test_below_the_smallest_size_its_time_holds() -> None:
    fabric = Fabric(hosts=hosts(1e12), collectives=(measured({KIB: 1e-3, MIB: 16e-3}),))
    cost = collective_cost(fabric, "all_reduce", 8, 4)
    assert cost.seconds == 1e-3
    assert not cost.is_in_range


def test_above_the_largest_size_the_last_marginal_rate_goes_on() -> None:
    fabric = Fabric(hosts=hosts(1e12), collectives=(measured({MIB: 11e-3, 2 * MIB: 21e-3}),))
    cost = collective_cost(fabric, "all_reduce", 4 * MIB, 4)
    assert cost.seconds == pytest.approx(41e-3)
    assert not cost.is_in_range


def test_pooled_points_at_the_end_do_not_make_bytes_free() -> None:
    fabric = Fabric(hosts=hosts(1e12), collectives=(measured({MIB: 10e-3, 2 * MIB: 20e-3, 3 * MIB: 20e-3}),))
    # From the last lower point: 10 ms over 2 MiB.
    assert collective_cost(fabric, "all_reduce", 5 * MIB, 4).seconds == pytest.approx(30e-3)


def test_a_curve_faster_than_the_wire_is_held_to_the_bound() -> None:
    fabric = Fabric(hosts=hosts(1e9, 1e9, 1e9, 1e9), collectives=(measured({KIB: 1e-6, MIB: 1e-5}),))
    cost = collective_cost(fabric, "all_reduce", MIB, 4)
    # 2 * 3/4 * 8 bit * 1 MiB at 1 Gbit/s.
    assert cost.seconds == cost.lower_bound_s == pytest.approx(12 * MIB / 1e9)


def test_the_slowest_host_that_must_take_part_sets_the_bound() -> None:
    fabric = Fabric(hosts=hosts(1e9, 4e9, 2e9, 4e9))
    assert lower_bound_s(fabric, "broadcast", 10**9, 4) == pytest.approx(8.0)
    # Two ranks can be on the two fast hosts, three need the one at 2 Gbit/s.
    assert lower_bound_s(fabric, "broadcast", 10**9, 2) == pytest.approx(2.0)
    assert lower_bound_s(fabric, "broadcast", 10**9, 3) == pytest.approx(4.0)
    assert lower_bound_s(Fabric(hosts=hosts(None)), "broadcast", 10**9, 4) == 0.0


@pytest.mark.parametrize(
    ("collective", "share"),
    # 8 ranks on 2 hosts: half of the data must cross, in both phases of all_reduce; each of 4 local ranks sends half of
    # its buffer abroad in all_to_all.
    [("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 0.5), ("all_to_all", 2.0), ("broadcast", 1.0)],
)
def test_what_must_cross_a_nic_shared_by_four_ranks(collective: Collective, share: float) -> None:
    assert nic_factor(collective, 8, 4) == share
    assert nic_factor(collective, 4, 4) == 0.0


def test_another_rank_count_is_a_ring_of_as_many_steps() -> None:
    # Of 4 ranks: 6 steps of 1 ms and 8 ns/byte * 1.5; at 8 ranks 14 steps and 8 ns/byte * 1.75.
    points = {size: 6e-3 + 1.5 * 8e-9 * size for size in (KIB, MIB, 64 * MIB)}
    cost = collective_cost(Fabric(hosts=hosts(1e12), collectives=(measured(points),)), "all_reduce", 128 * MIB, 8)
    assert cost.seconds == pytest.approx(14e-3 + 1.75 * 8e-9 * 128 * MIB, rel=1e-9)
    assert (cost.origin, cost.is_in_range) == ("assumed", False)


def test_a_broadcast_to_more_ranks_sends_no_more_bytes_per_link() -> None:
    fabric = Fabric(hosts=hosts(1e12), collectives=(measured({KIB: 1e-3, MIB: 10e-3}, "broadcast", num_ranks=2),))
    # Three more hops of the smallest message's time.
    assert collective_cost(fabric, "broadcast", MIB, 5).seconds == pytest.approx(10e-3 + 3 * 1e-3)


def test_the_nearest_measured_rank_count_is_taken() -> None:
    fabric = Fabric(
        hosts=hosts(1e12),
        collectives=(measured({MIB: 2e-3}, num_ranks=2), measured({MIB: 8e-3}, num_ranks=8)),
    )
    # 16 ranks from 8: 30 steps for 14, at half the size; one point extrapolates below as its own time.
    assert collective_cost(fabric, "all_reduce", 2 * MIB, 16).seconds == pytest.approx(8e-3 * 30 / 14)


def test_without_any_curve_a_ring_from_rate_and_round_trip_is_assumed() -> None:
    fabric = Fabric(hosts=hosts(1e9, 1e9, 1e9, 1e9), rtt_s=Figure(value=200e-6, origin="measured"))
    cost = collective_cost(fabric, "all_gather", 10**6, 4)
    # Three steps of half a round trip, and 3/4 of 8 Mbit at 1 Gbit/s.
    assert cost.seconds == pytest.approx(3 * 100e-6 + 6e-3)
    assert (cost.origin, cost.is_in_range) == ("assumed", False)
    assert collective_cost(fabric, "all_gather", 0, 4).seconds == pytest.approx(300e-6)


def test_sums_are_told_apart_by_type_and_moves_are_not() -> None:
    fabric = Fabric(
        hosts=hosts(1e12),
        collectives=(
            measured({MIB: 10e-3}),
            measured({MIB: 12e-3}, dtype="float16"),
            measured({MIB: 5e-3}, "all_gather", dtype="uint8"),
        ),
    )
    assert collective_cost(fabric, "all_reduce", MIB, 4).seconds == 10e-3
    assert collective_cost(fabric, "all_reduce", MIB, 4, dtype="float16").seconds == 12e-3
    stand_in = collective_cost(fabric, "all_reduce", MIB, 4, dtype="bfloat16")
    assert (stand_in.origin, stand_in.is_in_range) == ("assumed", False)
    assert collective_cost(fabric, "all_gather", MIB, 4, dtype="float16").is_in_range


def test_one_rank_needs_no_network() -> None:
    assert collective_cost(Fabric(hosts=hosts(None)), "all_reduce", MIB, 1).seconds == 0.0


def test_what_the_fabric_cannot_tell_is_an_error_that_says_what_to_measure() -> None:
    with pytest.raises(DataError, match=r"all_reduce over 4 ranks.*bench collectives"):
        collective_cost(Fabric(hosts=hosts(None)), "all_reduce", MIB, 4)
    with pytest.raises(DataError, match=r"stage 'encode' of codec 'int8'.*bench codecs"):
        codec_stage_cost(Fabric(hosts=hosts(None)), "int8", "encode", MIB, 4)
    one = Fabric(hosts=hosts(1e9), rtt_s=Figure(value=1e-4, origin="measured"))
    with pytest.raises(DataError, match="4 ranks, 4 per host"):
        collective_cost(one, "all_reduce", MIB, 4, ranks_per_host=4)
    with pytest.raises(UsageError, match="5 ranks, 2 per host"):
        collective_cost(Fabric(hosts=hosts(1e9)), "all_reduce", MIB, 5, ranks_per_host=2)


def test_a_codec_measured_for_other_ranks_only_is_out_of_range() -> None:
    held = CodecCurve(codec="topk@1%", stage="decode", kind="default", num_ranks=4, curve=curve({MIB: 2e-3}))
    fabric = Fabric(hosts=hosts(None), codecs=(held,))
    assert codec_stage_cost(fabric, "topk@1%", "decode", MIB, 4).is_in_range
    other = codec_stage_cost(fabric, "topk@1%", "decode", MIB, 8)
    assert (other.seconds, other.origin, other.is_in_range) == (2e-3, "assumed", False)
    assert codec_stage_cost(fabric, "topk@1%", "decode", 0, 4).seconds == 0.0


def test_bandwidths_of_one_gigabyte_in_one_second_over_four_ranks() -> None:
    assert algbw_bit_per_s(10**9, 1.0) == 8e9
    assert busbw_bit_per_s("all_reduce", 10**9, 4, 1.0) == 12e9
    assert busbw_bit_per_s("all_gather", 10**9, 4, 1.0) == 6e9
    assert busbw_bit_per_s("broadcast", 10**9, 4, 1.0) == 8e9
