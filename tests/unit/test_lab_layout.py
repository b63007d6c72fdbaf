"""The lab as data: specs in words, racks, addresses, the sizes of shapers."""

from __future__ import annotations

import math

import pytest

from wirespeed.errors import UsageError
from wirespeed.lab import LabSpec
from wirespeed.lab.layout import hosts_file, lay_out
from wirespeed.lab.shaping import shape_of


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("4x1gbit", LabSpec(hosts=4, rate_bit_per_s=1e9)),
        ("4 x 1 Gbit/s", LabSpec(hosts=4, rate_bit_per_s=1e9)),
        (
            "8x200mbit/2racks:100mbit",
            LabSpec(hosts=8, rate_bit_per_s=200e6, racks=2, uplink_bit_per_s=100e6),
        ),
        ("8x1gbit/s/4racks", LabSpec(hosts=8, rate_bit_per_s=1e9, racks=4)),
        ("4x1gbit+1ms", LabSpec(hosts=4, rate_bit_per_s=1e9, delay_s=0.001)),
        ("2x100mbit~0.1%", LabSpec(hosts=2, rate_bit_per_s=100e6, loss=0.001)),
        ("4x200mbit@26", LabSpec(hosts=4, rate_bit_per_s=200e6, first_dscp=26)),
        (
            "4x1gbit/2racks:1gbit+1ms~1%@46",
            LabSpec(
                hosts=4, rate_bit_per_s=1e9, racks=2, uplink_bit_per_s=1e9, delay_s=0.001, loss=0.01, first_dscp=46
            ),
        ),
        (
            "6x1gbit/3racks:500mbit+2ms~1%",
            LabSpec(hosts=6, rate_bit_per_s=1e9, racks=3, uplink_bit_per_s=500e6, delay_s=0.002, loss=0.01),
        ),
    ],
)
def test_a_spec_is_read_from_one_word(text: str, spec: LabSpec) -> None:
    assert LabSpec.parse(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "", "4", "x1gbit", "4x", "0x1gbit", "-1x1gbit", "201x1gbit", "4x1", "4x0gbit", "4x1gbit+", "4x1gbit~",
        "4x1gbit/2racks:", "4x1gbit/0racks", "4x1gbit/5racks", "4x1gbit/1racks:1gbit", "4x1gbit+1", "4x1gbit~100%",
        "4x1gbit@", "4x1gbit@0", "4x1gbit@64", "4x1gbit@26+1ms", "4x1gbit@first", "4x1gbit+9s", "4x99gbit", "4x1kbit", "4x1gbit/2racks:1kbit", "4x1gbit~1%+1ms", "9" * 30 + "x1gbit",
    ],
)  # fmt: skip
def test_a_spec_that_makes_no_lab_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        LabSpec.parse(text)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_odd_numbers_are_refused(bad: float) -> None:
    with pytest.raises(UsageError, match="rate"):
        LabSpec(hosts=2, rate_bit_per_s=bad)
    if bad != 0.0:
        with pytest.raises(UsageError, match="delay"):
            LabSpec(hosts=2, rate_bit_per_s=1e9, delay_s=bad)
        with pytest.raises(UsageError, match="loss"):
            LabSpec(hosts=2, rate_bit_per_s=1e9, loss=bad)


def test_hosts_fill_racks_in_order_and_evenly() -> None:
    hosts = lay_out(LabSpec(hosts=7, racks=3, rate_bit_per_s=1e9))
    assert [host.rack for host in hosts] == [0, 0, 0, 1, 1, 2, 2]
    assert [host.name for host in hosts] == [f"h{index}" for index in range(7)]


def test_every_host_has_an_address_of_its_own() -> None:
    hosts = lay_out(LabSpec(hosts=200, rate_bit_per_s=1e9))
    assert len({host.address for host in hosts}) == 200
    assert (hosts[0].address, hosts[199].address) == ("10.77.0.1", "10.77.0.200")


def test_lab_names_come_before_the_systems_in_the_hosts_file() -> None:
    text = hosts_file(lay_out(LabSpec(hosts=2, rate_bit_per_s=1e9)), "192.0.2.1 h1 other\n")
    assert text.splitlines()[2:] == [
        "10.77.0.1 h0",
        "10.77.0.2 h1",
        "::ffff:10.77.0.1 h0.lab",
        "::ffff:10.77.0.2 h1.lab",
        "192.0.2.1 h1 other",
    ]


@pytest.mark.parametrize(
    ("rate_bit_per_s", "burst_bytes", "segment_bytes"),
    [(1e9, 65500, 32750), (100e6, 16384, 15564), (10e6, 4542, 4314), (64e3, 4542, 4314), (10e9, 655000, 65536)],
)
def test_the_burst_follows_the_rate(rate_bit_per_s: float, burst_bytes: int, segment_bytes: int) -> None:
    # 1 Gbit/s: 125e6 B/s x 524 us, segments of half; 100 Mbit/s and somewhat below: 16 KiB; lowest: three frames of 1514 B.
    shape = shape_of(rate_bit_per_s)
    assert (shape.burst_bytes, shape.segment_bytes) == (burst_bytes, segment_bytes)
    assert shape.queue_bytes >= max(rate_bit_per_s / 8 * 0.05, 128 * 1024) - 1
