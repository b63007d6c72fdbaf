"""Evaluate and fit curves of seconds against bytes: log-log interpolation, never one latency-and-bandwidth pair.

Inside the measured sizes a curve passes through its points. Below the smallest size the smallest size's time holds (a
message costs its latency); above the largest the marginal rate of the last two points goes on. A fit is the isotonic
regression of the log times, so noise can flatten a curve but never make a larger message cheaper. It can be wrong
between points that straddle a protocol switch: measure more sizes there.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from wirespeed.fabric.topology import Curve


def curve_time_s(curve: Curve, size_bytes: float) -> float:
    """Seconds at ``size_bytes``; monotone in size."""
    sizes, times = curve.sizes_bytes, curve.times_s
    if size_bytes <= sizes[0]:
        return times[0]
    if size_bytes >= sizes[-1]:
        return times[-1] + (size_bytes - sizes[-1]) * _marginal_s_per_byte(curve)
    above = bisect.bisect_right(sizes, size_bytes)
    low, high = sizes[above - 1], sizes[above]
    share = math.log(size_bytes / low) / math.log(high / low)
    log_time = (1 - share) * math.log(times[above - 1]) + share * math.log(times[above])
    # Rounding of exp and log may leave the interval by an ulp, which would break monotony at its ends.
    return min(max(math.exp(log_time), times[above - 1]), times[above])


def curve_cpu(curve: Curve, size_bytes: float) -> float:
    """CPU seconds per second of the collective: linear in log size, constant outside the measured sizes."""
    sizes, cpu = curve.sizes_bytes, curve.cpu
    if not cpu:
        return 0.0
    if size_bytes <= sizes[0]:
        return cpu[0]
    if size_bytes >= sizes[-1]:
        return cpu[-1]
    above = bisect.bisect_right(sizes, size_bytes)
    share = math.log(size_bytes / sizes[above - 1]) / math.log(sizes[above] / sizes[above - 1])
    return cpu[above - 1] + share * (cpu[above] - cpu[above - 1])


def is_in_range(curve: Curve, size_bytes: float) -> bool:
    """Whether the size lies inside what was measured."""
    return curve.sizes_bytes[0] <= size_bytes <= curve.sizes_bytes[-1]


def _marginal_s_per_byte(curve: Curve) -> float:
    sizes, times = curve.sizes_bytes, curve.times_s
    if len(sizes) < 2:
        return times[-1] / sizes[-1]
    # Points pooled by the fit stand level: the slope to the last lower one keeps bytes from being free beyond the end.
    low = next((i for i in range(len(sizes) - 2, -1, -1) if times[i] < times[-1]), len(sizes) - 2)
    return (times[-1] - times[low]) / (sizes[-1] - sizes[low])


def fit_curve(
    medians_s: Mapping[int, float],
    *,
    floor_s_per_byte: float = 0.0,
    cpu: Mapping[int, float] | None = None,
) -> Curve:
    """A monotone curve through measured medians (size in bytes -> seconds), clamped to a physical floor.

    ``residual`` is the largest relative distance between a median and the curve, so that a reader sees how much of the
    measurement was put right.
    """
    sizes = sorted(medians_s)
    smooth = isotonic([math.log(medians_s[size]) for size in sizes])
    times: list[float] = []
    for size, log_time in zip(sizes, smooth, strict=True):
        lowest = max(floor_s_per_byte * size, times[-1] if times else 0.0)
        times.append(max(math.exp(log_time), lowest))
    residual = max(abs(time / medians_s[size] - 1) for size, time in zip(sizes, times, strict=True))
    return Curve(
        sizes_bytes=tuple(sizes),
        times_s=tuple(times),
        residual=residual,
        cpu=() if cpu is None else tuple(cpu[size] for size in sizes),
    )


def isotonic(values: Sequence[float]) -> list[float]:
    """Least-squares non-decreasing fit with equal weights: pool adjacent violators (Barlow et al., 1972)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, num = pools.pop()
            mean = (mean * count + other * num) / (count + num)
            count += num
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
