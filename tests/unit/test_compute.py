"""From a probe's traces to a workload."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from wirespeed.errors import WorkloadFailure
from wirespeed.measure.steps import StepParts
from wirespeed.spec.workload import GradientTensor
from wirespeed.train.trace import RunTrace
from wirespeed.tune.compute import workload_of

pytestmark = pytest.mark.torch


def trace(rank: int, backwards_s: list[float], waits_s: list[float]) -> RunTrace:
    """Forward 1 s, optimizer 0.5 s; backward and the wait for the others as given, step by step."""
    return RunTrace(
        status="complete",
        rank=rank,
        steps=tuple(
            StepParts(
                step_s=1.5 + backward_s + wait_s,
                forward_s=1.0,
                backward_s=backward_s,
                exposed_s=wait_s,
                optimizer_s=0.5,
                data_s=0.0,
                other_s=0.0,
                bucket_ready_s=(),
            )
            for backward_s, wait_s in zip(backwards_s, waits_s, strict=True)
        ),
        gradients=(GradientTensor(name="w", num_elements=10, ready_s=2.0),),
    )


def test_compute_is_as_long_as_the_groups_step_where_ranks_are_slow_in_turn():
    # Backward takes 2 or 4 s, in turn; the other rank waits 2 s, and each meeting costs 0.1 s. Every step of the group
    # takes 1 + 4 + 0.5 = 5.5 s, while each rank's own parts have a mean of 1 + 3 + 0.5 = 4.5.
    traces = [trace(0, [2, 4] * 4, [2.1, 0.1] * 4), trace(1, [4, 2] * 4, [0.1, 2.1] * 4)]
    workload = workload_of(traces, num_ranks=2, ranks_per_host=1, cpus_per_rank=1.0)
    assert workload.compute_s == pytest.approx(5.5)
    assert workload.forward_s == pytest.approx(1.0 * 5.5 / 4.5)
    assert workload.gradients[0].ready_s == pytest.approx(2.0 * 5.5 / 4.5)


def test_ranks_that_are_alike_are_not_stretched():
    traces = [trace(rank, [2.0] * 8, [0.1] * 8) for rank in range(2)]
    workload = workload_of(traces, num_ranks=2, ranks_per_host=1, cpus_per_rank=1.0)
    assert workload.compute_s == pytest.approx(3.5)
    assert workload.backward_s == pytest.approx(2.0)


def test_a_probe_without_gradients_is_refused():
    with pytest.raises(WorkloadFailure, match="the probe saw no gradients"):
        workload_of([RunTrace(status="complete")], num_ranks=1, ranks_per_host=1, cpus_per_rank=None)
