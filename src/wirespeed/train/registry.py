"""The sessions of this process, one per DDP model at most, and their end before the interpreter is taken down."""

from __future__ import annotations

import atexit
import gc
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from wirespeed.errors import UsageError
from wirespeed.spec.strategy import Strategy
from wirespeed.train import ranges
from wirespeed.train.refusals import check_is_ddp, check_model, check_optimizer
from wirespeed.train.session import Session

_SESSIONS: dict[int, Session] = {}


def session_of(ddp: DistributedDataParallel) -> Session | None:
    """The session attached to this model, or None."""
    return _SESSIONS.get(id(ddp))


def start_session(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None,
    strategy: Strategy,
    *,
    scaler: Any = None,
    is_silent: bool = False,
    is_inert: bool = False,
) -> Session:
    """Make and register a session. Raises UsageError where the model cannot take one."""
    check_is_ddp(ddp)
    check_optimizer(optimizer)
    if session_of(ddp) is not None:
        raise UsageError("this model has a session already", hint="call session.detach() before attaching again")
    if not is_inert:
        check_model(ddp, strategy)
    if getattr(ddp, "_comm_hooks", None):
        raise UsageError(
            "this model has a communication hook already",
            expected="a DDP model without one",
            hint="remove its register_comm_hook(...) call: the strategy takes its place",
        )
    session = Session(ddp, optimizer, strategy, scaler=scaler, is_silent=is_silent, is_inert=is_inert)
    if ranges.are_wanted():
        session.clock.on_event = ranges.StepRanges(ranges.open_backend()).on_event
    if not _SESSIONS:
        atexit.register(_release_all)
    _SESSIONS[id(ddp)] = session
    session.on_detached = lambda: _SESSIONS.pop(id(ddp), None)
    return session


def _release_all() -> None:
    for session in list(_SESSIONS.values()):
        session.release()
    gc.collect()
