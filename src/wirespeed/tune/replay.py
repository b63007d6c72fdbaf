"""Replay a model's training over a real network on a small machine: predict, run, compare.

Real DDP, real buckets, real sessions and a real (shaped) network; compute is replaced by layers that sleep until their
recorded times. Gradient bytes, bucket sizes and the network's rate are divided by one common scale, so that times are
those of full size. Three things do not scale: a codec encodes ``1 / scale`` of the bytes (so it looks ``scale`` times
as fast as this CPU is), and so does the copying of gradients, while the latency of a message stays what it is here.
Results say the scale. All strategies run in one process group, block after block, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median

import msgspec

from wirespeed import records
from wirespeed.errors import DataError, MissingCapability, PeerFailure, UsageError, WirespeedError, WorkloadFailure
from wirespeed.fabric.calibrate import calibrate
from wirespeed.fabric.topology import Fabric
from wirespeed.measure import environment, stats
from wirespeed.plan.models import ReplayModel, replay_workload
from wirespeed.plan.search import predict
from wirespeed.records import CodecsRecord, CollectivesRecord, LinksRecord
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.replay import ReplayArm, ReplayRecord
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.train.report import breakdown_of, mean_breakdown
from wirespeed.tune import survey
from wirespeed.tune.loop import Progress
from wirespeed.tune.places import LOG, Place, worker_command
from wirespeed.tune.replay_worker import (
    COMPUTE,
    PLAN,
    BlockResult,
    ReplayPlan,
    ReplayResult,
    heartbeat_path,
    result_path,
)
from wirespeed.tune.verdict import last_words
from wirespeed.tune.watch import RunEnd, Watch
from wirespeed.units import KIB, MIB, format_duration, format_size

MIN_BUCKET_BYTES = 1024
SCALES = (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64, 80, 100, 125, 160, 200, 250, 400, 500, 800, 1000)
MAX_RATE_BIT_PER_S = 1e9
"""Of one lab link: above it two cores, and not the network, are the limit of a few hosts."""
MAX_TOTAL_BIT_PER_S = 4e9
"""Of all lab links together, for the same reason."""
MAX_GRADIENT_BYTES = 512 * MIB
"""Of all ranks together: DDP, its buckets, residuals and buffers take about five times that."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What to replay. ``workload`` is at the scale of the run already; strategies are as at full size."""

    title: str
    source: str
    workload: TrainingWorkload
    strategies: tuple[Strategy, ...]
    scale: float = 1.0
    num_steps: int = 8
    num_warmup: int = 3
    rounds: int = 2
    predicts: bool = True
    stall_timeout_s: float = 120.0
    links_s: float = 0.25


def options_of(
    model: ReplayModel,
    strategies: Sequence[Strategy],
    *,
    num_ranks: int,
    scale: float,
    compute_s: float | None = None,
    **others: float | bool,
) -> ReplayOptions:
    """Options for a model of the catalogue. ``others`` are fields of ``ReplayOptions``."""
    return ReplayOptions(
        title=model.title,
        source=f"{model.source}; {model.batch}",
        workload=replay_workload(model, num_ranks=num_ranks, compute_s=compute_s, scale=scale),
        strategies=tuple(strategies),
        scale=scale,
        **others,  # type: ignore[arg-type]
    )


def fitting_scale(rate_bit_per_s: float, num_ranks: int, num_parameters: int) -> int:
    """The smallest scale that this project has found to fit two cores and a few GiB. Raises UsageError beyond 1000."""
    limit = min(MAX_RATE_BIT_PER_S, MAX_TOTAL_BIT_PER_S / num_ranks)
    for scale in SCALES:
        if rate_bit_per_s / scale <= limit and 4 * num_parameters * num_ranks / scale <= MAX_GRADIENT_BYTES:
            return scale
    raise UsageError(
        f"got {rate_bit_per_s:g} bit/s on {num_ranks} hosts",
        expected=f"what a scale of {SCALES[-1]} brings down to {limit:g} bit/s a host",
        hint="name a larger --scale, fewer hosts or a slower rate",
    )


def scaled_strategy(strategy: Strategy, scale: float) -> Strategy:
    """The strategy with its bucket at the scale of the run, so that it fills as many buckets as at full size."""
    bucket_bytes = max(MIN_BUCKET_BYTES, round(strategy.bucket_bytes / scale))
    return msgspec.structs.replace(strategy, bucket_bytes=bucket_bytes)


def first_bucket_bytes(scale: float) -> int:
    """DDP's first bucket of 1 MiB, at the scale of the run."""
    return max(MIN_BUCKET_BYTES, round(MIB / scale))


