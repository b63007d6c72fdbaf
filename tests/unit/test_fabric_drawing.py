from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from wirespeed.cli.main import main
from wirespeed.fabric.drawing import draw
from wirespeed.fabric.picture import fabric_page, fabric_svg
from wirespeed.fabric.topology import Fabric, Host
from wirespeed.fabric.words import load_fabric, parse_words


def test_what_looks_alike_is_drawn_once_with_its_number() -> None:
    root = draw(parse_words("fat-tree hosts=64 nic=400g-ib oversubscription=2"))
    (pods,) = root.children
    (racks,) = pods.children
    (hosts,) = racks.children
    assert [branch.title for branch in (root, pods, racks, hosts)] == [
        "core", "pod0 .. pod3 (4 alike)", "r0 .. r3 (4 alike)", "h0 .. h3 (4 alike)",
    ]  # fmt: skip
    assert racks.detail == "uplink 800 Gbit/s on 2 links"


def test_what_differs_stands_out() -> None:
    fabric = parse_words("tree hosts=12 rack=4 nic=10g")
    slow = msgspec.structs.replace(fabric.hosts[5], rate_bit_per_s=None)
    root = draw(msgspec.structs.replace(fabric, hosts=(*fabric.hosts[:5], slow, *fabric.hosts[6:])))
    assert [branch.title for branch in root.children] == ["r0", "r1", "r2"]
    assert [branch.title for branch in root.children[1].children] == ["h4", "h5", "h6 .. h7 (2 alike)"]
    assert "unknown rate" in root.children[1].children[1].detail


def test_a_rails_host_hangs_on_each_of_its_switches() -> None:
    root = draw(parse_words("rail hosts=4 group=4 nics=2 nic=400g-ib"))
    assert [branch.title for branch in root.children] == ["r0n0 .. r0n1 (2 alike)"]
    assert root.children[0].children[0].detail.startswith("2 x 400 Gbit/s")


@pytest.mark.parametrize(
    "line",
    ["star hosts=3 nic=10g", "dragonfly hosts=72 router=2 routers=4 nic=200g-ib", "tree nic=2x400g-ib+20x10g rack=4"],
)
def test_the_page_is_one_file_that_loads_nothing_and_its_drawing_is_well_formed(line: str) -> None:
    fabric = parse_words(line)
    page = fabric_page(fabric, [("hosts", "3")])
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    drawing = ElementTree.fromstring(fabric_svg(fabric))
    boxes = [float(box.get("x", "-1")) for box in drawing.iter("rect")]
    assert boxes
    assert all(0 <= x <= float(drawing.get("width", "0")) - 236 for x in boxes)


def test_names_are_shown_and_never_run() -> None:
    page = fabric_page(Fabric(name="<script>x</script>", hosts=(Host(name="<b>&"),)), [("a<", "b>")])
    assert "<script>" not in page
    assert "&lt;b&gt;&amp;" in page


def test_show_draws_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "f.html"
    assert main(["fabric", "show", "tree hosts=64 rack=16 nic=100g oversubscription=4", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    # 16 hosts of 69.6 Gbit/s over 4.
    assert "r0 .. r3 (4 alike)  uplink 278 Gbit/s on 4 links" in out
    assert "8.7" not in out
    assert "64 hosts: --all lists them" in out
    assert page.read_text().startswith("<!doctype html>")


def test_a_line_written_as_a_file_is_the_same_fabric(tmp_path: Path) -> None:
    line, path = "tree nic=2x400g-ib+6x100g rack=4 oversubscription=2", tmp_path / "f.toml"
    assert main(["fabric", "new", line, "-o", str(path)]) == 0
    assert load_fabric(str(path)) == parse_words(line)


def test_cost_tells_time_bound_and_binding_link(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fabric", "cost", "all_reduce", "64MiB", "-f", "tree hosts=8 rack=4 nic=100g-ib oversubscription=4"]
    assert main([*asked, "--order", "round_robin", "--algorithm", "ring", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["costs"]
    # Four flows on an uplink of one NIC's rate, at 0.96 of it.
    assert found["seconds"] == pytest.approx(2 * 7 / 8 * 64 * 2**20 * 4 / (12.5e9 * 0.96), rel=0.02)
    assert found["binding"] == "uplink of rack r0 (up)"
    assert main(asked) == 0
    assert "not calibrated" in capsys.readouterr().out


def test_nics_reproduces_the_published_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "nics", "--json"]) == 0
    held = {entry["nic"]: entry for entry in json.loads(capsys.readouterr().out)["nics"]}
    assert held["100g"]["seconds"] / held["200g-ib"]["seconds"] == pytest.approx(25 / 8.7, rel=0.01)
    assert all(entry["source"] for entry in held.values())
