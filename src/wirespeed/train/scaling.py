"""The loss scaler of a session: residuals are kept as if there were none.

With ``torch.amp.GradScaler`` the gradients that a hook sees are multiplied by a scale that changes now and then. What
error feedback holds back was multiplied by the scale of its own step, so before a backward under another scale it is
multiplied by new over old (powers of two: exact). The scaler is given to ``attach``, or found when it first calls the
optimizer, among the callers of ``Optimizer.step``; steps that it skipped before that were not finite.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

SEARCH_DEPTH = 16
"""Frames between an optimizer's pre-hook and ``GradScaler.step``: torch's wrapper of ``step``, a learning-rate
scheduler's and a framework's own come to fewer than ten."""


class LossScale:
    """The scaler in use, if any, and the scale of the backward that runs."""

    def __init__(self, scaler: Any = None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.held = 1.0
        """The scale by which what is held back is multiplied at present."""

    @property
    def is_known(self) -> bool:
        """Whether there is a scaler."""
        return self._scaler is not None

    def look_for_scaler(self) -> bool:
        """Search the callers for a scaler, from an optimizer's pre-hook. True when one has just been found."""
        if self._scaler is not None:
            return False
        code = (torch.amp.GradScaler.step.__code__, torch.amp.GradScaler._maybe_opt_step.__code__)
        frame = sys._getframe(1)
        for _ in range(SEARCH_DEPTH):
            if frame.f_back is None:
                return False
            frame = frame.f_back
            if frame.f_code in code:
                scaler = frame.f_locals["self"]
                self._scaler = scaler if scaler.is_enabled() else None
                return self._scaler is not None
        return False

    def current(self) -> float:
        """The scale now; 1 without a scaler. On CUDA this waits for the device, as ``GradScaler.step`` itself does."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def change(self) -> float:
        """What to multiply residuals by before a backward under the current scale. The caller has to do so."""
        now = self.current()
        factor, self.held = now / self.held, now
        return factor
