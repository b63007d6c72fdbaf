"""Measure a fabric, judge it, and measure on until what stands out is settled: an SPMD program like ``measure_links``.

Every rank calls ``check_fabric``; rank 0 decides after each measurement what the next one measures (``Inquiry``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from wirespeed.doctor.check import Finding
from wirespeed.doctor.matrix import Cell, Matrix, MatrixReport, judge, matrix_of, unexplained
from wirespeed.doctor.retest import PASSES, Again, confirm, joined, left_of, schedule_of, suspects
from wirespeed.launch import Ranks
from wirespeed.measure.links import Schedule, measure_links
from wirespeed.measure.messages import SocketOptions
from wirespeed.records import LinksRecord, Record

NOISY_FINDINGS = 3
"""More suspects than these after a first measurement, and all of it is measured once more: most will be noise."""
MAX_WHOLE = 3
"""Passes over the whole fabric, or over those of its rounds that are not clear, before suspects are measured alone."""
NUM_PINGS = 20
"""Round trips are only needed to know how long slow start takes."""
MAX_PASSES = 8
"""After ``PASSES`` only what stands and is not settled is measured on, the last number of repeats each time."""
MAX_ROUNDS = 160
"""Beyond the first measurement: after so many it is judged by what is known of suspects that were measured again."""


class FabricReport(Record, frozen=True, kw_only=True, tag="fabric_report"):
    """What stands out on a fabric. ``dropped``: what stood out once and was fine when measured again."""

    hosts: tuple[str, ...]
    usual_bit_per_s: float
    sending: dict[str, float]
    receiving: dict[str, float]
    findings: tuple[Finding, ...]
    cannot_tell: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    was_retested: bool = False


class Inquiry:
    """What to measure next, and what to make of it all: passes over the whole fabric, then over the suspects.

    A round in which something is slow that no suspect explains is measured again before anything is believed: on a busy
    machine it may be noise, or noise may hide what it is. Many suspects are noise most of the time, and then all rounds
    are.
    """

    def __init__(self, *, racks: Mapping[str, str] | None = None, seed: int = 0) -> None:
        self._racks = racks
        self._seed = seed
        self._whole: list[LinksRecord] = []
        self._again: list[LinksRecord] = []
        self._seen: tuple[MatrixReport, Matrix] | None = None
        self._is_second = False
        self._num_rounds = 0

    def follow_up(self, record: LinksRecord) -> Schedule:
        """Given what was measured last, the rounds to measure next; none when it is known enough."""
        table = self._next(record)
        self._num_rounds += len(table)
        # Never before its suspects were measured once: what is only suspect is no finding.
        return table if self._num_rounds <= MAX_ROUNDS or not self._again else ()

    def _next(self, record: LinksRecord) -> Schedule:
        if self._seen is not None:
            self._again.append(record)
            done = len(self._again)
            report, matrix = self._seen
            left = left_of(report, joined(self._again), matrix, done) if done < MAX_PASSES else []
            if table := suspects(report, matrix, still=left, repeats=PASSES[min(done, len(PASSES) - 1)]):
                return table
            return self._once_more(record.hosts)
        self._whole.append(record)
        table = schedule_of(len(record.hosts), seed=self._seed)
        matrix = matrix_of(self._whole[0], self._racks, again=self._whole[1:], schedule=table)
        report = judge(matrix, is_first_pass=True)
        if len(self._whole) < MAX_WHOLE:
            if len(report.findings) > NOISY_FINDINGS and len(self._whole) == 1:
                return table
            if rest := self._rounds_with(unexplained(matrix, report), record.hosts):
                return rest
        self._seen = (report, matrix)
        return suspects(report, matrix)

    def _rounds_with(self, cells: Sequence[Cell], hosts: Sequence[str]) -> Schedule:
        wanted = {frozenset(cell) for cell in cells}
        table = schedule_of(len(hosts), seed=self._seed)
        return [pairs for pairs in table if any(frozenset((hosts[a], hosts[b])) in wanted for a, b in pairs)]

    def _once_more(self, hosts: Sequence[str]) -> Schedule:
        """What was explained by a suspect that was dropped: it is measured and judged again, one time."""
        if self._is_second or self._seen is None:
            return ()
        self._is_second = True
        report, matrix = self._seen
        again = joined(self._again)
        kept, _ = confirm(report, again, matrix)
        held = Again(again, report.usual_bit_per_s)
        best = {cell: max(held.shares[cell]) * report.usual_bit_per_s for cell in held.shares}
        rates = {cell: max(rate, best.get(cell, 0.0)) for cell, rate in matrix.bit_per_s.items()}
        open_cells = unexplained(
            msgspec.structs.replace(matrix, bit_per_s=rates), msgspec.structs.replace(report, findings=kept)
        )
        if table := self._rounds_with(open_cells, hosts):
            self._seen = None
            self._again = []
        return table

    def report(self) -> FabricReport:
        """The verdict, after the last ``follow_up``."""
        assert self._seen is not None
        report, matrix = self._seen
        findings, dropped = confirm(report, joined(self._again), matrix) if self._again else (report.findings, ())
        return _report(self._whole[0], report, findings, dropped=dropped, was_retested=bool(self._again))


def check_fabric(
    ranks: Ranks,
    *,
    racks: Mapping[str, str] | None = None,
    streams: Sequence[int] = (1, 4),
    duration_s: float = 0.5,
    options: SocketOptions | None = None,
    timeout_s: float = 15.0,
    join_timeout_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> tuple[FabricReport, LinksRecord] | None:
    """Measure all pairs (or matchings), judge, measure suspects again. Every rank calls it; rank 0 gets the result.

    Raises what ``measure_links`` raises: PeerFailure names the host that does not answer.
    """
    inquiry = Inquiry(racks=racks, seed=seed)
    first = measure_links(
        ranks,
        streams=streams,
        duration_s=duration_s,
        num_pings=NUM_PINGS,
        options=options,
        timeout_s=timeout_s,
        join_timeout_s=join_timeout_s,
        progress=progress,
        schedule=lambda count: schedule_of(count, seed=seed),
        follow_up=inquiry.follow_up,
    )
    return None if first is None else (inquiry.report(), first)


def _report(
    record: LinksRecord,
    report: MatrixReport,
    findings: Sequence[Finding],
    *,
    dropped: Sequence[str] = (),
    was_retested: bool = False,
) -> FabricReport:
    return FabricReport(
        environment=record.environment,
        hosts=record.hosts,
        usual_bit_per_s=report.usual_bit_per_s,
        sending=report.sending,
        receiving=report.receiving,
        findings=tuple(findings),
        cannot_tell=report.cannot_tell if findings else (),
        dropped=tuple(dropped),
        was_retested=was_retested,
    )


def report_of(record: LinksRecord, racks: Mapping[str, str] | None = None) -> FabricReport:
    """The report of a record that was measured before: nothing is measured again."""
    report = judge(matrix_of(record, racks))
    return _report(record, report, report.findings)
