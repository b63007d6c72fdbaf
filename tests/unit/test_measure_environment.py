from __future__ import annotations

import os
from pathlib import Path

import pytest

from wirespeed.measure.environment import capture, command_line, cpu_model, nic_rate_bit_per_s, nics
from wirespeed.system import System


@pytest.fixture
def recorded(tmp_path: Path) -> System:
    """A host with a 25 Gbit/s NIC, a veth end, a bridge and a vlan."""
    net = tmp_path / "sys/class/net"
    for name, files in {
        "eth0": {"speed": "25000", "ifindex": "2", "iflink": "2", "uevent": "INTERFACE=eth0"},
        "veth1": {"speed": "10000", "ifindex": "5", "iflink": "6", "uevent": "INTERFACE=veth1"},
        "br0": {"speed": "-1", "ifindex": "7", "iflink": "7", "uevent": "DEVTYPE=bridge\nINTERFACE=br0"},
        "eth0.7": {"speed": "25000", "ifindex": "8", "iflink": "2", "uevent": "DEVTYPE=vlan\nINTERFACE=eth0.7"},
        "lo": {"ifindex": "1", "iflink": "1"},
    }.items():
        (net / name).mkdir(parents=True)
        for file, text in files.items():
            (net / name / file).write_text(text + "\n")
    (net / "eth0/device").mkdir()
    os.symlink("../../../../bus/pci/drivers/mlx5_core", net / "eth0/device/driver")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 7763\n\nprocessor\t: 1\n")
    return System(tmp_path)


def test_nics_carry_speed_and_driver_and_virtual_ones_only_their_kind(recorded: System) -> None:
    assert nics(recorded) == {
        "br0": "bridge",
        "eth0": "25 Gbit/s/mlx5_core",
        "eth0.7": "vlan",
        "veth1": "veth",
    }


def test_the_line_rate_is_that_of_the_one_real_nic(recorded: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert nic_rate_bit_per_s(recorded) == 25e9
    assert nic_rate_bit_per_s(recorded, interface="veth1") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    assert nic_rate_bit_per_s(recorded) == 25e9


def test_what_is_not_known_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty = System(tmp_path)
    assert cpu_model(empty) is None
    assert nics(empty) == {}
    assert nic_rate_bit_per_s(empty) is None
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert capture(empty, arguments=["x"]).git_commit is None


def test_the_environment_names_host_cpu_and_versions(recorded: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRESPEED_HOST", "node7")
    held = capture(recorded, arguments=["/usr/bin/wirespeed", "bench", "links"])
    assert (held.host, held.cpu, held.command) == ("node7", "AMD EPYC 7763", "wirespeed bench links")
    assert held.num_cpus == len(os.sched_getaffinity(0))
    assert {"python", "wirespeed", "numpy"} <= set(held.versions)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--token", "swordfish", "--size", "4"], "--token *** --size 4"),
        (["--hf-token=swordfish"], "--hf-token=***"),
        (["API_KEY=swordfish"], "API_KEY=***"),
        (["--password"], "--password"),
        (["--token", "--json"], "--token --json"),
        (["hf_AbCdEfGhIjKlMnOp"], "***"),
        (["--from=AKIAABCDEFGHIJKLMNOP"], "--from=***"),
        (["redis://user:swordfish@cache:6379/0"], "'redis://***@cache:6379/0'"),
        (["0123456789abcdef0123456789abcdef"], "***"),
        (["results/run-2026/links.json", "a b"], "results/run-2026/links.json 'a b'"),
        (["--monkey", "swordfish"], "--monkey swordfish"),
    ],
)
def test_secrets_do_not_enter_the_command_line(arguments: list[str], shown: str) -> None:
    assert command_line(["/opt/bin/wirespeed", *arguments]) == f"wirespeed {shown}"
