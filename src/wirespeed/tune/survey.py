"""Survey the network and the codecs from inside a place: ``python -m wirespeed.tune.survey FOLDER``, one rank.

Links first (no torch), then the collectives that strategies need, then every codec on all ranks at once, so that cores
which ranks share are shared in the figures too. Rank 0 leaves the Records in the folder.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from wirespeed import launch, records
from wirespeed.errors import WirespeedError
from wirespeed.measure.collectives import measure_collectives
from wirespeed.measure.links import measure_links
from wirespeed.plan.space import LOWRANK_RANKS, TOPK_RATIOS
from wirespeed.records import Collective
from wirespeed.spec.payloads import CODECS
from wirespeed.spec.strategy import Strategy
from wirespeed.train.speed import measure_codecs, slowest_of
from wirespeed.units import KIB, MIB

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
LINKS = "links.json"
COLLECTIVES = "collectives.json"
BESIDE_COMPUTE = "collectives-beside-compute.json"
BESIDE_COMPUTE_SIZES = (64 * KIB, MIB, 4 * MIB)
"""Few, so that the largest is reached: what compute costs a small message is many times what it costs a large one."""
CODECS_FILE = "codecs.json"
MIN_SIZES = 2
"""Of every collective, however short the time: nothing is predicted without, and one tells no latency from rate."""


class SurveyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. ``num_elements``: of the largest bucket that matters; times bound each part."""

    strategies: tuple[str, ...]
    collectives_s: float = 25.0
    beside_compute_s: float = 20.0
    codecs_s: float = 10.0
    links_s: float = 10.0
    sizes_bytes: tuple[int, ...] = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
    codec_sizes_bytes: tuple[int, ...] = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the script's gradients, in the order in which backward makes them."""

    def up_to(self, num_bytes: int) -> SurveyPlan:
        """The same plan without sizes that no bucket of ``num_bytes`` of gradients reaches (1 MiB always stays)."""
        limit = 4 * max(num_bytes, MIB // 4)
        return msgspec.structs.replace(
            self,
            sizes_bytes=tuple(size for size in self.sizes_bytes if size <= limit),
            codec_sizes_bytes=tuple(size for size in self.codec_sizes_bytes if size <= limit),
        )


def needed_collectives(strategies: list[Strategy]) -> tuple[Collective, ...]:
    """The collectives that these strategies use."""
    names: dict[Collective, None] = {"all_reduce": None}
    for strategy in strategies:
        names.update(dict.fromkeys(t.collective for t in strategy.transfers(1024, 2)))
    return tuple(names)


def default_strategies() -> tuple[Strategy, ...]:
    """Each codec with every parameter that the search tries."""
    return (
        *(Strategy(codec=codec) for codec in CODECS if codec not in {"topk", "lowrank"}),
        *(Strategy(codec="topk", ratio=ratio) for ratio in TOPK_RATIOS),
        *(Strategy(codec="lowrank", matrix_rank=matrix_rank) for matrix_rank in LOWRANK_RANKS),
    )


def main(folder: Path) -> int:
    """Measure what ``plan.json`` in the folder asks for."""
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=SurveyPlan)
    strategies = [Strategy.parse(name) for name in plan.strategies]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    ranks = launch.ranks()
    if ranks.local_world_size != ranks.world_size:  # ranks of one host have no link between them
        links = measure_links(ranks, streams=(1,), duration_s=plan.links_s / 40)
        if links is not None:
            records.write(folder / LINKS, links)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=COLLECTIVE_TIMEOUT)
    measured = measure_collectives(
        collectives=needed_collectives(strategies),
        sizes_bytes=plan.sizes_bytes,
        deadline_s=plan.collectives_s,
        min_sizes=MIN_SIZES,
    )
    if measured is not None:
        records.write(folder / COLLECTIVES, measured)
    if not torch.cuda.is_available():  # on an accelerator nothing of the step wants the cores that collectives want
        beside = measure_collectives(
            collectives=needed_collectives(strategies),
            sizes_bytes=[size for size in BESIDE_COMPUTE_SIZES if size <= max(plan.sizes_bytes)],
            repeats=5,
            warmup=1,
            deadline_s=plan.beside_compute_s,
            compute_threads=torch.get_num_threads(),
        )
        if beside is not None:
            records.write(folder / BESIDE_COMPUTE, beside)
    dist.barrier()
    codecs = measure_codecs(
        strategies,
        plan.codec_sizes_bytes,
        num_ranks=ranks.world_size,
        concurrent=ranks.world_size,
        deadline_s=plan.codecs_s,
        shapes=plan.shapes,
        slowest=slowest_of(None, torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    )
    if ranks.rank == 0:
        records.write(folder / CODECS_FILE, codecs)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except WirespeedError as fault:
        sys.stderr.write(f"wirespeed: {fault}\n")
        sys.exit(fault.exit_code)
