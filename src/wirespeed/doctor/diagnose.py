"""The verdict: is it the network, what does NCCL use, what can the links do, and which one cause to mend first.

In that order, because each question makes the next one moot: exposed communication below 5 % of the step means that no
network would help, whatever the links look like. Causes come from rules over facts (causes_*.py), findings of the host
checks, and link measurements; they are ranked, never added up. The gain of a mended cause is a simulation of the job's
own workload on its own fabric with the wire faster by what was measured, or a bound where that is not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from wirespeed.doctor.causes import Cause, Kind, WhatItGives, rank_causes
from wirespeed.doctor.causes_failures import failure_causes
from wirespeed.doctor.causes_measured import measured_causes, seen
from wirespeed.doctor.causes_settings import setting_causes
from wirespeed.doctor.causes_transport import transport_causes
from wirespeed.doctor.check import Evidence, Finding
from wirespeed.doctor.dossier import Dossier, Exposure
from wirespeed.doctor.log_scan import JobFacts
from wirespeed.doctor.nccl_facts import NcclFacts
from wirespeed.records import Record
from wirespeed.units import format_duration, format_percent, format_rate

MINOR_SHARE = 0.05
LARGE_SHARE = 0.20
"""Exposed communication over the step: below 5 % not the bottleneck, above 20 % worth work (own rule)."""

_RDMA_SIDE = frozenset(("tcp",))


class Verdict(Record, frozen=True, kw_only=True, tag="verdict"):
    """What is wrong with one job. ``is_network`` is None where nothing measured tells."""

    headline: str
    is_network: bool | None
    sources: tuple[str, ...]
    exposure: tuple[str, ...]
    transport: tuple[str, ...]
    capability: tuple[str, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_findings(self) -> bool:
        """Whether anything above a notice was found."""
        return any(cause.finding.severity != "notice" for cause in self.causes)


def causes_of(dossier: Dossier) -> tuple[Cause, ...]:
    """All causes, ranked, with what mending each would give where that can be said."""
    job = dossier.facts
    found = [
        *failure_causes(job),
        *transport_causes(job),
        *measured_causes(job),
        *setting_causes(job),
        *(_from_host(finding, job.nccl) for finding in dossier.host_findings),
        *_from_links(dossier),
    ]
    return tuple(_with_gain(_as_harmless(cause, dossier.exposure), dossier) for cause in rank_causes(found))


def diagnose(dossier: Dossier) -> Verdict:
    """The verdict on one job."""
    from wirespeed.measure.environment import capture

    causes = causes_of(dossier)
    is_network = _is_network(dossier.exposure, causes)
    return Verdict(
        environment=capture(),
        headline=_headline(dossier, causes),
        is_network=is_network,
        sources=dossier.sources,
        exposure=_exposure_lines(dossier.exposure),
        transport=transport_lines(dossier.facts.nccl),
        capability=_capability_lines(dossier),
        causes=causes,
        notes=(*dossier.notes, *_what_would_help(dossier, causes)),
    )


def _from_host(finding: Finding, nccl: NcclFacts) -> Cause:
    """A finding of the host checks as a cause: it explains what hurts only on the path that the job uses."""
    is_beside = finding.path in _RDMA_SIDE and nccl.uses_rdma
    kind: Kind = "capability" if finding.limit_bit_per_s is not None and not is_beside else "setting"
    weight = {"critical": 0.8, "warning": 0.6, "notice": 0.3}[finding.severity]
    alternatives = "NCCL uses RDMA here: this touches start-up, storage and data loading only" if is_beside else ""
    return Cause(finding=finding, kind=kind, weight=weight / 2 if is_beside else weight, alternatives=alternatives)


def _from_links(dossier: Dossier) -> list[Cause]:
    if dossier.links is None:
        return []
    from wirespeed.doctor.matrix import find_outliers

    return [Cause(finding=finding, kind="capability", weight=0.85) for finding in find_outliers(dossier.links).findings]


def _as_harmless(cause: Cause, exposure: Exposure | None) -> Cause:
    """Where communication hides behind compute, what slows it is worth knowing and not worth mending."""
    if exposure is None or exposure.share >= MINOR_SHARE or cause.kind == "failure":
        return cause
    if cause.id in ("measure.wrong-results", "setting.chunk-size"):
        return cause
    return msgspec.structs.replace(cause, finding=dataclasses.replace(cause.finding, severity="notice"))


def _with_gain(cause: Cause, dossier: Dossier) -> Cause:
    if cause.kind not in ("transport", "capability"):
        return cause
    gives = _simulated(cause, dossier) or _bounded(cause, dossier.exposure)
    return cause if gives is None else msgspec.structs.replace(cause, gives=gives)


def _simulated(cause: Cause, dossier: Dossier) -> WhatItGives | None:
    """The job's own step with the wire faster by what the finding measured."""
    limit, full = cause.finding.limit_bit_per_s, cause.finding.full_bit_per_s
    if dossier.workload is None or dossier.fabric is None or not limit or not full or full <= limit:
        return None
    from wirespeed.errors import WirespeedError
    from wirespeed.plan import costs_of
    from wirespeed.sim.costs import ScaledCosts
    from wirespeed.sim.training import simulate_step
    from wirespeed.spec.strategy import Strategy

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


