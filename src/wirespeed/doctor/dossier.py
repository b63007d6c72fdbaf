"""All that a user has about one job, sorted: traces, records of wirespeed by kind, fabric files; the rest are logs.

Files are told by their content. All of them are taken to be of one job on one cluster; nothing in a log can prove it.
Where a trace and a record of `tune` both tell the exposed time the trace counts, since it is the job itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wirespeed.doctor.check import Finding, on_host
from wirespeed.doctor.hops import PathReport
from wirespeed.doctor.inquiry import FabricReport
from wirespeed.doctor.log_lines import LogFile
from wirespeed.doctor.log_scan import JobFacts, Scan
from wirespeed.doctor.reports import ClusterReport, Drift, HostReport
from wirespeed.errors import DataError
from wirespeed.fabric.files import read_fabric
from wirespeed.fabric.topology import Fabric
from wirespeed.records import CollectivesRecord, LinksRecord, read
from wirespeed.spec.comparison import TuneRecord
from wirespeed.spec.traces import RankActivity, TracesRecord
from wirespeed.spec.workload import TrainingWorkload

_SQLITE = b"SQLite format 3\x00"
_NSYS_REPORTS = (".nsys-rep", ".qdrep")
_EVENTS = (b'"traceEvents"', b'"deviceProperties"', b'"distributedInfo"')
"""Of a Kineto trace, near its beginning."""


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

    @property
    def is_mostly_waiting(self) -> bool:
        """Over half of it is not the network but a rank that came late."""
        return self.waiting_s is not None and self.exposed_s > 0 and self.waiting_s > 0.5 * self.exposed_s


class Dossier(msgspec.Struct, frozen=True, kw_only=True):
    """One job. None and empty where no file says anything of the kind."""

    sources: tuple[str, ...] = ()
    facts: JobFacts = JobFacts()
    exposure: Exposure | None = None
    traces: TracesRecord | None = None
    workload: TrainingWorkload | None = None
    fabric: Fabric | None = None
    links: LinksRecord | None = None
    collectives: CollectivesRecord | None = None
    host_findings: tuple[Finding, ...] = ()
    drift: tuple[Drift, ...] = ()
    num_hosts: int = 0
    """Hosts that the checks looked at."""
    fabric_findings: tuple[Finding, ...] = ()
    paths: tuple[PathReport, ...] = ()
    notes: tuple[str, ...] = ()


_T = TypeVar("_T")


class _Head(msgspec.Struct):
    kind: str = ""
    schema: int = 0


def _kind(file: LogFile, head: bytes) -> str:
    """The kind of a record, or empty. Only the head is read where the file is none."""
    if head.lstrip()[:1] != b"{" or b'"kind"' not in head:
        return ""
    try:
        return msgspec.json.decode(Path(file.name).read_bytes(), type=_Head).kind
    except (msgspec.MsgspecError, OSError, RecursionError):
        return ""


def is_trace(name: str, head: bytes) -> bool:
    """Whether a file is a profiler's trace: Kineto's JSON (plain or gzip), or Nsight Systems' SQLite or report."""
    if head.startswith(_SQLITE) or name.endswith(_NSYS_REPORTS):
        return True
    return head.lstrip()[:1] == b"{" and any(word in head for word in _EVENTS)


def read_dossier(paths: Iterable[str | Path]) -> Dossier:
    """Read every file. Raises DataError where one cannot be read, or is a damaged record or trace."""
    reader = _Reader()
    for path in paths:
        reader.read(path)
    return reader.dossier()


