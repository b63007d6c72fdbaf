"""`plan collective` and `fabric extend`: what they answer, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wirespeed.cli.main import main
from wirespeed.fabric.files import read_fabric, write_fabric
from wirespeed.fabric.parts import Figure
from wirespeed.fabric.topology import Fabric, Host
from wirespeed.plan.collective import binding_kind

TREE = "tree hosts=8 rack=4 rate=800mbit latency=1us oversubscription=4"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["plan", "collective", *arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["kind"]) == (1, "collective")
    held: list[dict[str, object]] = document["predictions"]
    return held


def test_the_order_of_hosts_decides_which_link_binds(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("all_reduce", "--bytes", "100MB", "--fabric", TREE, "--algorithm", "ring")
    (near,) = ask(capsys, *command)
    (far,) = ask(capsys, *command, "--order", "h0,h4,h1,h5,h2,h6,h3,h7")
    assert near["binding_kind"] == "host NIC"
    assert far["binding_kind"] == "uplink"
    # In turn from rack to rack every one of four flows crosses an uplink as wide as one NIC.
    assert far["seconds"] == pytest.approx(4 * near["seconds"], rel=0.01)  # type: ignore[operator]
    assert far["order"] == ["h0", "h4", "h1", "h5", "h2", "h6", "h3", "h7"]


def test_several_sizes_are_answered_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "send", "--bytes", "1B,100MB", "--fabric", TREE, "--order", "h0,h7")
    assert [one["size_bytes"] for one in found] == [1, 100_000_000]
    assert [one["binding_kind"] for one in found] == ["latency", "host NIC"]
    assert found[0]["busbw_bit_per_s"] is None


def test_the_table_says_what_binds_and_where_the_figure_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "collective", "broadcast", "--bytes", "16MiB", "--fabric", TREE]) == 0
    told = capsys.readouterr().out
    assert "broadcast over 8 ranks" in told
    assert "NIC of host h0 (out)" in told
    assert "not in range" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce", "--bytes", "1MiB"], "operation 'allreduce'"),
        (["all_reduce", "--bytes", "1MiB", "--order", "h0,h9"], "host 'h9' in the order"),
        (["all_reduce", "--bytes", "1MiB", "--order", "h0,h1,h0"], "host 'h0' twice"),
        (["all_reduce", "--bytes", "1MiB", "--ranks", "9"], "9 ranks"),
        (["all_reduce", "--bytes", "1MiB", "--ranks", "3", "--order", "h0,h1"], "3 ranks and an order of 2"),
        (["all_reduce", "--bytes", "many"], "size 'many'"),
        (["all_reduce", "--bytes", "1MiB", "--backend", "mpi"], "backend 'mpi'"),
        (["broadcast", "--bytes", "1MiB", "--algorithm", "ring"], "algorithm 'ring' for broadcast"),
    ],
)
def test_what_cannot_be_asked_names_the_part_that_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "collective", *arguments, "--fabric", TREE]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_every_sort_of_binding_has_a_kind() -> None:
    told = ["NIC 2 of host h0 (in)", "uplink of rack r0 (up)", "latency", "the hosts' cores", "nothing", "nvlink4 of"]
    assert [binding_kind(one) for one in told] == [
        "host NIC", "uplink", "latency", "cores", "nothing", "inside a host",
    ]  # fmt: skip


def test_extend_writes_a_fabric_that_plan_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = Figure(value=100e6, origin="measured")
    small = Fabric(
        name="two", hosts=tuple(Host(name=f"h{i}", rate_bit_per_s=rate) for i in range(2)),
        rtt_s=Figure(value=1e-4, origin="measured"),
    )  # fmt: skip
    write_fabric(tmp_path / "two.toml", small)
    command = ["fabric", "extend", str(tmp_path / "two.toml"), "--hosts", "4", "--racks", "2", "--uplink", "50mbit"]
    assert main([*command, "-o", str(tmp_path / "four.toml")]) == 0
    assert len(read_fabric(tmp_path / "four.toml").hosts) == 4
    capsys.readouterr()
    (found,) = ask(
        capsys, "all_gather", "--bytes", "4MB", "--fabric", str(tmp_path / "four.toml"), "--algorithm", "ring"
    )
    assert found["seconds"] == pytest.approx(8 * 3e6 / 50e6, rel=0.01)
    assert main([*command, "--rate", "0mbit", "-o", str(tmp_path / "none.toml")]) == 2
    assert "rate" in capsys.readouterr().err
    assert not (tmp_path / "none.toml").exists()
