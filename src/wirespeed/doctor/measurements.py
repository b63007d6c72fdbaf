"""A bandwidth that some other tool measured, as it stands in the tool's output.

``bit_per_s`` is what can be held against a link: bus bandwidth of nccl-tests, average bandwidth of perftest, received
goodput of iperf3. On two hosts the bus bandwidth of tree or NVLS all-reduce can exceed the line (nccl#209, nccl#1017).
"""

from __future__ import annotations

from typing import Literal

import msgspec

GOOD_SHARE = 0.8
"""nccl-tests reaches about 80 % of the link, and a job about 80 % of nccl-tests (stas00/ml-engineering)."""

Tool = Literal["nccl-tests", "perftest", "iperf3"]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a size and what was reached with it. Latency tests have no rate, and others no latency."""

    size_bytes: int
    bit_per_s: float | None = None
    time_s: float | None = None


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a tool. None means that its output does not say."""

    tool: Tool
    test: str
    """Collective of nccl-tests, test of perftest (``write_bw``), ``tcp`` or ``udp`` of iperf3."""
    where: str
    points: tuple[Point, ...]
    hosts: tuple[str, ...] = ()
    num_ranks: int | None = None
    streams: int | None = None
    is_correct: bool | None = None
    retransmits: int | None = None
    num_bytes: float | None = None
    """Bytes sent in the run, where the tool says so."""
    device: str = ""
    layer: str = ""
    """``IB`` or ``Ethernet`` where perftest says so."""
    uses_gpu: bool = False
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Point | None:
        """The row with the highest rate."""
        with_rate = [p for p in self.points if p.bit_per_s is not None]
        return max(with_rate, key=lambda p: p.bit_per_s or 0.0) if with_rate else None

    @property
    def bit_per_s(self) -> float | None:
        """The highest rate of any size, or None."""
        return None if self.best is None else self.best.bit_per_s

    @property
    def still_rises(self) -> bool:
        """The largest size is the fastest by far: the sizes were too small for the link, and the rate is a latency."""
        rated = [p for p in self.points if p.bit_per_s]
        if len(rated) < 2:
            return False
        last, before = rated[-1], rated[-2]
        return (last.bit_per_s or 0.0) > 1.3 * (before.bit_per_s or 0.0)