def _bounded(cause: Cause, exposure: Exposure | None) -> WhatItGives | None:
    if exposure is None or exposure.exposed_s <= 0:
        return None
    limit, full = cause.finding.limit_bit_per_s, cause.finding.full_bit_per_s
    if limit and full and full > limit:
        saved_s = exposure.exposed_s * (1 - limit / full)
        basis = f"at most: all of the exposed time shrinks by {full / limit:.3g}"
    else:
        saved_s = exposure.exposed_s
        basis = "a bound: no exposed communication at all"
    return WhatItGives(step_s=exposure.step_s - saved_s, now_s=exposure.step_s, basis=basis)


def _is_network(exposure: Exposure | None, causes: Sequence[Cause]) -> bool | None:
    if any(cause.kind == "failure" for cause in causes):
        first = causes[0]
        return first.finding.path in ("tcp", "rdma") or first.id.startswith(("nic.", "rdma.", "tcp."))
    if exposure is not None:
        return exposure.share >= MINOR_SHARE
    return None


def _headline(dossier: Dossier, causes: Sequence[Cause]) -> str:
    exposure = dossier.exposure
    failures = [cause for cause in causes if cause.kind == "failure"]
    if failures:
        return f"the job failed: {failures[0].finding.title}"
    if exposure is not None and exposure.share < MINOR_SHARE:
        return (
            f"the network is not your bottleneck: {format_percent(exposure.share)} of the step is exposed communication"
        )
    real = [cause for cause in causes if cause.finding.severity != "notice"]
    if real:
        return real[0].finding.title
    if exposure is not None:
        word = "a minor part" if exposure.share < LARGE_SHARE else "a large part"
        return (
            f"exposed communication is {word} of the step ({format_percent(exposure.share)}), and nothing in these "
            "files "
            "is wrong with the network: send less, or overlap more"
        )
    if not dossier.facts.has_job_log and not dossier.facts.measurements and dossier.links is None:
        return "nothing that this command reads was found in these files"
    return "nothing wrong was found in these files"


def _exposure_lines(exposure: Exposure | None) -> tuple[str, ...]:
    if exposure is None:
        return ()
    share = exposure.share
    word = "not the bottleneck" if share < MINOR_SHARE else "minor" if share < LARGE_SHARE else "worth work"
    lines = [
        (
            f"step {format_duration(exposure.step_s)}, of which {format_duration(exposure.exposed_s)} exposed "
            "communication "
            f"({format_percent(share)}: {word}), from {exposure.source}"
        )
    ]
    if exposure.waiting_s is not None and exposure.waiting_s > 0.5 * exposure.exposed_s > 0:
        lines.append(
            f"{format_percent(exposure.waiting_s / exposure.exposed_s)} of that is waiting for ranks that came "
            "late: look "
            "at the slowest rank before the network"
        )
    return tuple(lines)


