"""What a collective or a codec stage costs on a fabric: measured curves first, closed forms only where none exists.

``collective_cost`` looks for a measured curve of the same backend, rank count and ranks per host. Failing that it takes
the measured layout nearest in rank count and rescales it step by step of a ring; failing that a textbook ring with the
fabric's rate and round trip. The last two say ``assumed`` and are not in range. Nothing is ever faster than the bytes
that must pass the slowest NIC that takes part at its measured goodput. A ring's latency grows with the rank count, so
for libraries that switch to trees the rescaled figure is too slow at many ranks and small sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.curves import curve_cpu, curve_time_s, is_in_range
from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Fabric
from wirespeed.records import Collective
from wirespeed.spec.payloads import bus_factor
from wirespeed.spec.workload import Origin

SUMS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter")
"""Collectives that add elements up, so that their type matters; the others move bytes."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """``seconds`` of one collective on every rank; ``cpu`` is CPU seconds of one rank per second of it."""

    seconds: float
    lower_bound_s: float
    cpu: float
    origin: Origin
    is_in_range: bool


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """``seconds`` of one local stage of a codec on one rank."""

    seconds: float
    origin: Origin
    is_in_range: bool


def collective_cost(
    fabric: Fabric,
    collective: Collective,
    size_bytes: int,
    num_ranks: int,
    *,
    ranks_per_host: int = 1,
    backend: str = "gloo",
    dtype: str = "float32",
) -> CollectiveCost:
    """Time of one collective of ``size_bytes`` (the convention of ``records``); monotone in size.

    ``dtype`` is that of the elements summed. Where only another one was measured, its curve is used and the answer is
    not in range; collectives that only move bytes ignore it.
    Raises DataError where the fabric holds neither a curve nor the rate and round trip that a closed form needs.
    """
    if size_bytes < 0 or num_ranks < 1 or ranks_per_host < 1 or num_ranks % ranks_per_host:
        raise UsageError(
            f"got {size_bytes} bytes over {num_ranks} ranks, {ranks_per_host} per host",
            expected="a size of 0 or more, and ranks that fill whole hosts",
        )
    if num_ranks == 1:
        return CollectiveCost(seconds=0.0, lower_bound_s=0.0, cpu=0.0, origin="measured", is_in_range=True)
    bound_s = lower_bound_s(fabric, collective, size_bytes, num_ranks, ranks_per_host=ranks_per_host)
    held = [
        c
        for c in fabric.collectives
        if (c.collective, c.backend, c.ranks_per_host) == (collective, backend, ranks_per_host)
        and not c.beside_compute
        and c.rate_bit_per_s is None  # else of another network: fabric.timing carries it over
    ]
    if not held:
        seconds = max(_ring_s(fabric, collective, size_bytes, num_ranks, ranks_per_host), bound_s)
        return CollectiveCost(seconds=seconds, lower_bound_s=bound_s, cpu=0.0, origin="assumed", is_in_range=False)
    moves = collective not in SUMS
    best = min(
        held,
        key=lambda c: (not (moves or c.dtype == dtype), _distance(c.num_ranks, num_ranks), c.num_ranks, c.dtype),
    )
    is_alike = moves or best.dtype == dtype
    if best.num_ranks == num_ranks:
        return CollectiveCost(
            seconds=max(curve_time_s(best.curve, size_bytes), bound_s),
            lower_bound_s=bound_s,
            cpu=curve_cpu(best.curve, size_bytes),
            origin=best.origin if is_alike else "assumed",
            is_in_range=is_alike and is_in_range(best.curve, size_bytes),
        )
    seconds, cpu = _rescaled(best, collective, size_bytes, num_ranks)
    return CollectiveCost(
        seconds=max(seconds, bound_s), lower_bound_s=bound_s, cpu=cpu, origin="assumed", is_in_range=False
    )


def slowdown_beside_compute(
    fabric: Fabric,
    collective: Collective,
    size_bytes: int,
    num_ranks: int,
    *,
    ranks_per_host: int = 1,
    backend: str = "gloo",
    dtype: str = "float32",
) -> float:
    """How many times as long the collective takes while its ranks compute: 1 or more, and 1 where it is not known.

    A collective is a chain of messages, and a rank whose cores compute takes up each of them late. Beyond the sizes
    measured beside compute the ratio of the nearest one holds.
    """
    curves = [
        c
        for c in fabric.collectives
        if (c.collective, c.backend, c.num_ranks, c.ranks_per_host) == (collective, backend, num_ranks, ranks_per_host)
        and (collective not in SUMS or c.dtype == dtype)
    ]
    alone = next((c.curve for c in curves if not c.beside_compute), None)
    beside = next((c.curve for c in curves if c.beside_compute), None)
    if alone is None or beside is None:
        return 1.0
    size = min(max(size_bytes, beside.sizes_bytes[0]), beside.sizes_bytes[-1])
    return max(1.0, curve_time_s(beside, size) / curve_time_s(alone, size))


def codec_stage_cost(
    fabric: Fabric, codec: str, stage: str, size_bytes: int, num_ranks: int, *, kind: str = "default",
    cpus_per_rank: float | None = None,
) -> StageCost:  # fmt: skip
    """Cost of a codec's local stage for a bucket of ``size_bytes`` of fp32 gradient; monotone in size.

    Where the stage was measured for another rank count only, the nearest one is used and the answer is not in range.
    ``cpus_per_rank``: cores that each rank has while all run the stage; where it was measured with another share of a
    core it takes as many times as long. None: as many as when it was measured.
    Raises DataError where the stage was never measured on this kind of host: codec speed is not guessed.
    """
    held = [c for c in fabric.codecs if (c.codec, c.stage, c.kind) == (codec, stage, kind)]
    if not held:
        raise DataError(
            f"the fabric holds no speed of stage {stage!r} of codec {codec!r} on hosts of kind {kind!r}",
            expected="a curve in [[codecs]]",
            hint="measure it with `wirespeed bench codecs`, then `wirespeed fabric calibrate`",
        )
    nearest = sorted(held, key=lambda c: (_distance(c.num_ranks, num_ranks), c.num_ranks))
    best: CodecCurve = nearest[0]
    seconds = _stage_s(best, size_bytes, cpus_per_rank)
    if best.num_ranks != num_ranks and len(nearest) > 1:
        # Some stages take as long for any group, others as many times as long as it has ranks: a line tells both.
        other = nearest[1]
        per_rank_s = (_stage_s(other, size_bytes, cpus_per_rank) - seconds) / (other.num_ranks - best.num_ranks)
        seconds += max(0.0, per_rank_s) * (num_ranks - best.num_ranks)
    is_same = best.num_ranks == num_ranks and seconds == curve_time_s(best.curve, size_bytes)
    return StageCost(
        seconds=max(0.0, seconds) if size_bytes > 0 else 0.0,
        origin=best.origin if is_same else "assumed",
        is_in_range=is_same and is_in_range(best.curve, size_bytes),
    )


def _stage_s(held: CodecCurve, size_bytes: int, cpus_per_rank: float | None) -> float:
    seconds = curve_time_s(held.curve, size_bytes)
    if cpus_per_rank is None or held.cpus is None:
        return seconds
    return seconds * min(1.0, held.cpus) / min(1.0, cpus_per_rank)


def codec_stage_s(
    fabric: Fabric, codec: str, stage: str, size_bytes: int, num_ranks: int, *, kind: str = "default"
) -> float:
    """Seconds of ``codec_stage_cost``."""
    return codec_stage_cost(fabric, codec, stage, size_bytes, num_ranks, kind=kind).seconds


def algbw_bit_per_s(size_bytes: int, seconds: float) -> float:
    """Algorithm bandwidth: size over time."""
    return 8 * size_bytes / seconds


def busbw_bit_per_s(collective: Collective, size_bytes: int, num_ranks: int, seconds: float) -> float:
    """Bus bandwidth: what each rank's link carries if the algorithm is a ring (nccl-tests, doc/PERFORMANCE.md)."""
    return bus_factor(collective, num_ranks) * algbw_bit_per_s(size_bytes, seconds)


