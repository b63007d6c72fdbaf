"""One workload and one fabric on which the planner's tests agree."""

from __future__ import annotations

from wirespeed.fabric.topology import CodecCurve, CollectiveCurve, Curve, Fabric, Figure, Host
from wirespeed.records import Collective
from wirespeed.sim.training import STAGES
from wirespeed.spec.workload import GradientTensor, TrainingWorkload

MIB = 2**20
SIZES_BYTES = (1024, 65_536, MIB, 16 * MIB, 256 * MIB)


def linear_curve(latency_s: float, s_per_byte: float, *, cpu: float = 0.0, residual: float = 0.0) -> Curve:
    return Curve(
        sizes_bytes=SIZES_BYTES,
        times_s=tuple(latency_s + size * s_per_byte for size in SIZES_BYTES),
        residual=residual,
        cpu=(cpu,) * len(SIZES_BYTES) if cpu else (),
    )


def gigabit_fabric(*, codecs: tuple[str, ...] = ("half", "int8", "topk@1%"), rate_bit_per_s: float = 1e9) -> Fabric:
    """Four hosts; collectives at 95 % of the rate with 1 ms of latency; codecs at 2 GB/s per stage."""
    factors: tuple[tuple[Collective, float], ...] = (("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75))
    return Fabric(
        name="test",
        hosts=tuple(
            Host(name=f"n{i}", rate_bit_per_s=Figure(value=rate_bit_per_s, origin="measured"), cpus=0.5)
            for i in range(4)
        ),
        collectives=tuple(
            CollectiveCurve(
                collective=collective,
                backend="gloo",
                num_ranks=4,
                ranks_per_host=1,
                curve=linear_curve(1e-3, 8 * factor / (0.95 * rate_bit_per_s), cpu=0.1, residual=0.04),
            )
            for collective, factor in factors
        ),
        codecs=tuple(
            CodecCurve(codec=codec, stage=stage, kind="default", num_ranks=4, curve=linear_curve(1e-5, 5e-10))
            for codec in codecs
            for stage in STAGES[codec.partition("@")[0]]
        ),
    )


def gigabit_workload(*, num_gradients: int = 40, elements: int = 2**18) -> TrainingWorkload:
    """40 gradients of 1 MiB over 200 ms of backward: 60 MiB sent by dense, half a second at 1 Gbit/s."""
    return TrainingWorkload(
        gradients=tuple(
            GradientTensor(name=f"g{i}", num_elements=elements, ready_s=0.2 * (i + 1) / num_gradients)
            for i in range(num_gradients)
        ),
        forward_s=0.1,
        backward_s=0.2,
        optimizer_s=0.02,
        num_ranks=4,
        cpus_per_rank=0.5,
    )
