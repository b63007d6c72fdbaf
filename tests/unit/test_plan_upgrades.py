"""Other networks: NICs changed, hosts upgraded first, rank orders written out."""

from __future__ import annotations

import json

import pytest

from wirespeed.errors import UsageError
from wirespeed.fabric.placement import place
from wirespeed.fabric.timing import prepare
from wirespeed.fabric.words import parse_words
from wirespeed.plan.placement import kubernetes_affinity, order_gain, rank_map, slurm_hostfile
from wirespeed.plan.upgrades import rdma_sibling, star_traffic_s, upgrade_order, with_nic

TREE = parse_words("tree hosts=8 rack=4 nic=25g oversubscription=4")
MIXED = parse_words("star nic=4x200g-ib+4x10g")


def ring_s(fabric):
    return prepare(fabric, "all_reduce", place(fabric), algorithm="ring").cost(128 * 2**20).seconds


def test_a_faster_nic_everywhere_keeps_the_oversubscription():
    faster = with_nic(TREE, "100g-roce")
    ratios = []
    for fabric in (TREE, faster):
        rack = next(switch for switch in fabric.switches if switch.name == "r0")
        ratios.append(rack.rate_bit_per_s.value / fabric.hosts[0].rate_bit_per_s.value)
    assert ratios[0] == pytest.approx(ratios[1])
    assert ring_s(faster) < ring_s(TREE)


def test_some_hosts_alone_keep_the_uplinks():
    some = with_nic(TREE, "100g-roce", ["h0"])
    assert some.switches == TREE.switches
    assert some.hosts[1] == TREE.hosts[1]
    with pytest.raises(UsageError, match="host 'h99'"):
        with_nic(TREE, "100g-roce", ["h99"])


def test_aggregators_are_upgraded_first():
    plain = parse_words("star hosts=16 nic=10g")
    centres, size = ("h3", "h9"), 1e9

    def load(fabric):
        return star_traffic_s(fabric, centres, size)

    steps = upgrade_order(plain, "100g-ib", lambda fabric: max(load(fabric)), load=load)
    assert steps[0].hosts == centres
    # 14 others through 2 centres at 9.7 Gbit/s: seven times as long as a worker's own traffic.
    assert steps[0].gain == pytest.approx(1 - 1 / 7, abs=0.03)


def test_a_ring_gains_only_when_all_its_slow_hosts_change():
    assert ring_s(with_nic(MIXED, "200g-ib", ["h4"])) == pytest.approx(ring_s(MIXED), rel=0.01)
    steps = upgrade_order(MIXED, "200g-ib", ring_s)
    assert steps[0].hosts == ("h4", "h5", "h6", "h7")
    assert steps[0].gain > 0.8


def test_nothing_to_gain_is_no_step():
    assert upgrade_order(parse_words("star hosts=4 nic=200g-ib"), "10g", ring_s) == ()


def test_tcp_has_an_rdma_sibling_and_infiniband_none():
    assert rdma_sibling(parse_words("star hosts=2 nic=100g")) == "100g-roce"
    assert rdma_sibling(parse_words("star hosts=2 nic=200g-ib")) is None


def test_an_order_that_follows_racks_beats_a_shuffled_one():
    worth = order_gain(TREE, 100 * 2**20)
    assert worth.shuffled_s > 1.5 * worth.racks_s
    assert worth.binding_shuffled.startswith("uplink")
    assert worth.listed_s == pytest.approx(worth.racks_s)


def test_what_launchers_take_names_every_rank_once():
    placed = place(parse_words("tree hosts=4 rack=2 nic=10g devices=2"))
    fabric = parse_words("tree hosts=4 rack=2 nic=10g devices=2")
    assert slurm_hostfile(fabric, placed).split() == ["h0", "h0", "h1", "h1", "h2", "h2", "h3", "h3"]
    held = json.loads(rank_map(fabric, placed))
    assert (held["nnodes"], held["nproc_per_node"], held["master"]) == (4, 2, "h0")
    assert sorted(rank for host in held["hosts"] for rank in host["ranks"]) == list(range(8))
    text = kubernetes_affinity(fabric, placed)
    assert '- "r0"' in text
    assert "topologyKey: topology.kubernetes.io/rack" in text
