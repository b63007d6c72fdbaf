"""Run one script of the user's under a directive: ``python -m wirespeed.tune.worker SCRIPT [ARGS]``, one rank.

The script need not know wirespeed. ``DistributedDataParallel`` gets a session as soon as it is made, the scalar on
which ``backward()`` is called is noted as the training loss, and the optimizer's steps are counted: where the forward
pass after the last one begins, so that the script could still evaluate, ``RunEnded`` is raised. The rank then leaves
its trace in the directive's folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import runpy
import signal
import struct
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from wirespeed.errors import UsageError, WirespeedError, WorkloadFailure
from wirespeed.spec.strategy import Strategy
from wirespeed.train.attach import begin_directed_session
from wirespeed.train.readiness import GradientTimes
from wirespeed.train.rebucket import bucket_bytes_of
from wirespeed.train.registry import session_of
from wirespeed.train.report import LossEntry
from wirespeed.train.session import Session, exchange_bucket
from wirespeed.train.trace import RunDirective, RunTrace, read_directive, write_trace


class RunEnded(BaseException):
    """The wanted number of steps is done. Not an Exception, so that a script's own handlers let it pass."""


class Run:
    """One rank's run: owns the session of the script's (first) DDP model."""

    def __init__(self, directive: RunDirective) -> None:
        self.directive = directive
        self.session: Session | None = None
        self.notes: list[str] = []
        self._losses: list[tuple[int, torch.Tensor]] = []
        self._readiness: GradientTimes | None = None
        self._heartbeat = -1
        self._stop_group: Any = None

    def patch(self) -> None:
        """Wrap DDP's constructor and ``Tensor.backward``, and refuse what a run under `tune` cannot be."""
        construct: Any = DistributedDataParallel.__init__
        backward: Any = torch.Tensor.backward

        def wrapped_construct(ddp: Any, *args: Any, **kwargs: Any) -> None:
            construct(ddp, *args, **kwargs)
            self._begin(ddp)

        def wrapped_backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.session is not None and tensor.numel() == 1 and torch.is_floating_point(tensor):
                self._losses.append((self.session.clock.num_steps + 1, tensor.detach()))
            return backward(tensor, *args, **kwargs)

        patched: Any = DistributedDataParallel
        patched.__init__ = wrapped_construct
        patched.register_comm_hook = self._refuse_other_hooks(patched.register_comm_hook)
        starters: Any = torch.multiprocessing
        starters.spawn = starters.start_processes = _refuse_spawn
        tensor_class: Any = torch.Tensor
        tensor_class.backward = wrapped_backward

    def trace(self, *, error: str | None = None) -> RunTrace:
        """What to leave behind, however the script ended."""
        session = self.session
        if session is None:
            return RunTrace(status="failed" if error else "no_ddp", error=error, rank=_rank_from_environment())
        steps = session.clock.steps()
        status: Any = "complete" if len(steps) >= self.directive.num_steps else "short"
        if not steps:
            status = "no_step"
        return RunTrace(
            status="failed" if error else status,
            error=error,
            rank=session.rank,
            num_ranks=session.num_ranks,
            host=os.environ.get("WIRESPEED_HOST", os.uname().nodename),
            strategy=session.strategy,
            steps=tuple(steps),
            losses=tuple(session.losses),
            training_losses=tuple(_mean_per_step(self._losses)),
            wire=tuple(session.wire),
            gradients=() if self._readiness is None else self._readiness.gradients(),
            report=session.report(),
            notes=(*self.notes, *session.notes),
        )

    def _refuse_other_hooks(self, register: Any) -> Any:
        def wrapped_register(ddp: Any, state: Any, hook: Any) -> None:
            if session_of(ddp) is not None and hook is not exchange_bucket:
                raise WorkloadFailure(
                    "the script registers a communication hook of its own",
                    expected="none under `wirespeed tune`",
                    hint="leave out register_comm_hook(): the strategies that are compared take its place",
                )
            register(ddp, state, hook)

        return wrapped_register

    def _begin(self, ddp: DistributedDataParallel) -> None:
        directive = self.directive
        if self.session is not None:
            self.notes.append("the script makes several DDP models; only the first is tuned and measured")
            return
        strategy = directive.strategy
        if directive.keeps_buckets:
            strategy = _with_buckets_of(ddp, strategy)
        self.session = begin_directed_session(ddp, strategy, is_silent=directive.is_silent)
        if directive.is_silent:
            self._readiness = GradientTimes(ddp.module)
        if directive.target_loss is not None:
            self._stop_group = dist.new_group()
        self._heartbeat = os.open(
            directive.heartbeat_path(self.session.rank), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644
        )
        self.session.on_step(self._step_done)
        self.session.on_begin(self._end_when_done)

    def _step_done(self, session: Session) -> None:
        num_steps = session.clock.num_steps
        os.pwrite(self._heartbeat, struct.pack("<q", num_steps), 0)
        if self._readiness is not None:
            self._readiness.end_step()

    def _end_when_done(self, session: Session) -> None:
        num_steps = session.clock.num_steps
        if num_steps >= self.directive.num_steps and self._is_over(session, num_steps):
            if session.strategy.schedule == "async":  # a rank that leaves would stop those that still train
                session.synchronize()
            raise RunEnded

    def _is_over(self, session: Session, num_steps: int) -> bool:
        directive = self.directive
        if directive.target_loss is None or num_steps >= (directive.max_steps or directive.num_steps):
            return True
        # Only some ranks may know the held-out loss, so rank 0 decides for all; not part of any step's time.
        with session.clock.evaluation():
            held_out = [e.loss for e in session.losses if e.is_held_out and e.loss is not None]
            is_reached = torch.tensor([1.0 if held_out and min(held_out) <= directive.target_loss else 0.0])
            dist.broadcast(is_reached.to(session.device), src=0, group=self._stop_group)
        return bool(is_reached.item())


