"""What mending a cause would give: the job's own step, simulated with what was measured changed, or a bound.

A simulation needs the job's workload and its fabric, and two rates: what the path carries now and what it could. Where
a finding does not name them, the slower one is what a benchmark between hosts reached and the faster one what the NICs
are sold for, less the share that no benchmark reaches. Without all of that the answer is a bound and says so: removing
exposed communication can save no more than the exposed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from wirespeed.doctor.causes import Cause, WhatItGives, make_cause
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.dossier import Dossier, Exposure
from wirespeed.doctor.measurements import GOOD_SHARE
from wirespeed.errors import WirespeedError
from wirespeed.units import format_duration, format_percent, format_rate

if TYPE_CHECKING:
    from wirespeed.plan.search import Choice

WORTH = 0.05
"""Of the step, below which another strategy is not worth naming."""


def with_gain(cause: Cause, dossier: Dossier) -> Cause:
    """The cause with its predicted step, where one can be told and mending it is about speed at all.

    A limit above what the job's own NICs carry does not bind this job: nothing is promised for it.
    """
    if cause.gives is not None or cause.kind == "failure" or cause.id in _NOT_SPEED:
        return cause
    rates = rates_of(cause, dossier)
    if rates is not None:
        nic = _nic_rate(dossier)
        if nic is not None and rates[0] > NOT_BINDING * nic:
            return cause
        gives = _simulated(rates, dossier) or _shrunk(rates, dossier.exposure)
    else:
        gives = _bound(cause, dossier.exposure)
    return cause if gives is None else msgspec.structs.replace(cause, gives=gives)


NOT_BINDING = 1.2
"""Line rate and goodput of one NIC differ by less."""
_NOT_SPEED = frozenset((
    "setting.chunk-size", "measure.wrong-results", "rdma.memlock", "host.memlock", "rdma.two-subnet-managers",
    "rdma.subnet-manager-silent", "rdma.subnet-manager-not-master",
))  # fmt: skip


def rates_of(cause: Cause, dossier: Dossier) -> tuple[float, float] | None:
    """What the path carries now and what it could: the finding's own, else measured against the NICs' line rate."""
    limit, full = cause.finding.limit_bit_per_s, cause.finding.full_bit_per_s
    if limit and full and full > limit:
        return limit, full
    if cause.kind != "transport":
        return None
    reached = _reached(dossier)
    line = _line_rate(dossier)
    if reached is None or line is None or reached >= GOOD_SHARE * line:
        return None
    return reached, GOOD_SHARE * line


def _reached(dossier: Dossier) -> float | None:
    """The best rate that a collective, or a pair, reached between hosts as things are."""
    tests = [
        m.bit_per_s
        for m in dossier.facts.measurements
        if m.tool == "nccl-tests" and len(m.hosts) != 1 and m.bit_per_s and not m.still_rises
    ]
    if tests:
        return max(tests)
    if dossier.traces is not None:
        rates = [c.nic_bit_per_s for c in dossier.traces.collectives if c.nic_bit_per_s]
        if rates:
            return max(rates)
    if dossier.links is not None:
        pairs = [max(s.bit_per_s) for s in dossier.links.samples if s.bit_per_s and not s.is_bidirectional]
        return sorted(pairs)[len(pairs) // 2] if pairs else None
    return None


def _line_rate(dossier: Dossier) -> float | None:
    """All NICs of one host together: of the fabric, else of the ports in NCCL's log."""
    if dossier.fabric is not None:
        rates = [h.rate_bit_per_s.value * h.num_nics for h in dossier.fabric.hosts if h.rate_bit_per_s is not None]
        if rates:
            return min(rates)
    speeds = dossier.facts.nccl.port_rates
    per_host = [sum(ports.values()) for ports in speeds.values() if ports]
    return min(per_host) if per_host else None


def _nic_rate(dossier: Dossier) -> float | None:
    """The slowest host's NIC, one of them; None where the fabric is not known."""
    if dossier.fabric is None:
        return None
    return min((h.rate_bit_per_s.value for h in dossier.fabric.hosts if h.rate_bit_per_s is not None), default=None)


