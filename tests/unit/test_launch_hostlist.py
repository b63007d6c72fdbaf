"""Host lists as Slurm writes them."""

from __future__ import annotations

import pytest

from wirespeed.errors import UsageError
from wirespeed.launch import expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ("node1",)),
        ("a,b", ("a", "b")),
        ("node[1-3]", ("node1", "node2", "node3")),
        ("node[01-02,70]", ("node01", "node02", "node70")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
        ("r[1-2]n[01-02]-ib", ("r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib")),
        ("a[1,3],b,c[2-2].example.org", ("a1", "a3", "b", "c2.example.org")),
        (" a , b ", ("a", "b")),
        ("[1-2]", ("1", "2")),
    ],
)
def test_lists_expand_in_order(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hostlist(text) == hosts


def test_the_contracts_example_has_65_hosts() -> None:
    hosts = expand_hostlist("node[01-64,70]")
    assert (len(hosts), hosts[0], hosts[8], hosts[63], hosts[64]) == (65, "node01", "node09", "node64", "node70")


@pytest.mark.parametrize(
    "text",
    ["", " ", ",", "n[", "n]", "n[1-2", "n[[1]]", "n[]", "n[a]", "n[2-1]", "n[1-]", "n[1-2-3]", "n[1,,2]", "n[-1]",
     "a b", "n[1-999999999999]", "n[0-99999],x", "r[1-1000]n[1-1000]", "n[1-2]]["],
)  # fmt: skip
def test_lists_that_are_wrong_or_too_long_are_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError):
        expand_hostlist(text)