def _refuse_spawn(*_: Any, **__: Any) -> None:
    raise WorkloadFailure(
        "the script starts ranks of its own with torch.multiprocessing",
        expected="a script that is one rank of RANK and WORLD_SIZE, as under torchrun",
        hint="call the training function directly: `wirespeed tune` starts one process per rank",
    )


def _with_buckets_of(ddp: DistributedDataParallel, strategy: Strategy) -> Strategy:
    import msgspec

    own = bucket_bytes_of(ddp)
    return strategy if own is None else msgspec.structs.replace(strategy, bucket_bytes=own)


def _mean_per_step(losses: list[tuple[int, torch.Tensor]]) -> list[LossEntry]:
    by_step: dict[int, list[float]] = {}
    for step, loss in losses:
        by_step.setdefault(step, []).append(float(loss))
    return [LossEntry(step=step, loss=sum(values) / len(values), is_held_out=False) for step, values in by_step.items()]


def _rank_from_environment() -> int:
    return int(os.environ.get("RANK", "0"))


def main(arguments: list[str]) -> int:
    """Run the script to its end or its last step. The exit code is 0 unless the script failed."""
    directive = read_directive()
    if directive is None or not arguments:
        raise UsageError("the worker is started by `wirespeed tune`", hint="run `wirespeed tune SCRIPT` instead")
    # A run that is given up is sent SIGTERM: every thread's stack then goes to the log, and tells where it stood.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    random.seed(directive.seed)
    torch.manual_seed(directive.seed)
    run = Run(directive)
    run.patch()
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    code, error = 0, None
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except RunEnded:
        pass
    except SystemExit as end:
        code = end.code & 0xFF if isinstance(end.code, int) else (0 if end.code is None else 1)
        error = None if code == 0 else f"the script ended with exit code {code}"
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as fault:
        traceback.print_exc()
        code = fault.exit_code if isinstance(fault, WirespeedError) else 1
        error = f"{type(fault).__name__}: {fault}"
    write_trace(directive, run.trace(error=error))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the script may have closed it
            stream.flush()
    if code == 0 and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.barrier()
            dist.destroy_process_group()
    # Loader workers, lanes and gloo's threads of a script that was stopped in mid-loop need not agree to end.
    os._exit(code)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WirespeedError as fault:
        sys.stderr.write(f"wirespeed: {fault}\n")
        sys.exit(fault.exit_code)
