"""One rank of a replay: ``python -m wirespeed.tune.replay_worker FOLDER``, started by ``tune.replay``.

Measures the links, the collectives and the codecs as far as the plan asks, then steps through the plan's blocks: each a
strategy for some steps, all in one process group, so that strategies are compared within minutes and not within runs.
What was measured is left in the folder as JSON.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from wirespeed import launch, records
from wirespeed.errors import MissingCapability, WirespeedError
from wirespeed.measure.collectives import measure_collectives
from wirespeed.measure.links import measure_links
from wirespeed.measure.steps import StepParts
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.train.rebucket import rebucket
from wirespeed.train.registry import start_session
from wirespeed.train.session import Session
from wirespeed.train.speed import measure_codecs, slowest_of
from wirespeed.tune.replay_layers import ReplayModule, ReplayOptimizer
from wirespeed.tune.survey import CODECS_FILE, COLLECTIVES, LINKS, MIN_SIZES, SurveyPlan, needed_collectives
from wirespeed.units import MIB

PLAN = "replay.json"
COMPUTE = "compute"
"""The name of the block without communication."""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks do. Everything here is at the scale of the run, not at full size."""

    workload: TrainingWorkload
    strategies: dict[str, Strategy]
    """By the name that the outcome gets."""
    blocks: tuple[str, ...]
    """Names of strategies, or ``compute``, in the order in which they run."""
    num_steps: int
    num_warmup: int
    first_bucket_bytes: int
    survey: SurveyPlan | None = None
    links_s: float = 0.25
    timeout_s: float = 120.0


class BlockResult(msgspec.Struct, frozen=True, kw_only=True):
    """One block on one rank. ``steps`` is empty for the block without communication, which has times only."""

    name: str
    step_times_s: tuple[float, ...]
    steps: tuple[StepParts, ...] = ()
    stated_bytes_per_step: float = 0.0
    wire_bytes_per_step: float | None = None


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """All blocks of one rank."""

    rank: int
    blocks: tuple[BlockResult, ...]
    warnings: tuple[str, ...] = ()


def result_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its result: a place brings files of this name home."""
    return folder / f"trace-{rank}.json"


def heartbeat_path(folder: Path, rank: int) -> Path:
    """Where a rank notes how many steps it has done."""
    return folder / f"step-{rank}"


class _Replay:
    """The model, its session and the count of steps on one rank."""

    def __init__(self, plan: ReplayPlan, folder: Path, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._heartbeat = os.open(heartbeat_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self._num_done = 0
        self._batch = torch.zeros(())
        self._alone = ReplayModule(plan.workload, seed=rank)
        self._idle = ReplayOptimizer(self._alone.parameters(), step_s=self._rest_s)
        module = ReplayModule(plan.workload, seed=rank)
        self._optimizer = ReplayOptimizer(module.parameters(), step_s=self._rest_s)
        first = next(iter(plan.strategies.values()))
        self._ddp = DistributedDataParallel(
            module,
            bucket_cap_mb=first.bucket_bytes / MIB,
            gradient_as_bucket_view=True,
            init_sync=False,
            broadcast_buffers=False,
        )
        self._session: Session | None = None
        self._present: Strategy | None = None

    @property
    def _rest_s(self) -> float:
        return self._plan.workload.optimizer_s + self._plan.workload.other_s

    def run(self, name: str) -> BlockResult:
        dist.barrier()
        if name == COMPUTE:
            return self._run_alone()
        session = self._switch(self._plan.strategies[name])
        before = session.clock.num_steps
        for _ in range(self._plan.num_warmup + self._plan.num_steps):
            self._optimizer.zero_grad()
            self._ddp(self._batch).backward()
            self._optimizer.step()
            self._beat()
        steps = session.clock.steps()[before - session.clock.num_steps + self._plan.num_warmup :]
        wire = session.wire[-len(steps) - 1 :]
        stated, counted = ((wire[-1][side] - wire[0][side]) / (len(wire) - 1) for side in (0, 1))
        return BlockResult(
            name=name,
            step_times_s=tuple(step.step_s for step in steps),
            steps=tuple(steps),
            stated_bytes_per_step=stated,
            wire_bytes_per_step=None if wire[0][1] < 0 else counted,
        )

    def _run_alone(self) -> BlockResult:
        ends = [time.perf_counter()]
        for _ in range(self._plan.num_warmup + self._plan.num_steps):
            self._idle.zero_grad()
            self._alone(self._batch).backward()
            self._idle.step()
            self._beat()
            ends.append(time.perf_counter())
        times = [end - begin for begin, end in pairwise(ends)]
        return BlockResult(name=COMPUTE, step_times_s=tuple(times[self._plan.num_warmup :]))

    def _switch(self, strategy: Strategy) -> Session:
        if strategy != self._present:
            # Before the session does: it would let the first bucket be 1 MiB, which is a scale too large here.
            if not rebucket(self._ddp, strategy.bucket_bytes, first_bucket_bytes=self._plan.first_bucket_bytes):
                raise MissingCapability(
                    "this version of torch cannot change the bucket size of a DDP model", hint="use torch 2.6 to 2.13"
                )
            if self._session is None:
                self._session = start_session(self._ddp, self._optimizer, strategy)
            else:
                self._session.switch(strategy)
            self._present = strategy
        assert self._session is not None
        return self._session

    def _beat(self) -> None:
        self._num_done += 1
        os.pwrite(self._heartbeat, struct.pack("<q", self._num_done), 0)


def main(folder: Path) -> int:
    """Do what ``replay.json`` in the folder asks for."""
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=ReplayPlan)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    ranks = launch.ranks()
    if ranks.local_world_size != ranks.world_size and plan.links_s > 0:
        links = measure_links(ranks, streams=(1,), duration_s=plan.links_s)
        if links is not None:
            records.write(folder / LINKS, links)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout_s))
    if plan.survey is not None:
        _survey(plan, plan.survey, folder, ranks)
    replay = _Replay(plan, folder, ranks.rank)
    blocks = tuple(replay.run(name) for name in plan.blocks)
    result = ReplayResult(rank=ranks.rank, blocks=blocks)
    records.write_bytes(result_path(folder, ranks.rank), msgspec.json.encode(result))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # lanes and gloo's threads need not agree to end


def _survey(plan: ReplayPlan, survey: SurveyPlan, folder: Path, ranks: launch.Ranks) -> None:
    strategies = list(plan.strategies.values())
    measured = measure_collectives(
        collectives=needed_collectives(strategies),
        sizes_bytes=survey.sizes_bytes,
        deadline_s=survey.collectives_s,
        min_sizes=MIN_SIZES,
    )
    if measured is not None:
        records.write(folder / COLLECTIVES, measured)
    dist.barrier()
    codecs = measure_codecs(
        strategies,
        survey.codec_sizes_bytes,
        num_ranks=ranks.world_size,
        concurrent=ranks.world_size,
        deadline_s=survey.codecs_s,
        shapes=[gradient.shape for gradient in plan.workload.gradients if gradient.shape],
        slowest=slowest_of(None, torch.device("cpu")),
    )
    if ranks.rank == 0:
        records.write(folder / CODECS_FILE, codecs)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except WirespeedError as fault:
        sys.stderr.write(f"wirespeed: {fault}\n")
        sys.exit(fault.exit_code)
