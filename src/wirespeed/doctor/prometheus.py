"""Reports and verdicts in Prometheus' text format, for node_exporter's textfile collector.

One file, replaced as a whole: a half-written one would make the collector drop everything. Label values are escaped as
the format asks (backslash, quote, line feed).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from wirespeed.doctor.diagnose import Verdict
from wirespeed.doctor.inquiry import FabricReport
from wirespeed.doctor.reports import HostReport, counts

_HELP = {
    "wirespeed_doctor_findings": "Findings that are not suppressed, by severity.",
    "wirespeed_doctor_finding": '1 for each finding; suppressed ones have suppressed="1".',
    "wirespeed_doctor_unknowns": "What the checks could not see.",
    "wirespeed_doctor_check": "1 for each check, by status.",
    "wirespeed_doctor_last_run_seconds": "When the checks ran, in seconds since the epoch.",
}


def textfile(reports: Iterable[HostReport]) -> str:
    """The file's content. Every sample is labelled with its host."""
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    for report in reports:
        for severity, count in counts(report.findings).items():
            samples["wirespeed_doctor_findings"].append(_sample({"host": report.host, "severity": severity}, count))
        told = [(finding, "0") for finding in report.findings]
        told += [(held.finding, "1") for held in report.suppressed]
        # Two findings may share id and subject; a sample must not stand twice.
        rows = {(finding.id, finding.subject, mark): finding.severity for finding, mark in reversed(told)}
        for (id_, subject, mark), severity in sorted(rows.items()):
            labels = {"host": report.host, "id": id_, "subject": subject, "severity": severity}
            samples["wirespeed_doctor_finding"].append(_sample({**labels, "suppressed": mark}, 1))
        samples["wirespeed_doctor_unknowns"].append(_sample({"host": report.host}, len(report.unknowns)))
        for check in report.checks:
            labels = {"host": report.host, "check": check.name, "status": check.status}
            samples["wirespeed_doctor_check"].append(_sample(labels, 1))
        at_s = round(datetime.fromisoformat(report.created).timestamp())
        samples["wirespeed_doctor_last_run_seconds"].append(_sample({"host": report.host}, at_s))
    return _file(_HELP, samples)


_VERDICT_HELP = {
    "wirespeed_verdict_cause": "1 for each cause, by kind and severity; rank counts from 1, the first to mend.",
    "wirespeed_verdict_is_network": "1 where the network is the bottleneck, 0 where not; absent where not known.",
    "wirespeed_verdict_predicted_step_seconds": "The predicted step once a cause is mended.",
    "wirespeed_verdict_last_run_seconds": "When the verdict was made, in seconds since the epoch.",
}


def verdict_textfile(verdict: Verdict, *, job: str) -> str:
    """A verdict on one job; every sample is labelled with the job's name."""
    samples: dict[str, list[str]] = {name: [] for name in _VERDICT_HELP}
    for rank, cause in enumerate(verdict.causes, start=1):
        finding = cause.finding
        labels = {"job": job, "id": finding.id, "subject": finding.subject, "kind": cause.kind}
        ranked = {**labels, "severity": finding.severity, "rank": str(rank)}
        samples["wirespeed_verdict_cause"].append(_sample(ranked, 1))
        if cause.gives is not None:
            predicted = {"job": job, "id": finding.id, "subject": finding.subject, "rank": str(rank)}
            samples["wirespeed_verdict_predicted_step_seconds"].append(_sample(predicted, cause.gives.step_s))
    if verdict.is_network is not None:
        samples["wirespeed_verdict_is_network"].append(_sample({"job": job}, int(verdict.is_network)))
    at_s = round(datetime.fromisoformat(verdict.created).timestamp())
    samples["wirespeed_verdict_last_run_seconds"].append(_sample({"job": job}, at_s))
    return _file(_VERDICT_HELP, samples)


_FABRIC_HELP = {
    "wirespeed_fabric_finding": "1 for each host, link or uplink that stands out.",
    "wirespeed_fabric_usual_bits_per_second": "What two healthy hosts reach.",
    "wirespeed_fabric_side_ratio": "A host's side over the usual rate; side is sends or receives.",
    "wirespeed_fabric_last_run_seconds": "When the fabric was judged, in seconds since the epoch.",
}


def fabric_textfile(report: FabricReport) -> str:
    """What was measured of a fabric, and what stands out."""
    samples: dict[str, list[str]] = {name: [] for name in _FABRIC_HELP}
    for finding in report.findings:
        labels = {"id": finding.id, "subject": finding.subject, "severity": finding.severity}
        samples["wirespeed_fabric_finding"].append(_sample(labels, 1))
    samples["wirespeed_fabric_usual_bits_per_second"].append(f" {report.usual_bit_per_s:g}")
    for side, shares in (("sends", report.sending), ("receives", report.receiving)):
        for host, share in shares.items():
            samples["wirespeed_fabric_side_ratio"].append(_sample({"host": host, "side": side}, round(share, 4)))
    at_s = round(datetime.fromisoformat(report.created).timestamp())
    samples["wirespeed_fabric_last_run_seconds"].append(f" {at_s}")
    return _file(_FABRIC_HELP, samples)


def _file(texts: Mapping[str, str], samples: Mapping[str, Sequence[str]]) -> str:
    lines = []
    for name, text in texts.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", *(f"{name}{sample}" for sample in samples[name])]
    return "\n".join(lines) + "\n"


def _sample(labels: dict[str, str], value: float) -> str:
    inner = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
    return f"{{{inner}}} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
