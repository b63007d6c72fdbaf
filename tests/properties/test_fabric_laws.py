"""Laws of the fabric's arithmetic: monotone in size, never below the bound, faithful to what was measured."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed.fabric.calibrate import calibrate
from wirespeed.fabric.collectives import codec_stage_s, collective_cost, lower_bound_s, nic_factor
from wirespeed.fabric.curves import fit_curve, isotonic
from wirespeed.fabric.files import format_fabric, parse_fabric
from wirespeed.fabric.parts import Island, Protocol, Switch, Transport
from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Curve, Fabric, Figure, Host, Uplink
from wirespeed.records import Collective, CollectiveSample, CollectivesRecord, Environment, LinkSample, LinksRecord
from wirespeed.spec.payloads import bus_factor

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
ENVIRONMENT = Environment(host="h0", kernel="6", cpu=None, num_cpus=2, versions={}, command="")

seconds = st.floats(1e-6, 1e3, allow_nan=False)
rates = st.floats(1e6, 1e12)
medians = st.dictionaries(st.integers(1, 2**30), seconds, min_size=1, max_size=12)
sizes = st.integers(0, 2**34)


def fabric_of(medians_s: dict[int, float], rate_bit_per_s: float, collective: Collective = "all_reduce") -> Fabric:
    """Four hosts with one curve, fitted as ``calibrate`` does."""
    return Fabric(
        hosts=tuple(
            Host(name=f"h{i}", rate_bit_per_s=Figure(value=rate_bit_per_s, origin="measured")) for i in range(4)
        ),
        rtt_s=Figure(value=1e-4, origin="measured"),
        collectives=(
            CollectiveCurve(
                collective=collective, backend="gloo", num_ranks=4, ranks_per_host=1, curve=fit_curve(medians_s)
            ),
        ),
    )


@given(medians, rates, st.lists(sizes, min_size=2, max_size=6), st.sampled_from([2, 4, 6, 64]))
def test_a_larger_collective_never_takes_less_time(
    medians_s: dict[int, float], rate: float, asked: list[int], num_ranks: int
) -> None:
    fabric = fabric_of(medians_s, rate)
    times = [collective_cost(fabric, "all_reduce", size, num_ranks).seconds for size in sorted(asked)]
    assert times == sorted(times)


@given(medians, rates, sizes, st.sampled_from([2, 4, 6, 64]), st.sampled_from(COLLECTIVES))
def test_no_collective_beats_the_bytes_at_the_slowest_link(
    medians_s: dict[int, float], rate: float, size: int, num_ranks: int, collective: Collective
) -> None:
    cost = collective_cost(fabric_of(medians_s, rate, collective), collective, size, num_ranks)
    assert cost.lower_bound_s == pytest.approx(8 * size * bus_factor(collective, num_ranks) / rate)
    assert cost.seconds >= cost.lower_bound_s


@given(medians)
def test_a_fitted_curve_stays_within_its_residual_of_every_median(medians_s: dict[int, float]) -> None:
    fabric = fabric_of(medians_s, 1e30)
    curve = fabric.collectives[0].curve
    for size, median_s in medians_s.items():
        predicted_s = collective_cost(fabric, "all_reduce", size, 4).seconds
        assert abs(predicted_s / median_s - 1) <= curve.residual * (1 + 1e-9) + 1e-9


@given(st.dictionaries(st.integers(1, 2**30), seconds, min_size=2, max_size=12))
def test_medians_that_rise_are_reproduced_exactly(medians_s: dict[int, float]) -> None:
    rising = dict(zip(sorted(medians_s), sorted(medians_s.values()), strict=True))
    assert fit_curve(rising).residual == pytest.approx(0, abs=1e-9)


@given(st.lists(st.floats(-50, 50), max_size=30))
def test_isotonic_never_falls_keeps_the_mean_and_is_idempotent(values: list[float]) -> None:
    fitted = isotonic(values)
    assert fitted == sorted(fitted)
    assert math.fsum(fitted) == pytest.approx(math.fsum(values), abs=1e-6)
    assert isotonic(fitted) == pytest.approx(fitted)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([1024, 4096, 2**20]), seconds), min_size=1, max_size=12), st.randoms())
def test_calibration_does_not_depend_on_the_order_of_samples(
    runs: list[tuple[int, float]], shuffler: random.Random
) -> None:
    def fit(order: list[tuple[int, float]]) -> Fabric:
        records = [
            CollectivesRecord(
                environment=ENVIRONMENT, backend="gloo", num_ranks=2, ranks_per_host=1, cpus_per_rank=1, created="now",
                samples=(
                    CollectiveSample(
                        collective="all_reduce", size_bytes=size, times_s=(time_s,), cpu_s=time_s / 2, is_correct=True
                    ),
                ),
            )
            for size, time_s in order
        ]  # fmt: skip
        return calibrate(None, records, name="x")

    shuffled = list(runs)
    shuffler.shuffle(shuffled)
    assert fit(shuffled) == fit(runs)


@given(st.lists(st.floats(1e6, 1e12), min_size=12, max_size=12))
def test_calibrated_curves_keep_above_the_measured_rate(bit_per_s: list[float]) -> None:
    ways = [(a, b) for a in range(4) for b in range(4) if a != b]
    links = LinksRecord(
        environment=ENVIRONMENT, hosts=("h0", "h1", "h2", "h3"), socket_options={},
        samples=tuple(
            LinkSample(source=f"h{a}", target=f"h{b}", streams=1, num_bytes=1, bit_per_s=(rate,), rtt_median_s=1e-4)
            for (a, b), rate in zip(ways, bit_per_s, strict=True)
        ),
    )  # fmt: skip
    impossible = CollectivesRecord(
        environment=ENVIRONMENT, backend="gloo", num_ranks=4, ranks_per_host=1, cpus_per_rank=1,
        samples=(
            CollectiveSample(collective="all_gather", size_bytes=2**30, times_s=(1e-9,), cpu_s=1e-9, is_correct=True),
        ),
    )  # fmt: skip
    fabric = calibrate(links, [impossible], name="x")
    curve = fabric.collectives[0].curve
    assert curve.times_s[0] >= lower_bound_s(fabric, "all_gather", 2**30, 4) * (1 - 1e-12)
    assert curve.residual > 1


@given(st.sampled_from(COLLECTIVES), st.integers(1, 16), st.integers(1, 8))
def test_what_must_leave_a_host_is_at_most_what_its_ranks_send(
    collective: Collective, num_hosts: int, ranks_per_host: int
) -> None:
    num_ranks = num_hosts * ranks_per_host
    out = nic_factor(collective, num_ranks, ranks_per_host)
    assert 0 <= out <= ranks_per_host * bus_factor(collective, num_ranks) + 1e-12
    if ranks_per_host == 1:
        assert out == bus_factor(collective, num_ranks)


@given(medians, sizes, sizes)
def test_codec_stages_are_monotone_in_size(medians_s: dict[int, float], one: int, two: int) -> None:
    codec = CodecCurve(codec="int8", stage="encode", kind="default", num_ranks=4, curve=fit_curve(medians_s))
    fabric = Fabric(hosts=(Host(name="h0"),), codecs=(codec,))
    low, high = (codec_stage_s(fabric, "int8", "encode", size, 4) for size in sorted((one, two)))
    assert low <= high


names = st.text(min_size=1, max_size=12)
figures = st.builds(
    Figure, value=st.floats(1e-9, 1e15), origin=st.sampled_from(["measured", "declared", "assumed"]), source=st.text()
)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    points = sorted(draw(st.sets(st.integers(1, 2**40), min_size=1, max_size=6)))
    times = sorted(draw(st.lists(st.floats(1e-9, 1e6), min_size=len(points), max_size=len(points))))
    cpu = draw(st.lists(st.floats(0, 64), min_size=len(points), max_size=len(points)) | st.just([]))
    return Curve(sizes_bytes=tuple(points), times_s=tuple(times), cpu=tuple(cpu), residual=draw(st.floats(0, 10)))


protocols = st.lists(
    st.builds(Protocol, name=names, hop_s=st.floats(0, 1), factor=st.floats(0.01, 1)), max_size=2
).map(tuple)  # fmt: skip
latencies = figures.filter(lambda figure: figure.value < 1e6)
transports = st.builds(
    Transport, name=names, latency_s=latencies, protocols=protocols, launch_s=st.floats(0, 1), switch_s=st.floats(0, 1),
    flow_bit_per_s=st.none() | figures, streams=st.integers(1, 9), window_bytes=st.none() | st.integers(1, 2**40),
    first_window_bytes=st.none() | st.integers(1, 2**20), buffer_bytes=st.none() | st.integers(1, 2**30),
    timeout_s=st.floats(0, 9), collective_share=st.floats(0.01, 1),
)  # fmt: skip
islands = st.builds(
    Island, name=names, kind=st.sampled_from(["switch", "bus"]), rate_bit_per_s=figures, num_devices=st.integers(1, 99),
    protocols=protocols, cross_bit_per_s=st.none() | figures,
)  # fmt: skip


@st.composite
def switched(draw: st.DrawFn) -> tuple[tuple[Switch, ...], tuple[str, ...]]:
    """A tree of switches, each below an earlier one, and their names."""
    held = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    switches = [Switch(name=held[0])]
    for i, name in enumerate(held[1:]):
        above = held[draw(st.integers(0, i))]
        rate = draw(st.none() | figures)
        switches.append(Switch(name=name, parent=above, rate_bit_per_s=rate, num_links=draw(st.integers(1, 64))))
    return tuple(switches), tuple(held)


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    switches, at = draw(st.just(((), ())) | switched())
    parts = {
        what: tuple(draw(st.lists(build, max_size=2, unique_by=lambda part: part.name)))
        for what, build in (("transport", transports), ("island", islands))
    }
    named = {what: st.sampled_from(["", *(part.name for part in held)]) for what, held in parts.items()}
    hosts = draw(
        st.lists(
            st.builds(Host, name=names, rack=st.sampled_from(at) if at else names, kind=names,
                      cpus=st.none() | st.floats(0.1, 512), rate_bit_per_s=st.none() | figures,
                      num_nics=st.integers(1, 8), num_devices=st.integers(1, 8), price=st.none() | st.floats(0, 1e6),
                      **named),
            min_size=1, max_size=4, unique_by=lambda host: host.name,
        )
    )  # fmt: skip
    racks = st.nothing() if at else st.sampled_from([host.rack for host in hosts])
    origins = st.sampled_from(["measured", "declared", "assumed"])
    return Fabric(
        name=draw(st.text()),
        hosts=tuple(hosts),
        rtt_s=draw(st.none() | figures),
        switches=switches,
        transports=parts["transport"],
        islands=parts["island"],
        spread=draw(st.sampled_from(["packets", "flows"])),
        currency=draw(names),
        uplinks=tuple(draw(st.lists(st.builds(Uplink, rack=racks, rate_bit_per_s=figures), max_size=2))),
        collectives=tuple(
            draw(
                st.lists(
                    st.builds(CollectiveCurve, collective=st.sampled_from(COLLECTIVES), backend=names,
                              num_ranks=st.integers(1, 9), ranks_per_host=st.integers(1, 9), curve=curves(),
                              origin=origins, dtype=names, beside_compute=st.booleans()),
                    max_size=2,
                )
            )
        ),
        codecs=tuple(
            draw(
                st.lists(
                    st.builds(CodecCurve, codec=names, stage=names, kind=names, num_ranks=st.integers(1, 9),
                              curve=curves(), origin=origins),
                    max_size=2,
                )
            )
        ),
    )  # fmt: skip


@settings(max_examples=60)
@given(fabrics())
def test_a_fabric_survives_its_file_to_the_last_bit(fabric: Fabric) -> None:
    assert parse_fabric(format_fabric(fabric)) == fabric
