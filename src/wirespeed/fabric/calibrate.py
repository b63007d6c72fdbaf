"""Turn Records into a Fabric: hosts with measured rates, and size-dependent curves with their residuals.

Per collective, layout and size the median of all runs of all records is taken, so neither the order of the records nor
one slow run matters, and a larger message never takes longer than its parts would. A host's rate is the best goodput it
reached with any peer, in its weaker direction: a bound that is a little high is safe, one that is too low would reject
true measurements. Assumes that all records come from the same network under the same load; nothing in a record can
prove that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.collectives import nic_factor
from wirespeed.fabric.curves import fit_curve
from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Fabric, Figure, Host
from wirespeed.records import CodecsRecord, Collective, CollectivesRecord, LinksRecord
from wirespeed.units import KIB, MIB

_Layout = tuple[Collective, str, str, int, int, bool]


def calibrate(
    links: LinksRecord | None,
    collectives: Sequence[CollectivesRecord] = (),
    codecs: Sequence[CodecsRecord] = (),
    *,
    name: str,
    cpus_per_host: float | None = None,
) -> Fabric:
    """Fit a fabric to records.

    ``cpus_per_host``: cores that one host can count on, where the hosts share a machine; None takes what the collective
    records say. Raises UsageError without a links or collectives record, DataError for a record that holds wrong
    results or no samples, or for codec records that cannot be pooled.
    """
    if links is None and not collectives:
        raise UsageError(
            "got no record of links or collectives",
            expected="at least one of them",
            hint="run `wirespeed bench links --out links.json` first",
        )
    names = _host_names(links, collectives)
    machine = _shared_machine(collectives)
    if cpus_per_host is None and collectives:
        cpus_per_host = max(record.cpus_per_rank * record.ranks_per_host for record in collectives)
        if machine:
            cores = max(record.cpus_per_rank * (record.ranks_per_machine or 1) for record in collectives)
            cpus_per_host = cores / len(names)
    rates = {} if links is None else host_rates_bit_per_s(links)
    rates = {host: _at_least(rate, collectives, len(names)) for host, rate in rates.items()}
    source = "" if links is None else f"bench links {links.created}"
    hosts = tuple(
        Host(
            name=host,
            rate_bit_per_s=Figure(value=rates[host], origin="measured", source=source) if host in rates else None,
            cpus=cpus_per_host,
            machine=machine,
        )
        for host in names
    )
    round_trips = [] if links is None else [s.rtt_median_s for s in links.samples if s.rtt_median_s is not None]
    return Fabric(
        name=name,
        hosts=hosts,
        rtt_s=Figure(value=median(round_trips), origin="measured", source=source) if round_trips else None,
        collectives=_collective_curves(collectives, rates),
        codecs=_codec_curves(codecs),
    )


def host_rates_bit_per_s(links: LinksRecord) -> dict[str, float]:
    """Goodput of each host's NIC: the best over its peers and stream counts, in the weaker direction."""
    best: dict[tuple[str, str], float] = {}
    for sample in links.samples:
        if sample.bit_per_s and not sample.is_bidirectional:
            # A reader that was late for one window makes up for it in the next, which is faster than the wire.
            rate = min(fmean(sample.bit_per_s), median(sample.bit_per_s))
            for end in (("out", sample.source), ("in", sample.target)):
                best[end] = max(best.get(end, 0.0), rate)
    rates = {}
    for host in links.hosts:
        both = [best[direction, host] for direction in ("out", "in") if (direction, host) in best]
        if both:
            rates[host] = min(both)
    return rates


PART_BYTES = 512 * KIB
"""Least size whose time per byte holds for larger ones too."""
PART_SLACK = 1.05
"""What a shaper's burst may have saved a message of that size."""
PROOF_BYTES = MIB
"""Least size of a collective that proves a NIC's rate: of smaller ones what a shaper lets pass at once counts."""
PROOF_FACTOR = 1.5
"""How much more than the links' record collectives may prove. More is an error of one of the two."""


def _at_least(rate_bit_per_s: float, collectives: Sequence[CollectivesRecord], num_hosts: int) -> float:
    """A host's rate, no less than what collectives of all hosts have moved through its NIC.

    The one disturbed transfer of a links record would make the bound too tight for every collective. Two collectives
    have to say so: one that is too fast is a wrong measurement.
    """
    proofs = sorted(
        8 * sample.size_bytes * nic_factor(sample.collective, record.num_ranks, record.ranks_per_host)
        / median(sample.times_s)
        for record in collectives
        if record.num_ranks == num_hosts * record.ranks_per_host and not record.compute_threads
        for sample in record.samples
        if sample.size_bytes >= PROOF_BYTES and sample.times_s and min(sample.times_s) > 0
    )  # fmt: skip
    if len(proofs) < 2 or proofs[-2] > PROOF_FACTOR * rate_bit_per_s:
        return rate_bit_per_s
    return max(rate_bit_per_s, proofs[-2])


