"""The error tree: messages, exit codes, and the way to them through the command line."""

from __future__ import annotations

import pickle

import pytest

import wirespeed
from wirespeed import errors


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.UsageError, 2),
        (errors.DataError, 2),
        (errors.MissingCapability, 3),
        (errors.PeerFailure, 4),
        (errors.WorkloadFailure, 1),
        (errors.InternalError, 70),
    ],
)
def test_exit_code_of_each_error_is_the_documented_one(error: type[errors.WirespeedError], exit_code: int):
    assert error("x").exit_code == exit_code


def test_message_says_what_was_seen_what_was_allowed_and_what_to_do():
    fault = errors.UsageError("got -1", expected="0 or more", hint="leave it out")
    assert str(fault) == "got -1; expected 0 or more; hint: leave it out"


def test_message_without_expectation_or_hint_is_the_problem_alone():
    assert str(errors.PeerFailure("host01 did not answer within 5 s")) == "host01 did not answer within 5 s"


def test_error_keeps_its_parts_on_the_way_between_processes():
    fault = pickle.loads(pickle.dumps(errors.MissingCapability("a", expected="b", hint="c")))
    assert isinstance(fault, errors.MissingCapability)
    assert (fault.problem, fault.expected, fault.hint) == ("a", "b", "c")


def test_public_names_are_sorted_and_exist():
    assert list(wirespeed.__all__) == sorted(wirespeed.__all__)
    assert all(hasattr(wirespeed, name) for name in wirespeed.__all__)


def test_every_error_of_the_tree_is_public():
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and value is not BaseException}
    assert {name for name in tree if issubclass(getattr(errors, name), errors.WirespeedError)} <= set(wirespeed.__all__)
