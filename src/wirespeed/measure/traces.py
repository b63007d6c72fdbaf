"""Where the time of a traced job goes: overlap, exposed communication, waiting and NIC load, from profilers' traces.

For jobs that do not use wirespeed at all: reads torch.profiler (Kineto) and Nsight Systems (SQLite) traces, without
torch. Several ranks' traces tell more than one: the shortest of one collective over all ranks waited for nobody, so
what the others took longer is waiting and not the network. Traces of ranks must be of the same steps for that; they are
matched by order within a group, never by their clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.collectives import busbw_bit_per_s, nic_factor
from wirespeed.measure import environment
from wirespeed.measure.kineto import read_kineto
from wirespeed.measure.nsys import DEFAULT_STEPS, MAGIC, read_nsys
from wirespeed.measure.spans import Spans, clip, intersect, shared, subtract, total, union
from wirespeed.measure.timeline import CollectiveSpan, NicSeries, Timeline
from wirespeed.records import Collective
from wirespeed.spec.traces import CollectiveActivity, NicActivity, RankActivity, TracesRecord
from wirespeed.units import format_duration, format_percent, format_rate

MIN_TRANSFER_BYTES = 256 * 1024
"""Smaller collectives cost latency: their rate says nothing about a link."""
_RATED: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
}
_Key = tuple[str, int | None]


def read_trace(path: str | Path, *, steps: str = DEFAULT_STEPS) -> tuple[Timeline, ...]:
    """The timelines of one file, whichever profiler wrote it. Raises DataError where it is of none that is known."""
    source = Path(path)
    try:
        with source.open("rb") as stream:
            head = stream.read(len(MAGIC))
    except OSError as fault:
        raise DataError(f"cannot read {source}: {fault.strerror or fault}") from fault
    if head == MAGIC:
        return read_nsys(source, steps=steps)
    if source.suffix in (".nsys-rep", ".qdrep"):
        raise DataError(
            f"{source} is a report of Nsight Systems",
            expected="its SQLite export",
            hint=f"nsys export --type sqlite --output {source.stem}.sqlite {source.name}",
        )
    return read_kineto(source)


def analyse(
    timelines: Sequence[Timeline],
    *,
    ranks_per_host: int = 1,
    nic_bit_per_s: float | None = None,
    nics_per_host: int = 1,
) -> TracesRecord:
    """Put the timelines of one job together.

    What a trace does not hold: ``ranks_per_host``, the line rate of one NIC in one direction, and how many NICs of a
    host carry this traffic. Raises DataError without a timeline.
    """
    if not timelines:
        raise DataError("got no trace", expected="at least one")
    if ranks_per_host < 1 or nics_per_host < 1:
        raise UsageError(f"got {ranks_per_host} ranks and {nics_per_host} NICs per host", expected="1 or more of each")
    host_bit_per_s = None if nic_bit_per_s is None else nic_bit_per_s * nics_per_host
    timelines = sorted(timelines, key=lambda t: (t.rank is None, t.rank, t.source, t.device))
    shortest, notes = _shortest(timelines)
    ranks = tuple(_rank(timeline, shortest) for timeline in timelines if timeline.device != "NICs")
    notes += [note for timeline in timelines for note in timeline.notes]
    collectives = _collectives(timelines, shortest, ranks_per_host, host_bit_per_s)
    nics = _nics(timelines, nic_bit_per_s)
    # Where nothing but communication was traced there is no limit to tell.
    rest = [(rank.window_s, rank.window_s - rank.exposed_s) for rank in ranks]
    limit = max((window_s / rest_s for window_s, rest_s in rest if rest_s > 0), default=None)
    return TracesRecord(
        environment=environment.capture(),
        files=tuple(dict.fromkeys(timeline.source for timeline in timelines)),
        ranks=ranks,
        collectives=collectives,
        nics=nics,
        ranks_per_host=ranks_per_host,
        nic_bit_per_s=nic_bit_per_s,
        nics_per_host=nics_per_host,
        speedup_limit=limit,
        findings=tuple(_findings(ranks, collectives, nics, limit)),
        notes=tuple(dict.fromkeys(notes)),
    )


# -------------------------------------------------------------------- one rank


def _window(timeline: Timeline) -> tuple[float, float]:
    """The traced steps, else everything from the first event to the last."""
    if timeline.steps:
        return timeline.steps[0][0], timeline.steps[-1][1]
    times = [c.begin_s for c in timeline.collectives] + [c.end_s for c in timeline.collectives]
    times += [float(timeline.compute[0, 0]), float(timeline.compute[-1, 1])] if len(timeline.compute) else []
    return (min(times), max(times)) if times else (0.0, 0.0)


def _busy(timeline: Timeline) -> Spans:
    return union([(c.begin_s, c.end_s) for c in timeline.collectives])


def _rank(timeline: Timeline, shortest: dict[tuple[int, int], float]) -> RankActivity:
    begin_s, end_s = _window(timeline)
    compute = clip(timeline.compute, begin_s, end_s)
    communication = clip(_busy(timeline), begin_s, end_s)
    exposed_s = total(subtract(communication, compute))
    window_s = end_s - begin_s
    inside = [(index, c) for index, c in enumerate(timeline.collectives) if c.begin_s < end_s and c.end_s > begin_s]
    known = [(c, shortest[id(timeline), index]) for index, c in inside if (id(timeline), index) in shortest]
    # A collective's own work takes its shortest time and comes last: what lies before it is waiting.
    waiting = clip(union([(c.begin_s, max(c.begin_s, c.end_s - least)) for c, least in known]), begin_s, end_s)
    return RankActivity(
        source=timeline.source,
        device=timeline.device,
        rank=timeline.rank,
        host=timeline.host,
        window_s=window_s,
        num_steps=len(timeline.steps),
        step_s=median(end - begin for begin, end in timeline.steps) if timeline.steps else None,
        compute_s=total(compute),
        communication_s=total(communication),
        overlap_s=total(intersect(communication, compute)),
        exposed_s=exposed_s,
        idle_s=max(0.0, window_s - total(compute) - exposed_s),
        num_collectives=len(inside),
        waiting_s=total(waiting) if known else None,
    )


# -------------------------------------------------------------------- over ranks


def _shortest(timelines: Sequence[Timeline]) -> tuple[dict[tuple[int, int], float], list[str]]:
    """Of each collective of each timeline, the shortest duration over the ranks that took part in it.

    Keyed by the timeline's identity and the collective's place. Collectives of one kind and group are matched by order;
    where ranks hold different numbers of them they are of different steps, and nothing is matched.
    """
    if len([t for t in timelines if t.collectives]) < 2:
        return {}, []
    by_group: dict[tuple[str, str], list[tuple[Timeline, list[int]]]] = defaultdict(list)
    for timeline in timelines:
        held: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, collective in enumerate(timeline.collectives):
            held[collective.collective, collective.group].append(index)
        for key, places in held.items():
            by_group[key].append((timeline, places))
    found: dict[tuple[int, int], float] = {}
    notes = []
    for (kind, group), ranks in by_group.items():
        if len(ranks) < 2 or kind == "send_recv":
            continue
        if len({len(places) for _, places in ranks}) > 1:
            told = f" of group {group}" if group else ""
            notes.append(
                f"the traces hold different numbers of {kind}{told}: not of the same steps, waiting is unknown"
            )
            continue
        for nth in zip(*(places for _, places in ranks), strict=True):
            sizes = {t.collectives[i].size_bytes for (t, _), i in zip(ranks, nth, strict=True)}
            if len(sizes) > 1:
                continue  # another collective of the same kind: matched wrongly
            least = min(t.collectives[i].seconds for (t, _), i in zip(ranks, nth, strict=True))
            found.update({(id(t), i): least for (t, _), i in zip(ranks, nth, strict=True)})
    return found, notes


def _collectives(
    timelines: Sequence[Timeline],
    shortest: dict[tuple[int, int], float],
    ranks_per_host: int,
    host_bit_per_s: float | None,
) -> tuple[CollectiveActivity, ...]:
    held: dict[_Key, list[tuple[CollectiveSpan, float]]] = defaultdict(list)
    for timeline in timelines:
        for index, collective in enumerate(timeline.collectives):
            num_ranks = timeline.num_ranks if collective.num_ranks is None else collective.num_ranks
            least = shortest.get((id(timeline), index), collective.seconds)
            held[collective.collective, num_ranks].append((collective, least))
    made = [_activity(key, rows, ranks_per_host, host_bit_per_s) for key, rows in held.items()]
    return tuple(sorted(made, key=lambda activity: -activity.seconds))


def _activity(
    key: _Key,
    rows: Sequence[tuple[CollectiveSpan, float]],
    ranks_per_host: int,
    host_bit_per_s: float | None,
) -> CollectiveActivity:
    kind, num_ranks = key
    sizes = [c.size_bytes for c, _ in rows if c.size_bytes is not None]
    rated = _RATED.get(kind)
    busbw = nic = None
    timed = [(c.size_bytes, least) for c, least in rows if c.size_bytes is not None and least > 0]
    large = [(size, least) for size, least in timed if size >= MIN_TRANSFER_BYTES]
    if rated is not None and num_ranks is not None and num_ranks > 1 and timed:
        busbw = median(busbw_bit_per_s(rated, size, num_ranks, least) for size, least in large or timed)
        if large and num_ranks > ranks_per_host and num_ranks % ranks_per_host == 0:
            factor = nic_factor(rated, num_ranks, ranks_per_host)
            nic = median(8 * size * factor / least for size, least in large)
    return CollectiveActivity(
        collective=kind,
        num_ranks=num_ranks,
        count=len(rows),
        seconds=sum(c.seconds for c, _ in rows),
        median_bytes=median(sizes) if sizes else None,
        transfer_s=median(least for _, least in rows),
        busbw_bit_per_s=busbw,
        nic_bit_per_s=nic,
        saturation=None if nic is None or host_bit_per_s is None else nic / host_bit_per_s,
    )


# -------------------------------------------------------------------- NICs


def _nics(timelines: Sequence[Timeline], nic_bit_per_s: float | None) -> tuple[NicActivity, ...]:
    made = []
    by_source: dict[str, list[Timeline]] = defaultdict(list)
    for timeline in timelines:
        by_source[timeline.source].append(timeline)
    for source, held in by_source.items():
        busy = union([(c.begin_s, c.end_s) for t in held for c in t.collectives])
        made += [_nic(source, series, busy, nic_bit_per_s) for series in held[0].nics]
    return tuple(made)


def _nic(source: str, series: NicSeries, busy: Spans, nic_bit_per_s: float | None) -> NicActivity:
    """Means over the time of collectives; each sample counts with the time that it shares with them."""
    lengths = series.spans[:, 1] - series.spans[:, 0]
    inside = shared(series.spans, busy)
    sent, received = (8 * np.array(rates) for rates in (series.sent_bytes_per_s, series.received_bytes_per_s))
    # Without collectives in the trace (only NICs were traced) all of it counts.
    weights = inside if inside.sum() > 0 else lengths
    outside = lengths - weights
    means = [float((rates * weights).sum() / weights.sum()) for rates in (sent, received)]
    busier = np.maximum(sent, received)
    return NicActivity(
        source=source,
        nic=series.name,
        sent_bit_per_s=means[0],
        received_bit_per_s=means[1],
        peak_bit_per_s=float(busier.max()),
        sent_outside_bit_per_s=float((sent * outside).sum() / outside.sum()) if outside.sum() > 0 else 0.0,
        saturation=None if nic_bit_per_s is None else max(means) / nic_bit_per_s,
        covered_s=float(inside.sum()),
    )


# -------------------------------------------------------------------- words


def _findings(
    ranks: Sequence[RankActivity],
    collectives: Sequence[CollectiveActivity],
    nics: Sequence[NicActivity],
    limit: float | None,
) -> Iterable[str]:
    """What a reader should take away, most important first."""
    if not ranks:
        return
    if not any(rank.num_collectives for rank in ranks):
        yield "no collectives in these traces: nothing was exchanged in the traced steps, or the backend is not known"
        return
    worst = max(ranks, key=lambda rank: rank.exposed_share)
    hidden = worst.hidden_share
    yield (
        f"{_name(worst)}: communication is exposed for {format_percent(worst.exposed_share)} of the time"
        + ("" if hidden is None else f", {format_percent(hidden)} of it is hidden behind compute")
        + ("" if limit is None else f"; no change of the network can make it more than {limit:.2f}x as fast")
    )
    waiting = [rank for rank in ranks if rank.waiting_s is not None and rank.communication_s > 0]
    if len(waiting) > 1:
        least = min(waiting, key=lambda rank: rank.waiting_s or 0.0)
        most = max(waiting, key=lambda rank: rank.waiting_s or 0.0)
        gap = (most.waiting_s or 0.0) - (least.waiting_s or 0.0)
        if gap > 0.05 * most.window_s:
            yield (
                f"{_name(least)} is late: {_name(most)} waits {format_duration(most.waiting_s or 0.0)} in collectives "
                "for others, more than 5 % of its time; look at that rank's data loading and device before the network"
            )
    rated = [c for c in collectives if c.saturation is not None]
    for counted in nics:
        if counted.saturation is not None:
            yield (
                f"{counted.nic} ({counted.source}): {format_percent(counted.saturation)} of its line rate during "
                f"collectives, counted; peak {format_rate(counted.peak_bit_per_s)}"
            )
    if rated and not any(counted.saturation is not None for counted in nics):
        top = max(rated, key=lambda c: c.seconds)
        assert top.saturation is not None
        verdict = (
            "the link binds: send fewer bytes" if top.saturation > 0.7 else "the link does not bind: look elsewhere"
        )
        yield f"{top.collective}: the NICs carry {format_percent(top.saturation)} of their line rate; {verdict}"


def _name(rank: RankActivity) -> str:
    return f"rank {rank.rank}" if rank.rank is not None else f"{rank.device} of {rank.source}"
