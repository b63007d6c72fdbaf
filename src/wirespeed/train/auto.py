"""``auto``: measure while training dense, predict, switch all ranks at the same step, go back if it disappoints.

Rank 0 decides and tells the others in a broadcast that every rank joins after the same optimizer step, so ranks never
disagree on what crosses the wire. Nothing below the allowed fidelity is considered, and dense stays where nothing is
predicted to be better by more than 5 %. What it costs: some seconds of measuring, once, unless a fabric is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from wirespeed.errors import DataError
from wirespeed.fabric.calibrate import calibrate
from wirespeed.fabric.files import read_fabric
from wirespeed.fabric.topology import Fabric
from wirespeed.measure.collectives import measure_collectives
from wirespeed.plan.search import choose, search
from wirespeed.plan.space import legal_strategies
from wirespeed.spec.strategy import DEFAULT_BUCKET_BYTES, Fidelity, Strategy
from wirespeed.spec.workload import GradientTensor, TrainingWorkload
from wirespeed.train.lanes import peer_failures
from wirespeed.train.readiness import GradientTimes
from wirespeed.train.report import breakdown_of
from wirespeed.train.session import Session
from wirespeed.train.speed import measure_codecs, slowest_of
from wirespeed.units import KIB, MIB, format_duration, format_percent

WARMUP_STEPS = 4
MEASURED_STEPS = 10
COLLECTIVES_S = 6.0
BESIDE_COMPUTE_S = 6.0
BESIDE_COMPUTE_BYTES = 4 * MIB
"""The largest message that is measured beside compute: what compute adds to a small one says nothing of a large one."""
CODECS_S = 3.0
MIN_GAIN = 0.02
"""After the switch a strategy stays only if its median step is shorter than dense's by more than the noise."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others."""

    strategy: Strategy
    reason: str


