"""Measurements in a lab, where the truth is known: the shaped rate less headers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pytest

from wirespeed.lab import Lab, LabSpec, why_unavailable
from wirespeed.lab.layout import HEADER_EFFICIENCY
from wirespeed.records import CollectivesRecord, LinksRecord, from_json

REASON = why_unavailable()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

RATE_BIT_PER_S = 50e6
GOODPUT_BIT_PER_S = RATE_BIT_PER_S * HEADER_EFFICIENCY


def bench(lab: Lab, arguments: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, rank 0's stdout, everybody's stderr."""
    out: list[str] = []
    err: list[str] = []

    def on_line(rank: int, stream: str, line: str) -> None:
        if stream == "stderr":
            err.append(line)
        elif rank == 0:
            out.append(line)

    result = lab.run([sys.executable, "-m", "wirespeed", "bench", *arguments], timeout_s=120, on_line=on_line)
    return result.returncode, "\n".join(out), "\n".join(err)


def test_links_find_the_shaped_rate_and_a_slow_host() -> None:
    """Measured up to five times: what else runs on the machine can take some percent of a rate, but never add any."""
    best: dict[tuple[str, str], float] = {}
    with Lab(LabSpec(hosts=3, rate_bit_per_s=RATE_BIT_PER_S)) as lab:
        # cubic: at 10 Mbit/s with 50 ms of queue bbr swings between 1 and 19 Mbit/s, and means 8.
        lab.fault("h2", "rate", rate_bit_per_s=RATE_BIT_PER_S / 5)
        for _ in range(5):
            code, out, err = bench(
                lab, ["links", "--streams", "1", "--congestion", "cubic", "--duration", "1s", "--json"]
            )
            assert code == 0, err
            record = from_json(out.encode(), LinksRecord)
            assert record.hosts == ("h0", "h1", "h2")
            assert record.environment.nics == {"eth0": "veth"}
            for sample in record.samples:
                expected = GOODPUT_BIT_PER_S / 5 if "h2" in (sample.source, sample.target) else GOODPUT_BIT_PER_S
                share = sum(sample.bit_per_s) / len(sample.bit_per_s) / expected
                assert share < 1.05
                pair = (sample.source, sample.target)
                best[pair] = max(share, best.get(pair, 0.0))
            if min(best.values()) >= 0.95:
                break
    assert min(best.values()) >= 0.95, best


def test_a_link_that_is_down_is_a_peer_failure_that_names_the_host() -> None:
    with Lab(LabSpec(hosts=2, rate_bit_per_s=RATE_BIT_PER_S)) as lab:
        lab.fault("h1", "down")
        code, _, err = bench(lab, ["links", "--join-timeout", "2s", "--timeout", "2s"])
    assert code == 4
    assert "rank 1" in err or "cannot reach rank 0" in err


@pytest.mark.torch
def test_collectives_approach_the_wire_and_never_beat_it() -> None:
    pytest.importorskip("torch")
    with Lab(LabSpec(hosts=4, rate_bit_per_s=RATE_BIT_PER_S)) as lab:
        code, out, err = bench(
            lab, ["collectives", "--sizes", "1MiB", "--only", "all_reduce,all_gather", "--dtypes", "float32",
                  "--repeats", "3", "--warmup", "1", "--json"],
        )  # fmt: skip
    assert code == 0, err
    record = from_json(out.encode(), CollectivesRecord)
    assert record.num_ranks == 4
    assert json.loads(out)["kind"] == "collectives"
    for sample in record.samples:
        factor = 1.5 if sample.collective == "all_reduce" else 0.75
        share = 8 * sample.size_bytes * factor / min(sample.times_s) / GOODPUT_BIT_PER_S
        # 0.84 to 0.89 when measured; a busy machine may halve it, nothing but a wrong clock or size exceeds the wire.
        assert 0.4 < share < 1.02
        assert sample.is_correct
