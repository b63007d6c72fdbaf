from __future__ import annotations

import numpy as np
import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.files import parse_fabric
from wirespeed.fabric.patterns import Operation
from wirespeed.fabric.placement import Placement, place, stack_groups
from wirespeed.fabric.timing import cost, prepare
from wirespeed.fabric.topology import CollectiveCurve, Curve, Fabric, Figure, Host, Uplink
from wirespeed.fabric.words import parse_words

HOSTS = "schema = 1\n[[hosts]]\nname = 'a'\nrack = 'x'\n"
MIB = 2**20


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[switches]]\nname='x'\nparent='y'\n[[switches]]\nname='y'\nparent='x'", r"switches x -> y -> x form a cycle.*hint"),
        ("[[switches]]\nname='x'\nparent='x'", r"switches x -> x form a cycle"),
        ("[[switches]]\nname='x'\n[[switches]]\nname='y'", r"not connected: switches 'x', 'y' have nothing above"),
        ("[[switches]]\nname='x'\nparent='z'", r"switch 'x' has parent 'z', which the fabric does not have"),
        ("[[switches]]\nname='x'\n[[switches]]\nname='x'", r"names switch 'x' twice"),
        ("[[switches]]\nname='y'", r"host 'a' is at switch 'x', which the fabric does not have"),
        ("[[switches]]\nname='x'\nrate='0 Gbit/s'", r"switches\[0\]\.rate: got rate '0 Gbit/s'"),
        ("[[switches]]\nname='x'\nrate='-1 Gbit/s'", r"switches\[0\]\.rate: got rate '-1 Gbit/s'"),
        ("[[switches]]\nname='x'\nnum_links=0", r"switches\[0\]: switch 'x' has 0 links"),
        ("[[uplinks]]\nrack='x'\nrate='1 Gbit/s'\n[[switches]]\nname='x'", r"both \[\[uplinks\]\] and \[\[switches\]\]"),
        ("num_nics = 0", r"hosts\[0\]: host 'a' has 0 NICs"),
        ("num_nics = 2\nswitches = ['x']", r"hosts\[0\]: host 'a' has 2 NICs and names 1 switches"),
        ("transport = 'tcp'", r"host 'a' has transport 'tcp', which the fabric does not describe"),
        ("island = 'nv'", r"host 'a' has island 'nv', which the fabric does not describe"),
        ("[[transports]]\nname='t'\nlatency='1 us'\ncollective_share=1.5", r"transports\[0\]: transport 't' has .* share of 1\.5"),
        ("[[transports]]\nname='t'\nlatency='1 parsec'", r"transports\[0\]\.latency: got duration"),
        ("[[islands]]\nname='n'\nrate='1 GB/s'\nnum_devices=0", r"islands\[0\]: island 'n' has 0 devices"),
        ("[dragonfly]\nnum_groups=2\nrouters_per_group=2\nlocal_rate='1 Gbit/s'\nglobal_rate='1 Gbit/s'",
         r"rack 'x' is no router of the dragonfly; expected g0r0 to g1r1"),
        ("[dragonfly]\nnum_groups=0\nrouters_per_group=2\nlocal_rate='1 Gbit/s'\nglobal_rate='1 Gbit/s'", r"dragonfly.*0 groups"),
        ("speed = 3", r"is not a fabric: .*speed"),
    ],
)  # fmt: skip
def test_a_fabric_that_cannot_be_is_an_error_that_names_the_entry(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        parse_fabric(HOSTS + text, source="f.toml")


def hosts(num: int, rate: float = 1e9, rack: int = 4) -> tuple[Host, ...]:
    figure = Figure(value=rate, origin="measured")
    return tuple(Host(name=f"h{i}", rack=f"r{i // rack}", rate_bit_per_s=figure) for i in range(num))


def curve(points: dict[int, float]) -> Curve:
    return Curve(sizes_bytes=tuple(points), times_s=tuple(points.values()), residual=0.03)


def calibrated(uplink: float = 1e9) -> Fabric:
    """Two racks of four, curves of a ring measured on 2 and 4 hosts of the first rack: 1 ms a step, 0.9 Gbit/s."""

    def ring(p: int) -> dict[int, float]:
        return {size: 2 * (p - 1) * (1e-3 + size / p * 8 / 0.9e9) for size in (1024, MIB, 4 * MIB, 64 * MIB)}

    return Fabric(
        hosts=hosts(8),
        rtt_s=Figure(value=1e-4, origin="measured"),
        uplinks=tuple(Uplink(rack=f"r{i}", rate_bit_per_s=Figure(value=uplink, origin="declared")) for i in range(2)),
        collectives=tuple(
            CollectiveCurve(
                collective="all_reduce", backend="gloo", num_ranks=p, ranks_per_host=1, curve=curve(ring(p))
            )
            for p in (2, 4)
        ),
    )


def test_a_measured_curve_replaces_the_closed_form_inside_its_range_and_says_so() -> None:
    fabric = calibrated()
    found = cost(fabric, "all_reduce", 4 * MIB, place(fabric, 4))
    assert found.seconds == pytest.approx(6 * (1e-3 + MIB * 8 / 0.9e9))
    assert (found.origin, found.is_in_range, found.uncertainty) == ("measured", True, 0.03)
    below = cost(fabric, "all_reduce", 16, place(fabric, 4))
    assert (below.is_in_range, below.uncertainty) == (False, 0.2)
    # The closed form by name: rate and round trip, nothing measured.
    assert cost(fabric, "all_reduce", 4 * MIB, place(fabric, 4), algorithm="ring").seconds == pytest.approx(
        6 * (5e-5 + MIB * 8 / 1e9)
    )


def test_a_curve_is_carried_to_more_ranks_step_by_step() -> None:
    fabric = calibrated()
    found = cost(fabric, "all_reduce", 8 * MIB, place(fabric))
    # From 4 ranks to 8: 14 steps of 1 MiB each, and the ring in order crosses the uplink once.
    # The curves of 2 and 4 ranks agree but for what their smallest sizes leave out.
    assert found.seconds == pytest.approx(14 * (1e-3 + MIB * 8 / 0.9e9), rel=1e-3)
    assert (found.origin, found.is_in_range) == ("assumed", False)


def test_an_order_that_crosses_the_uplink_pays_for_it_with_the_bytes_alone() -> None:
    fabric = calibrated()
    placement = place(fabric, order="round_robin")
    found = cost(fabric, "all_reduce", 64 * MIB, placement)
    # Four flows on an uplink as fast as a NIC, four times the bytes. A flow alone on its link reaches 0.9 of it, but
    # where four share one they fill it: while one waits the others send.
    assert found.seconds == pytest.approx(14 * (1e-3 + 4 * 8 * MIB * 8 / 1e9), rel=1e-3)
    assert found.binding == "uplink of rack r0 (up)"
    small = cost(fabric, "all_reduce", 64, placement)
    assert small.seconds == pytest.approx(14 * 1e-3, rel=0.01)
    assert small.binding == "latency"


def test_gloos_own_rings_are_longer_than_the_textbooks() -> None:
    fabric = Fabric(hosts=hosts(4), rtt_s=Figure(value=1e-9, origin="measured"))
    wire_s = 64 * MIB * 8 / 1e9

    def seconds(operation: Operation, backend: str) -> float:
        return cost(fabric, operation, 64 * MIB, place(fabric), backend=backend, algorithm="auto").seconds

    assert seconds("all_gather", "nccl") == pytest.approx(0.75 * wire_s)
    # Half a block more, of which a rank sends three.
    assert seconds("all_gather", "gloo") == pytest.approx(0.75 * wire_s * 3.5 / 3)
    # A whole all_reduce, of which each keeps its part.
    assert seconds("reduce_scatter", "nccl") == pytest.approx(0.75 * wire_s)
    assert seconds("reduce_scatter", "gloo") == pytest.approx(1.5 * wire_s)


def test_a_slow_host_binds_and_is_named() -> None:
    slow = Host(name="slow", rack="r0", rate_bit_per_s=Figure(value=1e8, origin="measured"))
    fabric = Fabric(hosts=(*hosts(3), slow), rtt_s=Figure(value=1e-4, origin="measured"))
    found = cost(fabric, "all_gather", 64 * MIB, place(fabric))
    assert found.binding.startswith("NIC of host slow")
    assert found.lower_bound_s == pytest.approx(0.75 * 64 * MIB * 8 / 1e8)


def test_what_one_tcp_stream_reaches_binds_and_more_streams_help() -> None:
    line = "star hosts=2 nic=100g"
    one, four = parse_words(line), parse_words(f"{line} streams=4")
    alone = cost(one, "send", 2**30, place(one))
    assert alone.binding == "what one connection reaches"
    assert alone.seconds == pytest.approx(2**30 * 8 / 20e9, rel=0.01)
    assert cost(four, "send", 2**30, place(four)).seconds == pytest.approx(2**30 * 8 / 69.6e9, rel=0.01)
    # A window of 64 KiB over a round trip of 1 ms: 0.52 Gbit/s.
    far = parse_words("star hosts=2 nic=10g latency=500us window=64KiB")
    assert cost(far, "send", 2**30, place(far)).seconds == pytest.approx(2**30 * 1e-3 / 65536, rel=0.01)


def test_a_cold_connection_starts_slowly_and_no_slower_than_its_rounds() -> None:
    fabric = parse_words("star hosts=2 nic=10g latency=500us")
    warm, cold = (prepare(fabric, "send", place(fabric), is_cold=cold) for cold in (False, True))
    sizes = np.array([1e3, 14480, 14481, 1e5, 1e6, 1e7, 1e9])
    extra = cold.seconds(sizes) - warm.seconds(sizes)
    assert extra[:2] == pytest.approx([0, 0])
    # One round trip less the time of the first window at full rate.
    assert extra[2] == pytest.approx(1e-3 - 14480 * 8 / 9.7e9)
    assert (np.diff(cold.seconds(sizes)) > 0).all()
    assert extra[-1] == pytest.approx(extra[-2])
    assert extra[-1] < 7e-3  # 14480 bytes double 7 times to the 1.2 MB of rate times round trip


def test_gather_into_a_shallow_buffer_waits_for_a_timeout() -> None:
    deep, shallow = parse_words("star hosts=16 nic=10g"), parse_words("star hosts=16 nic=10g buffer=1MiB")
    # 15 messages of 1 MiB at once into 1 MiB of buffer; of 32 KiB they fit.
    for size, waits in ((16 * MIB, 0.2), (16 * 32 * 1024, 0.0)):
        late = cost(shallow, "gather", size, place(shallow), algorithm="flat")
        assert late.seconds == pytest.approx(cost(deep, "gather", size, place(deep), algorithm="flat").seconds + waits)
    ring = [cost(f, "all_reduce", 16 * MIB, place(f), algorithm="ring").seconds for f in (deep, shallow)]
    assert ring[0] == ring[1]


def test_hashed_flows_collide_and_sprayed_packets_do_not() -> None:
    sprayed, hashed = (
        parse_words(f"leaf-spine hosts=64 rack=16 spines=16 nic=100g-ib spread={spread}")
        for spread in ("packets", "flows")
    )
    one, other = (prepare(f, "all_reduce", place(f, order="round_robin"), algorithm="ring") for f in (sprayed, hashed))
    assert one.cost(2**30).binding.startswith("NIC")
    # 16 flows thrown on 16 links: some link gets two or more (all different: once in 880,000 throws).
    assert other.cost(2**30).seconds > 1.9 * one.cost(2**30).seconds
    assert "uplink" in other.cost(2**30).binding


def test_a_ring_over_eight_nics_uses_all_of_them() -> None:
    fabric = parse_words("rail hosts=4 group=4 nics=8 nic=400g-ib island=nvlink5")
    found = cost(fabric, "all_reduce", 2**33, place(fabric), algorithm="ring", backend="nccl")
    # 2 * 31/32 of the bytes pass each host's NICs: 8 of 50 GB/s at 0.94.
    assert found.seconds == pytest.approx(2 * 31 / 32 * 2**33 / (8 * 50e9 * 0.94), rel=0.05)
    assert found.binding.startswith("NIC")


def test_groups_that_share_nics_share_their_rate() -> None:
    fabric = parse_words("star hosts=4 nic=100g-ib devices=2 island=nvlink3")
    placement = place(fabric)
    one, both = ([np.arange(0, 8, 2)], [np.arange(0, 8, 2), np.arange(1, 8, 2)])
    times = [cost(fabric, "all_reduce", 2**30, placement, groups=g, algorithm="ring").seconds for g in (one, both)]
    assert times[1] == pytest.approx(2 * times[0], rel=0.01)


def test_nccl_keeps_a_hosts_ranks_together_and_gloo_takes_the_order_it_is_given() -> None:
    fabric = parse_words("star hosts=4 nic=100g-ib devices=2 island=nvlink3")
    placement = place(fabric)
    dealt = [np.array([0, 2, 4, 6, 1, 3, 5, 7])]
    times = [
        cost(fabric, "all_reduce", 2**30, placement, groups=dealt, algorithm="ring", backend=b).seconds
        for b in ("nccl", "gloo")
    ]
    assert times[1] == pytest.approx(2 * times[0], rel=0.01)


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        ({"num_ranks": 9}, "9 ranks for 8 hosts of 1 ranks each; expected 1 to 8 ranks"),
        ({"num_ranks": 0}, "expected 1 to 8"),
        ({"ranks_per_host": 0}, "0 ranks per host"),
        ({"num_ranks": 3, "ranks_per_host": 2}, "leave host 'h1' partly filled.* such as 2 or 4"),
    ],
)
def test_ranks_that_do_not_fit_or_divide_are_refused(ask: dict[str, int], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        place(Fabric(hosts=hosts(8)), **ask)  # type: ignore[arg-type]


def test_bad_groups_and_questions_are_refused() -> None:
    fabric = parse_words("star hosts=4 nic=10g")
    placement = place(fabric)
    for groups, problem in (
        ([], "no group"), ([[]], "group 0 has no ranks"), ([[0, 1], [2, 9]], "group 1 holds rank 9; expected ranks 0 to 3"),
        ([[0, 1, 1]], "group 0 holds a rank twice"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=problem):
            stack_groups(placement, groups)  # type: ignore[arg-type]
    for ask, problem in (
        ({"operation": "gossip"}, "operation 'gossip'; expected all_reduce"),
        ({"algorithm": "star"}, "algorithm 'star' for all_reduce; expected auto, ring"),
        ({"backend": "mpi"}, "backend 'mpi'; expected gloo, nccl or any"),
        ({"size_bytes": -1}, "a size of 0 or more"), ({"size_bytes": float("nan")}, "a size of 0 or more"),
        ({"share": 0.0}, "a share of 0.0"), ({"operation": "send"}, "two: sender and receiver"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=problem):
            cost(fabric, **{"operation": "all_reduce", "size_bytes": 1, "placement": placement, **ask})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="without ranks"):
        Placement(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def test_what_the_fabric_does_not_tell_is_an_error_and_no_number() -> None:
    unknown = Fabric(hosts=(*hosts(1), Host(name="dark")), rtt_s=Figure(value=1e-4, origin="measured"))
    with pytest.raises(DataError, match=r"does not tell the rate of host 'dark'.*bench links"):
        cost(unknown, "all_reduce", 1, place(unknown))
    with pytest.raises(DataError, match="a round trip or a transport"):
        cost(Fabric(hosts=hosts(2)), "all_reduce", 1, place(Fabric(hosts=hosts(2))))
    alone = cost(unknown, "all_reduce", MIB, place(unknown, 1))
    assert (alone.seconds, alone.binding) == (0.0, "nothing")
