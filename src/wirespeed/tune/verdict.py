"""Turns how a run ended into the one error that names its cause, or into nothing when it was fine.

Who is to blame decides the exit code: the user's script (1), this host (3), or a peer or a link (4). A rank that
somebody else killed counts as a peer that failed: the kernel out of memory, a scheduler, a host going down.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from wirespeed.errors import DataError, MissingCapability, PeerFailure, WirespeedError, WorkloadFailure
from wirespeed.train.trace import RunTrace
from wirespeed.tune.watch import RunEnd

_KILLED = {128 + signal.SIGKILL: "SIGKILL", 128 + signal.SIGTERM: "SIGTERM"}
OWN_WORDS = "wirespeed: "
"""What a line of our own workers begins with, when it is they who cannot go on."""
_OWN_ERRORS: dict[int, type[WirespeedError]] = {2: DataError, 3: MissingCapability, 4: PeerFailure}


def raise_unless_fine(end: RunEnd, traces: Sequence[RunTrace], num_ranks: int, script: str, log: Path) -> None:
    """Raise what ended the run of a script; return when it ran to its end on every rank."""
    if end.log_problem is not None:
        raise MissingCapability(end.log_problem, hint="free some space, or name another place with --out")
    hint = f"the whole output is in {log}"
    by_rank = {trace.rank: trace for trace in traces}
    if end.is_peer_failure:
        raise PeerFailure(f"a host or a link failed during the run of {script}: {end.reason}", hint=hint)
    if end.is_stalled:
        raise WorkloadFailure(
            f"{script} was ended: {end.reason}",
            hint=f"{hint}, and at its end where each rank stood; --stall-timeout and --start-timeout allow more time",
        )
    if end.returncode != 0:
        raise _failure_of(end, by_rank, script, hint)
    silent = [rank for rank in range(num_ranks) if rank not in by_rank]
    if silent:
        raise WorkloadFailure(
            f"{script} ended on rank {silent[0]} with exit code 0 before its run was over",
            expected="every rank to train to the end",
            hint=f"does it call os._exit()? {hint}",
        )
    if any(trace.status == "no_ddp" for trace in traces):
        raise WorkloadFailure(
            f"{script} made no DistributedDataParallel model",
            expected="a script that trains with torch's DistributedDataParallel, as one rank of RANK and WORLD_SIZE",
            hint="wrap the model: model = DistributedDataParallel(model)",
        )
    if any(trace.status == "no_step" for trace in traces):
        raise WorkloadFailure(
            f"{script} ended without a training step",
            expected="loss.backward() and optimizer.step() on the DDP model",
        )


def _failure_of(end: RunEnd, by_rank: dict[int, RunTrace], script: str, hint: str) -> WirespeedError:
    rank = end.failed_rank
    trace = None if rank is None else by_rank.get(rank)
    words = last_words(end)
    if trace is None and words.startswith(OWN_WORDS) and end.returncode in _OWN_ERRORS:
        return _OWN_ERRORS[end.returncode](f"rank {rank}: {words.removeprefix(OWN_WORDS)}")
    if trace is None and end.returncode in _KILLED:
        return PeerFailure(
            f"rank {rank} was killed from outside ({_KILLED[end.returncode]}) during the run of {script}",
            hint=f"out of memory, or its host went down? {hint}",
        )
    error = words if trace is None or trace.error is None else trace.error
    if _is_consequence(error):
        # It may have been seen to end before the rank that it had lost.
        rank, error = next(
            ((r, t.error) for r, t in sorted(by_rank.items()) if t.error is not None and not _is_consequence(t.error)),
            (rank, error),
        )
    if rank is None:
        rank, error = next(((r, t.error) for r, t in by_rank.items() if t.error is not None), (None, error))
    who = "" if rank is None else f" on rank {rank}"
    if _is_consequence(error):
        hint = f"another rank ended first; {hint}"
    return WorkloadFailure(f"{script} failed{who} with exit code {end.returncode}: {error}", hint=hint)


def _is_consequence(error: str) -> bool:
    return "closed by peer" in error or "reset by peer" in error


def last_words(end: RunEnd) -> str:
    """The last line that the rank to blame printed."""
    rank = 0 if end.failed_rank is None else end.failed_rank
    lines = [line for line in end.tail.get(rank, []) if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
