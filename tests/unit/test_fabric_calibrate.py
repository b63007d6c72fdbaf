from __future__ import annotations

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.calibrate import calibrate, host_rates_bit_per_s
from wirespeed.records import (
    CodecSample,
    CodecsRecord,
    CollectiveSample,
    CollectivesRecord,
    Environment,
    LinkSample,
    LinksRecord,
)

ENVIRONMENT = Environment(host="a", kernel="6", cpu=None, num_cpus=2, versions={}, command="")
MIB = 1024**2


def link(source: str, target: str, *bit_per_s: float, both: bool = False, rtt_s: float | None = 1e-4) -> LinkSample:
    return LinkSample(
        source=source, target=target, streams=1, num_bytes=1, bit_per_s=bit_per_s, rtt_median_s=rtt_s,
        is_bidirectional=both,
    )  # fmt: skip


def links(*samples: LinkSample, hosts: tuple[str, ...] = ("a", "b")) -> LinksRecord:
    return LinksRecord(environment=ENVIRONMENT, hosts=hosts, samples=samples, socket_options={}, created="today")


def sums(
    points: dict[int, tuple[float, ...]], *, is_correct: bool = True, cpus_per_rank: float = 0.5
) -> CollectivesRecord:
    return CollectivesRecord(
        environment=ENVIRONMENT, backend="gloo", num_ranks=2, ranks_per_host=1, cpus_per_rank=cpus_per_rank,
        samples=tuple(
            CollectiveSample(
                collective="all_reduce", size_bytes=size, times_s=times_s, cpu_s=times_s[0] / 4, is_correct=is_correct
            )
            for size, times_s in points.items()
        ),
    )  # fmt: skip


def codecs(kernels: str = "numba", time_s: float = 1e-3) -> CodecsRecord:
    return CodecsRecord(
        environment=ENVIRONMENT, device="cpu", kernels=kernels, num_ranks=2, concurrent=2,
        samples=(CodecSample(codec="int8", stage="encode", size_bytes=MIB, times_s=(time_s,)),),
    )  # fmt: skip


def test_a_hosts_rate_is_its_best_peer_in_its_weaker_direction() -> None:
    record = links(
        link("a", "b", 9e8), link("b", "a", 8e8), link("a", "c", 5e8), link("c", "a", 5e8), link("b", "c", 6e8),
        link("c", "b", 7e8), hosts=("a", "b", "c"),
    )  # fmt: skip
    assert host_rates_bit_per_s(record) == {"a": 8e8, "b": 8e8, "c": 6e8}


def test_a_late_reader_and_a_busy_reverse_path_do_not_make_a_rate() -> None:
    late = link("a", "b", 2e8, 9e8, 9e8, 16e8, 9e8)  # mean and median 9e8
    burst = link("b", "a", 9e8, 9e8, 9e8, 9e8, 30e8)  # the mean alone would be 13.2e8
    busy = link("a", "b", 99e8, both=True)
    assert host_rates_bit_per_s(links(late, burst, busy)) == {"a": 9e8, "b": 9e8}


def test_runs_of_all_records_are_pooled_by_size() -> None:
    fabric = calibrate(None, [sums({MIB: (1e-3, 9e-3)}), sums({MIB: (2e-3,)})], name="x")
    assert [host.name for host in fabric.hosts] == ["host0", "host1"]
    assert fabric.collectives[0].curve.times_s == pytest.approx((2e-3,))
    assert fabric.hosts[0].cpus == 0.5
    assert fabric.rtt_s is None


def test_noise_that_falls_with_size_is_pooled_and_shows_in_the_residual() -> None:
    fabric = calibrate(None, [sums({1024: (4e-3,), 4096: (1e-3,)})], name="x")
    held = fabric.collectives[0].curve
    assert held.times_s == pytest.approx((2e-3, 2e-3))  # the geometric mean of 4 and 1 ms
    assert held.residual == pytest.approx(1.0)  # 2 ms where 1 ms was measured
    assert held.cpu == pytest.approx((0.25, 0.25))