def nic_factor(collective: Collective, num_ranks: int, ranks_per_host: int = 1) -> float:
    """Bytes that must pass one host's NIC in its busier direction, as a share of the size, whatever the algorithm.

    With one rank per host these are the bus factors. With several, a host's ranks can reduce or copy among themselves,
    so only one share per host has to leave it; all_to_all has nothing to merge and sends every rank's share.
    """
    num_hosts = num_ranks // ranks_per_host
    scale = ranks_per_host if collective == "all_to_all" else 1
    return scale * bus_factor(collective, num_hosts)


def lower_bound_s(
    fabric: Fabric, collective: Collective, size_bytes: int, num_ranks: int, *, ranks_per_host: int = 1
) -> float:
    """The bytes that must pass the slowest NIC, at its goodput; 0 where no rate is known or one host holds all ranks.

    Which hosts take part is not known here: the fastest ones that suffice are taken, so the bound is never too high.
    """
    num_hosts = num_ranks // ranks_per_host
    figures = [(host.rate_bit_per_s, host.num_nics) for host in fabric.hosts]
    rates = sorted((rate.value * num_nics for rate, num_nics in figures if rate is not None), reverse=True)
    if not rates:
        return 0.0
    rate_bit_per_s = rates[min(num_hosts, len(rates)) - 1]
    return 8 * size_bytes * nic_factor(collective, num_ranks, ranks_per_host) / rate_bit_per_s


