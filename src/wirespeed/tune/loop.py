"""The loop over a real script: measure, model, predict, apply, measure again.

1. Survey the network and the codecs. 2. Run the script without any communication for a few steps: its compute alone.
3. Predict every strategy. 4. Run dense, the baseline. 5. Run the promising strategies, from the same seed and for the
same number of steps; one that has not come down to dense's final loss by then may go on while it still is the faster
way there. 6. Compare, choose, write. Predictions are made before any strategy runs and are never touched afterwards.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from wirespeed import records
from wirespeed.errors import MissingCapability, PeerFailure, UsageError, WorkloadFailure
from wirespeed.fabric import files as fabric_files
from wirespeed.fabric.calibrate import calibrate
from wirespeed.fabric.topology import Fabric
from wirespeed.measure import environment
from wirespeed.measure.steal import DISTURBING_SHARE, StealMeter
from wirespeed.plan.search import search
from wirespeed.plan.space import legal_strategies
from wirespeed.records import CodecsRecord, CollectivesRecord, LinksRecord
from wirespeed.spec.comparison import MeasuredFabric, StrategyOutcome, TuneRecord
from wirespeed.spec.prediction import Prediction
from wirespeed.spec.strategy import DEFAULT_BUCKET_BYTES, Fidelity, Strategy
from wirespeed.spec.strategy_file import StrategyFile, strategy_text
from wirespeed.spec.workload import TrainingWorkload
from wirespeed.train.trace import RunDirective, RunTrace, decode_trace, write_directive
from wirespeed.tune import compare, survey
from wirespeed.tune.candidates import candidates
from wirespeed.tune.compute import workload_of
from wirespeed.tune.places import LOG, Place, worker_command
from wirespeed.tune.verdict import last_words, raise_unless_fine
from wirespeed.tune.watch import Watch
from wirespeed.units import format_percent

PROBE_STEPS = 14
MIN_STEPS = 20
DENSE_SHARE = 0.3
"""Of the budget, for the baseline: the other runs are mostly faster."""
EXTRA_STEPS = 2.0
"""A run that has not reached the target may go on to this many times the steps."""


class Progress(Protocol):
    """What the loop tells of its phases: the command line shows it."""

    def phase(self, text: str, *, total: int | None = None) -> None:
        """A new phase begins; ``total`` steps when they can be counted."""
        ...

    def advance(self, step: int) -> None:
        """The phase is at this step."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to run and how far to go."""

    script: str
    arguments: tuple[str, ...] = ()
    fidelity: Fidelity = "half"
    budget_s: float = 300.0
    num_steps: int = 120
    seed: int = 0
    out: Path = Path("out/tune")
    strategies: tuple[Strategy, ...] | None = None
    stall_timeout_s: float = 90.0
    start_timeout_s: float = 120.0
    profile_only: bool = False


