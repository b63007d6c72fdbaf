"""gloo's broadcast, played through: who has the data when, on paper and in the model."""

from __future__ import annotations

import numpy as np
import pytest

from wirespeed.fabric.parts import Figure
from wirespeed.fabric.placement import Placement, place, place_on
from wirespeed.fabric.timing import prepare
from wirespeed.fabric.topology import Fabric, Host, Uplink

RATE = 8e8  # bit/s: 1e8 bytes per second and NIC
SIZE = 10**8


def fabric(num_hosts: int, *, racks: int = 1, uplink: float | None = None) -> Fabric:
    hosts = tuple(
        Host(name=f"h{i}", rack=f"r{i * racks // num_hosts}", rate_bit_per_s=Figure(value=RATE, origin="declared"))
        for i in range(num_hosts)
    )
    uplinks = () if uplink is None else tuple(
        Uplink(rack=f"r{i}", rate_bit_per_s=Figure(value=uplink, origin="declared")) for i in range(racks)
    )  # fmt: skip
    return Fabric(hosts=hosts, uplinks=uplinks, rtt_s=Figure(value=1e-9, origin="declared"))


@pytest.mark.parametrize(
    ("num_hosts", "seconds"),
    [
        (2, 1.0),
        (3, 2.0),  # the root sends to both at once
        (4, 3.0),  # to 1 and 2 at once until 2 s, then 1 to 3
        (8, 6.0),  # to 1, 2 and 4 until 3 s; 1 to 3 and 5 until 5 s; 3 to 7 until 6 s
    ],
)
def test_a_broadcast_takes_what_sharing_the_senders_nic_gives(num_hosts: int, seconds: float) -> None:
    held = fabric(num_hosts)
    found = prepare(held, "broadcast", place(held), backend="gloo").cost(SIZE)
    assert found.algorithm == "relay"
    assert found.seconds == pytest.approx(seconds, rel=1e-3)
    assert found.binding.startswith("NIC of host h")


def test_a_narrow_uplink_carries_each_copy_that_crosses_it() -> None:
    # Ranks 0, 1 | 2, 3 on an uplink of a quarter of a NIC. Rank 0 sends to 1 and 2; only 2 is across: 4 s. Meanwhile
    # rank 1, done after 1.33 s (it had 3/4 of the NIC), sends to 3 across the same uplink: both share it, and each
    # needs 4 s of it: 8 s in all for two copies.
    held = fabric(4, racks=2, uplink=RATE / 4)
    found = prepare(held, "broadcast", place(held), backend="gloo").cost(SIZE)
    assert found.seconds == pytest.approx(8.0, rel=1e-3)
    assert found.binding == "uplink of rack r0 (up)"


def test_the_order_of_ranks_decides_how_often_the_uplink_is_crossed() -> None:
    held = fabric(4, racks=2, uplink=RATE / 4)
    # 0 and 2 (h0, h1) in one rack, 1 and 3 (h2, h3) in the other: only 0 -> 1 crosses.
    found = prepare(held, "broadcast", place_on(held, ["h0", "h2", "h1", "h3"]), backend="gloo").cost(SIZE)
    assert found.seconds == pytest.approx(5.0, rel=1e-3)  # 4 s across, then a whole NIC for 1 -> 3


def test_many_groups_share_the_links_that_they_share() -> None:
    held = fabric(4)
    placement = Placement(host=np.array([0, 1, 0, 1, 2, 3]), device=np.array([0, 0, 1, 1, 0, 0]))
    twice = prepare(held, "broadcast", placement, groups=np.array([[0, 1], [2, 3]]), backend="gloo").cost(SIZE)
    apart = prepare(held, "broadcast", placement, groups=np.array([[0, 1], [4, 5]]), backend="gloo").cost(SIZE)
    assert (twice.seconds, apart.seconds) == (pytest.approx(2.0, rel=1e-3), pytest.approx(1.0, rel=1e-3))


def test_ranks_of_one_host_cost_no_wire() -> None:
    held = fabric(2)
    placement = Placement(host=np.array([0, 0, 1, 1]), device=np.array([0, 1, 0, 1]))
    # 0 -> 1 is inside; 0 -> 2 and then 1 -> 3 leave the same host: 1 has it at once, so both share the NIC.
    assert prepare(held, "broadcast", placement, backend="gloo").cost(SIZE).seconds == pytest.approx(2.0, rel=1e-3)


def test_a_broadcast_over_thousands_is_told_at_once_and_not_below_its_bound() -> None:
    held = fabric(3000)
    found = prepare(held, "broadcast", place(held), backend="gloo").cost(SIZE)
    assert found.seconds >= 12.0  # generations that wait for each other: log2 of 3000, rounded up
    assert found.seconds < 13.0
