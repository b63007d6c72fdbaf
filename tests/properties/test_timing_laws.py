"""Laws of a collective's time on a topology, over every shape, operation and algorithm."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from test_routing_laws import SHAPES, shapes

from wirespeed.errors import UsageError
from wirespeed.fabric.bounds import cut_bound
from wirespeed.fabric.network import network_of
from wirespeed.fabric.patterns import Layout, Operation, binary_trees
from wirespeed.fabric.placement import Placement, place
from wirespeed.fabric.schedules import OPERATIONS, Algorithm, algorithms, phases
from wirespeed.fabric.timing import cost, prepare
from wirespeed.fabric.topology import Fabric, Figure, Host, Transport
from wirespeed.fabric.words import parse_words

MIB = 1024**2
CHOICES = [
    (operation, algorithm)
    for operation in OPERATIONS
    if operation != "send"
    for algorithm in algorithms(operation, "any")  # type: ignore[arg-type]
]
choices = st.sampled_from(CHOICES)
sizes = st.lists(st.floats(0, 2**36), min_size=2, max_size=8)


def ways_to(fabric: Fabric, operation: Operation, algorithm: Algorithm, num_ranks: int, seed: int | None):  # type: ignore[no-untyped-def]
    placement = place(fabric, seed=seed)
    group = (
        np.random.default_rng(seed).permutation(placement.num_ranks)[:num_ranks]
        if seed is not None
        else np.arange(placement.num_ranks)
    )
    try:
        return prepare(fabric, operation, placement, groups=[group], algorithm=algorithm), placement, group
    except UsageError as fault:
        assert "cannot be used" in str(fault)  # noqa: PT017 - which error matters, not whether
        return None, placement, group


@given(shapes, choices, sizes, st.integers(2, 9), st.none() | st.integers(0, 99))
def test_more_bytes_never_take_less_time(
    shape: str, choice: tuple[Operation, Algorithm], asked: list[float], num: int, seed: int | None
) -> None:
    model, _, _ = ways_to(parse_words(shape), *choice, num, seed)
    assume(model is not None)
    times = model.seconds(np.array(sorted(asked)))
    assert (np.diff(times) >= -1e-12 * times[:-1]).all()
    assert model.cost(asked[0]).seconds == pytest.approx(float(model.seconds(np.array([asked[0]]))[0]))


@given(shapes, choices, st.integers(2, 9), st.none() | st.integers(0, 99))
@example("star hosts=12 nic=10g", ("broadcast", "tree"), 2, 0)  # the second tree once began where no data were
def test_no_algorithm_beats_the_cut(
    shape: str, choice: tuple[Operation, Algorithm], num: int, seed: int | None
) -> None:
    fabric = parse_words(shape)
    model, placement, group = ways_to(fabric, *choice, num, seed)
    assume(model is not None)
    bound = cut_bound(network_of(fabric), choice[0], [placement.host[group][None, :]])
    # Before the model is held to the bound: the algorithm's own bytes at the tightest link.
    ((_, timed),) = model._timed
    assert (timed.s_per_byte.sum(axis=0) >= bound.s_per_byte * (1 - 1e-9)).all()
    assert model.cost(MIB).lower_bound_s == pytest.approx(bound.s_per_byte * MIB)


@given(shapes, st.integers(2, 9), st.none() | st.integers(0, 99), sizes)
def test_gloos_broadcast_moves_each_copy_once_beats_no_cut_and_never_falls_with_size(
    shape: str, num: int, seed: int | None, asked: list[float]
) -> None:
    fabric = parse_words(shape)
    placement = place(fabric, seed=seed)
    group = np.random.default_rng(seed).permutation(placement.num_ranks)[:num]
    model = prepare(fabric, "broadcast", placement, groups=[group], backend="gloo")
    assume(model.algorithms == ("relay",))
    ((_, timed),) = model._timed
    bound = cut_bound(network_of(fabric), "broadcast", [placement.host[group][None, :]])
    assert (timed.s_per_byte.sum(axis=0) >= bound.s_per_byte * (1 - 1e-9)).all()
    # Every rank that is not on its sender's host gets one copy over the wire.
    hosts = np.unique(placement.host[group]).size
    assert hosts - 1 - 1e-6 <= timed.net_weight <= num - 1 + 1e-6
    times = model.seconds(np.array(sorted(asked)))
    assert (np.diff(times) >= -1e-12 * times[:-1]).all()


def layout_of(num_hosts: int, block: int, num_nics: int = 1) -> Layout:
    ranks = np.arange(num_hosts * block)
    return Layout(ranks[None, :], (ranks // block)[None, :], num_nics, (ranks // block // 2)[None, :])


layouts = st.builds(layout_of, st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))


def exchanged(operation: Operation, algorithm: Algorithm, layout: Layout) -> tuple[np.ndarray, np.ndarray] | None:
    """What each rank sends and receives over all phases, as shares of the size."""
    found = phases(operation, algorithm, layout)
    if found is None:
        return None
    sent, received = np.zeros(layout.size), np.zeros(layout.size)
    for phase in found:
        np.add.at(sent, phase.source, phase.weight)
        np.add.at(received, phase.target, phase.weight)
    return sent, received


@given(layouts, choices)
def test_what_is_sent_is_received_and_each_rank_gets_what_the_operation_owes_it(
    layout: Layout, choice: tuple[Operation, Algorithm]
) -> None:
    operation, algorithm = choice
    p = layout.size
    assume(p > 1)
    held = exchanged(operation, algorithm, layout)
    assume(held is not None)
    sent, received = held
    assert sent.sum() == pytest.approx(received.sum())
    part = (p - 1) / p
    owed = {
        "all_reduce": (2 * part * p, 0.0), "all_gather": (part * p, part), "reduce_scatter": (part * p, 0.0),
        "all_to_all": (part * p, part), "broadcast": (p - 1.0, 0.0), "reduce": (p - 1.0, 0.0),
        "scatter": (part, 0.0), "gather": (part, 0.0),
    }  # fmt: skip
    total, each = owed[operation]
    assert received.sum() >= total - 1e-9
    assert (received >= each - 1e-9).all()
    if operation == "broadcast" and algorithm != "scatter_allgather":
        # Nobody gets the data twice.
        assert received.sum() == pytest.approx(p - 1)
        assert received[1:].min() > 0
        # Nothing has to come to where the data are: both halves start at the root, or at devices of its host.
        if layout.block == 1:
            assert received[0] == 0
            assert sent[0] >= 1 - 1e-9
    if operation == "scatter":
        # What stays with each rank is its own part.
        assert (received - sent)[1:] == pytest.approx(np.full(p - 1, 1 / p))
    if operation == "reduce_scatter" and algorithm == "ring":
        assert sent.sum() == pytest.approx(part * p)


@given(st.integers(1, 200))
def test_the_two_trees_reach_all_and_no_rank_is_inside_both(num: int) -> None:
    first, second = binary_trees(num)
    for parent in (first, second):
        assert (parent == -1).sum() == 1
        depth, at = np.zeros(num, dtype=int), parent.copy()
        while (at >= 0).any():
            depth[at >= 0] += 1
            at = np.where(at >= 0, parent[at], -1)
        assert depth.max() <= int(np.ceil(np.log2(num))) if num > 1 else depth.max() == 0
        assert np.bincount(parent[parent >= 0], minlength=num).max(initial=0) <= 2
    children = [np.bincount(parent[parent >= 0], minlength=num) for parent in (first, second)]
    inner = [(c > 0) & (parent >= 0) for c, parent in zip(children, (first, second), strict=True)]
    assert not (inner[0] & inner[1]).any()


@settings(max_examples=60)
@given(st.sampled_from([s for s in SHAPES if "flows" not in s and "detour" not in s]), choices, st.integers(0, 99))
def test_names_and_the_order_of_the_file_do_not_matter(
    shape: str, choice: tuple[Operation, Algorithm], seed: int
) -> None:
    fabric = parse_words(shape)
    order = np.random.default_rng(seed).permutation(len(fabric.hosts))
    renamed = tuple(msgspec.structs.replace(fabric.hosts[i], name=f"node-{i}") for i in order)
    other = msgspec.structs.replace(fabric, hosts=renamed, name="other")
    placement = place(fabric)
    where = np.argsort(order)
    moved = Placement(where[placement.host], placement.device.copy())
    for size in (1.0, 2.0**28):
        try:
            here = cost(fabric, choice[0], size, placement, algorithm=choice[1])
        except UsageError:
            return
        there = cost(other, choice[0], size, moved, algorithm=choice[1])
        assert there.seconds == pytest.approx(here.seconds, rel=1e-9)
        assert there.lower_bound_s == pytest.approx(here.lower_bound_s, rel=1e-9)


@settings(max_examples=60)
@given(choices, st.integers(0, 2**34), st.sampled_from([1.0, 2.0, 4.0]))
def test_ranks_further_apart_never_take_less_time(choice: tuple[Operation, Algorithm], size: int, over: float) -> None:
    fabric = parse_words(f"fat-tree hosts=64 k=8 nic=100g-ib oversubscription={over:g} core_oversubscription=2")
    placement = place(fabric)
    # Four hosts of one edge switch, of one pod, of four pods (4 hosts per edge, 16 per pod).
    near, pod, far = np.arange(4), np.arange(0, 16, 4), np.arange(0, 64, 16)
    assume(choice[1] != "hierarchical")  # needs several ranks per rack
    model = [prepare(fabric, choice[0], placement, groups=[g], algorithm=choice[1]) for g in (near, pod, far)]
    times = [m.cost(size).seconds for m in model]
    assert times[0] <= times[1] * (1 + 1e-12)
    assert times[1] <= times[2] * (1 + 1e-12)


@settings(max_examples=60)
@given(shapes, choices, st.floats(1, 2**33))
@example(SHAPES[7], ("all_reduce", "ring"), 1.0)  # the mean hop was once taken over all groups
def test_company_never_helps(shape: str, choice: tuple[Operation, Algorithm], size: float) -> None:
    fabric = parse_words(shape)
    placement = place(fabric)
    half = placement.num_ranks // 2
    one, two = np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2)
    try:
        alone = prepare(fabric, choice[0], placement, groups=[one], algorithm=choice[1]).cost(size)
    except UsageError:
        return
    both = prepare(fabric, choice[0], placement, groups=[one, two], algorithm=choice[1]).cost(size)
    with_less = prepare(fabric, choice[0], placement, groups=[one], algorithm=choice[1], share=0.5).cost(size)
    assert both.seconds >= alone.seconds * (1 - 1e-12)
    assert with_less.seconds >= alone.seconds * (1 - 1e-12)
    assert with_less.seconds <= 2 * alone.seconds * (1 + 1e-12)


def plain(num: int, rate: float, latency_s: float) -> Fabric:
    return Fabric(
        hosts=tuple(Host(name=f"h{i}", rate_bit_per_s=Figure(value=8 * rate, origin="declared")) for i in range(num)),
        transports=(Transport(name="plain", latency_s=Figure(value=latency_s, origin="declared")),),
    )


CLOSED_FORMS = {
    ("all_reduce", "ring"): lambda p, n, a, b: 2 * (p - 1) * a + 2 * (p - 1) / p * n * b,
    ("all_gather", "ring"): lambda p, n, a, b: (p - 1) * a + (p - 1) / p * n * b,
    ("reduce_scatter", "ring"): lambda p, n, a, b: (p - 1) * a + (p - 1) / p * n * b,
    ("all_to_all", "pairwise"): lambda p, n, a, b: (p - 1) * a + (p - 1) / p * n * b,
    ("scatter", "flat"): lambda p, n, a, b: (p - 1) * a + (p - 1) / p * n * b,
    ("gather", "flat"): lambda p, n, a, b: (p - 1) * a + (p - 1) / p * n * b,
    # (sqrt(n b) + sqrt((p - 2) a))^2 is the best of (p - 2 + k) (a + n b / k) over k; of one chunk at least.
    ("broadcast", "chain"): lambda p, n, a, b: (
        (np.sqrt(n * b) + np.sqrt((p - 2) * a)) ** 2 if (p - 2) * n * b > a else (p - 1) * (a + n * b)
    ),
}
POWERS_OF_TWO = {
    ("all_reduce", "halving_doubling"): lambda p, n, a, b: 2 * np.log2(p) * a + 2 * (p - 1) / p * n * b,
    ("all_gather", "halving_doubling"): lambda p, n, a, b: np.log2(p) * a + (p - 1) / p * n * b,
    ("broadcast", "binomial"): lambda p, n, a, b: np.log2(p) * (a + n * b),
    ("reduce", "binomial"): lambda p, n, a, b: np.log2(p) * (a + n * b),
    ("scatter", "binomial"): lambda p, n, a, b: np.log2(p) * a + (p - 1) / p * n * b,
    ("all_to_all", "bruck"): lambda p, n, a, b: np.log2(p) * (a + n * b / 2),
    ("broadcast", "scatter_allgather"): lambda p, n, a, b: (np.log2(p) + p - 1) * a + 2 * (p - 1) / p * n * b,
}


@given(
    st.sampled_from([*CLOSED_FORMS]),
    st.integers(2, 24),
    st.floats(1, 2**34),
    st.floats(1e6, 1e12),
    st.floats(1e-7, 1e-3),
)
def test_on_a_star_every_algorithm_is_its_closed_form(
    choice: tuple[Operation, Algorithm], p: int, size: float, rate: float, latency_s: float
) -> None:
    fabric = plain(p, rate, latency_s)
    expected = CLOSED_FORMS[choice](p, size, latency_s, 1 / rate)
    assert cost(fabric, choice[0], size, place(fabric), algorithm=choice[1]).seconds == pytest.approx(expected)


@given(
    st.sampled_from([*POWERS_OF_TWO]),
    st.sampled_from([2, 4, 8, 16, 32]),
    st.floats(1, 2**34),
    st.floats(1e6, 1e12),
    st.floats(1e-7, 1e-3),
)
def test_of_powers_of_two_as_well(
    choice: tuple[Operation, Algorithm], p: int, size: float, rate: float, latency_s: float
) -> None:
    fabric = plain(p, rate, latency_s)
    expected = POWERS_OF_TWO[choice](p, size, latency_s, 1 / rate)
    assert cost(fabric, choice[0], size, place(fabric), algorithm=choice[1]).seconds == pytest.approx(expected)


@given(st.integers(2, 6), st.sampled_from([2, 4, 8]), st.floats(1, 2**34), st.floats(1e6, 1e12))
def test_a_hierarchy_sends_a_hosts_part_through_its_nic_whatever_the_devices(
    num_hosts: int, devices: int, size: float, rate: float
) -> None:
    fabric = Fabric(
        hosts=tuple(
            Host(name=f"h{i}", num_devices=devices, rate_bit_per_s=Figure(value=8 * rate, origin="declared"))
            for i in range(num_hosts)
        ),
        transports=(Transport(name="plain", latency_s=Figure(value=0.0, origin="declared")),),
    )
    placement = place(fabric)
    expected = 2 * (num_hosts - 1) / num_hosts * size / rate
    assert cost(fabric, "all_reduce", size, placement, algorithm="hierarchical").seconds == pytest.approx(expected)
    # A flat ring over all ranks crosses each NIC with a little more: 2 (p - 1) / p.
    p = num_hosts * devices
    ring = cost(fabric, "all_reduce", size, placement, algorithm="ring")
    assert ring.seconds == pytest.approx(2 * (p - 1) / p * size / rate)


def test_every_operation_and_algorithm_is_covered() -> None:
    # Those that only gloo has are in the law of its broadcast and in unit tests of its rings.
    own = {"relay", "halved_ring", "whole_ring"}
    assert {algorithm for _, algorithm in CHOICES} == set(get_args(Algorithm)) - {"direct"} - own
    gloo = {algorithms(operation, "gloo")[0] for operation in OPERATIONS}  # type: ignore[arg-type]
    assert own <= gloo
