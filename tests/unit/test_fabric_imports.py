from __future__ import annotations

import json
from pathlib import Path

import pytest

from wirespeed.cli.main import main
from wirespeed.errors import DataError
from wirespeed.fabric.files import read_fabric
from wirespeed.fabric.imports.kubernetes import read_nodes
from wirespeed.fabric.imports.nccl_xml import read_nccl_xml
from wirespeed.fabric.imports.nvidia_smi import read_nvidia_smi
from wirespeed.fabric.imports.slurm import read_topology_conf
from wirespeed.fabric.words import parse_host, parse_words
from wirespeed.launch.hostlist import expand_hostlist

TOPOLOGY = """
# two racks below one spine
SwitchName=leaf1 Nodes=node[01-04]  LinkSpeed=100
switchname=leaf2 nodes=node[05-07],login
SwitchName=spine \\
    Switches=leaf[1-2]
"""


def test_slurms_switches_become_racks_below_their_spine() -> None:
    fabric = read_topology_conf(TOPOLOGY, expand_hostlist, kind=parse_host("nic=200g-ib nics=2"))
    assert {host.name: host.rack for host in fabric.hosts} == {
        "node01": "leaf1", "node02": "leaf1", "node03": "leaf1", "node04": "leaf1",
        "node05": "leaf2", "node06": "leaf2", "node07": "leaf2", "login": "leaf2",
    }  # fmt: skip
    assert {s.name: s.parent for s in fabric.switches} == {"leaf1": "spine", "leaf2": "spine", "spine": None}
    assert (fabric.hosts[0].num_nics, fabric.hosts[0].transport) == (2, "200g-ib")
    bare = read_topology_conf(TOPOLOGY, expand_hostlist)
    assert bare.hosts[0].rate_bit_per_s is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no hosts"),
        ("Nodes=a", "line 1 has no SwitchName"),
        ("SwitchName=s", "line 1 names 1 switches with nothing below"),
        ("SwitchName=s Nodes", "line 1 holds 'Nodes'; expected Key=value"),
        ("SwitchName=s Nodes=a[1-", "line 1: got host list"),
        ("SwitchName=s Nodes=a\nSwitchName=s Nodes=b", "line 2 describes switch 's' a second time"),
        ("SwitchName=s Nodes=a\nSwitchName=t Nodes=a", "line 2 puts node 'a' at 't'; it is at 's'"),
        ("SwitchName=s Nodes=a\nSwitchName=t Switches=s\nSwitchName=u Switches=s", "line 3 puts switch 's' below 'u'.*hint"),
        ("SwitchName=s Nodes=a\nSwitchName=t Switches=s,v", "no line of switch 'v'"),
        ("SwitchName=s Nodes=a\nSwitchName=t Nodes=b", "not connected: switches 's', 't'"),
        ("SwitchName=s Nodes=a Switches=t\nSwitchName=t Switches=s", "form a cycle"),
    ],
)  # fmt: skip
def test_a_wrong_topology_conf_is_an_error_that_names_the_line(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_topology_conf(text, expand_hostlist)


def nccl_xml(num_gpus: int = 2, links: int = 18, sm: int = 90, speed: int = 400000) -> str:
    gpus = "".join(
        f'<pci busid="0000:{i:02x}:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{i}" sm="{sm}" rank="{i}" gdr="1">'
        + (f'<nvlink target="0000:c0:00.0" count="{links}" tclass="0x068000"/>' if links else "")
        + "</gpu></pci>"
        for i in range(num_gpus)
    )
    nets = "".join(
        f'<pci busid="0000:a{i}:00.0" class="0x020000"><nic><net name="mlx5_{i}" dev="{i}" speed="{speed}" port="1"/></nic></pci>'
        for i in range(num_gpus)
    )
    return f'<system version="1"><cpu numaid="0" arch="x86_64">{gpus}{nets}</cpu></system>'


def test_nccls_topology_tells_gpus_nvlinks_and_nics() -> None:
    inside = read_nccl_xml(nccl_xml(num_gpus=8))
    assert (inside.num_devices, inside.num_nics, inside.nic_line_bit_per_s) == (8, 8, 400e9)
    assert inside.island is not None
    # 18 links of 20.6 GB/s.
    assert inside.island.rate_bit_per_s.value == pytest.approx(18 * 20.6e9 * 8)
    assert inside.island.kind == "switch"
    fabric = parse_words("rail hosts=4 group=4 nic=400g-ib", inside=inside)
    assert (fabric.hosts[0].num_devices, fabric.hosts[0].num_nics, fabric.hosts[0].island) == (8, 8, "nvlink4x18")
    outranked = parse_words("star hosts=2 nic=400g-ib nics=1 island=pcie5 devices=4", inside=inside)
    assert (outranked.hosts[0].num_devices, outranked.hosts[0].num_nics, outranked.hosts[0].island) == (4, 1, "pcie5")


def test_gpus_without_nvlink_share_pcie() -> None:
    inside = read_nccl_xml(nccl_xml(links=0))
    assert inside.island is not None
    assert (inside.island.name, inside.island.kind, inside.island.rate_bit_per_s.origin) == ("pcie5", "bus", "assumed")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<system", "is not XML"),
        ("<topology/>", "begins with <topology>"),
        ("<system/>", "holds no <gpu>"),
        (nccl_xml().replace('speed="400000"', 'speed="fast"'), "<net> has speed='fast'"),
        (nccl_xml().replace(' sm="90"', ""), "<gpu> has sm=None"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><system/>', "declares entities"),
    ],
)
def test_what_is_no_nccl_topology_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_nccl_xml(text)


