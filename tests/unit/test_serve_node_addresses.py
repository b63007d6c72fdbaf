"""How commands name nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.serve.node_addresses import parse_nodes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1:7000, h2:7001,h1:7000", ("h1:7000", "h2:7001")),
        ("node[08-11]:7000", ("node08:7000", "node09:7000", "node10:7000", "node11:7000")),
        ("r[1,3]n[1-2]:7000,x:1", ("r1n1:7000", "r1n2:7000", "r3n1:7000", "r3n2:7000", "x:1")),
        ("[::1]:7000", ("[::1]:7000",)),
        ("dns:127.0.0.1:7000", ("127.0.0.1:7000",)),
    ],
)
def test_lists_ranges_and_names(text: str, expected: tuple[str, ...]) -> None:
    assert parse_nodes(text) == expected


def test_a_file_has_one_or_several_per_line(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("h1:7000  # the first\n\n# none here\nh[2-3]:7000,h1:7000\n")
    assert parse_nodes(f"@{tmp_path}/nodes") == ("h1:7000", "h2:7000", "h3:7000")


@pytest.mark.parametrize("text", ["", ",", "h1", "h1:port", "h[1-2", "node[1-5000]:7000", "@/nowhere"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_nodes(text)


def test_a_name_that_nobody_has_is_told() -> None:
    with pytest.raises(PeerFailure, match=r"no-such-host\.invalid"):
        parse_nodes("dns:no-such-host.invalid:7000")
