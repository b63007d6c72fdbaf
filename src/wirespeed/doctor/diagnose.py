"""The verdict: is it the network, what does NCCL use, what can the links do, and which one cause to mend first.

In that order, because each question makes the next one moot: exposed communication below 5 % of the step means that no
network would help, whatever the links look like. Causes come from rules over facts (causes_*.py), findings of the host
checks, and link measurements; they are ranked, never added up. The gain of a mended cause is a simulation of the job's
own workload on its own fabric with the wire faster by what was measured, or a bound where that is not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

import msgspec

from wirespeed.doctor.causes import Cause, rank_causes
from wirespeed.doctor.causes_exposed import exposed_causes
from wirespeed.doctor.causes_failures import failure_causes
from wirespeed.doctor.causes_hosts import host_causes, link_causes
from wirespeed.doctor.causes_measured import measured_causes, seen
from wirespeed.doctor.causes_settings import setting_causes
from wirespeed.doctor.causes_transport import transport_causes
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.dossier import Dossier, Exposure
from wirespeed.doctor.gains import send_less, with_gain
from wirespeed.doctor.log_scan import JobFacts
from wirespeed.doctor.nccl_facts import NcclFacts
from wirespeed.fabric.collectives import busbw_bit_per_s
from wirespeed.records import CollectiveSample, CollectivesRecord, Record
from wirespeed.spec.traces import TracesRecord
from wirespeed.units import format_duration, format_percent, format_rate, format_size

MINOR_SHARE = 0.05
LARGE_SHARE = 0.20
"""Exposed communication over the step: below 5 % not the bottleneck, above 20 % worth work (own rule)."""


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
        *exposed_causes(dossier),
        *transport_causes(job),
        *measured_causes(job),
        *setting_causes(job),
        *host_causes(dossier),
        *link_causes(dossier),
    ]
    ranked = [with_gain(_as_harmless(cause, dossier.exposure), dossier) for cause in rank_causes(found)]
    if dossier.exposure is None or dossier.exposure.share >= MINOR_SHARE:
        ranked += send_less(dossier)
    return tuple(ranked)


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


def _as_harmless(cause: Cause, exposure: Exposure | None) -> Cause:
    """Where communication hides behind compute, what slows it is worth knowing and not worth mending."""
    if exposure is None or exposure.share >= MINOR_SHARE or cause.kind == "failure":
        return cause
    if cause.id in ("measure.wrong-results", "setting.chunk-size"):
        return cause
    return msgspec.structs.replace(cause, finding=dataclasses.replace(cause.finding, severity="notice"))


def _is_network(exposure: Exposure | None, causes: Sequence[Cause]) -> bool | None:
    if any(cause.kind == "failure" for cause in causes):
        first = causes[0]
        return first.finding.path in ("tcp", "rdma") or first.id.startswith(("nic.", "rdma.", "tcp."))
    if exposure is not None:
        return exposure.share >= MINOR_SHARE and not exposure.is_mostly_waiting
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
            "files is wrong with the network: send less, or overlap more"
        )
    if not _holds_anything(dossier):
        return "nothing that this command reads was found in these files"
    return "nothing wrong was found in these files"


def _holds_anything(dossier: Dossier) -> bool:
    held = (dossier.links, dossier.collectives, dossier.fabric, dossier.workload)
    return (
        dossier.facts.has_job_log
        or bool(dossier.facts.measurements or dossier.facts.kernel or dossier.facts.tools or dossier.num_hosts)
        or bool(dossier.paths)
        or any(one is not None for one in held)
    )


def _exposure_lines(exposure: Exposure | None) -> tuple[str, ...]:
    if exposure is None:
        return ()
    share = exposure.share
    word = "not the bottleneck" if share < MINOR_SHARE else "minor" if share < LARGE_SHARE else "worth work"
    first = (
        f"step {format_duration(exposure.step_s)}, of which {format_duration(exposure.exposed_s)} exposed "
        f"communication ({format_percent(share)}: {word}), from {exposure.source}"
    )
    lines = [first]
    if exposure.waiting_s is not None and exposure.is_mostly_waiting:
        lines.append(
            f"{format_percent(exposure.waiting_s / exposure.exposed_s)} of that is waiting for ranks that came "
            "late: look at the slowest rank before the network"
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
    texts += _collective_lines(dossier.collectives)
    texts += _trace_lines(dossier.traces)
    return tuple(texts)


def _collective_lines(record: CollectivesRecord | None) -> list[str]:
    """The largest size of each collective of `bench collectives`, as bus bandwidth."""
    if record is None:
        return []
    largest: dict[str, CollectiveSample] = {}
    for sample in record.samples:
        known = largest.get(sample.collective)
        if sample.times_s and (known is None or sample.size_bytes > known.size_bytes):
            largest[sample.collective] = sample
    return [
        f"{name} of {record.num_ranks} ranks: "
        f"{format_rate(busbw_bit_per_s(s.collective, s.size_bytes, record.num_ranks, median(s.times_s)))} at "
        f"{format_size(s.size_bytes)} ({record.backend})"
        for name, s in largest.items()
        if record.num_ranks > 1
    ]


def _trace_lines(record: TracesRecord | None) -> list[str]:
    """What the job's own collectives and NICs reached while it ran."""
    if record is None:
        return []
    lines = [
        f"in the job: {c.collective} of {c.num_ranks} ranks, {format_size(round(c.median_bytes))}: "
        f"{format_rate(c.busbw_bit_per_s)} (trace)"
        for c in record.collectives[:3]
        if c.busbw_bit_per_s is not None and c.median_bytes is not None
    ]
    for nic in record.nics[:4]:
        share = "" if nic.saturation is None else f", {format_percent(nic.saturation)} of its line rate"
        lines.append(f"{nic.nic} in collectives: sends {format_rate(nic.sent_bit_per_s)}{share} ({nic.source})")
    return lines


def _what_would_help(dossier: Dossier, causes: Sequence[Cause]) -> list[str]:
    """What was not there and would sharpen the answer."""
    notes = []
    nccl = dossier.facts.nccl
    has_failure = any(cause.kind == "failure" for cause in causes)
    if dossier.exposure is None and not has_failure:
        notes.append(
            "whether the network is the bottleneck is not known from these files; hint: add a profiler's trace "
            "(torch.profiler, Nsight Systems), or a record of `wirespeed tune`"
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
