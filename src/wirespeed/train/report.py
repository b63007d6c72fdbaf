"""What a session tells of its steps: medians of the parts, bytes stated and counted, and every bucket's way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from wirespeed.measure.steps import StepParts
from wirespeed.spec.comparison import StepBreakdown
from wirespeed.spec.strategy import Strategy
from wirespeed.units import format_duration, format_percent, format_size

SKIPPED_STEPS = 3
"""The first steps hold one-off work: buckets are formed anew after step 1, kernels and connections warm up."""


class LossEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A loss that the script recorded after ``step`` optimizer steps; None where it was not finite."""

    step: int
    loss: float | None
    is_held_out: bool

    def __post_init__(self) -> None:
        if self.loss is not None and not math.isfinite(self.loss):
            msgspec.structs.force_setattr(self, "loss", None)


class BucketTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket's way in one step. ``spans_s``: begin and end of stage 0, collective 0, stage 1, ... on one clock."""

    bucket: int
    num_bytes: int
    stages: tuple[str, ...]
    queued_s: float
    spans_s: tuple[tuple[float, float], ...]


class BucketReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one bucket, in seconds: its local stages, its collectives, and waiting for a lane (queue)."""

    bucket: int
    num_bytes: int
    stages_s: dict[str, float]
    wire_s: float
    queue_s: float
    total_s: float


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a session on one rank."""

    strategy: str
    num_ranks: int
    num_steps: int
    breakdown: StepBreakdown | None
    stated_bytes_per_step: float
    wire_bytes_per_step: float | None
    residual_norm: float
    residual_bytes: int
    buckets: tuple[BucketReport, ...]
    notes: tuple[str, ...] = ()
    steps_per_exchange: int = 1
    nic_bytes_per_step: float | None = None
    """What the rank's whole host is stated to send to other hosts; None where nobody asked which ranks share a host."""

    def __str__(self) -> str:
        lines = [f"strategy {self.strategy}, {self.num_ranks} ranks, {self.num_steps} steps"]
        if self.breakdown is not None:
            b = self.breakdown
            lines.append(
                f"step {format_duration(b.step_s)}: data {format_duration(b.data_s)}, "
                f"forward {format_duration(b.forward_s)}, backward {format_duration(b.backward_s)}, "
                f"exposed communication {format_duration(b.exposed_s)} ({format_percent(b.exposed_share)}), "
                f"optimizer {format_duration(b.optimizer_s)}, other {format_duration(b.other_s)}"
            )
        counted = "unknown" if self.wire_bytes_per_step is None else format_size(self.wire_bytes_per_step)
        per = "" if self.steps_per_exchange == 1 else f" on the mean of periods of {self.steps_per_exchange} steps"
        lines.append(f"sent per step{per}: {format_size(self.stated_bytes_per_step)} stated, {counted} counted")
        if self.nic_bytes_per_step is not None:
            lines.append(f"sent per step by the host to others: {format_size(self.nic_bytes_per_step)} stated")
        for bucket in self.buckets:
            stages = ", ".join(f"{name} {format_duration(value)}" for name, value in bucket.stages_s.items())
            size, wire, queue = (
                format_size(bucket.num_bytes),
                format_duration(bucket.wire_s),
                format_duration(bucket.queue_s),
            )
            lines.append(f"bucket {bucket.bucket} ({size}): {stages}, wire {wire}, queue {queue}")
        lines += self.notes
        return "\n".join(lines)


def breakdown_of(steps: Sequence[StepParts], *, period: int = 1) -> StepBreakdown | None:
    """Medians over the steps after the first few; None without any step.

    With a ``period`` of several steps per exchange, medians over the means of whole periods: a median over steps would
    not see the one that exchanges.
    """
    kept = steps[SKIPPED_STEPS:] if len(steps) > 2 * SKIPPED_STEPS else steps
    if not kept:
        return None
    return StepBreakdown(
        **{
            name: median(period_means([getattr(step, name) for step in kept], period))
            for name in StepBreakdown.__struct_fields__
        }
    )


def period_means(values: Sequence[float], period: int) -> Sequence[float]:
    """Means of consecutive whole periods, wherever they begin; of all values where there are fewer."""
    if period == 1:
        return values
    whole = len(values) // period * period
    if whole == 0:
        return [fmean(values)] if values else []
    return [fmean(values[first : first + period]) for first in range(0, whole, period)]


def mean_breakdown(ranks: Sequence[StepBreakdown]) -> StepBreakdown:
    """The mean over ranks, part by part."""
    return StepBreakdown(
        **{name: fmean(getattr(rank, name) for rank in ranks) for name in StepBreakdown.__struct_fields__}
    )


def summarize(
    *,
    strategy: Strategy,
    num_ranks: int,
    steps: Sequence[StepParts],
    buckets: Sequence[BucketTimes],
    stated_bytes: int,
    wire: Sequence[tuple[int, int]],
    residual_norm: float,
    residual_bytes: int,
    nic_share: float | None = None,
    notes: Sequence[str] = (),
) -> SessionReport:
    """Put a session's notes together. ``wire`` holds cumulative (stated, counted) bytes after every step.

    ``nic_share``: bytes that the host sends to others, over those that the rank sends.
    """
    counted = None
    stated = float(stated_bytes) / max(1, len(steps))
    last = len(wire) - 1
    if last >= strategy.steps_per_cycle:  # whole cycles only
        last -= last % strategy.steps_per_cycle
    if last > 0:
        stated = (wire[last][0] - wire[0][0]) / last
        if wire[0][1] >= 0:
            counted = (wire[last][1] - wire[0][1]) / last
    return SessionReport(
        strategy=strategy.name,
        num_ranks=num_ranks,
        num_steps=len(steps),
        breakdown=breakdown_of(steps, period=strategy.steps_per_cycle),
        stated_bytes_per_step=stated,
        wire_bytes_per_step=counted,
        residual_norm=residual_norm,
        residual_bytes=residual_bytes,
        buckets=tuple(_bucket_report([t for t in buckets if t.bucket == index]) for index in _indices(buckets)),
        notes=tuple(notes),
        steps_per_exchange=strategy.steps_per_exchange,
        nic_bytes_per_step=None if nic_share is None else stated * nic_share,
    )


def _indices(buckets: Sequence[BucketTimes]) -> list[int]:
    return sorted({times.bucket for times in buckets})


def _bucket_report(times: list[BucketTimes]) -> BucketReport:
    newest = [t for t in times if (t.num_bytes, t.stages) == (times[-1].num_bytes, times[-1].stages)]
    lengths = [[end - begin for begin, end in entry.spans_s] for entry in newest]
    totals = [entry.spans_s[-1][1] - entry.queued_s for entry in newest]
    return BucketReport(
        bucket=newest[-1].bucket,
        num_bytes=newest[-1].num_bytes,
        stages_s={name: median(spans[2 * index] for spans in lengths) for index, name in enumerate(newest[-1].stages)},
        wire_s=median(sum(spans[1::2]) for spans in lengths),
        queue_s=median(total - sum(spans) for total, spans in zip(totals, lengths, strict=True)),
        total_s=median(totals),
    )
