"""Where workers go in a cluster, and what its supervisor's words become."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from wirespeed.errors import MissingCapability, PeerFailure, UsageError
from wirespeed.serve.cluster import Cluster, Told, Wanted
from wirespeed.serve.cluster_supervisor import choose

RACKS = [("a", "r1"), ("b", "r2"), ("c", "r2"), ("d", "r2"), ("e", "r1"), ("f", "r3")]


def test_pack_takes_the_largest_rack() -> None:
    assert choose(RACKS, workers=0, placement="pack") == (3, "PACK", ["r2"] * 3)
    assert choose(RACKS, workers=2, placement="pack") == (2, "PACK", ["r2"] * 2)
    assert choose([("a", ""), ("b", "")], workers=0, placement="pack") == (2, "PACK", [None, None])


def test_spread_takes_hosts_and_racks_in_turn() -> None:
    number, strategy, racks = choose(RACKS, workers=0, placement="spread")
    assert (number, strategy) == (6, "STRICT_SPREAD")
    assert Counter(racks) == {"r1": 2, "r2": 3, "r3": 1}
    assert set(choose(RACKS, workers=3, placement="spread")[2]) == {"r1", "r2", "r3"}
    # More workers than hosts, or hosts without a rack: Ray spreads them by itself.
    assert choose(RACKS, workers=8, placement="spread") == (8, "SPREAD", [None] * 8)
    assert choose([("a", "r1"), ("b", "")], workers=2, placement="spread") == (2, "STRICT_SPREAD", [None, None])


def test_an_empty_cluster_is_an_error() -> None:
    with pytest.raises(MissingCapability, match="no host"):
        choose([], workers=0, placement="spread")


@pytest.mark.parametrize("wrong", [{"address": ""}, {"command": ()}, {"workers": -1}, {"gpus": -0.5}])
def test_what_cannot_be_placed_is_a_usage_error(wrong: dict[str, object]) -> None:
    given: dict[str, object] = {"address": "auto", "command": ("m",), **wrong}
    with pytest.raises(UsageError):
        Wanted(**given)  # type: ignore[arg-type]


class Scripted(Cluster):
    """A cluster that hears lines without a supervisor."""

    def hear(self, lines: Sequence[Told | bytes]) -> list[str]:
        faults = [self._take(line if isinstance(line, bytes) else msgspec.json.encode(line)) for line in lines]
        return [str(fault) for fault in faults if fault is not None]


def test_addresses_follow_what_is_told() -> None:
    async def main() -> None:
        news: list[str] = []
        events: list[tuple[str, str]] = []
        cluster = Scripted(Wanted(address="auto", command=("m",)), on_news=news.append)
        cluster._on_up = lambda address: events.append(("up", address))
        cluster._on_down = lambda address: events.append(("down", address))
        cluster._first = asyncio.get_running_loop().create_future()
        up = Told(event="up", worker=1, address="h:1", host="h", rack="r1")
        faults = cluster.hear([b"a line of somebody else\n", up, up, Told(event="down", worker=1, text="gone")])
        assert (faults, events, cluster._first.done()) == ([], [("up", "h:1")], True)
        cluster.hear([msgspec.structs.replace(up, address="g:2", host="g", rack="")])
        assert events[1:] == [("down", "h:1"), ("up", "g:2")]
        assert cluster.addresses == {1: "g:2"}
        assert news == ["worker 1 is up at h:1 on h, rack r1", "worker 1 is gone: gone; Ray starts it again",
                        "worker 1 is up at g:2 on g"]  # fmt: skip
        faults = cluster.hear([Told(event="failed", kind="MissingCapability", text="no room", hint="ask for less")])
        assert len(faults) == 1
        assert "no room" in faults[0]

    asyncio.run(main())


def test_a_supervisor_that_cannot_start_is_told_with_its_words() -> None:
    async def main() -> None:
        cluster = Cluster(Wanted(address="127.0.0.1:1", command=("m",)))
        with pytest.raises((MissingCapability, PeerFailure), match=r"Ray is not installed|no Ray cluster"):
            await cluster.start(lambda _: None, lambda _: None)

    asyncio.run(main())
