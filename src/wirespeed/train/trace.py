"""What one rank brings home from a run under `tune` or `profile`: its directive and its trace, as JSON files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from wirespeed import records
from wirespeed.errors import DataError
from wirespeed.measure.steps import StepParts
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.workload import GradientTensor
from wirespeed.train.report import LossEntry, SessionReport

DIRECTIVE_VARIABLE = "WIRESPEED_RUN"

RunStatus = Literal["complete", "short", "no_ddp", "no_step", "failed"]


class RunDirective(msgspec.Struct, frozen=True, kw_only=True):
    """How a script has to be run: it outranks what the script itself asks of wirespeed.

    The run ends after ``num_steps`` optimizer steps. With ``target_loss`` it may go on, up to ``max_steps``, until the
    held-out loss has come down to the target.
    """

    label: str
    strategy: Strategy
    num_steps: int
    folder: str
    seed: int = 0
    keeps_buckets: bool = False
    """Take the bucket size that the script chose, whatever ``strategy`` says: the baseline is the script as it is."""
    is_silent: bool = False
    """Exchange nothing: the compute of a step, alone."""
    max_steps: int | None = None
    target_loss: float | None = None

    def trace_path(self, rank: int) -> Path:
        """Where this rank writes its trace."""
        return Path(self.folder) / f"trace-{rank}.json"

    def heartbeat_path(self, rank: int) -> Path:
        """Where this rank notes its step number."""
        return Path(self.folder) / f"step-{rank}"


class RunTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's run. ``gradients`` only in a silent run; ``wire`` is cumulative (stated, counted) after each step."""

    status: RunStatus
    error: str | None = None
    rank: int = 0
    num_ranks: int = 1
    host: str = ""
    strategy: Strategy = Strategy()
    steps: tuple[StepParts, ...] = ()
    losses: tuple[LossEntry, ...] = ()
    training_losses: tuple[LossEntry, ...] = ()
    wire: tuple[tuple[int, int], ...] = ()
    gradients: tuple[GradientTensor, ...] = ()
    report: SessionReport | None = None
    notes: tuple[str, ...] = ()


def read_directive(environ: dict[str, str] | None = None) -> RunDirective | None:
    """The directive named by WIRESPEED_RUN, or None when there is none."""
    path = (os.environ if environ is None else environ).get(DIRECTIVE_VARIABLE)
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=RunDirective)
    except (OSError, msgspec.MsgspecError) as fault:
        raise DataError(
            f"{DIRECTIVE_VARIABLE}={path} cannot be read: {fault}", hint="unset it: `tune` sets it"
        ) from fault


def write_directive(directive: RunDirective) -> Path:
    """Write the directive into its folder."""
    return records.write_bytes(Path(directive.folder) / "run.json", msgspec.json.encode(directive))


def write_trace(directive: RunDirective, trace: RunTrace) -> None:
    """Write this rank's trace."""
    records.write_bytes(directive.trace_path(trace.rank), msgspec.json.encode(trace))


def decode_trace(content: bytes, *, source: str) -> RunTrace:
    """Read a trace. Raises DataError naming its origin."""
    try:
        return msgspec.json.decode(content, type=RunTrace)
    except msgspec.MsgspecError as fault:
        raise DataError(f"{source} is damaged: {fault}", expected="a trace of this version of wirespeed") from fault
