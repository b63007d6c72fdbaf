"""Measured curves in place of closed forms: which curve fits, and how it is carried to another layout.

A measured time of S bytes over M ranks is carried to another layout step by step: with l times the latency and b times
the seconds per byte of the layout that was measured, T(S) = l * T_measured(S * b / l). Of a ring over N ranks that is
N - 1 over M - 1 steps of S / N bytes each; of an uplink shared by four flows it is the time of four times the bytes,
and so it is of NICs at a quarter of the rate. Nothing is changed where l and b are 1.

What the library costs the cores is carried by messages in place of steps: as many times the CPU seconds of a message of
as many bytes. Where hosts have fewer cores for it than the wire leaves time, the cores bind. Assumes that all ranks
work alike, and that at the rates of the measurement the cores were not the limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import msgspec
import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric.curves import curve_time_s, is_in_range, isotonic
from wirespeed.fabric.network import Floats
from wirespeed.fabric.parts import Figure
from wirespeed.fabric.patterns import Operation
from wirespeed.fabric.phases import Timed
from wirespeed.fabric.placement import Groups, Placement, place, stack_groups
from wirespeed.fabric.topology import CollectiveCurve, Curve, Fabric, Host
from wirespeed.spec.workload import Origin

SAME = 1e-6
"""Relative distance below which two layouts count as the same: rounding, far below any measurement."""
CARRIED = 0.2
"""Worst error of published sweeps predicted from their neighbours in log-log, leaving one out: 20 to 26 %."""
_TREND = (-0.1, 1.1)
"""Logarithm of the factor between two numbers of ranks that counts as a trend: from a little less to three times."""
SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class Measured:
    """A curve and the layout in which it was measured: ranks rack by rack on the first hosts of ``fabric``."""

    curve: CollectiveCurve
    fabric: Fabric
    placement: Placement
    groups: list[Groups]
    is_alike: bool
    """Measured with the type that is asked for."""
    spent: CollectiveCurve | None = None
    """What tells the cost to the cores, where ``curve`` was changed: waiting longer is no more work."""


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A curve carried to a layout with ``latency`` and ``transfer`` times those of its own.

    ``messages`` and ``moved``: times the messages, and the bytes that they carry together, of the layout measured;
    ``cores``: those of the layout over its ranks, infinite where they are not known. ``shared_s_per_byte``: of a link
    that several flows share, where none was shared when it was measured; there one flow uses what another leaves while
    it waits, so that the link has no idle time to carry over.
    """

    measured: Measured
    latency: float
    transfer: float
    messages: float = 1.0
    moved: float = 1.0
    cores: float = math.inf
    shared_s_per_byte: float = 0.0

    @classmethod
    def scaled(cls, measured: Measured, wanted: Timed, reference: Timed, cores: float = math.inf) -> Calibrated:
        """Carry a curve from the layout timed as ``reference`` to the one timed as ``wanted``."""
        has_alpha = reference.alpha_s.sum() > 0 and np.isfinite(wanted.alpha_s).all()
        latency = (
            wanted.alpha_s[:, -1].sum() / reference.alpha_s[:, -1].sum()
            if has_alpha
            else wanted.steps.sum() / reference.steps.sum()
        )
        has_rate = reference.last_s_per_byte > 0 and wanted.last_s_per_byte > 0
        transfer = wanted.last_s_per_byte / reference.last_s_per_byte if has_rate else wanted.weight / reference.weight
        shared_s_per_byte = 0.0
        was_single = reference.single_s_per_byte >= reference.last_s_per_byte * (1 - SAME)
        if has_rate and was_single and wanted.single_s_per_byte < wanted.last_s_per_byte * (1 - SAME):
            shared_s_per_byte = wanted.last_s_per_byte
            transfer = max(wanted.single_s_per_byte, SAME * wanted.last_s_per_byte) / reference.last_s_per_byte
        sends = min(reference.messages, wanted.messages, reference.net_weight, wanted.net_weight) > 0
        return cls(
            measured=measured,
            latency=float(latency),
            transfer=float(transfer),
            messages=wanted.messages / reference.messages if sends else 1.0,
            moved=wanted.net_weight / reference.net_weight if sends else 1.0,
            cores=cores if sends else math.inf,
            shared_s_per_byte=float(shared_s_per_byte),
        )

    def seconds(self, sizes_bytes: Floats) -> Floats:
        """Times for sizes (S,)."""
        return np.maximum(self._wire_s(sizes_bytes), self._cpu_s(sizes_bytes))

    def _wire_s(self, sizes_bytes: Floats) -> Floats:
        curve = self.measured.curve.curve
        scale = self.transfer / self.latency
        alone = np.array([self.latency * curve_time_s(curve, float(size) * scale) for size in sizes_bytes])
        if self.is_same or not self.shared_s_per_byte:
            return alone
        result: Floats = np.maximum(alone, self.latency_s + self.shared_s_per_byte * sizes_bytes)
        return result

    def _cpu_s(self, sizes_bytes: Floats) -> Floats:
        """What the cores take for a size when they do nothing else; never falling with size."""
        if self.is_same or not self.measured.curve.curve.cpu or math.isinf(self.cores):
            return np.zeros(sizes_bytes.shape)
        spent = _cpu_curve(self.measured.curve if self.measured.spent is None else self.measured.spent)
        scale = self.moved / self.messages
        return self.messages / self.cores * np.array([curve_time_s(spent, float(size) * scale) for size in sizes_bytes])

    def is_cpu_bound(self, size_bytes: float) -> bool:
        """Whether the cores, and no link, make it as slow as it is."""
        size = np.array([float(size_bytes)])
        return bool(self._cpu_s(size)[0] > self._wire_s(size)[0])

    @property
    def is_same(self) -> bool:
        """Whether the curve holds as it stands."""
        return abs(self.latency - 1) < SAME and abs(self.transfer - 1) < SAME and self.measured.is_alike

    def is_in_range(self, size_bytes: float) -> bool:
        """Whether this very layout and size were measured."""
        return self.is_same and is_in_range(self.measured.curve.curve, size_bytes)

    @property
    def origin(self) -> Origin:
        """The curve's own where it holds as it stands, else assumed."""
        return self.measured.curve.origin if self.is_same else "assumed"

    def uncertainty(self, size_bytes: float) -> float:
        """The curve's residual where it holds as it stands; carried over, no less than ``CARRIED``."""
        residual = self.measured.curve.curve.residual
        return residual if self.is_in_range(size_bytes) else max(residual, CARRIED)

    @property
    def latency_s(self) -> float:
        """What the smallest message takes."""
        return self.latency * self.measured.curve.curve.times_s[0]


