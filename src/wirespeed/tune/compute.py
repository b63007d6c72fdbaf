"""From the traces of a silent run to a workload: what a step computes, and when each gradient is ready.

The run exchanges no gradients, so ranks drift apart in their parameters and no loss of it means anything. They meet
once per step, at the end of backward: a step of the whole group takes as long as its slowest rank, and which rank that
is changes from step to step where ranks share cores. Times are those of compute under the contention of this place.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from wirespeed.errors import WorkloadFailure
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.train.report import SKIPPED_STEPS, breakdown_of, mean_breakdown
from wirespeed.train.trace import RunTrace
from wirespeed.tune.compare import elapsed_steps


def workload_of(
    traces: Sequence[RunTrace], *, num_ranks: int, ranks_per_host: int, cpus_per_rank: float | None
) -> TrainingWorkload:
    """One rank's step without communication, from a silent run: means over ranks of medians over steps, stretched.

    They are stretched to the step of the whole group, less what meeting costs: the wait of the rank that comes last.
    """
    parts = [b for b in (breakdown_of(t.steps) for t in traces) if b is not None]
    if not parts or not traces[0].gradients:
        raise WorkloadFailure(
            "the probe saw no gradients", hint="does the script call backward() and optimizer.step()?"
        )
    mean = mean_breakdown(parts)
    last_s = traces[0].gradients[-1].ready_s
    scale = min(1.0, mean.backward_s / last_s) if last_s > 0 else 1.0
    alone_s = mean.forward_s + mean.backward_s + mean.optimizer_s + mean.data_s + mean.other_s
    stretch = max(1.0, _group_step_s(traces) / alone_s) if alone_s > 0 else 1.0
    return TrainingWorkload(
        gradients=tuple(msgspec.structs.replace(g, ready_s=g.ready_s * scale * stretch) for g in traces[0].gradients),
        forward_s=mean.forward_s * stretch,
        backward_s=mean.backward_s * stretch,
        optimizer_s=mean.optimizer_s * stretch,
        data_s=mean.data_s * stretch,
        other_s=mean.other_s * stretch,
        num_ranks=num_ranks,
        ranks_per_host=ranks_per_host,
        cpus_per_rank=cpus_per_rank,
    )


def _group_step_s(traces: Sequence[RunTrace]) -> float:
    """Median step of the whole group, without the meeting's own latency."""
    steps = [t.steps[SKIPPED_STEPS:] or t.steps for t in traces]
    elapsed = elapsed_steps([[step.step_s for step in rank] for rank in steps])
    # Whoever comes last waits for no one: what it still waits is the latency.
    latency = [min(step.exposed_s for step in ranks) for ranks in zip(*steps, strict=False)]
    return float(median(elapsed) - median(latency))