@dataclass(kw_only=True)
class Tuning:
    """The state of one tuning: kept as it grows, so that an interrupted one still leaves what it measured."""

    options: TuneOptions
    place: Place
    progress: Progress
    began_s: float = field(default_factory=time.monotonic)
    fabric: Fabric | None = None
    links: LinksRecord | None = None
    workload: TrainingWorkload | None = None
    predictions: tuple[Prediction, ...] = ()
    outcomes: list[StrategyOutcome] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    num_steps: int = 0
    target: float | None = None
    steal_share: float = 0.0
    is_complete: bool = False
    _out_handle: int = -1
    """Locks the folder for as long as this program runs; a lock on the folder itself leaves no file."""

    # ------------------------------------------------------------ phases

    def run(self) -> TuneRecord:
        """All phases. On an interruption ``record()`` still tells what was measured."""
        self.check(self.options)
        self._hold_out()
        self.probe()  # before the survey: what is wrong with a script shows at once
        self.survey()
        self.predict()
        self.run_baseline()
        if not self.options.profile_only:
            self.run_candidates()
        self.is_complete = True
        return self.record()

    @staticmethod
    def check(options: TuneOptions) -> None:
        """Raise what can be known before anything is set up: no such script, not Python, no place to write to."""
        script = Path(options.script)
        if not script.is_file():
            raise UsageError(f"no script at {options.script!r}", expected="the path of a Python training script")
        try:
            compile(script.read_bytes(), options.script, "exec", dont_inherit=True)
        except OSError as fault:
            raise UsageError(f"cannot read {options.script!r}: {fault.strerror or fault}") from fault
        except (SyntaxError, ValueError) as fault:
            raise WorkloadFailure(f"{options.script} is not a Python script: {fault}") from fault
        if options.out.exists() and not options.out.is_dir():
            raise UsageError(f"got --out {str(options.out)!r}, which is not a folder", hint="name another place")
        records.write_bytes(options.out / ".check", b"wirespeed").unlink(missing_ok=True)

    def survey(self) -> None:
        """Measure links, collectives and codecs, and fit the fabric."""
        folder = self._folder("survey")
        strategies = self.options.strategies or survey.default_strategies()
        wanted = {msgspec.structs.replace(s, bucket_bytes=DEFAULT_BUCKET_BYTES) for s in strategies}
        names = sorted(s.name for s in wanted if s.allows(self.options.fidelity) or self.options.strategies)
        share = min(1.0, self.options.budget_s / 300)
        plan = survey.SurveyPlan(
            strategies=tuple(names),
            collectives_s=25 * share,
            beside_compute_s=20 * share,
            codecs_s=10 * share,
            links_s=10 * max(share, 0.5),
        )
        if self.workload is not None:
            plan = msgspec.structs.replace(
                plan.up_to(4 * sum(gradient.num_elements for gradient in self.workload.gradients)),
                shapes=tuple(gradient.shape for gradient in self.workload.gradients),
            )
        for name in (survey.LINKS, survey.COLLECTIVES, survey.BESIDE_COMPUTE, survey.CODECS_FILE):  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        records.write_bytes(folder / "plan.json", msgspec.json.encode(plan))
        self.progress.phase(f"measuring the network: links, collectives and codecs on {self.place.description}")
        meter = StealMeter()
        end = self.place.run(
            worker_command("wirespeed.tune.survey", str(folder)),
            env={},
            folder=folder,
            watch=None,
            timeout_s=2 * (plan.collectives_s + plan.beside_compute_s + plan.codecs_s + plan.links_s) + 60,
        )
        if end.log_problem is not None:
            raise MissingCapability(end.log_problem, hint="free some space, or name another place with --out")
        if end.returncode != 0:
            reasons = [text for text in (end.reason, last_words(end)) if text]
            raise PeerFailure(f"measuring the network failed: {': '.join(reasons)}", hint=f"see {folder / LOG}")
        self._warn_of_neighbours("the network was measured", meter)
        if (folder / survey.LINKS).is_file():
            self.links = records.read(folder / survey.LINKS, LinksRecord)
        collectives = [
            records.read(folder / name, CollectivesRecord)
            for name in (survey.COLLECTIVES, survey.BESIDE_COMPUTE)
            if (folder / name).is_file()
        ]
        codecs = records.read(folder / survey.CODECS_FILE, CodecsRecord)
        self.fabric = calibrate(self.links, collectives, [codecs], name=self.place.description)
        fabric_files.write_fabric(self.options.out / "fabric.toml", self.fabric)

    def probe(self) -> None:
        """Run the script with silent communication: what a step computes, and when each gradient is ready."""
        self.progress.phase("running the script without communication: its compute alone", total=PROBE_STEPS)
        traces = self._run_script(
            RunDirective(
                label="compute",
                strategy=Strategy(),
                num_steps=PROBE_STEPS,
                folder=str(self._folder("compute")),
                seed=self.options.seed,
                is_silent=True,
            )
        )
        self.workload = workload_of(
            traces,
            num_ranks=self.place.num_ranks,
            ranks_per_host=self.place.ranks_per_host,
            cpus_per_rank=self.place.cpus_per_rank,
        )

    def predict(self) -> None:
        """Predict every strategy that may be of interest, from the survey and the probe."""
        assert self.fabric is not None
        assert self.workload is not None
        strategies = self.options.strategies or legal_strategies(self.workload, self.options.fidelity)
        found = search(self.workload, self.fabric, self.options.fidelity, strategies=strategies)
        self.warnings += [f"{name} could not be predicted: {why}" for name, why in found.skipped.items()]
        baseline = search(self.workload, self.fabric, "exact", strategies=[Strategy()]).predictions[0]
        self.predictions = (baseline, *(p for p in found.predictions if p.strategy != baseline.strategy))
        affordable = int(DENSE_SHARE * self.options.budget_s / max(baseline.step_s, 1e-6))
        self.num_steps = min(self.options.num_steps, max(MIN_STEPS, affordable))

    def run_baseline(self) -> None:
        """Run dense, with the buckets that the script chose."""
        outcome = self._measure(self.predictions[0].strategy, self.predictions[0], name="dense", keeps_buckets=True)
        if outcome.stated_bytes_per_step == 0 and outcome.num_steps > 1:
            raise WorkloadFailure(
                f"{self.options.script} exchanges no gradients",
                expected="forward passes through the DistributedDataParallel model itself",
                hint="call ddp(x) and not ddp.module(x) or the model inside it",
            )
        self.num_steps = outcome.num_steps
        kind = compare.loss_kind_of(outcome)
        self.target = compare.final_loss(outcome, kind, self.num_steps)
        self.outcomes.append(compare.with_losses(outcome, kind, self.target, self.num_steps))

    def run_candidates(self) -> None:
        """Run the promising strategies, best predicted first, while the budget lasts."""
        for prediction in candidates(self.predictions, self.options.strategies):
            left_s = self.options.budget_s - (time.monotonic() - self.began_s)
            needed_s = prediction.step_s * self.num_steps
            if needed_s > left_s and len(self.outcomes) > 1:
                self.warnings.append(f"{prediction.strategy.name} was not run: the budget was used up")
                continue
            outcome = self._measure(prediction.strategy, prediction)
            kind = compare.loss_kind_of(self.outcomes[0])
            self.outcomes.append(compare.with_losses(outcome, kind, self.target, self.num_steps))

    # ------------------------------------------------------------ results

    def record(self) -> TuneRecord:
        """The Record of what was measured so far. Raises WorkloadFailure when the baseline was not."""
        if not self.outcomes:
            raise WorkloadFailure("nothing was measured: the baseline did not run to its end")
        kind = compare.loss_kind_of(self.outcomes[0])
        outcomes, chosen, reason = compare.choose(self.outcomes, kind, self.options.fidelity)
        ran = {o.strategy for o in outcomes}
        predicted_only = tuple(
            StrategyOutcome(
                name=p.strategy.name,
                strategy=p.strategy,
                prediction=p,
                predicted_step_s=p.step_s,
                stated_bytes_per_step=p.wire_bytes,
                verdict="predicted only",
            )
            for p in self.predictions
            if p.strategy not in ran
        )
        return TuneRecord(
            environment=environment.capture(),
            script=self.options.script,
            arguments=self.options.arguments,
            fabric=self._measured_fabric(),
            workload=self.workload,
            fidelity=self.options.fidelity,
            loss_kind=kind,
            loss_target=self.target,
            strategies=(*outcomes, *predicted_only),
            chosen=chosen,
            reason=reason,
            warnings=tuple(dict.fromkeys(self.warnings)),
            is_complete=self.is_complete,
            steal_share=self.steal_share,
        )

    def write(self, record: TuneRecord) -> None:
        """Write ``tune.json`` and ``strategy.toml``."""
        records.write(self.options.out / "tune.json", record)
        best = next(o for o in record.strategies if o.name == record.chosen)
        held = StrategyFile(
            schema=1,
            strategy=best.strategy,
            predicted_step_s=best.predicted_step_s,
            measured_step_s=best.measured_step_s,
            note=record.reason,
        )
        records.write_bytes(self.options.out / "strategy.toml", strategy_text(held).encode())

    # ------------------------------------------------------------ inside

    def _measure(
        self, strategy: Strategy, prediction: Prediction | None, *, name: str | None = None, keeps_buckets: bool = False
    ) -> StrategyOutcome:
        label = name or strategy.name
        self.progress.phase(f"running {label}", total=self.num_steps)
        meter = StealMeter()
        traces = self._run_script(
            RunDirective(
                label=label,
                strategy=strategy,
                num_steps=self.num_steps,
                folder=str(self._folder("run-" + label.replace("/", "-"))),
                seed=self.options.seed,
                keeps_buckets=keeps_buckets,
                max_steps=None if self.target is None else round(EXTRA_STEPS * self.num_steps),
                target_loss=self.target if self._compares_held_out() else None,
            )
        )
        for trace in traces[:1]:
            self.warnings += list(trace.notes)
        self._warn_of_neighbours(f"{label} ran", meter)
        return compare.outcome_of(traces[0].strategy, traces, prediction, num_steps=self.num_steps, name=name)

    def _warn_of_neighbours(self, what: str, meter: StealMeter) -> None:
        share = meter.share()
        self.steal_share = max(self.steal_share, share)
        if share > DISTURBING_SHARE:
            told = f"other machines on this host took {format_percent(share)} of the CPU while {what}"
            self.warnings.append(f"{told}: run again in a quieter hour before you trust its times")

    def _compares_held_out(self) -> bool:
        return bool(self.outcomes) and compare.loss_kind_of(self.outcomes[0]) == "held_out"

    def _run_script(self, directive: RunDirective) -> list[RunTrace]:
        options = self.options
        path = write_directive(directive)
        for rank in range(self.place.num_ranks):
            directive.trace_path(rank).unlink(missing_ok=True)
            directive.heartbeat_path(rank).unlink(missing_ok=True)
        log = Path(directive.folder) / LOG
        watch = Watch(
            directive.heartbeat_path,
            self.place.num_ranks,
            start_timeout_s=options.start_timeout_s,
            stall_timeout_s=options.stall_timeout_s,
            on_progress=self.progress.advance,
        )
        try:
            end = self.place.run(
                worker_command("wirespeed.tune.worker", options.script, *options.arguments),
                env={"WIRESPEED_RUN": str(path.resolve()), "PYTHONHASHSEED": str(options.seed), "WIRESPEED_OFF": ""},
                folder=Path(directive.folder),
                watch=watch,
                timeout_s=max(600.0, 4 * options.budget_s),
            )
        finally:
            for left in Path(directive.folder).glob(".trace-*"):  # a rank was ended while it wrote its trace
                left.unlink(missing_ok=True)
        traces = []
        for rank in range(self.place.num_ranks):
            held = directive.trace_path(rank)
            if held.is_file():
                traces.append(decode_trace(held.read_bytes(), source=str(held)))
        raise_unless_fine(end, traces, self.place.num_ranks, options.script, log)
        return traces

    def _hold_out(self) -> None:
        """Refuse the folder of a tuning that still runs: the two would read each other's traces."""
        self._out_handle = os.open(self.options.out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._out_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            raise UsageError(
                f"another tuning is writing to {self.options.out}", hint="name another folder with --out"
            ) from fault
        except OSError:  # a file system without locks
            return

    def _folder(self, name: str) -> Path:
        folder = (self.options.out / name).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise MissingCapability(
                f"cannot make {folder}: {fault.strerror}", hint="free some space, or name another place with --out"
            ) from fault
        return folder

    def _measured_fabric(self) -> MeasuredFabric:
        links: dict[str, dict[str, float]] = {}
        for sample in self.links.samples if self.links is not None else ():
            if sample.bit_per_s:
                best = max(sample.bit_per_s)
                row = links.setdefault(sample.source, {})
                row[sample.target] = max(best, row.get(sample.target, 0.0))
        rates = sorted(rate for row in links.values() for rate in row.values())
        return MeasuredFabric(
            description=self.place.description,
            hosts=self.place.hosts,
            num_ranks=self.place.num_ranks,
            link_bit_per_s=rates[len(rates) // 2] if rates else None,
            declared_bit_per_s=self.place.declared_bit_per_s,
            rtt_s=None if self.fabric is None or self.fabric.rtt_s is None else self.fabric.rtt_s.value,
            links=links,
        )
