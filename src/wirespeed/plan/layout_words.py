"""A layout's prediction in words with numbers: where the time goes, what binds, what each change would give.

Every "would give" is a prediction of the same layout with one thing changed. A change below the margin of a choice is
called not worth it, and where all are, the advice is to change nothing.
"""

from __future__ import annotations

import msgspec

from wirespeed.fabric.topology import Fabric
from wirespeed.plan.axes import FabricAxes
from wirespeed.plan.explain import WhatIf
from wirespeed.plan.layouts import LayoutSearch
from wirespeed.plan.question import Question
from wirespeed.plan.search import MARGIN
from wirespeed.plan.upgrades import rdma_sibling, with_nic
from wirespeed.sim.axes import AxisCosts, ScaledAxes
from wirespeed.sim.parallelism import LayoutPrediction, predict_layout
from wirespeed.spec.device import Device
from wirespeed.units import format_duration, format_percent, format_size


class LayoutExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One layout, explained. ``latency_share``: of its communication, what does not grow with bytes."""

    layout: str
    step_s: float
    parts_s: dict[str, float]
    what_ifs: tuple[WhatIf, ...]
    latency_share: float
    lines: tuple[str, ...]


def explain_layout(
    question: Question, prediction: LayoutPrediction, search: LayoutSearch | None = None
) -> LayoutExplanation:
    """Explain ``prediction``, made for ``question``; with ``search`` also what to do."""
    shape = question.model.transformer
    assert shape is not None
    costs = FabricAxes(question.fabric, question.placement, prediction.layout, backend=question.backend)

    def step_s(changed: AxisCosts, device: Device = question.device) -> float:
        return predict_layout(
            shape, device, prediction.layout, changed, slowdown=question.slowdown, check_memory=False
        ).step_s

    steps_s = {
        "twice the bandwidth of every link": step_s(ScaledAxes(costs=costs, wire=0.5)),
        "half the latency": step_s(ScaledAxes(costs=costs, latency=0.5)),
        "a network that costs nothing": step_s(ScaledAxes(costs=costs, wire=0.0, latency=0.0)),
    }
    rdma = rdma_sibling(question.fabric)
    if rdma is not None:
        changed = _axes_on(with_nic(question.fabric, rdma), question, prediction)
        steps_s[f"RDMA at the same line rate ({rdma})"] = step_s(changed)
    if question.slowdown > 1:
        even = predict_layout(shape, question.device, prediction.layout, costs, check_memory=False)
        steps_s["every device as fast as its kind"] = even.step_s
    what_ifs = tuple(
        WhatIf(change=change, step_s=changed_s, gain=1 - changed_s / prediction.step_s)
        for change, changed_s in steps_s.items()
    )
    latency_share = _latency_share(
        prediction, steps_s["a network that costs nothing"], step_s(ScaledAxes(costs=costs, latency=0.0))
    )
    lines = [
        *_time_lines(question, prediction),
        *_binding_lines(prediction, latency_share, what_ifs),
        *[_change_line(one) for one in what_ifs],
        *_advice_lines(search),
        *_trust_lines(question, prediction),
    ]
    return LayoutExplanation(
        layout=prediction.layout.name,
        step_s=prediction.step_s,
        parts_s=prediction.parts_s,
        what_ifs=what_ifs,
        latency_share=latency_share,
        lines=tuple(lines),
    )


def _axes_on(fabric: Fabric, question: Question, prediction: LayoutPrediction) -> FabricAxes:
    return FabricAxes(fabric, question.placement, prediction.layout, backend=question.backend)


def _latency_share(prediction: LayoutPrediction, free_s: float, no_latency_s: float) -> float:
    exposed_s = prediction.step_s - free_s
    return min(1.0, max(0.0, (prediction.step_s - no_latency_s) / exposed_s)) if exposed_s > 1e-12 else 0.0


def _time_lines(question: Question, prediction: LayoutPrediction) -> list[str]:
    step_s = prediction.step_s
    parts = sorted(prediction.parts_s.items(), key=lambda one: -one[1])
    shares = ", ".join(f"{name} {format_duration(part)} ({format_percent(part / step_s)})" for name, part in parts)
    peak = question.device.peak(question.dtype)
    memory = prediction.memory
    return [
        (
            f"{question.model.name} on {question.num_ranks} x {question.device.name}, {prediction.layout.name}: "
            f"{format_duration(step_s)} per step of {question.global_batch} samples, "
            f"{prediction.samples_per_s:.4g} samples/s, {prediction.flop_per_s / 1e12:.0f} TFLOP/s per device "
            f"({format_percent(prediction.flop_per_s / peak)} of its peak)"
        ),
        f"time: {shares}",
        (
            f"memory: {format_size(memory.total_bytes)} of {format_size(question.device.memory_bytes)} per device: "
            f"weights {format_size(memory.weights_bytes)}, gradients {format_size(memory.gradients_bytes)}, optimizer "
            f"{format_size(memory.optimizer_bytes)}, activations {format_size(memory.activations_bytes)}"
        ),
    ]


def _binding_lines(prediction: LayoutPrediction, latency_share: float, what_ifs: tuple[WhatIf, ...]) -> list[str]:
    lines = [f"{prediction.binding} binds: it takes most of the step"]
    if prediction.binding_link is not None and prediction.exposed_s > 0:
        kind = "latency-bound" if latency_share > 0.5 else "bandwidth-bound"
        lines.append(
            f"exposed communication is {format_percent(prediction.exposed_s / prediction.step_s)} of the step and "
            f"{kind} ({format_percent(latency_share)} of it does not grow with bytes); its busiest link: "
            f"{prediction.binding_link}"
        )
    free = next(one for one in what_ifs if one.change == "a network that costs nothing")
    lines.append(
        f"limit: no network can give more than {prediction.step_s / free.step_s:.3g} x with this layout; no "
        f"schedule of it is below {format_duration(prediction.lower_bound_s)}"
    )
    return lines


def _change_line(one: WhatIf) -> str:
    if one.gain < 0.001:
        words = "no gain"
    else:
        words = f"{format_percent(one.gain)} less" + ("" if one.gain >= MARGIN else ": not worth it by itself")
    return f"{one.change}: {format_duration(one.step_s)} per step ({words})"


def _advice_lines(search: LayoutSearch | None) -> list[str]:
    if search is None:
        return []
    return [f"change nothing: {search.reason}" if search.changes_nothing else f"use {search.reason}"]


def _trust_lines(question: Question, prediction: LayoutPrediction) -> list[str]:
    lines = [f"the prediction is good to about {format_percent(prediction.uncertainty)} either way"]
    if not prediction.is_in_range:
        lines.append(
            "outside the calibrated range: device times come from a roofline, and some exchange from presets or "
            "carried curves; measure a step (`wirespeed tune`) or the network (`wirespeed bench`) before buying on it"
        )
    if question.model.origin == "assumed":
        lines.append(f"the model's shape is assumed: {question.model.source}")
    return lines
