"""Reports in Prometheus' text format, for node_exporter's textfile collector.

One file, replaced as a whole: a half-written one would make the collector drop everything. Label values are escaped as
the format asks (backslash, quote, line feed).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

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
    lines = []
    for name, text in _HELP.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", *(f"{name}{sample}" for sample in samples[name])]
    return "\n".join(lines) + "\n"


def _sample(labels: dict[str, str], value: int) -> str:
    inner = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
    return f"{{{inner}}} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