class _Reader:
    """Takes files one by one and sorts them."""

    def __init__(self) -> None:
        self._scan = Scan()
        self._held: dict[str, object] = {}
        self._findings: list[Finding] = []
        self._hosts: set[str] = set()
        self._drift: list[Drift] = []
        self._fabric_findings: list[Finding] = []
        self._paths: list[PathReport] = []
        self._traces: list[Path] = []
        self._sources: list[str] = []
        self._notes: list[str] = []

    def read(self, path: str | Path) -> None:
        """One file of any kind."""
        name = str(path)
        self._sources.append(name)
        if name.endswith(".toml"):
            self._held["fabric"] = read_fabric(path)
            return
        head, file = b"", LogFile(path)
        if name != "-":
            head = file.head()
            if is_trace(name, head):
                self._traces.append(Path(path))
                return
        kind = _kind(file, head)
        if not kind:
            self._scan.read(path)
        elif not self._take_record(kind, Path(path)):
            self._notes.append(f"{path} is a record of kind {kind!r}, which the verdict does not use")

    def _take_record(self, kind: str, path: Path) -> bool:
        held = self._held
        if kind == "tune":
            record = read(path, TuneRecord)
            held["workload"] = record.workload
            held["exposure"] = exposure_of(record, str(path)) or held.get("exposure")
        elif kind == "traces":
            held["traces"] = read(path, TracesRecord)
            held["exposure"] = exposure_of_traces(read(path, TracesRecord), str(path)) or held.get("exposure")
        elif kind == "links":
            held["links"] = read(path, LinksRecord)
        elif kind == "collectives":
            held["collectives"] = read(path, CollectivesRecord)
        elif kind == "host_report":
            self._take_hosts([read(path, HostReport)])
        elif kind == "cluster_report":
            cluster = read(path, ClusterReport)
            self._take_hosts(cluster.hosts)
            self._drift += cluster.drift
            self._notes += [f"{path}: {failure.host} gave no answer: {failure.why}" for failure in cluster.failures]
        elif kind == "fabric_report":
            report = read(path, FabricReport)
            self._fabric_findings += report.findings
            self._notes += [f"{path}: cannot tell: {what}" for what in report.cannot_tell]
        elif kind == "path_report":
            self._paths.append(read(path, PathReport))
        elif kind == "training_workload":
            from wirespeed.plan.workloads import read_workload

            held["workload"] = read_workload(path)
        else:
            return False
        return True

    def _take_hosts(self, reports: Sequence[HostReport]) -> None:
        for report in reports:
            self._hosts.add(report.host)
            self._findings += [on_host(finding, report.host) for finding in report.findings]

    def _analysed(self) -> TracesRecord | None:
        """All traces together. One that cannot be read is noted, but for the only file there is."""
        if not self._traces:
            return None
        from wirespeed.measure.traces import analyse, read_trace

        timelines: list[Any] = []
        for path in self._traces:
            try:
                timelines += read_trace(path)
            except DataError as fault:
                if len(self._sources) == 1:
                    raise
                self._notes.append(f"left out: {fault}")
        return analyse(timelines) if timelines else None

    def dossier(self) -> Dossier:
        """Everything, sorted. Traces are put together here, since their ranks are compared with each other."""
        held = self._held
        record = self._analysed()
        if record is not None:
            held["traces"] = record
            self._notes += record.notes
            held["exposure"] = exposure_of_traces(record, _named(self._traces)) or held.get("exposure")
        facts = self._scan.facts()
        return Dossier(
            sources=tuple(self._sources),
            facts=facts,
            exposure=_typed(held.get("exposure"), Exposure),
            traces=_typed(held.get("traces"), TracesRecord),
            workload=_typed(held.get("workload"), TrainingWorkload),
            fabric=_typed(held.get("fabric"), Fabric),
            links=_typed(held.get("links"), LinksRecord),
            collectives=_typed(held.get("collectives"), CollectivesRecord),
            host_findings=tuple(self._findings),
            drift=tuple(self._drift),
            num_hosts=len(self._hosts),
            fabric_findings=tuple(self._fabric_findings),
            paths=tuple(self._paths),
            notes=(*self._notes, *facts.notes),
        )


def _typed(value: object, kind: type[_T]) -> _T | None:
    return value if isinstance(value, kind) else None


def _named(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} traces ({paths[0].name}, ...)"


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


def exposure_of_traces(record: TracesRecord, source: str) -> Exposure | None:
    """Of the middle rank by exposed share: neither the late one, which waits for nobody, nor the one that waits most.

    Exposed time is scaled from the traced window to one step. None without a rank that has a window.
    """
    ranks = [rank for rank in record.ranks if rank.window_s > 0]
    if not ranks:
        return None
    usual = sorted(ranks, key=lambda rank: rank.exposed_share)[len(ranks) // 2]
    scale = _step_scale(usual)
    return Exposure(
        source=source,
        step_s=usual.window_s * scale,
        exposed_s=usual.exposed_s * scale,
        waiting_s=None if usual.waiting_s is None else min(usual.waiting_s, usual.exposed_s) * scale,
    )


def _step_scale(rank: RankActivity) -> float:
    return rank.step_s / rank.window_s if rank.step_s is not None and rank.step_s > 0 else 1.0
