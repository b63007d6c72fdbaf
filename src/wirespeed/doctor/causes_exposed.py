"""What a trace says about exposed communication that no log does: who comes late, what is too small, what is full.

A rank that waits in a collective for another one looks like a slow network and is none: the shortest of one collective
over all ranks tells the two apart (measure/traces.py). The rest compares the job's own collectives with a benchmark of
the same size and ranks, and with the NICs' line rate.
"""

from __future__ import annotations

from collections.abc import Iterator

from wirespeed.doctor.causes import Cause, make_cause
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.dossier import Dossier
from wirespeed.doctor.measurements import GOOD_SHARE
from wirespeed.spec.traces import CollectiveActivity, RankActivity, TracesRecord
from wirespeed.units import format_duration, format_percent, format_rate, format_size

LATE_SHARE = 0.05
"""Of the traced time that another rank waits, above which a rank is late (own rule, as `profile --trace`)."""
SMALL_BYTES = 256 * 1024
"""Below this a collective costs latency (reference: algorithm bandwidth still rises with size)."""
MANY = 20
FULL = 0.7
"""Of the line rate during collectives, above which the link itself binds."""


def exposed_causes(dossier: Dossier) -> Iterator[Cause]:
    """All causes of this kind; none without a trace."""
    if dossier.traces is None:
        return
    yield from _late_rank(dossier)
    yield from _small_messages(dossier.traces)
    yield from _below_benchmark(dossier)
    yield from _full_link(dossier.traces)


def name_of(rank: RankActivity) -> str:
    """A rank for a sentence, with its host where the trace names it."""
    name = f"rank {rank.rank}" if rank.rank is not None else f"{rank.device} of {rank.source}"
    return f"{name} on {rank.host}" if rank.host else name


def _late_rank(dossier: Dossier) -> Iterator[Cause]:
    assert dossier.traces is not None
    known = [rank for rank in dossier.traces.ranks if rank.waiting_s is not None and rank.window_s > 0]
    if len(known) < 2:
        return
    late = min(known, key=lambda rank: rank.waiting_s or 0.0)
    most = max(known, key=lambda rank: rank.waiting_s or 0.0)
    gap_s = (most.waiting_s or 0.0) - (late.waiting_s or 0.0)
    if gap_s <= LATE_SHARE * most.window_s:
        return
    is_first = dossier.exposure is not None and dossier.exposure.is_mostly_waiting
    works = late.compute_s / late.window_s
    others = max((rank.compute_s / rank.window_s for rank in known if rank is not late), default=0.0)
    why = (
        "it computes longer than the others: more work, or a slower device"
        if works > others + LATE_SHARE
        else "it is idle before it joins: its data loader, its Python, or a checkpoint"
        if late.idle_s > 0.1 * late.window_s
        else "its trace does not say why"
    )
    yield make_cause(
        "job.late-rank",
        f"{name_of(late)} comes late to collectives, and the others wait for it; {why}",
        [
            Evidence(
                where=rank.source,
                seen=f"{name_of(rank)} waits {format_duration(rank.waiting_s or 0.0)} of "
                f"{format_duration(rank.window_s)}, computes {format_percent(rank.compute_s / rank.window_s)}, idle "
                f"{format_percent(rank.idle_s / rank.window_s)}",
            )
            for rank in (late, most)
        ],
        kind="program" if is_first else "capability",
        weight=0.93,
        severity="critical" if gap_s > 0.2 * most.window_s else "warning",
        subject=name_of(late),
        host=late.host or "",
        path="any",
        fix="look at that rank before the network: its data loading, its device's clock and temperature, its host",
        commands=("nvidia-smi -q -d PERFORMANCE,CLOCK   # on its host", "py-spy top --pid <pid of the rank>"),
        source="C4 (arXiv 2406.04594): slow ranks show as others' waiting; 5 %: own rule",
        alternatives="one slow NIC makes its rank slow to finish, not late to start: its own collectives are then long",
    )