def find_curve(
    fabric: Fabric, operation: Operation, placement: Placement, groups: Sequence[Groups], *, backend: str, dtype: str,
    beside: CollectiveCurve | None = None,
) -> Measured | None:  # fmt: skip
    """The curve whose layout is nearest to the groups'; None where none was measured that could be carried over.

    ``beside``: the nearest of another number of ranks, measured like this one on the same network.
    """
    if not fabric.collectives:
        return None
    largest = groups[0].ranks[0]
    ranks_per_host = largest.size / np.unique(placement.host[largest]).size
    moves = operation not in SUMS
    held = [
        c
        for c in fabric.collectives
        if c.collective == operation
        and not c.beside_compute
        and c.ranks_per_host == ranks_per_host
        and backend in ("any", c.backend)
        and c.num_ranks > 1
        and (beside is None or (c.num_ranks != beside.num_ranks and _kind(c) == _kind(beside)))
    ]
    rate = fabric.hosts[int(placement.host[largest[0]])].rate_bit_per_s
    held.sort(
        key=lambda c: (
            not (moves or c.dtype == dtype),
            _distance(c.rate_bit_per_s, None if rate is None else rate.value),
            max(c.num_ranks / largest.size, largest.size / c.num_ranks),
            c.num_ranks,
            c.backend,
            c.dtype,
        )
    )
    for curve in held:
        measured_on = fabric if curve.rate_bit_per_s is None else _bench(fabric, curve)
        try:
            measured_at = place(measured_on, curve.num_ranks, curve.ranks_per_host)
        except UsageError:
            # The fabric no longer has the hosts it was measured on.
            continue
        is_alike = moves or curve.dtype == dtype
        return Measured(curve, measured_on, measured_at, stack_groups(measured_at, None), is_alike)
    return None


