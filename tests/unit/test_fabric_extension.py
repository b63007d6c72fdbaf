"""What was measured on a few hosts, carried to more hosts, other rates, several racks."""

from __future__ import annotations

import math

import msgspec
import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.extension import extend
from wirespeed.fabric.files import format_fabric, parse_fabric
from wirespeed.fabric.parts import Figure
from wirespeed.fabric.placement import place
from wirespeed.fabric.timing import CORES, prepare
from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Curve, Fabric, Host
from wirespeed.units import MIB

GOODPUT = 240e6
WIRE_S = 8 * 1.5 / GOODPUT  # seconds per byte of a ring all_reduce over 4 ranks


def all_reduce(*, cpu: float = 0.01) -> CollectiveCurve:
    sizes = (MIB, 4 * MIB, 16 * MIB)
    curve = Curve(
        sizes_bytes=sizes, times_s=tuple(size * WIRE_S for size in sizes), residual=0.02, cpu=(cpu,) * len(sizes)
    )
    return CollectiveCurve(collective="all_reduce", backend="gloo", num_ranks=4, ranks_per_host=1, curve=curve)


def measured(*, cpu: float = 0.01) -> Fabric:
    rate = Figure(value=GOODPUT, origin="measured", source="bench links")
    hosts = tuple(Host(name=f"m{i}", rate_bit_per_s=rate, cpus=0.5, machine="shared") for i in range(4))
    codec = CodecCurve(
        codec="int8", stage="encode", kind="default", num_ranks=4, cpus=0.5,
        curve=Curve(sizes_bytes=(MIB,), times_s=(1e-3,), residual=0.0),
    )  # fmt: skip
    return Fabric(
        name="small", hosts=hosts, rtt_s=Figure(value=1e-4, origin="measured"), collectives=(all_reduce(cpu=cpu),),
        codecs=(codec,),
    )  # fmt: skip


def seconds(fabric: Fabric, size_bytes: int) -> float:
    return prepare(fabric, "all_reduce", place(fabric), backend="gloo").cost(size_bytes).seconds


def test_hosts_racks_and_uplinks_are_those_asked_for_and_a_file_keeps_them() -> None:
    found = extend(measured(), num_hosts=6, rate_bit_per_s=1e9, measured_line_bit_per_s=250e6, num_racks=2,
                   uplink_bit_per_s=2e9)  # fmt: skip
    assert [(host.name, host.rack) for host in found.hosts] == [
        ("h0", "rack0"), ("h1", "rack0"), ("h2", "rack0"), ("h3", "rack1"), ("h4", "rack1"), ("h5", "rack1"),
    ]  # fmt: skip
    # Of a line of 250 Mbit/s 240 arrived, so of 1 and 2 Gbit/s 0.96 and 1.92 will.
    assert [host.rate_bit_per_s.value for host in found.hosts if host.rate_bit_per_s] == [pytest.approx(0.96e9)] * 6
    assert [uplink.rate_bit_per_s.value for uplink in found.uplinks] == [pytest.approx(1.92e9)] * 2
    assert [host.cpus for host in found.hosts] == [pytest.approx(2 / 6)] * 6  # the machine's two cores, over six hosts
    assert {curve.rate_bit_per_s for curve in found.collectives} == {GOODPUT}
    assert parse_fabric(format_fabric(found)) == found


def test_a_curve_is_carried_to_another_rate_and_another_number_of_ranks() -> None:
    slow = extend(measured(), num_hosts=4, rate_bit_per_s=GOODPUT / 2)
    assert seconds(slow, 8 * MIB) == pytest.approx(8 * MIB * WIRE_S * 2)
    more = extend(measured(), num_hosts=8)
    # A ring over 8 carries 2 * 7 / 8 of the size on each link, over 4 it was 2 * 3 / 4.
    assert seconds(more, 8 * MIB) == pytest.approx(8 * MIB * WIRE_S * 1.75 / 1.5)


def test_of_curves_at_two_rates_the_nearest_is_carried_over() -> None:
    slow = msgspec.structs.replace(all_reduce(), curve=Curve(sizes_bytes=(MIB,), times_s=(1.0,), residual=0.0))
    rate = Figure(value=10 * GOODPUT, origin="measured")
    fast = Fabric(
        name="fast", hosts=tuple(Host(name=f"f{i}", rate_bit_per_s=rate) for i in range(4)), collectives=(slow,)
    )
    held = {
        factor: extend(measured(), num_hosts=4, rate_bit_per_s=factor * GOODPUT, others=[fast]) for factor in (2, 8)
    }
    assert seconds(held[2], 8 * MIB) == pytest.approx(8 * MIB * WIRE_S / 2)
    assert seconds(held[8], 8 * MIB) == pytest.approx(8 * 10 / 8)  # a second per MiB at ten times the rate