def run_replay(options: ReplayOptions, place: Place, folder: Path, progress: Progress) -> ReplayRecord:
    """Run all strategies of the options, each ``rounds`` times in turn, and give the record.

    Raises what ended the run: PeerFailure for a link or a rank that was lost, MissingCapability for a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = _plan(options, place)
    for rank in range(place.num_ranks):
        result_path(folder, rank).unlink(missing_ok=True)
        heartbeat_path(folder, rank).unlink(missing_ok=True)
    records.write_bytes(folder / PLAN, msgspec.json.encode(plan))
    total = len(plan.blocks) * (plan.num_warmup + plan.num_steps)
    progress.phase(
        f"replaying {options.title} on {place.num_ranks} ranks: {', '.join(plan.strategies)}"
        + (", after measuring the network and the codecs" if plan.survey is not None else ""),
        total=total,
    )
    survey_s = 0.0 if plan.survey is None else 2 * (plan.survey.collectives_s + plan.survey.codecs_s) + 30
    watch = Watch(
        lambda rank: heartbeat_path(folder, rank),
        place.num_ranks,
        start_timeout_s=120.0 + survey_s + 2 * place.num_ranks,
        stall_timeout_s=options.stall_timeout_s,
        on_progress=progress.advance,
    )
    end = place.run(
        worker_command("wirespeed.tune.replay_worker", str(folder.resolve())),
        env={},
        folder=folder,
        watch=watch,
        timeout_s=600.0 + survey_s + total * options.stall_timeout_s,
    )
    _raise_unless_fine(end, folder)
    results = _read_results(folder, place.num_ranks)
    fabric = _fabric(folder, place) if plan.survey is not None else None
    return _record(options, plan, place, results, fabric, _goodput(folder))


def _plan(options: ReplayOptions, place: Place) -> ReplayPlan:
    if place.num_ranks < 2:
        raise UsageError("got one rank", expected="two hosts or more: one has nothing to exchange")
    if not options.strategies:
        raise UsageError("got no strategy to replay", expected="at least one, such as dense")
    if options.num_steps < 1 or options.rounds < 1 or options.num_warmup < 2:
        raise UsageError(
            f"got {options.num_steps} steps, {options.rounds} rounds and {options.num_warmup} warm-up steps",
            expected="1, 1 and 2 or more: DDP forms its buckets in the first step",
        )
    strategies = {s.name: scaled_strategy(s, options.scale) for s in options.strategies}
    names = list(strategies)
    # Turned by one place per round, so that no strategy always follows the same other.
    rounds = [[COMPUTE, *names[r % len(names) :], *names[: r % len(names)]] for r in range(options.rounds)]
    held = None
    if options.predicts:
        largest = 4 * max(sum(g.num_elements for g in options.workload.gradients) // 2, MIB // 4)
        sizes = tuple(size for size in (4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB) if size <= largest)
        held = survey.SurveyPlan(
            strategies=tuple(names), collectives_s=15.0, codecs_s=5.0, sizes_bytes=sizes, codec_sizes_bytes=sizes[1:]
        )
    return ReplayPlan(
        workload=options.workload,
        strategies=strategies,
        blocks=tuple(name for names in rounds for name in names),
        num_steps=options.num_steps,
        num_warmup=options.num_warmup,
        first_bucket_bytes=first_bucket_bytes(options.scale),
        survey=held,
        links_s=options.links_s,
    )


def _raise_unless_fine(end: RunEnd, folder: Path) -> None:
    if end.log_problem is not None:
        raise MissingCapability(end.log_problem, hint="free some space, or name another place with --out")
    if end.returncode == 0:
        return
    told = ": ".join(text for text in (end.reason, last_words(end)) if text)
    hint = f"the whole output is in {folder / LOG}"
    if end.is_peer_failure or end.is_stalled or end.returncode in (4, 137, 143):
        raise PeerFailure(f"a rank or a link failed during the replay: {told}", hint=hint)
    kinds: dict[int, type[WirespeedError]] = {2: UsageError, 3: MissingCapability}
    raise kinds.get(end.returncode, WorkloadFailure)(f"the replay failed: {told}", hint=hint)


def _read_results(folder: Path, num_ranks: int) -> list[ReplayResult]:
    results = []
    for rank in range(num_ranks):
        path = result_path(folder, rank)
        try:
            results.append(msgspec.json.decode(path.read_bytes(), type=ReplayResult))
        except (OSError, msgspec.MsgspecError) as fault:
            raise DataError(f"rank {rank} left no result: {fault}", hint=f"see {folder / LOG}") from fault
    return results


def _goodput(folder: Path) -> float | None:
    """Median over all pairs of what one TCP stream gave, at the scale of the run."""
    if not (folder / survey.LINKS).is_file():
        return None
    links = records.read(folder / survey.LINKS, LinksRecord)
    return median(median(sample.bit_per_s) for sample in links.samples)


def _fabric(folder: Path, place: Place) -> Fabric:
    links = records.read(folder / survey.LINKS, LinksRecord) if (folder / survey.LINKS).is_file() else None
    return calibrate(
        links,
        [records.read(folder / survey.COLLECTIVES, CollectivesRecord)],
        [records.read(folder / survey.CODECS_FILE, CodecsRecord)],
        name=place.description,
    )


def _record(  # noqa: PLR0917
    options: ReplayOptions,
    plan: ReplayPlan,
    place: Place,
    results: Sequence[ReplayResult],
    fabric: Fabric | None,
    goodput_bit_per_s: float | None,
) -> ReplayRecord:
    alone = _slowest([_blocks_of(result, COMPUTE) for result in results])
    compute_s = median(alone)
    warnings = list(dict.fromkeys(text for result in results for text in result.warnings))
    declared_s = options.workload.compute_s
    if compute_s > 1.05 * declared_s:
        warnings.append(
            f"the compute alone took {format_duration(compute_s)} instead of {format_duration(declared_s)}: "
            "this machine is too busy, or the step too short for so many ranks; a larger --compute helps"
        )
    arms = []
    for strategy in options.strategies:
        scaled = plan.strategies[strategy.name]
        prediction = None
        if fabric is not None:
            try:
                prediction = predict(
                    plan.workload, scaled, fabric, first_bucket_bytes=min(plan.first_bucket_bytes, scaled.bucket_bytes)
                )
            except DataError as fault:
                warnings.append(f"{strategy.name} could not be predicted: {fault}")
        arms.append(_arm(strategy, results, compute_s, options.scale, prediction))
    return ReplayRecord(
        environment=environment.capture(),
        model=options.title,
        source=options.source,
        num_parameters=round(options.workload.num_elements * options.scale),
        num_ranks=place.num_ranks,
        network=place.description,
        scale=options.scale,
        declared_bit_per_s=None if place.declared_bit_per_s is None else place.declared_bit_per_s * options.scale,
        goodput_bit_per_s=None if goodput_bit_per_s is None else goodput_bit_per_s * options.scale,
        compute_s=declared_s,
        measured_compute_s=compute_s,
        arms=tuple(arms),
        warnings=tuple(warnings),
    )


def _arm(
    strategy: Strategy,
    results: Sequence[ReplayResult],
    compute_s: float,
    scale: float,
    prediction: Prediction | None,
) -> ReplayArm:
    blocks = [_blocks_of(result, strategy.name) for result in results]
    times = _slowest(blocks)
    step_s = median(times)
    every = [block for held in blocks for block in held]
    parts = [breakdown_of([step for block in held for step in block.steps]) for held in blocks]
    counted = [block.wire_bytes_per_step for block in every if block.wire_bytes_per_step is not None]
    exposed_s = max(0.0, step_s - compute_s)
    return ReplayArm(
        name=strategy.name,
        strategy=strategy,
        step_times_s=tuple(times),
        step_s=step_s,
        spread=stats.spread(times),
        exposed_s=exposed_s,
        exposed_share=exposed_s / step_s,
        stated_bytes_per_step=scale * fmean(block.stated_bytes_per_step for block in every),
        wire_bytes_per_step=scale * fmean(counted) if len(counted) == len(every) else None,
        breakdown=mean_breakdown([part for part in parts if part is not None]),
        prediction=prediction,
        predicted_step_s=None if prediction is None else prediction.step_s,
        prediction_error=None if prediction is None else prediction.step_s / step_s - 1,
    )


def _blocks_of(result: ReplayResult, name: str) -> list[BlockResult]:
    return [block for block in result.blocks if block.name == name]


def _slowest(by_rank: Sequence[Sequence[BlockResult]]) -> list[float]:
    """Step by step, over the blocks in order, the time of the slowest rank."""
    times = [[step_s for block in blocks for step_s in block.step_times_s] for blocks in by_rank]
    return [max(step) for step in zip_longest(*times, fillvalue=0.0)]


def describe(record: ReplayRecord) -> list[str]:
    """Lines that say what was replayed and on what: for a table's head."""
    scale = f", bytes and rates divided by {record.scale:g}" if record.scale != 1 else ""
    size, told = format_size(4 * record.num_parameters), format_duration(record.compute_s)
    return [
        f"{record.model}, {size} of gradients, {record.num_ranks} ranks on {record.network}{scale}",
        f"compute {format_duration(record.measured_compute_s)} a step without communication (told to take {told})",
    ]
