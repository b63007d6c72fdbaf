"""What a check may say, and the runner: order, deadlines, bugs, and nothing concluded from what cannot be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from doctor_trees import Tree, system_of
from wirespeed.doctor.check import (
    Evidence,
    Fact,
    Finding,
    FunctionCheck,
    Outcome,
    Unknown,
    check,
    run_checks,
    worst_first,
)
from wirespeed.doctor.cpu_lists import parse_list, parse_mask
from wirespeed.doctor.inventory import HostView
from wirespeed.errors import InternalError


def finding(id_: str = "nic.mtu", severity: str = "warning") -> Finding:
    return Finding(
        id=id_, subject="eth0", severity=severity, title="It is wrong.", evidence=(Evidence(where="here", seen="1"),)
    )  # type: ignore[arg-type]


@pytest.fixture
def view() -> HostView:
    return HostView(system_of(Tree("h0")))


def make(name: str, *outcomes: Outcome) -> FunctionCheck:
    return FunctionCheck(name=name, about="something", deadline_s=5.0, looks=lambda _: outcomes)


@pytest.mark.parametrize(
    "change",
    [{"id": "Nic MTU"}, {"id": ""}, {"severity": "bad"}, {"evidence": ()}, {"title": ""}],
)
def test_a_finding_without_id_severity_title_or_evidence_cannot_be_made(change: dict[str, object]):
    good = {
        "id": "nic.mtu",
        "subject": "eth0",
        "severity": "notice",
        "title": "t",
        "evidence": (Evidence(where="w", seen="s"),),
    }
    Finding(**good)  # type: ignore[arg-type]
    with pytest.raises(InternalError):
        Finding(**{**good, **change})  # type: ignore[arg-type]


def test_a_check_with_an_unknown_has_not_passed(view: HostView):
    unknown, fact = Unknown(what="x", why="y"), Fact(key="k", value="v")
    results = run_checks([make("a", fact), make("b", fact, unknown), make("c", unknown, finding())], view)
    assert [r.status for r in results] == ["passed", "unknown", "found"]
    assert (results[0].facts, results[1].unknowns, len(results[2].findings)) == ((fact,), (unknown,), 1)


def test_a_check_that_does_not_apply_says_why_and_does_not_look(view: HostView):
    @check("gpu.x", "gpus", applies=lambda _: "no GPU")
    def looks(_: HostView) -> Iterator[Outcome]:
        raise AssertionError("it looked")
        yield

    (result,) = run_checks([looks], view)
    assert (result.status, result.why, result.unknowns) == ("not_applicable", "no GPU", ())


def test_a_check_that_raises_is_unknown_and_the_others_still_run(view: HostView):
    @check("a.broken", "numbers")
    def broken(_: HostView) -> Iterator[Outcome]:
        yield finding()
        raise ValueError("seven")

    results = run_checks([broken, make("b", finding())], view)
    assert [r.status for r in results] == ["unknown", "found"]
    assert results[0].unknowns[0].why == "the check itself failed: ValueError: seven"


def test_checks_that_hang_end_at_their_own_deadline_and_do_not_keep_others_waiting(view: HostView):
    release = threading.Event()

    def hangs(_: HostView) -> Iterator[Outcome]:
        release.wait(30)
        yield finding()

    hanging = [FunctionCheck(name=f"h{i}", about="a driver", deadline_s=0.2, looks=hangs) for i in range(3)]
    started_at = time.monotonic()
    try:
        results = run_checks([*hanging, make("b", finding())], view, max_parallel=2)
    finally:
        release.set()
    assert time.monotonic() - started_at < 25  # three deadlines, two at a time; not the 30 s that they hang
    assert [r.status for r in results] == ["unknown"] * 3 + ["found"]
    assert results[0].unknowns[0].why == "no answer within 0.2 s"


def test_results_keep_the_order_of_the_checks(view: HostView):
    names = [f"c{i}" for i in range(40)]
    assert [r.name for r in run_checks([make(n) for n in names], view)] == names


def test_findings_are_put_worst_first_and_stay_in_order_within_a_severity():
    ids = [("a", "notice"), ("b", "critical"), ("c", "warning"), ("d", "critical")]
    assert [f.id for f in worst_first(finding(i, s) for i, s in ids)] == ["b", "d", "c", "a"]


def test_an_answer_is_made_once_for_all_threads_that_ask():
    view, made = HostView(system_of(Tree("h0"))), []

    def slow() -> int:
        made.append(1)
        return len(made)

    threads = [threading.Thread(target=lambda: view.keep("k", slow)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8", (0, 1, 2, 3, 8)), ("5", (5,)), ("", ()), ("x-y", ()), ("3-1", ()), (" 1 , 2", (1, 2))],
)
def test_kernel_lists(text: str, numbers: tuple[int, ...]):
    assert parse_list(text) == numbers


@pytest.mark.parametrize(
    ("text", "bits"), [("f", (0, 1, 2, 3)), ("1,00000000", (32,)), ("0", ()), ("zz", ()), ("", ())]
)
def test_kernel_masks(text: str, bits: tuple[int, ...]):
    assert parse_mask(text) == bits
