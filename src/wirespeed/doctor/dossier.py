"""All that a user has about one job, sorted: records of wirespeed by kind, fabric files, and everything else as logs.

Files are told by their content. All of them are taken to be of one job on one cluster; nothing in a log can prove it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from wirespeed.doctor.check import Finding
from wirespeed.doctor.log_lines import LogFile
from wirespeed.doctor.log_scan import JobFacts, Scan
from wirespeed.doctor.reports import HostReport
from wirespeed.errors import DataError
from wirespeed.fabric.files import read_fabric
from wirespeed.fabric.topology import Fabric
from wirespeed.records import CollectivesRecord, LinksRecord, read
from wirespeed.spec.comparison import TuneRecord
from wirespeed.spec.workload import TrainingWorkload


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """Exposed communication of the job as it ran. ``waiting_s``: of it, waiting for ranks that came late."""

    source: str
    step_s: float
    exposed_s: float
    waiting_s: float | None = None

    @property
    def share(self) -> float:
        """Exposed over the whole step."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0


class Dossier(msgspec.Struct, frozen=True, kw_only=True):
    """One job. None and empty where no file says anything of the kind."""

    sources: tuple[str, ...] = ()
    facts: JobFacts = JobFacts()
    exposure: Exposure | None = None
    workload: TrainingWorkload | None = None
    fabric: Fabric | None = None
    links: LinksRecord | None = None
    collectives: CollectivesRecord | None = None
    host_findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


_T = TypeVar("_T")


class _Head(msgspec.Struct):
    kind: str = ""
    schema: int = 0


class _TracedRank(msgspec.Struct):
    window_s: float
    exposed_s: float
    waiting_s: float | None = None
    step_s: float | None = None


class _Traces(msgspec.Struct):
    ranks: list[_TracedRank]


def _kind(file: LogFile) -> str:
    """The kind of a record, or empty. Only the head is read where the file is none."""
    if file.head().lstrip()[:1] != b"{":
        return ""
    try:
        return msgspec.json.decode(Path(file.name).read_bytes(), type=_Head).kind
    except (msgspec.MsgspecError, OSError, RecursionError):
        return ""


def read_dossier(paths: Iterable[str | Path]) -> Dossier:
    """Read every file. Raises DataError where one cannot be read, or is a damaged record."""
    scan = Scan()
    held: dict[str, object] = {}
    findings: list[Finding] = []
    sources: list[str] = []
    notes: list[str] = []
    for path in paths:
        sources.append(str(path))
        if str(path).endswith(".toml"):
            held["fabric"] = read_fabric(path)
            continue
        kind = "" if str(path) == "-" else _kind(LogFile(path))
        if kind == "tune":
            record = read(path, TuneRecord)
            held["workload"] = record.workload
            held["exposure"] = exposure_of(record, str(path)) or held.get("exposure")
        elif kind == "traces":
            held["exposure"] = _traced(Path(path))
        elif kind == "links":
            held["links"] = read(path, LinksRecord)
        elif kind == "collectives":
            held["collectives"] = read(path, CollectivesRecord)
        elif kind == "host_report":
            findings += read(path, HostReport).findings
        elif kind == "training_workload":
            from wirespeed.plan.workloads import read_workload

            held["workload"] = read_workload(path)
        elif kind:
            notes.append(f"{path} is a record of kind {kind!r}, which the verdict does not use")
        else:
            scan.read(path)
    facts = scan.facts()
    return Dossier(
        sources=tuple(sources),
        facts=facts,
        exposure=_typed(held.get("exposure"), Exposure),
        workload=_typed(held.get("workload"), TrainingWorkload),
        fabric=_typed(held.get("fabric"), Fabric),
        links=_typed(held.get("links"), LinksRecord),
        collectives=_typed(held.get("collectives"), CollectivesRecord),
        host_findings=tuple(findings),
        notes=(*notes, *facts.notes),
    )


def _typed(value: object, kind: type[_T]) -> _T | None:
    return value if isinstance(value, kind) else None


def exposure_of(record: TuneRecord, source: str) -> Exposure | None:
    """Of the strategy that runs if nothing is changed (dense), else of the chosen one; None where none was measured."""
    measured = [s for s in record.strategies if s.breakdown is not None]
    dense = [s for s in measured if s.strategy.codec == "dense"]
    outcome = next(iter(dense or [s for s in measured if s.chosen] or measured), None)
    if outcome is None or outcome.breakdown is None:
        return None
    return Exposure(
        source=f"{source} ({outcome.name})", step_s=outcome.breakdown.step_s, exposed_s=outcome.breakdown.exposed_s
    )


def _traced(path: Path) -> Exposure | None:
    try:
        ranks = msgspec.json.decode(path.read_bytes(), type=_Traces).ranks
    except msgspec.MsgspecError as fault:
        raise DataError(f"{path} is damaged: {fault}", expected="a record of `wirespeed profile --trace`") from fault
    if not ranks:
        return None
    # The rank with the least exposed time waits for nobody: what it exposes is the network, the rest waits for ranks.
    usual = sorted(ranks, key=lambda r: r.exposed_s / r.window_s if r.window_s > 0 else 0.0)[len(ranks) // 2]
    scale = usual.step_s / usual.window_s if usual.step_s and usual.window_s > 0 else 1.0
    return Exposure(
        source=str(path),
        step_s=usual.window_s * scale,
        exposed_s=usual.exposed_s * scale,
        waiting_s=None if usual.waiting_s is None else usual.waiting_s * scale,
    )