class Chooser:
    """Watches a session that starts dense, and switches it once, or twice when the first switch disappoints."""

    def __init__(
        self, session: Session, module: torch.nn.Module, *, fabric: Fabric | str | Path | None, fidelity: Fidelity
    ) -> None:
        self._session = session
        self._fabric = read_fabric(fabric) if isinstance(fabric, str | Path) else fabric
        self._fidelity: Fidelity = fidelity
        self._readiness: GradientTimes | None = GradientTimes(module)
        self._phase: Literal["measure", "verify", "done"] = "measure"
        self._until = WARMUP_STEPS + MEASURED_STEPS
        self._dense_step_s = 0.0
        self._dense = session.strategy
        if session.num_ranks == 1:
            self._finish(Decision(strategy=self._dense, reason="one rank: nothing to exchange"))
        else:
            session.on_step(self._step_done)

    def _step_done(self, session: Session) -> None:
        if self._phase == "done":
            return
        if self._readiness is not None:
            self._readiness.end_step()
        if session.clock.num_steps < self._until:
            return
        with session.clock.evaluation(), peer_failures():
            if self._phase == "measure":
                decision = self._share(self._decide)
                if decision.strategy == self._dense:
                    self._finish(decision)
                    return
                session.switch(decision.strategy)
                session.note(decision.reason)
                self._phase = "verify"
                self._until = session.clock.num_steps + WARMUP_STEPS + MEASURED_STEPS
                self._stop_watching()
            else:
                decision = self._share(self._verify)
                if decision.strategy != session.strategy:
                    session.switch(decision.strategy)
                self._finish(decision)

    def _decide(self) -> Decision:
        assert self._fabric is not None
        workload = self._workload()
        found = search(
            workload,
            self._fabric,
            self._fidelity,
            strategies=legal_strategies(workload, self._fidelity),
            backend=self._backend,
        )
        choice = choose(found.predictions, self._fidelity)
        if choice.changes_nothing:
            return Decision(strategy=self._dense, reason=choice.reason)
        return Decision(strategy=choice.strategy, reason=choice.reason)

    def _verify(self) -> Decision:
        steps = self._session.clock.steps()[-MEASURED_STEPS:]
        measured_s = median(s.step_s for s in steps)
        strategy = self._session.strategy
        told = (
            f"{strategy.name} takes {format_duration(measured_s)} a step, dense {format_duration(self._dense_step_s)}"
        )
        if measured_s > self._dense_step_s * (1 - MIN_GAIN):
            return Decision(strategy=self._dense, reason=f"back to dense: {told}")
        return Decision(strategy=strategy, reason=f"{told} ({format_percent(measured_s / self._dense_step_s)})")

    def _share(self, decide: Callable[[], Decision]) -> Decision:
        """Rank 0 decides, all get the decision. Measuring, where needed, is done by all ranks together first."""
        session = self._session
        if self._phase == "measure":
            steps = session.clock.steps()[WARMUP_STEPS:]
            self._dense_step_s = median(s.step_s for s in steps)
            if self._fabric is None:
                self._fabric = self._measure_fabric()
        content = b""
        if session.rank == 0:
            try:
                content = msgspec.json.encode(decide())
            except Exception as fault:  # whatever it is: the others wait for a decision, and would wait for ever
                reason = f"dense: cannot predict: {type(fault).__name__}: {fault}"
                content = msgspec.json.encode(Decision(strategy=self._dense, reason=reason))
        return msgspec.json.decode(_broadcast(content, session), type=Decision)

    def _measure_fabric(self) -> Fabric | None:
        session = self._session
        num_bytes = sum(g.num_elements for g in self._gradients()) * 4
        sizes = tuple(size for size in (64 * KIB, MIB, 4 * MIB, 16 * MIB) if size <= max(num_bytes, MIB))
        strategies = {
            msgspec.structs.replace(s, bucket_bytes=DEFAULT_BUCKET_BYTES)
            for s in legal_strategies(self._workload(), self._fidelity)
        }
        ordered = sorted(strategies, key=lambda s: s.name)
        needed = tuple(
            dict.fromkeys(t.collective for s in [Strategy(), *ordered] for t in s.transfers(1024, session.num_ranks))
        )
        collectives = [measure_collectives(collectives=needed, sizes_bytes=sizes, deadline_s=COLLECTIVES_S)]
        if session.device.type == "cpu":
            collectives.append(
                measure_collectives(
                    collectives=needed,
                    sizes_bytes=[size for size in sizes if size <= BESIDE_COMPUTE_BYTES],
                    repeats=5,
                    deadline_s=BESIDE_COMPUTE_S,
                    compute_threads=torch.get_num_threads(),
                )
            )
        codecs = measure_codecs(
            ordered,
            sizes,
            num_ranks=session.num_ranks,
            concurrent=session.num_ranks,
            deadline_s=CODECS_S,
            device=session.device,
            shapes=[gradient.shape for gradient in self._gradients()],
            slowest=slowest_of(session.group, session.device),
        )
        measured = [record for record in collectives if record is not None]  # rank 0 has them, the others none
        return calibrate(None, measured, [codecs], name="measured by auto") if measured else None

    def _gradients(self) -> tuple[GradientTensor, ...]:
        assert self._readiness is not None
        return self._readiness.gradients()

    def _workload(self) -> TrainingWorkload:
        assert self._readiness is not None
        parts = breakdown_of(self._session.clock.steps())
        assert parts is not None
        gradients = self._readiness.gradients()
        return TrainingWorkload(
            gradients=gradients,
            forward_s=parts.forward_s,
            backward_s=max(parts.backward_s, gradients[-1].ready_s),
            optimizer_s=parts.optimizer_s,
            data_s=parts.data_s,
            other_s=parts.other_s,
            num_ranks=self._session.num_ranks,
            ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            cpus_per_rank=None if self._session.device.type == "cuda" else cpus_per_rank(self._session.num_ranks),
        )

    @property
    def _backend(self) -> str:
        return "nccl" if self._session.device.type == "cuda" else "gloo"

    def _stop_watching(self) -> None:
        if self._readiness is not None:
            self._readiness.remove()
            self._readiness = None

    def _finish(self, decision: Decision) -> None:
        self._stop_watching()
        self._phase = "done"
        self._session.is_choosing = False
        self._session.note(decision.reason)


def cpus_per_rank(num_ranks: int) -> float:
    """Cores that one rank can count on: in a lab all ranks share this machine, else those of its host do."""
    sharing = num_ranks if "WIRESPEED_LAB" in os.environ else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len(os.sched_getaffinity(0)) / max(1, sharing)


def _broadcast(content: bytes, session: Session) -> bytes:
    size = torch.tensor([len(content)], dtype=torch.int64, device=session.device)
    source = dist.get_global_rank(session.group, 0)
    dist.broadcast(size, src=source, group=session.group)
    if not 0 < int(size.item()) < MIB:
        raise DataError(f"rank 0 announced a decision of {int(size.item())} bytes", expected="1 byte to 1 MiB")
    body = torch.zeros(int(size.item()), dtype=torch.uint8, device=session.device)
    if session.rank == 0:
        body.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(body, src=source, group=session.group)
    return bytes(body.cpu().numpy().tobytes())
