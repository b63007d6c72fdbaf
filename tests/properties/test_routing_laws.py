"""Laws of the flow solver: fair shares fill links, never overfill them, and equal the closed forms on symmetric cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed.fabric.network import Network, network_of
from wirespeed.fabric.placement import Placement, place
from wirespeed.fabric.routing import flow_rates, group_bandwidth, max_min
from wirespeed.fabric.topology import Fabric, Figure, Host, Switch, Uplink
from wirespeed.fabric.words import parse_words

SHAPES = (
    "star hosts=12 nic=10g",
    "tree hosts=16 rack=4 nic=10g oversubscription=4",
    "leaf-spine hosts=16 rack=4 spines=2 nic=100g spread=flows",
    "fat-tree hosts=16 k=4 nic=100g oversubscription=2",
    "fat-tree hosts=16 k=4 nic=100g spread=flows core_oversubscription=2",
    "rail hosts=8 group=4 nics=2 devices=4 nic=400g-ib island=nvlink4",
    "dragonfly hosts=24 router=2 routers=3 nic=200g-ib",
    "dragonfly hosts=24 router=2 routers=3 nic=200g-ib routing=detour",
    "star hosts=4 nic=100g-ib island=pcie3",
    "tree nic=4x100g+12x10g rack=4 oversubscription=2",
)
shapes = st.sampled_from(SHAPES)


@st.composite
def shares(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    num_links, num_variables = draw(st.integers(1, 8)), draw(st.integers(1, 10))
    uses = draw(
        st.lists(
            st.tuples(st.integers(0, num_variables - 1), st.integers(0, num_links - 1), st.floats(0.1, 4)),
            min_size=num_variables, max_size=40,
        )
    )  # fmt: skip
    capacity = draw(st.lists(st.floats(1, 1e12), min_size=num_links, max_size=num_links))
    # Every variable uses some link, so that none is unlimited.
    uses += [(v, v % num_links, 1.0) for v in range(num_variables)]
    variable, link, weight = (np.array(column) for column in zip(*uses, strict=True))
    return variable, link, weight, np.array(capacity), num_variables


@given(shares())
def test_no_link_carries_more_than_its_capacity(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    variable, link, weight, capacity, num = case
    held = max_min(variable, link, weight, capacity, num_variables=num)
    load = np.bincount(link, weights=weight * held.rate[variable], minlength=capacity.size)
    assert (load <= capacity * (1 + 1e-6)).all()
    assert (held.rate > 0).all()


@given(shares())
def test_each_stops_at_a_full_link_where_none_gets_more(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    # Bertsekas, Gallager: rates are max-min fair exactly if each flow has a full link on which no flow is faster.
    variable, link, weight, capacity, num = case
    held = max_min(variable, link, weight, capacity, num_variables=num)
    load = np.bincount(link, weights=weight * held.rate[variable], minlength=capacity.size)
    for v in range(num):
        stop = held.binding[v]
        assert load[stop] >= capacity[stop] * (1 - 1e-6)
        assert held.rate[v] >= held.rate[variable[link == stop]].max() * (1 - 1e-6)


@given(shares(), st.floats(1e-3, 1e12))
def test_a_limit_of_its_own_is_kept_and_helps_the_others(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], most: float
) -> None:
    variable, link, weight, capacity, num = case
    free = max_min(variable, link, weight, capacity, num_variables=num)
    limit = np.full(num, np.inf)
    limit[0] = most
    held = max_min(variable, link, weight, capacity, num_variables=num, limit=limit)
    assert held.rate[0] <= most * (1 + 1e-9)
    assert held.rate.min() >= min(most, free.rate.min()) * (1 - 1e-6)


@given(st.integers(2, 40), st.floats(1e6, 1e12))
def test_flows_that_share_one_link_get_equal_parts(num: int, rate: float) -> None:
    fabric = Fabric(
        hosts=tuple(Host(name=f"h{i}", rate_bit_per_s=Figure(value=rate, origin="declared")) for i in range(num + 1))
    )
    network = network_of(fabric)
    senders, zeros = np.arange(1, num + 1), np.zeros(num, dtype=np.int64)
    rates, binding = flow_rates(network, (senders, zeros), (zeros, zeros))
    assert rates == pytest.approx(np.full(num, rate / num))
    assert {network.link_name(int(link)) for link in binding} == {"NIC of host h0 (in)"}


@settings(max_examples=40)
@given(shapes, st.randoms())
def test_ways_are_ways_and_the_way_back_is_as_long(shape: str, random: object) -> None:
    fabric = parse_words(shape)
    network = network_of(fabric)
    placement = place(fabric)
    source = np.arange(placement.num_ranks)
    target = np.random.default_rng(random.randrange(2**32)).permutation(placement.num_ranks)  # type: ignore[attr-defined]
    there = _hops(network, placement, source, target)
    back = _hops(network, placement, target, source)
    if "detour" not in shape:
        assert (there == back).all()
    crosses = placement.host[source] != placement.host[target]
    assert (there[crosses] >= 2).all()
    assert (there[source == target] == 0).all()


def _hops(network: Network, placement: Placement, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    paths = network.paths(
        placement.host[source], placement.device[source], placement.host[target], placement.device[target]
    )
    return (paths != network.no_link).sum(axis=1)


@settings(max_examples=30)
@given(st.sampled_from([1.0, 2.0, 4.0]), st.integers(2, 6), st.integers(2, 8))
def test_a_ring_in_order_is_not_harmed_by_oversubscription(over: float, num_racks: int, per_rack: int) -> None:
    if over > per_rack:
        return
    fabric = parse_words(f"tree hosts={num_racks * per_rack} rack={per_rack} nic=100g-ib oversubscription={over:g}")
    (rate,) = group_bandwidth(fabric, place(fabric))
    # One flow per rack leaves it: the uplink carries it whole as long as it is no thinner than a NIC.
    assert rate.bytes_per_s == pytest.approx(100e9 / 8)


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(2, 8), st.sampled_from([1.0, 2.0, 4.0]))
def test_a_ring_dealt_to_the_racks_in_turn_gets_its_part_of_the_uplink(
    num_racks: int, per_rack: int, over: float
) -> None:
    fabric = parse_words(f"tree hosts={num_racks * per_rack} rack={per_rack} nic=100g-ib oversubscription={over:g}")
    (rate,) = group_bandwidth(fabric, place(fabric, order="round_robin"))
    # Every host's flow leaves its rack: per_rack flows share per_rack * 100 / over Gbit/s.
    assert rate.bytes_per_s == pytest.approx(100e9 / 8 / over)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_a_random_order_is_harmed_as_counting_flows_on_links_says(seed: int) -> None:
    num, per_rack, over = 64, 8, 4.0
    fabric = parse_words(f"tree hosts={num} rack={per_rack} nic=100g-ib oversubscription={over:g}")
    placement = place(fabric, seed=seed)
    (rate,) = group_bandwidth(fabric, placement)
    rack = placement.host // per_rack
    leaving = np.bincount(rack[rack != np.roll(rack, -1)], minlength=num // per_rack)
    entering = np.bincount(np.roll(rack, -1)[rack != np.roll(rack, -1)], minlength=num // per_rack)
    uplink = per_rack * 100e9 / over
    expected = min(100e9, uplink / max(leaving.max(), entering.max()))
    assert rate.bytes_per_s == pytest.approx(expected / 8)


@pytest.mark.parametrize(("num_hosts", "share"), [(1024, 0.25), (10240, 0.13)])
def test_the_harm_to_a_large_random_ring_is_that_of_the_reference(num_hosts: int, share: float) -> None:
    # Reference (planning.md, section 2): leaves 4:1, pods 2:1, 100G NICs: 24.7 % at 1,024 hosts, 13.0 % at 10,240.
    per_rack, per_pod = 32, 512
    rate = Figure(value=100e9, origin="declared")
    leaf = Figure(value=per_rack * 100e9 / 4, origin="declared")
    pod = Figure(value=per_pod * 100e9 / 8, origin="declared")
    fabric = Fabric(
        hosts=tuple(Host(name=f"h{i}", rack=f"r{i // per_rack}", rate_bit_per_s=rate) for i in range(num_hosts)),
        switches=(
            Switch(name="core"),
            *(Switch(name=f"p{i}", parent="core", rate_bit_per_s=pod) for i in range(-(-num_hosts // per_pod))),
            *(
                Switch(name=f"r{i}", parent=f"p{i * per_rack // per_pod}", rate_bit_per_s=leaf)
                for i in range(num_hosts // per_rack)
            ),
        ),
    )
    (in_order,) = group_bandwidth(fabric, place(fabric))
    assert in_order.bytes_per_s == pytest.approx(12.5e9)
    (shuffled,) = group_bandwidth(fabric, place(fabric, seed=1))
    assert shuffled.bytes_per_s / 12.5e9 == pytest.approx(share, rel=0.1)


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(1, 5))
def test_groups_on_one_uplink_share_it_and_a_group_apart_does_not_pay(num_groups: int, apart: int) -> None:
    # Each of num_groups pairs crosses one uplink of 1 Gbit/s; the last pair stays in its rack.
    fast = Figure(value=1e9, origin="declared")
    fabric = Fabric(
        hosts=tuple(
            Host(name=f"h{i}", rack="ab"[i % 2], rate_bit_per_s=fast) for i in range(2 * num_groups + 2 * apart)
        ),
        uplinks=(Uplink(rack="a", rate_bit_per_s=fast),),
    )
    placement = place(fabric, order="listed")
    pairs = [np.array([2 * i, 2 * i + 1]) for i in range(num_groups)]
    local = np.array([2 * num_groups, 2 * num_groups + 2]) if apart > 1 else None
    rates = group_bandwidth(fabric, placement, [*pairs, *([local] if local is not None else [])], "pairs")
    for rate in rates[:num_groups]:
        assert rate.bytes_per_s == pytest.approx(1e9 / 8 / num_groups)
        assert rate.binding == "uplink of rack a (up)"
    if local is not None:
        assert rates[-1].bytes_per_s == pytest.approx(1e9 / 8)