def _shared_machine(collectives: Sequence[CollectivesRecord]) -> str:
    """The name of the machine whose cores all hosts share, as those of a lab do; empty where each is its own."""
    if not collectives or any((r.ranks_per_machine or 0) < r.num_ranks for r in collectives):
        return ""
    return "shared" if any(r.num_ranks > r.ranks_per_host for r in collectives) else ""


def _host_names(links: LinksRecord | None, collectives: Sequence[CollectivesRecord]) -> tuple[str, ...]:
    named = () if links is None else links.hosts
    needed = max((record.num_ranks // record.ranks_per_host for record in collectives), default=1)
    # Collective records do not name their hosts: those that no links record names get names of their own.
    extra = [f"host{i}" for i in range(len(named), needed)]
    clash = sorted(set(extra) & set(named))
    if clash:
        raise DataError(f"the links record lacks hosts and names one {clash[0]!r}", expected="a record of all hosts")
    return (*named, *extra)


def _collective_curves(records: Sequence[CollectivesRecord], rates: dict[str, float]) -> tuple[CollectiveCurve, ...]:
    times: dict[_Layout, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    cpu: dict[_Layout, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for sample in record.samples:
            layout = (record.backend, record.num_ranks, record.ranks_per_host, record.compute_threads > 0)
            key = (sample.collective, sample.dtype, *layout)
            what = f"{sample.collective} of {sample.size_bytes} bytes in the record of {record.created}"
            if not sample.is_correct:
                raise DataError(f"{what} gave wrong results", expected="correct results", hint="do not use this host")
            _check_times(sample.times_s, what)
            times[key][sample.size_bytes].extend(sample.times_s)
            # The kernel counts in ticks: of a short run it may tell more than the cores there are.
            share = sample.cpu_s / median(sample.times_s)
            cpu[key][sample.size_bytes].append(min(share, record.cpus_per_rank))
    fastest_first = sorted(rates.values(), reverse=True)
    curves = []
    for key in sorted(times):
        collective, dtype, backend, num_ranks, ranks_per_host, beside_compute = key
        num_hosts = num_ranks // ranks_per_host
        floor_s_per_byte = 0.0
        if fastest_first:
            slowest = fastest_first[min(num_hosts, len(fastest_first)) - 1]
            floor_s_per_byte = 8 * nic_factor(collective, num_ranks, ranks_per_host) / slowest
        curve = fit_curve(
            _undisturbed({size: median(runs) for size, runs in times[key].items()}),
            floor_s_per_byte=floor_s_per_byte,
            cpu={size: median(shares) for size, shares in cpu[key].items()},
        )
        curves.append(
            CollectiveCurve(
                collective=collective,
                backend=backend,
                num_ranks=num_ranks,
                ranks_per_host=ranks_per_host,
                curve=curve,
                dtype=dtype,
                beside_compute=beside_compute,
            )
        )
    return tuple(curves)


def _undisturbed(medians_s: dict[int, float]) -> dict[int, float]:
    """Medians of which none is longer than that of a smaller size, in proportion to their bytes.

    A message can always be sent in parts, so what takes longer than its parts was disturbed: other work on the cores or
    on the wire went on for all runs of that size. Messages below ``PART_BYTES`` are no parts to go by: they may fit
    into a buffer or a shaper's burst and pass faster than the wire.
    """
    held: dict[int, float] = {}
    best_s_per_byte = math.inf
    for size in sorted(medians_s):
        held[size] = min(medians_s[size], PART_SLACK * best_s_per_byte * size)
        if size >= PART_BYTES:
            best_s_per_byte = min(best_s_per_byte, held[size] / size)
    return held


def _codec_curves(records: Sequence[CodecsRecord]) -> tuple[CodecCurve, ...]:
    settings = {(r.device, r.kernels) for r in records}
    shares = {record.num_ranks: record.environment.num_cpus / record.concurrent for record in records}
    if len(settings) > 1 or any(r.environment.num_cpus / r.concurrent != shares[r.num_ranks] for r in records):
        every = sorted({(r.device, r.kernels, r.concurrent) for r in records})
        raise DataError(
            f"the codec records differ in device, kernels or concurrency: {every}",
            expected="one setting",
            hint="calibrate with the records of the setting that training will run in",
        )
    times: dict[tuple[str, str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for sample in record.samples:
            _check_times(sample.times_s, f"stage {sample.stage!r} of codec {sample.codec!r}")
            times[sample.codec, sample.stage, record.num_ranks][sample.size_bytes].extend(sample.times_s)
    return tuple(
        CodecCurve(
            codec=codec,
            stage=stage,
            kind="default",
            num_ranks=num_ranks,
            cpus=shares[num_ranks],
            curve=fit_curve({size: median(runs) for size, runs in by_size.items()}),
        )
        for (codec, stage, num_ranks), by_size in sorted(times.items())
    )


def _check_times(times_s: Sequence[float], what: str) -> None:
    if not times_s or not all(0 < time_s < float("inf") for time_s in times_s):
        raise DataError(f"{what} holds no times or one that is not positive", expected="positive, finite times")