def _simulated(rates: tuple[float, float], dossier: Dossier) -> WhatItGives | None:
    """The job's own step with the wire faster by what was measured."""
    if dossier.workload is None or dossier.fabric is None:
        return None
    from wirespeed.plan import costs_of
    from wirespeed.sim.costs import ScaledCosts
    from wirespeed.sim.training import simulate_step
    from wirespeed.spec.strategy import Strategy

    limit, full = rates
    try:
        costs = costs_of(dossier.workload, dossier.fabric)
        now_s = simulate_step(dossier.workload, Strategy(), costs).step_s
        step_s = simulate_step(dossier.workload, Strategy(), ScaledCosts(costs=costs, wire=limit / full)).step_s
    except WirespeedError:
        return None
    return WhatItGives(
        step_s=step_s,
        now_s=now_s,
        basis=f"simulated: the wire {full / limit:.3g} times as fast ({format_rate(limit)} -> {format_rate(full)})",
    )


def _network_s(exposure: Exposure) -> float:
    """Of the exposed time, what is not waiting for a late rank: that stays whatever becomes of the network."""
    return max(0.0, exposure.exposed_s - (exposure.waiting_s or 0.0))


def _shrunk(rates: tuple[float, float], exposure: Exposure | None) -> WhatItGives | None:
    if exposure is None or _network_s(exposure) <= 0:
        return None
    limit, full = rates
    return WhatItGives(
        step_s=exposure.step_s - _network_s(exposure) * (1 - limit / full),
        now_s=exposure.step_s,
        basis=f"at most: all of the exposed time shrinks by {full / limit:.3g}",
        is_bound=True,
    )


def _bound(cause: Cause, exposure: Exposure | None) -> WhatItGives | None:
    """No exposed communication at all, for what slows the path itself; nothing for what is merely set wrongly."""
    if exposure is None:
        return None
    saved_s, basis = _network_s(exposure), "a bound: no exposed communication at all"
    if cause.id == "job.late-rank":
        saved_s, basis = exposure.waiting_s or 0.0, "at most: nobody waits for a late rank"
    elif cause.kind == "setting" or (cause.kind == "capability" and cause.finding.path == "any"):
        return None
    if saved_s <= 0:
        return None
    return WhatItGives(step_s=exposure.step_s - saved_s, now_s=exposure.step_s, basis=basis, is_bound=True)


def send_less(dossier: Dossier) -> list[Cause]:
    """The strategy that `plan` would choose, as an answer where the network is the bottleneck and nothing is wrong.

    Empty where the workload or the fabric is not known, or nothing allowed is faster by WORTH of the step.
    """
    choice = _choice(dossier)
    if choice is None or choice.changes_nothing:
        return []
    now_s, step_s = choice.baseline.step_s, choice.prediction.step_s
    if now_s <= 0 or 1 - step_s / now_s < WORTH:
        return []
    name = choice.strategy.name
    return [
        msgspec.structs.replace(
            make_cause(
                "job.send-less",
                f"the job sends more than it need: {name} is predicted to take {format_percent(1 - step_s / now_s)} "
                "less per step",
                [
                    Evidence(where="predicted", seen=f"{choice.baseline.strategy.name} {format_duration(now_s)}"),
                    Evidence(where="predicted", seen=f"{name} {format_duration(step_s)}"),
                ],
                kind="setting",
                weight=0.35,
                severity="notice",
                subject=name,
                path="any",
                fix=f"compare it on the job itself, with its loss: {choice.reason}",
                commands=("wirespeed tune <script>",),
                undo=("remove attach() from the script",),
                source="plan.search at fidelity half",
            ),
            gives=WhatItGives(step_s=step_s, now_s=now_s, basis=f"simulated: {name} instead of dense"),
        )
    ]


def _choice(dossier: Dossier) -> Choice | None:
    if dossier.workload is None or dossier.fabric is None:
        return None
    from wirespeed.plan.search import choose, search

    try:
        return choose(search(dossier.workload, dossier.fabric, "half").predictions, "half")
    except WirespeedError:
        return None


def best_gain(causes: Sequence[Cause]) -> WhatItGives | None:
    """What mending the first cause with a prediction would give, simulated ones first: for a page's head."""
    held = [cause.gives for cause in causes if cause.gives is not None]
    return next((gives for gives in held if not gives.is_bound), held[0] if held else None)
