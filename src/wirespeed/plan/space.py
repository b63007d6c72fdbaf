"""The space of strategies: every legal combination for a workload, down to the fidelity that is allowed.

Only flat strategies that exchange every step are tried unless others are asked for. Whether hosts have as many ranks
each, as a hierarchical one needs, is known to the ranks alone. A longer period is always
predicted to be faster, and no prediction sees what it costs the loss: which period a model bears has to be tried, by
name (``wirespeed tune --strategies local_sgd@8``).

Two bucket sizes that fill the same buckets are one strategy; the default size is kept, else the smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

from wirespeed.errors import UsageError
from wirespeed.sim.training import Bucket, fill_buckets
from wirespeed.spec.payloads import CODECS, CodecName
from wirespeed.spec.strategy import DEFAULT_BUCKET_BYTES, FIDELITIES, PERIODIC, Fidelity, Schedule, Strategy, Topology
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.units import MIB

BUCKET_SIZES_BYTES = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, DEFAULT_BUCKET_BYTES, 50 * MIB, 100 * MIB)
TOPK_RATIOS = (0.01, 0.02, 0.05, 0.1)
LOWRANK_RANKS = (4, 32)
PERIODS = (4, 16, 64)


def legal_strategies(
    workload: TrainingWorkload,
    fidelity: Fidelity = "half",
    *,
    codecs: Sequence[CodecName] = CODECS,
    bucket_sizes_bytes: Sequence[int] = BUCKET_SIZES_BYTES,
    ratios: Sequence[float] = TOPK_RATIOS,
    matrix_ranks: Sequence[int] = LOWRANK_RANKS,
    schedules: Sequence[Schedule] = ("every_step",),
    periods: Sequence[int] = PERIODS,
    topologies: Sequence[Topology] = ("flat",),
) -> tuple[Strategy, ...]:
    """Strategies at least as faithful as ``fidelity``, most faithful first, and always the default, dense."""
    if fidelity not in FIDELITIES:
        raise UsageError(f"got fidelity {fidelity!r}", expected=f"one of {', '.join(FIDELITIES)}")
    sizes = _distinct_sizes(workload, bucket_sizes_bytes)
    when = [(schedule, period) for schedule in schedules for period in (periods if schedule in PERIODIC else (None,))]
    found = [Strategy()]
    for codec in codecs:
        for ratio in ratios if codec == "topk" else (None,):
            for matrix_rank in matrix_ranks if codec == "lowrank" else (None,):
                where = [t for t in topologies if t == "flat" or codec != "lowrank"]
                found += [
                    Strategy(
                        codec=codec,
                        ratio=ratio,
                        matrix_rank=matrix_rank,
                        bucket_bytes=size,
                        topology=topology,
                        schedule=schedule,
                        period=period,
                    )
                    for topology in where
                    for schedule, period in when
                    for size in sizes
                ]
    return tuple(dict.fromkeys(strategy for strategy in found if strategy.allows(fidelity)))


def _distinct_sizes(workload: TrainingWorkload, sizes_bytes: Sequence[int]) -> list[int]:
    by_buckets: dict[tuple[Bucket, ...], int] = {}
    for size in sorted(set(sizes_bytes), key=lambda size: (size != DEFAULT_BUCKET_BYTES, size)):
        by_buckets.setdefault(fill_buckets(workload.gradients, size), size)
    return sorted(by_buckets.values())
