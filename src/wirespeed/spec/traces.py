"""What profilers' traces tell about communication: per rank, per collective and per NIC."""

from __future__ import annotations

import msgspec

from wirespeed.records import Record


class RankActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One rank (or device) over the traced window. Seconds; ``num_steps`` is 0 where the trace marks none.

    ``compute_s`` and ``communication_s`` are times in which at least one of their kind runs; ``overlap_s`` is in both,
    ``exposed_s`` is communication beside which nothing computes, ``idle_s`` neither. Hence window = compute + exposed +
    idle. ``waiting_s`` is the part of communication in which this rank waited for the last one to join, known only
    where the other ranks' traces are there too.
    """

    source: str
    device: str
    rank: int | None
    host: str | None
    window_s: float
    num_steps: int
    step_s: float | None
    compute_s: float
    communication_s: float
    overlap_s: float
    exposed_s: float
    idle_s: float
    num_collectives: int
    waiting_s: float | None = None

    @property
    def exposed_share(self) -> float:
        """Exposed communication over the window."""
        return self.exposed_s / self.window_s if self.window_s > 0 else 0.0

    @property
    def hidden_share(self) -> float | None:
        """Share of communication that is hidden behind compute; None without communication."""
        return self.overlap_s / self.communication_s if self.communication_s > 0 else None


class CollectiveActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One collective at one group size, over all ranks.

    Rates are None where the trace tells no sizes, and the load of the NICs also where all are so small that they cost
    latency and not bandwidth.

    ``transfer_s`` is the median over collectives of the shortest rank, which waited for nobody; it is the median of all
    where only one rank's trace is there. ``nic_bit_per_s``: what each host's NICs had to carry meanwhile, in their
    busier direction; ``saturation`` is that over their line rate.
    """

    collective: str
    num_ranks: int | None
    count: int
    seconds: float
    median_bytes: float | None
    transfer_s: float
    busbw_bit_per_s: float | None
    nic_bit_per_s: float | None
    saturation: float | None


class NicActivity(msgspec.Struct, frozen=True, kw_only=True):
    """Counted traffic of one port while collectives ran, and while none did. Bits per second, time-weighted means."""

    source: str
    nic: str
    sent_bit_per_s: float
    received_bit_per_s: float
    peak_bit_per_s: float
    sent_outside_bit_per_s: float
    saturation: float | None
    """The busier direction during collectives over the line rate; None where that is not known."""
    covered_s: float
    """Of the collectives' time, how much has samples."""


class TracesRecord(Record, frozen=True, kw_only=True, tag="traces"):
    """The outcome of `wirespeed profile --trace`. ``nic_bit_per_s``: the line rate of one NIC, as declared."""

    files: tuple[str, ...]
    ranks: tuple[RankActivity, ...]
    collectives: tuple[CollectiveActivity, ...]
    nics: tuple[NicActivity, ...]
    ranks_per_host: int
    nics_per_host: int
    nic_bit_per_s: float | None
    speedup_limit: float | None
    """How many times as fast the slowest rank's steps could be if nothing of its communication were exposed."""
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
