"""Workload files, and workloads that are assumed from parameter sizes."""

from __future__ import annotations

import json

import pytest
from plan_cases import gigabit_workload

from wirespeed.errors import DataError, UsageError
from wirespeed.plan import from_parameters, read_workload, workload_from_json, write_workload
from wirespeed.records import Environment, to_json
from wirespeed.spec.comparison import MeasuredFabric, TuneRecord


def tune_record(*, has_workload: bool) -> TuneRecord:
    return TuneRecord(
        environment=Environment(host="h", kernel="k", cpu=None, num_cpus=2, versions={}, command="c"),
        script="train.py",
        arguments=(),
        fabric=MeasuredFabric(
            description="lab", hosts=("n0",), num_ranks=4, link_bit_per_s=None, declared_bit_per_s=None, rtt_s=None
        ),
        workload=gigabit_workload() if has_workload else None,
        fidelity="half",
        loss_kind="none",
        loss_target=None,
        strategies=(),
        chosen="dense",
        reason="",
    )


def test_a_workload_reads_back_as_it_was_written(tmp_path):
    path = write_workload(tmp_path / "w" / "workload.json", gigabit_workload())
    assert read_workload(path) == gigabit_workload()
    assert json.loads(path.read_text())["kind"] == "training_workload"


def test_a_tune_record_gives_its_workload():
    assert workload_from_json(to_json(tune_record(has_workload=True))) == gigabit_workload()


def test_a_tune_record_without_workload_says_so():
    with pytest.raises(DataError, match="holds no workload"):
        workload_from_json(to_json(tune_record(has_workload=False)))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"not json", "is not a workload"),
        (b"{}", "is not a workload"),
        (b'{"kind": "links", "schema": 1}', "of kind 'links'"),
        (b'{"kind": "training_workload", "schema": 9}', "schema 9"),
        (b'{"kind": "training_workload", "schema": 1, "workload": 3}', "damaged"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(content, what, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        read_workload(path)
    assert "bad.json" in str(caught.value)


def test_a_workload_that_breaks_its_own_rules_is_damaged(tmp_path):
    content = json.loads(write_workload(tmp_path / "w.json", gigabit_workload()).read_text())
    content["workload"]["gradients"].reverse()
    with pytest.raises(DataError, match="backward order"):
        workload_from_json(json.dumps(content).encode())


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        read_workload(tmp_path / "none.json")


def test_parameters_become_gradients_in_reverse_with_times_by_size():
    workload = from_parameters([("first", 300), ("last", 100)], backward_s=0.8, num_ranks=4)
    assert [(g.name, g.num_elements, g.ready_s) for g in workload.gradients] == [
        ("last", 100, 0.2),
        ("first", 300, 0.8),
    ]
    assert workload.forward_s == 0.4
    assert workload.origin == "assumed"


def test_parameters_of_nothing_are_refused():
    with pytest.raises(UsageError):
        from_parameters([], backward_s=1.0, num_ranks=2)
    with pytest.raises(UsageError):
        from_parameters([("p", 0)], backward_s=1.0, num_ranks=2)
    with pytest.raises(UsageError):
        from_parameters([("p", 1)], backward_s=-1.0, num_ranks=2)