def ring_steps(collective: Collective, num_ranks: int) -> int:
    """Messages in sequence of a ring (pairwise for all_to_all, a pipelined chain for broadcast)."""
    return 2 * (num_ranks - 1) if collective == "all_reduce" else num_ranks - 1


def _ring_s(fabric: Fabric, collective: Collective, size_bytes: int, num_ranks: int, ranks_per_host: int) -> float:
    bound_s = lower_bound_s(fabric, collective, size_bytes, num_ranks, ranks_per_host=ranks_per_host)
    has_rate = any(host.rate_bit_per_s is not None for host in fabric.hosts)
    if fabric.rtt_s is None or not has_rate or num_ranks == ranks_per_host:
        raise DataError(
            f"the fabric {fabric.name!r} cannot tell the time of {collective} over {num_ranks} ranks, "
            f"{ranks_per_host} per host",
            expected="a measured curve, or rate_bit_per_s of the hosts and rtt_s",
            hint="run `wirespeed bench links` and `wirespeed bench collectives`, then `wirespeed fabric calibrate`",
        )
    return ring_steps(collective, num_ranks) * fabric.rtt_s.value / 2 + bound_s


def _rescaled(held: CollectiveCurve, collective: Collective, size_bytes: int, num_ranks: int) -> tuple[float, float]:
    """A measured layout at another rank count, ring step by ring step.

    A ring of N ranks takes s(N) steps of size / N each, hence T_N(S) = s(N) / s(M) * T_M(S * M / N): the bandwidth part
    keeps its bus bandwidth exactly, and latency grows with the number of steps.
    """
    alike = size_bytes if collective == "broadcast" else size_bytes * held.num_ranks / num_ranks
    steps = ring_steps(collective, num_ranks) / ring_steps(collective, held.num_ranks)
    if collective == "broadcast":
        # A pipelined chain: the whole buffer passes every link once, whatever the number of ranks.
        latency_s = held.curve.times_s[0]
        return curve_time_s(held.curve, alike) + max(steps - 1, 0.0) * latency_s, curve_cpu(held.curve, alike)
    return steps * curve_time_s(held.curve, alike), curve_cpu(held.curve, alike)


def _distance(measured: int, wanted: int) -> float:
    return max(measured, wanted) / min(measured, wanted)