def _distance(measured: float | None, wanted: float | None) -> float:
    """How far apart two rates are; a curve of the fabric's own NICs is nearest to them."""
    return 0.0 if measured is None or wanted is None else abs(math.log(measured / wanted))


def _kind(curve: CollectiveCurve) -> tuple[str, str, float | None]:
    return curve.backend, curve.dtype, curve.rate_bit_per_s


def with_trend(nearest: Measured, at: Timed, other: Measured, other_at: Timed, num_ranks: int) -> Measured:
    """The nearest curve as it would be with ``num_ranks``, told from how far the other one misses it.

    Ranks wait for each other, for cores and for queues, and do so the more of them there are. The other curve, carried
    to the layout of the nearest, shows by what factor that differs between the two numbers of ranks; the factor is
    taken to be the same for every doubling. It is smoothed so that it falls with size, since large messages hide what
    small ones wait for, and used no further beyond the nearest layout than the two are apart.
    """
    curve, ranks = nearest.curve.curve, nearest.curve.num_ranks
    sizes = np.array(curve.sizes_bytes, dtype=np.float64)
    shift = Calibrated.scaled(other, at, other_at)
    # Straight lines between points, not log-log: of a latency and a rate they say what is between without an error,
    # and errors of both curves would count as a trend.
    held = other.curve.curve
    carried = shift.latency * np.interp(sizes * shift.transfer / shift.latency, held.sizes_bytes, held.times_s)
    # Beyond its largest size the other curve tells nothing.
    known = sizes * shift.transfer / shift.latency <= held.sizes_bytes[-1]
    with np.errstate(divide="ignore"):
        missed = np.clip(np.log(np.array(curve.times_s) / carried), *_TREND)
    missed[~known] = missed[known][-1] if known.any() else 0.0
    falling = np.array(isotonic(missed.tolist()[::-1])[::-1])
    doublings = math.log(num_ranks / ranks) / math.log(ranks / other.curve.num_ranks)
    times = np.array(curve.times_s) * np.exp(falling * float(np.clip(doublings, -1.0, 1.0)))
    changed = msgspec.structs.replace(curve, times_s=tuple(np.maximum.accumulate(times).tolist()))
    return dataclasses.replace(
        nearest, curve=msgspec.structs.replace(nearest.curve, curve=changed), spent=nearest.curve
    )


def _bench(fabric: Fabric, curve: CollectiveCurve) -> Fabric:
    """The hosts that a curve of another network was measured on: as many as it needs, in one rack."""
    assert curve.rate_bit_per_s is not None
    rate = Figure(value=curve.rate_bit_per_s, origin=curve.origin)
    num_hosts = max(1, curve.num_ranks // curve.ranks_per_host)
    hosts = tuple(Host(name=f"h{i}", rate_bit_per_s=rate) for i in range(num_hosts))
    return Fabric(name=fabric.name, hosts=hosts, rtt_s=fabric.rtt_s)


@lru_cache(maxsize=64)
def _cpu_curve(held: CollectiveCurve) -> Curve:
    """CPU seconds of all ranks together against bytes; what noise makes fall with size is held level."""
    curve = held.curve
    spent = [held.num_ranks * time_s * share for time_s, share in zip(curve.times_s, curve.cpu, strict=True)]
    return Curve(
        sizes_bytes=curve.sizes_bytes,
        times_s=tuple(accumulate((max(one, 1e-9) for one in spent), max)),
        residual=curve.residual,
    )


def cores_of(fabric: Fabric, placement: Placement, groups: Sequence[Groups]) -> float:
    """The cores that all ranks of the groups have together, on the machine with the fewest per rank.

    Infinite where a host does not tell its own.
    """
    ranks = np.concatenate([part.ranks.ravel() for part in groups])
    hosts, counts = np.unique(placement.host[ranks], return_counts=True)
    if all(fabric.hosts[int(at)].cpus is None for at in hosts):
        return math.inf
    cores: dict[str, float] = defaultdict(float)
    for host in fabric.hosts:
        cores[host.machine or f"host {host.name}"] += math.inf if host.cpus is None else host.cpus
    working: dict[str, int] = defaultdict(int)
    for at, count in zip(hosts, counts, strict=True):
        host = fabric.hosts[int(at)]
        working[host.machine or f"host {host.name}"] += int(count)
    return float(ranks.size * min(cores[machine] / count for machine, count in working.items()))