def _small_messages(traces: TracesRecord) -> Iterator[Cause]:
    total_s = sum(c.seconds for c in traces.collectives)
    small = [
        c
        for c in traces.collectives
        if c.median_bytes is not None and c.median_bytes < SMALL_BYTES and c.count >= MANY and c.collective != "barrier"
    ]
    spent_s = sum(c.seconds for c in small)
    if not small or total_s <= 0 or spent_s < 0.5 * total_s:
        return
    top = max(small, key=lambda c: c.seconds)
    yield make_cause(
        "job.small-messages",
        f"most communication is small: {top.count} {top.collective} of {format_size(round(top.median_bytes or 0))} "
        "cost latency, not bandwidth",
        [
            Evidence(
                where=c.collective,
                seen=f"{c.count} of {format_size(round(c.median_bytes or 0))}, {format_duration(c.transfer_s)} each",
                expected=f"{format_size(SMALL_BYTES)} or more",
            )
            for c in sorted(small, key=lambda c: -c.seconds)[:3]
        ],
        kind="capability",
        weight=0.8,
        subject=top.collective,
        path="any",
        fix="fuse them: larger buckets (DDP bucket_cap_mb), fewer scalars synchronised per step; a faster NIC does not "
        "help",
        commands=("wirespeed tune <script>   # tries bucket sizes",),
        source="nccl-tests doc/PERFORMANCE.md: compare equal payloads; below 256 KiB: own rule",
    )


def _below_benchmark(dossier: Dossier) -> Iterator[Cause]:
    """The same collective at about the same size is much faster in a benchmark: the job's side, not the fabric."""
    assert dossier.traces is not None
    tests = [m for m in dossier.facts.measurements if m.tool == "nccl-tests" and m.bit_per_s]
    for activity in dossier.traces.collectives:
        if activity.busbw_bit_per_s is None or activity.median_bytes is None or activity.median_bytes < SMALL_BYTES:
            continue
        for test in tests:
            if test.test != activity.collective or test.num_ranks not in (None, activity.num_ranks):
                continue
            near = [p for p in test.points if p.bit_per_s and 0.5 <= p.size_bytes / activity.median_bytes <= 2]
            reached = max((p.bit_per_s or 0.0 for p in near), default=0.0)
            if reached and activity.busbw_bit_per_s < GOOD_SHARE * reached:
                yield _slower_in_job(activity, reached, test.where)
                return


def _slower_in_job(activity: CollectiveActivity, reached: float, where: str) -> Cause:
    now = activity.busbw_bit_per_s or 0.0
    return make_cause(
        "job.slower-than-benchmark",
        f"{activity.collective} reaches {format_rate(now)} in the job and {format_rate(reached)} in nccl-tests: the "
        "fabric can do it, the job does not",
        [
            Evidence(where="trace", seen=f"{format_rate(now)} at {format_size(round(activity.median_bytes or 0))}"),
            Evidence(where=where, seen=format_rate(reached), expected=f"at most {1 / GOOD_SHARE:.3g} times that"),
        ],
        kind="capability",
        weight=0.7,
        subject=activity.collective,
        path="any",
        fix="kernels that compete for the GPU's SMs or memory, ranks that come late, NCCL settings of the job",
        commands=("wirespeed profile --trace <traces of all ranks>", "env | grep NCCL_"),
        source="80 % rule of stas00/ml-engineering",
        limit_bit_per_s=now,
        full_bit_per_s=reached,
    )


def _full_link(traces: TracesRecord) -> Iterator[Cause]:
    counted = [nic for nic in traces.nics if nic.saturation is not None and nic.saturation > FULL]
    rated = [c for c in traces.collectives if c.saturation is not None and c.saturation > FULL]
    if not counted and not rated:
        return
    evidence = [
        Evidence(where=f"{nic.nic} ({nic.source})", seen=f"{format_percent(nic.saturation or 0.0)} of its line rate")
        for nic in counted[:3]
    ] or [Evidence(where=c.collective, seen=f"{format_percent(c.saturation or 0.0)} of line rate") for c in rated[:3]]
    yield make_cause(
        "job.link-full",
        "the NICs are full during collectives: the network does what it can, and the job sends more",
        evidence,
        kind="setting",
        weight=0.6,
        severity="notice",
        subject="nics",
        path="any",
        fix="send less (half precision, compression, less often), overlap more, or buy more: `plan` compares them",
        commands=("wirespeed tune <script>", "wirespeed plan --help"),
        source=f"above {FULL:.0%} of line rate: own rule",
    )