def test_a_time_below_the_wires_is_raised_to_it() -> None:
    record = links(link("a", "b", 1e9), link("b", "a", 1e9))
    held = calibrate(record, [sums({MIB: (1e-3,)})], name="x").collectives[0].curve
    # 2 * 1/2 of 8 Mibit at 1 Gbit/s.
    assert held.times_s == pytest.approx((8 * MIB / 1e9,))


def test_a_size_that_took_longer_than_its_parts_was_disturbed() -> None:
    # 8 MiB in four parts of 2 MiB would have been over after 80 ms, 5 % for bursts; below 512 KiB nothing is told of larger messages.
    points = {64 * 1024: (1e-4,), 2 * MIB: (20e-3,), 8 * MIB: (130e-3,), 16 * MIB: (150e-3,)}
    held = calibrate(None, [sums(points)], name="x").collectives[0].curve
    assert held.times_s == pytest.approx((1e-4, 20e-3, 84e-3, 150e-3))


def test_a_link_that_was_disturbed_is_put_right_by_two_collectives_but_not_by_one() -> None:
    record = links(link("a", "b", 0.8e9), link("b", "a", 0.8e9))
    one = sums({MIB: (8 * MIB / 0.9e9,)})
    two = sums({MIB: (8 * MIB / 0.9e9,), 4 * MIB: (32 * MIB / 0.95e9,), 16 * MIB: (128 * MIB / 0.99e9,)})
    small = sums({1024: (8 * 1024 / 1e9,), 4096: (8 * 4096 / 1e9,)})
    impossible = sums({MIB: (8 * MIB / 2e9,), 4 * MIB: (32 * MIB / 2e9,)})

    def rate(*collectives: CollectivesRecord) -> float:
        held = calibrate(record, collectives, name="x").hosts[0].rate_bit_per_s
        assert held is not None
        return held.value

    assert rate(one) == rate(small) == rate(impossible) == 0.8e9
    assert rate(two) == pytest.approx(0.95e9)


def test_every_figure_says_where_it_is_from() -> None:
    fabric = calibrate(links(link("a", "b", 1e9), link("b", "a", 1e9)), [], name="lab", cpus_per_host=3)
    rate, rtt = fabric.hosts[0].rate_bit_per_s, fabric.rtt_s
    assert rate is not None
    assert (rate.value, rate.origin, rate.source) == (1e9, "measured", "bench links today")
    assert rtt is not None
    assert (rtt.value, rtt.origin) == (1e-4, "measured")
    assert fabric.hosts[1].cpus == 3


def test_codec_curves_are_kept_per_stage_and_rank_count() -> None:
    fabric = calibrate(None, [sums({MIB: (1e-3,)})], [codecs(), codecs(time_s=3e-3)], name="x")
    (held,) = fabric.codecs
    assert (held.codec, held.stage, held.num_ranks, held.kind) == ("int8", "encode", 2, "default")
    assert held.curve.times_s == pytest.approx((2e-3,))


def test_wrong_results_are_refused() -> None:
    with pytest.raises(DataError, match=r"all_reduce of 1048576 bytes .* gave wrong results"):
        calibrate(None, [sums({MIB: (1e-3,)}, is_correct=False)], name="x")


def test_codec_records_of_different_kernels_are_not_pooled() -> None:
    with pytest.raises(DataError, match="differ in device, kernels or concurrency"):
        calibrate(None, [sums({MIB: (1e-3,)})], [codecs(), codecs("torch")], name="x")


def test_times_that_are_not_positive_are_refused() -> None:
    with pytest.raises(DataError, match="expected positive, finite times"):
        calibrate(None, [sums({MIB: (0.0,)})], name="x")


def test_no_record_at_all_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="bench links"):
        calibrate(None, [], [codecs()], name="x")


def test_hosts_that_links_did_not_name_get_names_of_their_own() -> None:
    fabric = calibrate(
        links(link("a", "b", 1e9), link("b", "a", 1e9)),
        [CollectivesRecord(environment=ENVIRONMENT, backend="gloo", num_ranks=3, ranks_per_host=1, cpus_per_rank=1,
                           samples=())],
        name="x",
    )  # fmt: skip
    assert [host.name for host in fabric.hosts] == ["a", "b", "host2"]
    assert fabric.hosts[2].rate_bit_per_s is None