def transport_lines(nccl: NcclFacts) -> tuple[str, ...]:
    """What NCCL chose, in sentences."""
    if not nccl.num_lines:
        return ()
    lines = []
    version = f"NCCL {', '.join(nccl.versions)}" if nccl.versions else "NCCL of unknown version"
    lines.append(f"{version}, {nccl.num_processes} processes on {max(1, len(nccl.hosts))} hosts")
    rdma, gdr = nccl.num_via("NET", network="IB"), nccl.num_via("NET", network="IB", has_gdr=True)
    sockets = nccl.num_via("NET", network="Socket") + nccl.num_via("NET", network="FastSocket")
    other = nccl.num_via("NET") - rdma - sockets
    layer = "RoCE" if nccl.is_roce else "InfiniBand" if nccl.hcas else "RDMA"
    parts = [
        f"{rdma} by {layer} ({gdr} with GPUDirect)" if rdma else "",
        f"{sockets} by TCP" if sockets else "",
        f"{other} by another network plugin" if other else "",
        f"{nccl.num_via('P2P')} by GPU to GPU" if nccl.num_via("P2P") else "",
        f"{nccl.num_via('SHM')} by shared memory" if nccl.num_via("SHM") else "",
    ]
    if any(parts):
        lines.append("channels: " + ", ".join(part for part in parts if part))
    elif nccl.networks:
        lines.append(f"network: {', '.join(nccl.networks)} (no channel lines: NCCL_DEBUG_SUBSYS may hide them)")
    if nccl.hcas:
        counts = sorted({len(hcas) for hcas in nccl.hcas.values()})
        first = next(iter(nccl.hcas.values()))
        lines.append(f"RDMA ports per host: {'-'.join(map(str, counts))} ({', '.join(h.name for h in first[:8])})")
    if nccl.algorithms:
        lines.append("algorithms: " + ", ".join(f"{c} {a}/{p} x{n}" for c, a, p, n in nccl.algorithms[:4]))
    return tuple(lines)


def _capability_lines(dossier: Dossier) -> tuple[str, ...]:
    lines = [seen(m) for m in dossier.facts.measurements[:8]]
    texts = [f"{line.seen} ({line.where})" for line in lines]
    texts += [
        f"{m.test} of nccl-tests still rises with size at {m.where}: larger sizes would tell more"
        for m in dossier.facts.measurements
        if m.still_rises and m.tool == "nccl-tests"
    ]
    if dossier.links is not None:
        rates = sorted(max(s.bit_per_s) for s in dossier.links.samples if s.bit_per_s)
        if rates:
            texts.append(
                f"links between {len(dossier.links.hosts)} hosts: {format_rate(rates[0])} to {format_rate(rates[-1])}"
            )
    return tuple(texts)


def _what_would_help(dossier: Dossier, causes: Sequence[Cause]) -> list[str]:
    """What was not there and would sharpen the answer."""
    notes = []
    nccl = dossier.facts.nccl
    has_failure = any(cause.kind == "failure" for cause in causes)
    if dossier.exposure is None and not has_failure:
        notes.append(
            "whether the network is the bottleneck is not known from these files; hint: add a record of `wirespeed "
            "tune` "
            "or `wirespeed profile`"
        )
    if dossier.facts.has_job_log and nccl.num_lines and not nccl.vias and not nccl.networks:
        notes.append("NCCL's set-up is not in these files; hint: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,ENV")
    untimed = [f for f in dossier.facts.failures if f.is_primary and f.time_s is None]
    if len(dossier.sources) > 1 and len(untimed) > 1:
        notes.append("failures without a time in several files: which came first is a guess")
    return notes


def evidence_text(evidence: Evidence) -> str:
    """One line of evidence."""
    text = f"{evidence.where}: {evidence.seen}"
    return f"{text} (expected {evidence.expected})" if evidence.expected else text


def facts_document(job: JobFacts) -> dict[str, object]:
    """The facts as plain data, for ``--json``."""
    held: dict[str, object] = msgspec.to_builtins(job)
    return {"schema": 1, "kind": "job_facts", **held}
