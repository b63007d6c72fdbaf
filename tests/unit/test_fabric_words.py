from __future__ import annotations

from pathlib import Path

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.builders import smallest_fat_tree
from wirespeed.fabric.files import format_fabric, parse_fabric
from wirespeed.fabric.network import network_of
from wirespeed.fabric.placement import place
from wirespeed.fabric.presets import GRADIENTS_BYTES, ISLANDS, NIC_NAMES, NICS, nic, transfer_table
from wirespeed.fabric.timing import cost
from wirespeed.fabric.topology import Fabric
from wirespeed.fabric.words import load_fabric, parse_words


def uplinks(fabric: Fabric) -> dict[str, float]:
    return {s.name: s.rate_bit_per_s.value for s in fabric.switches if s.rate_bit_per_s is not None}


def test_a_fat_tree_takes_the_smallest_switches_that_hold_its_hosts() -> None:
    fabric = parse_words("fat-tree hosts=64 nic=400g-ib oversubscription=2")
    # k = 6 holds 54, k = 8 holds 128: 4 hosts per edge switch, 4 edges per pod.
    assert smallest_fat_tree(64) == 8
    rates = uplinks(fabric)
    assert rates["r0"] == 4 * 400e9 / 2
    assert rates["pod0"] == 4 * 4 * 400e9 / 2
    assert {host.rack for host in fabric.hosts} == {f"r{i}" for i in range(16)}
    assert len(rates) == 16 + 4


def test_racks_share_an_uplink_of_their_hosts_over_the_oversubscription() -> None:
    rates = uplinks(parse_words("tree hosts=40 rack=16 nic=10g oversubscription=4:1"))
    # The last rack holds 8 hosts and has the uplink of a full one.
    assert rates == {f"r{i}": pytest.approx(16 * 9.7e9 / 4) for i in range(3)}


def test_each_nic_of_a_rail_host_is_at_a_switch_of_its_own() -> None:
    fabric = parse_words("rail hosts=8 group=4 nics=4 nic=200g-ib island=nvlink3")
    assert fabric.hosts[5].switches == ("r1n0", "r1n1", "r1n2", "r1n3")
    assert fabric.hosts[5].num_devices == 8
    assert uplinks(fabric)["r1n3"] == 4 * 200e9


def test_a_message_to_another_rail_goes_over_the_island_and_not_the_spine() -> None:
    fabric = parse_words("rail hosts=8 group=4 nics=4 nic=200g-ib island=nvlink3")
    network, placement = network_of(fabric), place(fabric)
    # Rank 0 (host 0, device 0, rail 0) to rank 15 (host 1, device 7, rail 3), in one group.
    (path,) = network.paths(
        *(placement.host[[0]], placement.device[[0]]), *(placement.host[[15]], placement.device[[15]])
    )
    names = [network.link_name(int(link)) for link in path if link != network.no_link]
    assert names == ["nvlink3 of device 0 of host h0", "NIC 3 of host h0 (out)", "NIC 3 of host h1 (in)"]


def test_mixed_hosts_keep_their_own_nics() -> None:
    fabric = parse_words("tree nic=2x400g-ib+3x100g rack=8")
    assert [host.transport for host in fabric.hosts] == ["400g-ib"] * 2 + ["100g"] * 3
    assert [host.kind for host in fabric.hosts[1:3]] == ["400g-ib", "100g"]
    assert len(fabric.transports) == 2
    # A message to a slow host takes as long as the slow host does.
    assert (
        cost(fabric, "send", 2**30, place(fabric), groups=[[0, 1]]).seconds
        < cost(fabric, "send", 2**30, place(fabric), groups=[[0, 2]]).seconds / 4
    )


def test_a_dragonfly_deals_its_global_links_to_the_other_groups() -> None:
    shape = parse_words("dragonfly hosts=72 router=2 routers=4 nic=200g-ib").dragonfly
    assert shape is not None
    # 9 groups of 8 hosts; 4 routers x 2 global links = 8 links for 8 other groups.
    assert (shape.num_groups, shape.global_bit_per_s.value) == (9, 200e9)


