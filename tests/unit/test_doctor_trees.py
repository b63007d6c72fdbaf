"""Recorded hosts of every kind against golden files: the findings exactly, and what is not known."""

from __future__ import annotations

import json
import os

import pytest

from doctor_trees import DATA, TREES, Tree, system_of
from wirespeed.doctor.check import Finding
from wirespeed.doctor.examine import Examination, examine
from wirespeed.doctor.recorded import RecordedSystem


def summary(examination: Examination) -> dict[str, list[list[str]]]:
    """What a golden file holds. WIRESPEED_GOLDEN=write makes them anew: then read every line of the difference."""
    return {
        "findings": [[f.severity, f.id, f.subject, f.title] for c in examination.checks for f in c.findings],
        "unknown": sorted({(u.what, u.why) for c in examination.checks for u in c.unknowns}),  # type: ignore[dict-item]
    }


def assert_golden(name: str, examination: Examination) -> None:
    path = DATA / f"{name}.golden.json"
    seen = json.loads(json.dumps(summary(examination)))
    if os.environ.get("WIRESPEED_GOLDEN") == "write":
        path.write_text(json.dumps(seen, indent=1) + "\n")
    assert seen == json.loads(path.read_text())


@pytest.mark.parametrize("name", sorted(TREES))
def test_a_recorded_host_gives_exactly_the_findings_of_its_golden_file(name: str):
    assert_golden(name, examine(system_of(TREES[name]())))


def test_this_projects_ci_machine_gives_exactly_the_findings_of_its_golden_file():
    assert_golden("ci_machine", examine(RecordedSystem.load(DATA / "ci_machine.json")))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("roce_mtu_1500", "rdma.roce-mtu"),
        ("roce_mtu_4096", "rdma.roce-mtu"),
        ("ib_without_gpudirect", "gpu.no-gpudirect"),
        ("pcie_x8", "pci.width-reduced"),
        ("nic_in_wrong_slot", "gpu.nic-far"),
        ("ib_with_acs", "pci.acs"),
    ],
)
def test_the_one_fault_of_a_host_is_the_only_thing_found(name: str, first: str):
    assert {f[1] for f in summary(examine(system_of(TREES[name]())))["findings"]} == {first}


@pytest.mark.parametrize("name", ["h100_ib", "roce_healthy"])
def test_a_healthy_host_has_no_finding_and_nothing_unknown(name: str):
    assert summary(examine(system_of(TREES[name]()))) == {"findings": [], "unknown": []}


@pytest.mark.parametrize("name", sorted(TREES))
def test_an_empty_machine_and_one_where_nothing_may_be_read_are_unknown_and_never_fine(name: str):
    tree = TREES[name]()
    tree.problems = dict.fromkeys([*tree.files, "/dev/infiniband", "/usr/lib/x86_64-linux-gnu"], "denied")
    tree.files, tree.binaries, tree.commands = {}, {}, {}
    checks = examine(system_of(tree)).checks
    assert [f.id for c in checks for f in c.findings] == []
    assert [u.why for c in checks for u in c.unknowns if "check itself failed" in u.why] == []
    assert any(c.status == "unknown" for c in checks)


def test_nothing_at_all_to_read_is_unknown():
    checks = examine(RecordedSystem({})).checks
    status = {c.name: c.status for c in checks}
    assert status["host.identity"] == status["tcp.buffers"] == status["route.subnets"] == "unknown"
    assert "found" not in status.values()


def test_every_finding_says_what_was_seen_what_to_do_and_where_the_rule_comes_from():
    found = [f for make in TREES.values() for c in examine(system_of(make())).checks for f in c.findings]
    assert len(found) >= 10
    for finding in found:
        assert finding.evidence[0].seen
        assert finding.remedy is not None
        assert finding.remedy.text
        assert finding.source


def findings_of(tree: Tree) -> dict[str, Finding]:
    return {f.id: f for c in examine(system_of(tree)).checks for f in c.findings}


def test_a_width_of_8_limits_a_400g_port_to_what_eight_lanes_carry():
    finding = findings_of(TREES["pcie_x8"]())["pci.width-reduced"]
    # 32 GT/s x 8 lanes x 128/130 = 252.06 Gbit/s
    assert finding.limit_bit_per_s == pytest.approx(252.06e9, rel=1e-3)
    assert finding.full_bit_per_s == 400e9
    assert finding.severity == "critical"