def matrix(rows: dict[str, str]) -> str:
    names = list(rows)
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    lines += [f"{name}\t" + "\t".join(row.split()) + "\t0-63\t0" for name, row in rows.items()]
    return "\n".join(
        [*lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # NVLinks"]
    )


def test_nvidia_smis_matrix_tells_islands_and_nics() -> None:
    switched = read_nvidia_smi(
        matrix({f"GPU{i}": " ".join("X" if i == j else "NV18" for j in range(4)) + " PIX SYS" for i in range(4)}
               | {f"NIC{i}": "PIX PIX SYS SYS " + ("X SYS" if i == 0 else "SYS X") for i in range(2)})
    )  # fmt: skip
    assert (switched.num_devices, switched.num_nics) == (4, 2)
    assert switched.island is not None
    assert (switched.island.name, switched.island.num_devices) == ("nvlink4x18", 4)
    assert switched.island.rate_bit_per_s.origin == "assumed"
    bridged = read_nvidia_smi(
        matrix({"GPU0": "X NV4 SYS SYS", "GPU1": "NV4 X SYS SYS", "GPU2": "SYS SYS X NV4", "GPU3": "SYS SYS NV4 X"})
    )
    assert bridged.island is not None
    # Two islands of two; between them PCIe.
    assert (bridged.num_devices, bridged.island.num_devices) == (4, 2)
    assert bridged.island.cross_bit_per_s is not None
    plain = read_nvidia_smi("\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n")
    assert plain.island is not None
    assert plain.island.kind == "bus"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("No devices were found", "no line of GPU0 GPU1"),
        ("\tGPU0\tGPU1\nGPU0\tX", "line 2 has 1 columns; expected 2 or more"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNV12", "no row of GPU1"),
    ],
)
def test_what_is_no_matrix_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_nvidia_smi(text)


def nodes(*labels: dict[str, str], gpus: str = "8") -> str:
    return json.dumps(
        {"items": [
            {"metadata": {"name": f"n{i}", "labels": held}, "status": {"allocatable": {"nvidia.com/gpu": gpus, "cpu": "64"}}}
            for i, held in enumerate(labels)
        ]}
    )  # fmt: skip


NVIDIA = "network.topology.nvidia.com/"


def test_kubernetes_labels_tell_switches_level_by_level() -> None:
    fabric = read_nodes(
        nodes(*({f"{NVIDIA}leaf": leaf, f"{NVIDIA}spine": spine, f"{NVIDIA}core": "c"}
                for leaf, spine in (("l1", "s1"), ("l2", "s1"), ("l1", "s2"))))
    )  # fmt: skip
    # l1 below s1 and l1 below s2 are two switches.
    assert [host.rack for host in fabric.hosts] == ["c/s1/l1", "c/s1/l2", "c/s2/l1"]
    assert {s.name: s.parent for s in fabric.switches}["c/s1/l1"] == "c/s1"
    assert fabric.hosts[0].num_devices == 8
    zones = read_nodes(nodes({"rack-of-mine": "a"}, {"rack-of-mine": "b"}), levels=("rack-of-mine",))
    assert [host.rack for host in zones.hosts] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "is no list of nodes"),
        ('{"items": []}', "holds no nodes"),
        (nodes({"x": "1"}), "share no label .*hint: name your own with --level"),
    ],
)
def test_what_tells_no_places_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_nodes(text)


def test_a_node_without_the_label_is_named() -> None:
    with pytest.raises(DataError, match="node 'n1' lacks the label 'rack'"):
        read_nodes(nodes({"rack": "a"}, {}), levels=("rack",))


def test_the_command_imports_what_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    (tmp_path / "topo.xml").write_text(nccl_xml(num_gpus=8))
    (tmp_path / "nodes.json").write_text(nodes({"topology.kubernetes.io/zone": "a"}))
    out = tmp_path / "f.toml"
    for arguments in (
        ["slurm", str(tmp_path / "topology.conf"), "--host", "nic=200g-ib", "--uplink", "800 Gbit/s"],
        ["nccl", str(tmp_path / "topo.xml"), "--shape", "rail hosts=64 nic=400g-ib"],
        ["kubernetes", str(tmp_path / "nodes.json")],
    ):
        assert main(["fabric", "import", *arguments, "-o", str(out)]) == 0
        assert main(["fabric", "show", str(out)]) == 0
    assert read_fabric(out).hosts[0].name == "n0"
    captured = capsys.readouterr()
    assert "uplink 800 Gbit/s" in captured.out
    assert "found 8 devices on nvlink4x18, 8 NICs" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["import", "ufm", "x", "-o", "f.toml"], ["import", "slurm", "absent", "-o", "f.toml"],
        ["show", "absent.toml"], ["show", "star hosts=4 nic=40g"], ["new", "star", "-o", "f.toml"],
        ["cost", "all_reduce", "1MiB", "--fabric", "star hosts=4 nic=10g", "--order", "best"],
        ["cost", "all_reduce", "1", "--fabric", "star hosts=4 nic=10g", "--ranks", "9"],
        ["cost", "gossip", "1MiB", "--fabric", "star hosts=4 nic=10g"], ["nics", "--size", "much"],
    ],
)  # fmt: skip
def test_bad_input_ends_with_2_and_prints_nothing_that_looks_like_a_result(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fabric", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "expected" in captured.err or "cannot read" in captured.err
    assert not list(tmp_path.iterdir())