def test_extending_to_what_was_measured_changes_nothing() -> None:
    same = extend(measured(), num_hosts=4)
    for size in (MIB, 3 * MIB, 16 * MIB):
        assert seconds(same, size) == pytest.approx(seconds(measured(), size))


def test_where_the_cores_take_longer_than_the_wire_they_bind() -> None:
    # 10 % of a core in each of 4 ranks at 240 Mbit/s. At ten times the rate the wire takes a tenth of the time and the
    # cores, two in all, work as much as before: 0.4 core-seconds per second over 2 cores, a fifth of the old time.
    faster = extend(measured(cpu=0.1), num_hosts=4, rate_bit_per_s=10 * GOODPUT)
    found = prepare(faster, "all_reduce", place(faster), backend="gloo").cost(8 * MIB)
    assert found.seconds == pytest.approx(8 * MIB * WIRE_S * 0.2)
    assert found.binding == CORES
    # On machines of their own each rank has its 0.5 cores, as before: the wire binds.
    alone = extend(measured(cpu=0.01), num_hosts=4, rate_bit_per_s=10 * GOODPUT)
    assert prepare(alone, "all_reduce", place(alone), backend="gloo").cost(8 * MIB).binding.startswith("NIC")


def test_what_is_carried_over_never_falls_with_size_however_noisy_the_cores_were() -> None:
    sizes = (1024, MIB, 4 * MIB, 16 * MIB)
    noisy = Curve(sizes_bytes=sizes, times_s=(1e-3, 2e-2, 9e-2, 0.4), residual=0.0, cpu=(0.9, 0.01, 0.5, 0.02))
    held = msgspec.structs.replace(measured(), collectives=(msgspec.structs.replace(all_reduce(), curve=noisy),))
    faster = extend(held, num_hosts=8, rate_bit_per_s=100 * GOODPUT)
    times = [seconds(faster, size) for size in range(1, 32 * MIB, MIB // 3)]
    assert times == sorted(times)


def test_what_ranks_lose_by_waiting_for_each_other_is_told_from_two_numbers_of_ranks() -> None:
    pair = Curve(sizes_bytes=(1024, 16 * MIB), times_s=(1024 * 8 / GOODPUT, 16 * MIB * 8 / GOODPUT), residual=0.0)
    four = Curve(sizes_bytes=(MIB, 16 * MIB), times_s=(MIB * WIRE_S * 1.2, 16 * MIB * WIRE_S * 1.2), residual=0.0)
    curves = (
        msgspec.structs.replace(all_reduce(), num_ranks=2, curve=pair),
        msgspec.structs.replace(all_reduce(), curve=four),
    )
    held = msgspec.structs.replace(measured(), collectives=curves)
    wire_s = 8 * MIB * 8 / GOODPUT
    # Two ranks lose nothing, four 20 %: eight lose as much again, three what lies between.
    assert seconds(extend(held, num_hosts=8), 8 * MIB) == pytest.approx(wire_s * 1.75 * 1.44)
    assert seconds(extend(held, num_hosts=3), 8 * MIB) == pytest.approx(wire_s * 4 / 3 * 1.2 ** math.log2(1.5))
    assert seconds(extend(held, num_hosts=4), 8 * MIB) == pytest.approx(wire_s * 1.5 * 1.2)
    # No further than the two are apart: nobody has seen what 64 ranks lose.
    assert seconds(extend(held, num_hosts=64), 64 * MIB) == pytest.approx(8 * wire_s * 2 * 63 / 64 * 1.44)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_hosts": 0}, "0 hosts in 1 racks"),
        ({"num_hosts": 2, "num_racks": 3}, "2 hosts in 3 racks"),
        ({"num_hosts": 2, "uplink_bit_per_s": 1e9}, "an uplink for one rack"),
        ({"num_hosts": 2, "measured_line_bit_per_s": 100e6}, "line rate of 1e+08"),
    ],
)
def test_what_makes_no_network_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError) as told:
        extend(measured(), **arguments)  # type: ignore[arg-type]
    assert message in str(told.value)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf")])
def test_a_rate_that_is_not_above_zero_is_refused(rate: float) -> None:
    with pytest.raises(DataError, match="above zero"):
        extend(measured(), num_hosts=2, rate_bit_per_s=rate)


def test_a_fabric_without_measured_rates_cannot_be_extended() -> None:
    with pytest.raises(DataError, match="does not tell the rate of each host"):
        extend(Fabric(name="dark", hosts=(Host(name="h0"),)), num_hosts=2)