def test_words_change_what_a_preset_says() -> None:
    fabric = parse_words("star hosts=2 nic=100g streams=4 rate=90Gbit/s latency=30us window=4MiB price=7 name=mine")
    (transport,) = fabric.transports
    assert (transport.streams, transport.window_bytes, transport.latency_s.value) == (
        4,
        4 * 2**20,
        pytest.approx(30e-6),
    )
    assert fabric.hosts[0].rate_bit_per_s is not None
    assert (fabric.hosts[0].rate_bit_per_s.value, fabric.hosts[0].rate_bit_per_s.origin) == (90e9, "declared")
    assert (fabric.hosts[0].price, fabric.name) == (7.0, "mine")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "begins with ''; expected the path of a fabric.toml, or a shape"),
        ("fattree hosts=4 nic=10g", "hint: did you mean fat-tree"),
        ("star 'hosts=4", "No closing quotation"),
        ("star hosts=4", "without a NIC; expected nic=... or rate=..."),
        ("star nic=10g", "without hosts"),
        ("star hosts=4 nic=40g", "unknown NIC '40g'; expected 1g, 10g"),
        ("star hosts=4 nic=10g island=nvlink9", "unknown island 'nvlink9'.*hint: did you mean nvlink"),
        ("star hosts=0 nic=10g", "hosts=0; expected a whole number of 1 or more"),
        ("star hosts=-4 nic=10g", "hosts=-4; expected a whole number"),
        ("star hosts=4 nic=10g rack=2", "unknown key 'rack' of a star fabric"),
        ("tree hosts=4 nic=10g oversubscripton=2", "did you mean oversubscription"),
        ("tree hosts=4 nic=10g oversubscription=0.5", "oversubscription=0.5; expected 1 or more"),
        ("tree hosts=4 nic=10g oversubscription=inf", "oversubscription=inf; expected 1 or more"),
        ("star hosts=4 nic=10g hosts=5", "hosts twice"),
        ("star hosts=4 nic", "got 'nic' in a star fabric; expected key=value"),
        ("star hosts=4 rate=0Gbit/s latency=1us", "rate: got rate '0Gbit/s'; expected a rate above zero"),
        ("star hosts=4 rate=-1Gbit/s latency=1us", "rate: got rate '-1Gbit/s'"),
        ("star hosts=4 rate=10 latency=1us", "rate: got rate '10'"),
        ("star hosts=4 rate=1Gbit/s", "expected latency=... as well"),
        ("star hosts=4 nic=400g-ib streams=4", "expected TCP"),
        ("star hosts=9999999 nic=10g", "at most 1000000"),
        ("star hosts=5 nic=2x10g+2x100g", "hosts=5 and NICs for 4 hosts"),
        ("star nic=2x10g+100g", "a count for each"),
        ("star hosts=4 nic=10g price=cheap", "price: got 'cheap'"),
        ("star hosts=4 nic=10g spread=packet", "spread=packet; expected packets or flows"),
        ("fat-tree hosts=64 k=4 nic=10g", r"k\^3 / 4 = 16; hint: k=8 holds them"),
        ("fat-tree hosts=4 k=5 nic=10g", "an even number"),
        ("rail hosts=4 nic=10g", "2 or more; hint: name it, such as nics=8"),
        ("dragonfly hosts=4000 router=1 routers=2 nic=10g", "one to each other group"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_the_word(line: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        load_fabric(line)


def test_what_names_a_file_is_read_and_what_begins_with_a_shape_is_a_line(tmp_path: Path) -> None:
    fabric = parse_words("leaf-spine hosts=4 rack=2 nic=25g")
    path = tmp_path / "star"
    path.write_text(format_fabric(fabric))
    assert load_fabric(path) == load_fabric(str(path)) == fabric
    assert load_fabric(Path("star hosts=2 nic=10g")) == parse_words("star hosts=2 nic=10g")
    with pytest.raises(DataError, match=r"cannot read .*absent\.toml"):
        load_fabric("absent.toml")


@pytest.mark.parametrize(
    "line",
    [
        "star hosts=3 nic=100g buffer=1MiB", "tree hosts=8 rack=4 nic=1g spread=flows", "fat-tree hosts=16 nic=400g-roce",
        "rail hosts=4 group=2 nics=2 nic=800g-ib island=nvlink5", "dragonfly hosts=24 router=2 routers=3 nic=200g-ib",
        "tree nic=2x400g-ib+2x10g island=pcie4 devices=4",
    ],
)  # fmt: skip
def test_every_shape_survives_its_file(line: str) -> None:
    fabric = parse_words(line)
    assert parse_fabric(format_fabric(fabric)) == fabric


def test_every_preset_builds_and_says_where_its_figures_are_from() -> None:
    for name in [*NICS, *NIC_NAMES]:
        preset = nic(name.upper())
        assert parse_words(f"star hosts=2 nic={name}").hosts[0].transport == preset.name
        assert preset.rate.value <= preset.line_bit_per_s
        for figure in (preset.rate, preset.transport.latency_s):
            assert figure.source
    assert all(island.rate_bit_per_s.source for island in ISLANDS.values())


def test_tcp_on_ethernet_against_infiniband_is_as_published() -> None:
    # FEATURES E6, 128 MB: 8.7 GB/s and 10 to 20 us (100GbE) against 25 GB/s and 1.2 us (HDR).
    ethernet, infiniband = transfer_table(GRADIENTS_BYTES)
    assert ethernet.bytes_per_s == pytest.approx(8.7e9)
    assert 10e-6 <= ethernet.latency_s <= 20e-6
    assert (infiniband.bytes_per_s, infiniband.latency_s) == (pytest.approx(25e9), pytest.approx(1.2e-6))
    assert ethernet.seconds == pytest.approx(128e6 / 8.7e9, rel=0.01)
    # The same from the flow model: one message, streams enough to fill the NIC.
    for row, line in ((ethernet, "star hosts=2 nic=100g streams=4"), (infiniband, "star hosts=2 nic=200g-ib")):
        fabric = parse_words(line)
        assert cost(fabric, "send", GRADIENTS_BYTES, place(fabric)).seconds == pytest.approx(row.seconds, rel=0.01)
