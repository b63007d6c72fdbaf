"""Measured curves in place of closed forms: which curve fits, and how it is carried to another layout.

A measured time of S bytes over M ranks is carried to another layout step by step: with l times the latency and b times
the seconds per byte of the layout that was measured, T(S) = l * T_measured(S * b / l). Of a ring over N ranks that is
N - 1 over M - 1 steps of S / N bytes each; of an uplink shared by four flows it is the time of four times the bytes.
Nothing is changed where l and b are 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric.curves import curve_time_s, is_in_range
from wirespeed.fabric.network import Floats
from wirespeed.fabric.patterns import Operation
from wirespeed.fabric.phases import Timed
from wirespeed.fabric.placement import Groups, Placement, place, stack_groups
from wirespeed.fabric.topology import CollectiveCurve, Fabric
from wirespeed.spec.workload import Origin

SAME = 1e-6
"""Relative distance below which two layouts count as the same: rounding, far below any measurement."""
CARRIED = 0.2
"""Worst error of published sweeps predicted from their neighbours in log-log, leaving one out: 20 to 26 %."""
SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class Measured:
    """A curve and the layout in which it was measured: ranks rack by rack on the first hosts."""

    curve: CollectiveCurve
    placement: Placement
    groups: list[Groups]
    is_alike: bool
    """Measured with the type that is asked for."""


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A curve carried to a layout with ``latency`` and ``transfer`` times those of its own."""

    measured: Measured
    latency: float
    transfer: float

    @classmethod
    def scaled(cls, measured: Measured, wanted: Timed, reference: Timed) -> Calibrated:
        """Carry a curve from the layout timed as ``reference`` to the one timed as ``wanted``."""
        has_alpha = reference.alpha_s.sum() > 0 and np.isfinite(wanted.alpha_s).all()
        latency = (
            wanted.alpha_s[:, -1].sum() / reference.alpha_s[:, -1].sum()
            if has_alpha
            else wanted.steps.sum() / reference.steps.sum()
        )
        has_rate = reference.last_s_per_byte > 0 and wanted.last_s_per_byte > 0
        transfer = wanted.last_s_per_byte / reference.last_s_per_byte if has_rate else wanted.weight / reference.weight
        return cls(measured=measured, latency=float(latency), transfer=float(transfer))

    def seconds(self, sizes_bytes: Floats) -> Floats:
        """Times for sizes (S,)."""
        curve = self.measured.curve.curve
        scale = self.transfer / self.latency
        return np.array([self.latency * curve_time_s(curve, float(size) * scale) for size in sizes_bytes])

    def is_in_range(self, size_bytes: float) -> bool:
        """Whether this very layout and size were measured."""
        is_same = abs(self.latency - 1) < SAME and abs(self.transfer - 1) < SAME and self.measured.is_alike
        return is_same and is_in_range(self.measured.curve.curve, size_bytes)

    @property
    def origin(self) -> Origin:
        """The curve's own where it holds as it stands, else assumed."""
        is_same = abs(self.latency - 1) < SAME and abs(self.transfer - 1) < SAME and self.measured.is_alike
        return self.measured.curve.origin if is_same else "assumed"

    def uncertainty(self, size_bytes: float) -> float:
        """The curve's residual where it holds as it stands; carried over, no less than ``CARRIED``."""
        residual = self.measured.curve.curve.residual
        return residual if self.is_in_range(size_bytes) else max(residual, CARRIED)

    @property
    def latency_s(self) -> float:
        """What the smallest message takes."""
        return self.latency * self.measured.curve.curve.times_s[0]


def find_curve(
    fabric: Fabric, operation: Operation, placement: Placement, groups: Sequence[Groups], *, backend: str, dtype: str
) -> Measured | None:
    """The curve whose layout is nearest to the groups'; None where none was measured that could be carried over."""
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
    ]
    held.sort(
        key=lambda c: (
            not (moves or c.dtype == dtype),
            max(c.num_ranks / largest.size, largest.size / c.num_ranks),
            c.num_ranks,
            c.backend,
            c.dtype,
        )
    )
    for curve in held:
        try:
            measured_at = place(fabric, curve.num_ranks, curve.ranks_per_host)
        except UsageError:
            # The fabric no longer has the hosts it was measured on.
            continue
        return Measured(curve, measured_at, stack_groups(measured_at, None), moves or curve.dtype == dtype)
    return None
