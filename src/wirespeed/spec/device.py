"""Device: what computes, as data: peak rates, memory, and the shares of them that real kernels reach.

Two shares stand for all kernels: ``matrix_share`` of the peak for large matrix products and ``memory_share`` of the
memory's rate for everything that streams. They hold for well-written kernels of large shapes; small shapes are slower,
which ``matrix_s`` models by a reduction dimension that must fill the pipeline and by the bytes that must move.
"""

from __future__ import annotations

import math

import msgspec

from wirespeed.errors import UsageError
from wirespeed.spec.workload import Origin

BYTES_OF: dict[str, float] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator (or a whole CPU). Rates are vendor peaks for dense matrices, per device."""

    name: str
    flop_per_s: dict[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    matrix_share: float = 0.75
    memory_share: float = 0.8
    launch_s: float = 3e-6
    """Least time of one kernel."""
    half_depth: int = 128
    """Reduction length at which a matrix product reaches half of ``matrix_share``: fill and drain of the pipeline."""
    origin: Origin = "declared"
    source: str = ""

    def __post_init__(self) -> None:
        rates = (*self.flop_per_s.values(), self.memory_bytes, self.memory_bytes_per_s)
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise UsageError(f"got device {self.name!r} with a rate that is not positive", expected="rates above zero")
        if not (0 < self.matrix_share <= 1 and 0 < self.memory_share <= 1) or self.launch_s < 0:
            raise UsageError(
                f"got device {self.name!r} with shares {self.matrix_share:g} and {self.memory_share:g}",
                expected="shares above 0 and at most 1, and a launch of 0 s or more",
            )

    def peak(self, dtype: str) -> float:
        """Operations per second at ``dtype``. Raises UsageError where the device has none."""
        rate = self.flop_per_s.get(dtype)
        if rate is None:
            raise UsageError(
                f"got dtype {dtype!r} for device {self.name}", expected=f"one of {', '.join(sorted(self.flop_per_s))}"
            )
        return rate

    def matrix_s(self, rows: float, columns: float, depth: float, *, dtype: str, count: float = 1.0) -> float:
        """Seconds of ``count`` products (rows x depth) (depth x columns): operations or bytes, whichever is longer."""
        if rows <= 0 or columns <= 0 or depth <= 0 or count <= 0:
            return 0.0
        share = self.matrix_share * depth / (depth + self.half_depth)
        work_s = 2.0 * rows * columns * depth / (self.peak(dtype) * share)
        moved = BYTES_OF[dtype] * (rows * columns + columns * depth + rows * depth)
        return count * max(work_s, moved / (self.memory_bytes_per_s * self.memory_share)) + self.launch_s

    def stream_s(self, num_bytes: float) -> float:
        """Seconds of an element-wise kernel that reads and writes ``num_bytes`` in all."""
        return num_bytes / (self.memory_bytes_per_s * self.memory_share) + self.launch_s if num_bytes > 0 else 0.0
