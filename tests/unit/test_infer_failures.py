"""Whether an input without an answer goes out again or becomes an error row."""

from __future__ import annotations

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.infer.failures import Failures, Verdict, is_full
from wirespeed.infer.schedule import Chunk
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.wire import CallFailed, Status

LOST = CallFailed("lost n1:7000: it closed the connection", status=Status.UNAVAILABLE)


def chunk(*indices: int, is_solitary: bool = False) -> Chunk:
    return Chunk("n1", list(indices), 100, 0.0, is_solitary=is_solitary)


def test_an_input_that_failed_in_the_model_is_an_error_at_once() -> None:
    verdict = Failures().of_input(4, Reason.FAILED, "ValueError: no image", num_nodes=3)
    assert verdict == Verdict(4, "ValueError: no image")


def test_a_full_node_never_counts_against_an_input() -> None:
    failures = Failures()
    verdicts = [failures.of_input(4, Reason.EXHAUSTED, "full", num_nodes=1) for _ in range(10)]
    assert verdicts == [Verdict(4)] * 10


def test_an_input_without_an_answer_in_three_tries_is_given_up() -> None:
    failures = Failures()
    verdicts = [failures.of_input(4, Reason.DEADLINE, "late", num_nodes=2) for _ in range(3)]
    assert verdicts == [Verdict(4), Verdict(4), Verdict(4, "no answer in 3 tries: late")]


@pytest.mark.parametrize(("num_nodes", "num_tries"), [(1, 1), (2, 2), (5, 2)])
def test_a_worker_that_dies_under_an_input_is_tried_on_one_other_node(num_nodes: int, num_tries: int) -> None:
    failures = Failures()
    verdicts = [failures.of_input(4, Reason.UNAVAILABLE, "died", num_nodes=num_nodes) for _ in range(num_tries)]
    assert [verdict.error is None for verdict in verdicts] == [True] * (num_tries - 1) + [False]


def test_inputs_of_a_node_whose_process_ended_are_suspects_and_of_a_silent_one_are_not() -> None:
    failures = Failures()
    assert failures.of_chunk(chunk(1, 2), LOST, was_silent=False, num_nodes=2) == [
        Verdict(1, is_suspect=True),
        Verdict(2, is_suspect=True),
    ]
    assert failures.of_chunk(chunk(1, 2), LOST, was_silent=True, num_nodes=2) == [Verdict(1), Verdict(2)]


def test_only_three_nodes_lost_under_an_input_alone_condemn_it() -> None:
    failures = Failures()
    for _ in range(5):
        failures.of_chunk(chunk(1, 2), LOST, was_silent=False, num_nodes=2)
        failures.of_chunk(chunk(1, is_solitary=True), LOST, was_silent=True, num_nodes=2)
    alone = chunk(1, is_solitary=True)
    ends = [failures.of_chunk(alone, LOST, was_silent=False, num_nodes=2)[0] for _ in range(3)]
    assert [end.is_suspect for end in ends] == [True, True, False]
    assert str(ends[2].error).startswith("3 nodes were lost while they ran it alone")


def test_what_an_input_did_before_is_forgotten_when_it_has_its_row() -> None:
    failures = Failures()
    failures.of_input(4, Reason.DEADLINE, "late", num_nodes=2)
    failures.of_input(4, Reason.DEADLINE, "late", num_nodes=2)
    failures.forget(4)
    assert failures.of_input(4, Reason.DEADLINE, "late", num_nodes=2) == Verdict(4)


@pytest.mark.parametrize(
    ("fault", "is_again"),
    [
        (CallFailed("late", status=Status.DEADLINE), True),
        (CallFailed("gone", status=Status.CANCELLED), True),
        (CallFailed("full", status=Status.EXHAUSTED), True),
        (CallFailed("wrong", status=Status.INVALID), False),
        (RequestFailed("wrong", reason=Reason.INVALID), False),
        (DataError("got an answer that is none"), True),
        (UsageError("got a message of 1 GB"), False),
    ],
)
def test_a_call_that_could_never_pass_is_not_sent_again(fault: BaseException, is_again: bool) -> None:
    (verdict,) = Failures().of_chunk(chunk(9), fault, was_silent=False, num_nodes=2)
    assert verdict.place == 9
    assert (verdict.error is None) is is_again
    assert not verdict.is_suspect


def test_a_node_says_that_it_is_full_in_two_ways() -> None:
    assert is_full(CallFailed("full", status=Status.EXHAUSTED))
    assert is_full(RequestFailed("full", reason=Reason.EXHAUSTED))
    assert not is_full(LOST)
    assert not is_full(DataError("got nothing"))
