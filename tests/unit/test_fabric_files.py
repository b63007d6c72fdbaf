from __future__ import annotations

from pathlib import Path

import pytest

from wirespeed.errors import DataError
from wirespeed.fabric.files import exact_duration, exact_rate, exact_size, parse_fabric, read_fabric, write_fabric
from wirespeed.fabric.topology import Fabric, Figure, Host

BY_HAND = """
schema = 1
name = "two racks"
rtt = "50 us"

[[hosts]]
name = "node1"
rack = "r1"
rate = "25 Gbit/s"
cpus = 64

[[hosts]]
name = "node2"
rack = "r2"
rate = { value = "9.41 Gbit/s", origin = "measured", source = "iperf" }

[[uplinks]]
rack = "r1"
rate = "100 Gbit/s"

[[collectives]]
collective = "all_reduce"
backend = "nccl"
num_ranks = 2
points = [["1 KiB", "20 us"], ["1 MiB", "400 us"]]
"""


def test_a_fabric_written_by_hand_is_declared() -> None:
    fabric = parse_fabric(BY_HAND)
    assert fabric.hosts[0] == Host(
        name="node1", rack="r1", rate_bit_per_s=Figure(value=25e9, origin="declared"), cpus=64
    )
    assert fabric.hosts[1].rate_bit_per_s == Figure(value=9.41e9, origin="measured", source="iperf")
    assert fabric.rtt_s == Figure(value=50 * 1e-6, origin="declared")
    (held,) = fabric.collectives
    assert (held.origin, held.ranks_per_host, held.curve.sizes_bytes) == ("declared", 1, (1024, 1048576))
    assert held.curve.times_s == pytest.approx((20e-6, 400e-6))


def test_numbers_are_written_as_people_write_them() -> None:
    assert exact_size(25 * 1024**2) == "25 MiB"
    assert exact_size(1000) == "1000 B"
    assert exact_rate(950e6) == "950 Mbit/s"
    assert exact_rate(0.5) == "0.5 bit/s"
    assert exact_duration(0.25) == "250 ms"


def test_writing_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fabric.toml"
    fabric = Fabric(hosts=(Host(name='quote " back\\slash \x7f ü'),))
    write_fabric(path, Fabric(hosts=(Host(name="old"),)))
    write_fabric(path, fabric)
    assert read_fabric(path) == fabric
    assert [entry.name for entry in path.parent.iterdir()] == ["fabric.toml"]


HOST = "schema = 1\n[[hosts]]\nname = 'a'\n"
CURVE = HOST + "[[collectives]]\ncollective = 'all_reduce'\nbackend = 'gloo'\nnum_ranks = 2\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("schema = ", r"f\.toml is not TOML"),
        ("name = 'x'", r"f\.toml has no schema"),
        ("schema = 2", r"f\.toml has schema 2; expected schema 1; hint: .*upgrade"),
        ("schema = 1", r"f\.toml: the fabric: the fabric has no hosts"),
        (HOST + "speed = '1 Gbit/s'", r"f\.toml is not a fabric: .*`speed`.*hosts"),
        (HOST + "rate = 25", r"f\.toml is not a fabric: .*hosts"),
        (HOST + "rate = '25'", r"f\.toml: hosts\[0\]\.rate: got rate '25'"),
        (HOST + "rate = { value = '1 Gbit/s', origin = 'guessed' }", r"f\.toml is not a fabric: .*origin"),
        (HOST + "[[hosts]]\nname = 'a'", r"f\.toml: the fabric: the fabric names host 'a' twice"),
        (HOST + "[[uplinks]]\nrack = 'r9'\nrate = '1 Gbit/s'", r"rack 'r9', which holds no host"),
        (CURVE + "points = [['1 KiB', '2 ms'], ['2 KiB', '1 ms']]", r"collectives\[0\]\.points: .* not monotone"),
        (CURVE + "points = [['1 KiB']]", r"collectives\[0\]\.points: got the point"),
        (CURVE + "points = [['1 KiB', '1 ms', 1.0], ['2 KiB', '2 ms']]", r"only some points have a CPU share"),
        (CURVE + "points = [['1 KiB', '1 ms', 'much']]", r"got the CPU share 'much'"),
        (CURVE + "points = [['1 KiB', '1 parsec']]", r"collectives\[0\]\.points: got duration '1 parsec'"),
        (CURVE + "points = []", r"collectives\[0\]\.points: a curve needs"),
        (CURVE.replace("all_reduce", "gossip") + "points = []", r"f\.toml is not a fabric: .*collective"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_an_error_that_names_file_and_field(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        parse_fabric(text, source="f.toml")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*absent\.toml"):
        read_fabric(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"cannot read .*binary\.toml"):
        read_fabric(tmp_path / "binary.toml")
