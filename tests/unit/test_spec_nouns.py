"""Workload, comparison and fabric: what they refuse, and what they derive."""

from __future__ import annotations

import math
from typing import Any

import pytest

from wirespeed.errors import DataError
from wirespeed.fabric.topology import Curve, Fabric, Figure, Host, Uplink
from wirespeed.spec.comparison import LossPoint, StepBreakdown
from wirespeed.spec.workload import GradientTensor, TrainingWorkload


def make_workload(**changes: Any) -> TrainingWorkload:
    fields: dict[str, Any] = {
        "gradients": (
            GradientTensor(name="head", num_elements=10, ready_s=0.01),
            GradientTensor(name="embed", num_elements=30, ready_s=0.03),
        ),
        "forward_s": 0.02,
        "backward_s": 0.04,
        "optimizer_s": 0.005,
        "data_s": 0.001,
        "other_s": 0.002,
        "num_ranks": 4,
    }
    return TrainingWorkload(**{**fields, **changes})


def test_workload_adds_up_its_elements_and_its_compute():
    assert make_workload().num_elements == 40
    assert make_workload().compute_s == pytest.approx(0.068)


def test_workload_refuses_gradients_that_are_not_in_backward_order():
    with pytest.raises(DataError, match="not in backward order"):
        make_workload(gradients=tuple(reversed(make_workload().gradients)))


@pytest.mark.parametrize("field", ["forward_s", "backward_s", "optimizer_s", "data_s", "other_s"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_workload_refuses_durations_that_cannot_be(field: str, value: float):
    with pytest.raises(DataError, match="negative or not finite"):
        make_workload(**{field: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ranks": 0},
        {"ranks_per_host": 0},
        {"gradients": (GradientTensor(name="w", num_elements=0, ready_s=0.0),)},
    ],
)
def test_workload_refuses_empty_gradients_and_no_rank(changes: dict[str, Any]):
    with pytest.raises(DataError, match="at least one of each"):
        make_workload(**changes)


def test_exposed_share_is_of_the_whole_step_and_zero_for_an_empty_one():
    parts = {"forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0, "data_s": 0.0, "other_s": 0.0}
    assert StepBreakdown(step_s=0.4, exposed_s=0.1, **parts).exposed_share == 0.25
    assert StepBreakdown(step_s=0.0, exposed_s=0.0, **parts).exposed_share == 0.0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_none(loss: float):
    assert LossPoint(step=1, train_s=0.1, loss=loss).loss is None
    assert LossPoint(step=1, train_s=0.1, loss=0.0).loss == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": ()}, "no hosts"),
        ({"hosts": (Host(name="a"), Host(name="a"))}, "names host 'a' twice"),
        (
            {"uplinks": (Uplink(rack="r9", rate_bit_per_s=Figure(value=1e9, origin="declared")),)},
            "rack 'r9', which holds no host",
        ),
        ({"hosts": (Host(name="a", rate_bit_per_s=Figure(value=0, origin="declared")),)}, "a rate of 0 bit/s"),
    ],
)
def test_fabric_refuses_what_cannot_be(changes: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        Fabric(**{"hosts": (Host(name="a"),), **changes})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figure_that_is_not_finite_is_refused(value: float):
    with pytest.raises(DataError, match="a finite number"):
        Figure(value=value, origin="measured")


@pytest.mark.parametrize(
    ("sizes", "times", "cpu"),
    [
        ((), (), ()),
        ((1, 2), (1.0,), ()),
        ((2, 1), (1.0, 2.0), ()),
        ((1, 1), (1.0, 2.0), ()),
        ((1, 2), (2.0, 1.0), ()),
        ((0, 1), (1.0, 2.0), ()),
        ((1, 2), (0.0, 1.0), ()),
        ((1, 2), (1.0, math.inf), ()),
        ((1,), (math.nan,), ()),
        ((1, 2), (1.0, 2.0), (0.5,)),
    ],
)
def test_curve_that_is_not_positive_monotone_and_finite_is_refused(sizes, times, cpu):
    with pytest.raises(DataError, match="curve"):
        Curve(sizes_bytes=sizes, times_s=times, residual=0.0, cpu=cpu)
