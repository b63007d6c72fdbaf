"""``attach``: the one line that a user adds. Decides which strategy a model gets, and who has the last word.

Precedence: WIRESPEED_OFF=1, then the directive of `tune` (it outranks all and says so), then the argument, then
WIRESPEED_STRATEGY, then ``auto``.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from wirespeed.errors import UsageError
from wirespeed.spec.strategy import FIDELITIES, Fidelity, Strategy
from wirespeed.spec.strategy_file import read_strategy_text
from wirespeed.train.registry import session_of, start_session
from wirespeed.train.session import Session
from wirespeed.train.trace import read_directive
from wirespeed.train.traffic import wanted_dscp

if TYPE_CHECKING:
    from wirespeed.fabric.topology import Fabric

AUTO = "auto"


def attach(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strategy: str | Strategy | Path | None = None,
    fabric: Fabric | str | Path | None = None,
    fidelity: Fidelity = "half",
    scaler: Any = None,
    dscp: int | None = None,
) -> Session:
    """Send this model's gradients with a strategy from now on. The training loop does not change.

    ``strategy``: ``"auto"`` (the default: measure, predict, switch, keep dense when nothing is better), a name such as
    ``"int8"`` or ``"topk@1%/8MiB"``, a ``Strategy``, or the path of a ``strategy.toml`` that `tune` wrote.
    ``optimizer``: whose steps end the training steps; None takes every optimizer that holds the model's parameters.
    ``fabric``: a ``fabric.toml``, so that ``auto`` need not measure the network. ``fidelity``: what ``auto`` may do to
    gradients at most (``exact``, ``half``, ``compressed``, ``lossy``); a strategy named outright is not limited by it.
    ``scaler``: the ``torch.amp.GradScaler`` that steps the optimizer, so that residuals are kept unscaled. Without it
    the scaler is found at the first step that it lets through; give it where a run has to resume bit by bit.
    ``dscp``: a mark, 0 to 63, for the job's TCP connections between hosts; None takes WIRESPEED_DSCP, if that is set.

    A model that ``torch.compile`` has wrapped may be given as well. Every rank must call it at the same point, after
    ``DistributedDataParallel`` and before the first step. Raises UsageError for a model that is not DDP or already has
    a hook.
    """
    if fidelity not in FIDELITIES:
        raise UsageError(f"got fidelity {fidelity!r}", expected=f"one of {', '.join(FIDELITIES)}")
    mark = wanted_dscp(dscp)
    session = _begin(ddp, optimizer, strategy=strategy, fabric=fabric, fidelity=fidelity, scaler=scaler)
    if mark is not None and os.environ.get("WIRESPEED_OFF") != "1":
        session.mark_traffic(mark)
    return session


def _begin(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None,
    *,
    strategy: str | Strategy | Path | None,
    fabric: Fabric | str | Path | None,
    fidelity: Fidelity,
    scaler: Any,
) -> Session:
    ddp = getattr(ddp, "_orig_mod", ddp)  # torch.compile(ddp)
    if os.environ.get("WIRESPEED_OFF") == "1":
        return start_session(ddp, optimizer, Strategy(), is_inert=True)
    directed = session_of(ddp)
    if directed is not None and read_directive() is not None:
        if strategy is not None and strategy != AUTO:
            told = str(strategy) if not isinstance(strategy, Strategy) else strategy.name
            text = f"the script asks for strategy {told!r}; `tune` decides instead"
            directed.note(text)
            _say(directed, text)
        return directed
    wanted = resolve(strategy)
    if wanted is not None:
        return start_session(ddp, optimizer, wanted, scaler=scaler)
    from wirespeed.train.auto import Chooser

    session = start_session(ddp, optimizer, Strategy(), scaler=scaler)
    session.is_choosing = session.num_ranks > 1
    Chooser(session, ddp.module, fabric=fabric, fidelity=fidelity)
    return session


def resolve(strategy: str | Strategy | Path | None) -> Strategy | None:
    """The strategy that an argument or, without one, the environment names. None stands for ``auto``."""
    if strategy is None:
        strategy = os.environ.get("WIRESPEED_STRATEGY") or AUTO
    if isinstance(strategy, Strategy):
        return strategy
    text = str(strategy)
    if text == AUTO:
        return None
    if isinstance(strategy, Path) or text.endswith(".toml"):
        try:
            return read_strategy_text(Path(text).read_text(encoding="utf-8"), source=text)
        except OSError as fault:
            raise UsageError(f"cannot read strategy file {text!r}: {fault.strerror}") from fault
    return Strategy.parse(text)


def begin_directed_session(ddp: DistributedDataParallel, strategy: Strategy, *, is_silent: bool) -> Session:
    """The session that `tune` wants for this model."""
    return start_session(ddp, None, strategy, is_silent=is_silent)


def _say(session: Session, text: str) -> None:
    if session.rank == 0:
        warnings.warn(f"wirespeed: {text}", stacklevel=3)


__all__ = ["AUTO", "attach", "begin_directed_session", "resolve"]
