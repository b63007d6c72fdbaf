"""From the traces of a silent run to a workload: what a step computes, and when each gradient is ready.

The run exchanges nothing, so ranks drift apart in their parameters and never wait for each other: times are those of
compute under the contention of this place, and no loss of such a run means anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from wirespeed.errors import WorkloadFailure
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.train.report import breakdown_of, mean_breakdown
from wirespeed.train.trace import RunTrace


def workload_of(
    traces: Sequence[RunTrace], *, num_ranks: int, ranks_per_host: int, cpus_per_rank: float | None
) -> TrainingWorkload:
    """One rank's step without communication, from a silent run: means over ranks of medians over steps."""
    parts = [b for b in (breakdown_of(t.steps) for t in traces) if b is not None]
    if not parts or not traces[0].gradients:
        raise WorkloadFailure(
            "the probe saw no gradients", hint="does the script call backward() and optimizer.step()?"
        )
    mean = mean_breakdown(parts)
    last_s = traces[0].gradients[-1].ready_s
    scale = mean.backward_s / last_s if last_s > 0 else 1.0
    return TrainingWorkload(
        gradients=tuple(msgspec.structs.replace(g, ready_s=g.ready_s * min(scale, 1.0)) for g in traces[0].gradients),
        forward_s=mean.forward_s,
        backward_s=mean.backward_s,
        optimizer_s=mean.optimizer_s,
        data_s=mean.data_s,
        other_s=mean.other_s + mean.exposed_s,
        num_ranks=num_ranks,
        ranks_per_host=ranks_per_host,
        cpus_per_rank=cpus_per_rank,
    )
