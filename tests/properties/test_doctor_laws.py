"""Whatever a host answers, no check fails: cut, swapped and foreign text in every file."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from doctor_trees import TREES, Tree
from wirespeed.doctor.drift import fold_hosts
from wirespeed.doctor.examine import Question, examine
from wirespeed.doctor.pci import parse_config
from wirespeed.doctor.recorded import RecordedSystem
from wirespeed.doctor.sockets import parse_answer
from wirespeed.launch import expand_hostlist
from wirespeed.system import Reading

_HELD = {name: make().held() for name, make in TREES.items()}
_TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", "0", "-1", "999999999999999999999", "0x", "\0", "N/A", "[]", "{}", "1 2 3", "a b c d e f g h i"]
    ),
)


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(TREES)), data=st.data())
def test_no_text_in_any_file_makes_a_check_fail(name: str, data: st.DataObject):
    held = json.loads(json.dumps(_HELD[name]))
    for path in data.draw(st.lists(st.sampled_from(sorted(held["files"])), max_size=12)):
        text = held["files"][path]
        held["files"][path] = data.draw(st.one_of(_TEXTS, st.integers(0, len(text)).map(lambda n, text=text: text[:n])))
    for command in data.draw(st.lists(st.sampled_from(sorted(held["commands"])), max_size=4)):
        held["commands"][command] = {"stdout": data.draw(_TEXTS), "returncode": data.draw(st.sampled_from([0, 1]))}
    checks = examine(RecordedSystem(held), Question(peers=("192.0.2.1",))).checks
    assert [(c.name, u.why) for c in checks for u in c.unknowns if "check itself failed" in u.why] == []


@settings(max_examples=25)
@given(name=st.sampled_from(["h100_ib", "roce_healthy"]), data=st.data())
def test_what_disappears_from_a_healthy_host_is_never_a_reason_to_call_it_slow_or_broken(
    name: str, data: st.DataObject
):
    """Files that may not be read make unknowns. (What is absent may be a finding: a missing device is one.)"""
    held = json.loads(json.dumps(_HELD[name]))
    for path in data.draw(st.lists(st.sampled_from(sorted(held["files"])), max_size=40)):
        if held["files"].pop(path, None) is not None:
            held["problems"][path] = "denied"
    held["folders"] = {"/dev/infiniband": ["uverbs0"], "/usr/lib/x86_64-linux-gnu": ["libibverbs.so.1"]}
    system = CountingSystem(held)
    checks = examine(system).checks
    assert [f.id for c in checks for f in c.findings] == []
    # Whatever was asked for and denied stands in some check's unknowns, or keeps a check from having passed.
    assert not system.denied or any(c.status == "unknown" for c in checks)


@settings(max_examples=60)
@given(name=st.sampled_from(["h100_ib", "roce_healthy"]), data=st.data())
def test_one_file_that_is_denied_keeps_a_check_from_passing(name: str, data: st.DataObject):
    held = json.loads(json.dumps(_HELD[name]))
    path = data.draw(st.sampled_from(sorted(held["files"])))
    del held["files"][path]
    held["problems"] = {path: "denied"}
    system = CountingSystem(held)
    checks = examine(system).checks
    assert [f.id for c in checks for f in c.findings] == []
    assert any(c.status == "unknown" for c in checks) == bool(system.denied)


class CountingSystem(RecordedSystem):
    """Remembers what it denied."""

    def __init__(self, held: dict[str, object]) -> None:
        super().__init__(held)
        self.denied: set[str] = set()

    def read(self, name: str) -> Reading:
        reading = super().read(name)
        if reading.problem == "denied":
            self.denied.add(name)
        return reading


@given(st.binary(max_size=300))
def test_foreign_bytes_are_no_configuration_space_and_no_connection(content: bytes):
    parse_config(content)
    parse_answer(content)


@given(
    st.lists(
        st.tuples(st.sampled_from(["node", "r1-n", "gpu-r2-"]), st.integers(0, 120), st.sampled_from([2, 3])),
        min_size=1,
        max_size=40,
    )
)
def test_folding_hosts_is_undone_by_expanding(parts: list[tuple[str, int, int]]):
    hosts = {f"{prefix}{number:0{width}d}" for prefix, number, width in parts}
    assert set(expand_hostlist(fold_hosts(sorted(hosts)))) == hosts


def test_a_tree_is_made_anew_for_each_call():
    assert isinstance(TREES["h100_ib"](), Tree)
