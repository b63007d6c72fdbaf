"""Undo: a backward whose gradients are not finite leaves no trace in the residuals.

A loss scaler skips the optimizer step of such a backward on every rank, because a codec turns what is not finite on one
rank into nan on all. Error feedback must then stand as if the backward had never been: what was sent is thrown away, so
what was held back before has to be held back still. So while a loss scaler is in use the residuals are copied before
each exchange (one more gradient copy, one memcpy per bucket), and copied back when any averaged value is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Undo:
    """The residuals of one rank as they were before the present backward."""

    def __init__(self) -> None:
        self.is_on = False
        self._held: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        """By bucket: the residual itself, and its copy."""
        self._are_finite: list[Tensor] = []

    def remember(self, names: tuple[str, ...], residual: Tensor) -> None:
        """Keep the residual as it is now. Called before the bucket is encoded."""
        if not self.is_on:
            return
        held = self._held.get(names)
        if held is None or held[0] is not residual:
            self._drop(names)
            self._held[names] = (residual, residual.clone())
        else:
            held[1].copy_(residual)

    def look_at(self, averaged: Tensor) -> None:
        """Note whether an averaged bucket is finite. May be called from any thread; nothing waits for the device."""
        # A sum is one pass over memory and is not finite where any term is not. A sum that overflows by itself is told
        # apart by the second look, which is rare.
        is_finite = torch.isfinite(averaged.sum())
        if averaged.device.type == "cpu" and not bool(is_finite):
            is_finite = torch.isfinite(averaged).all()
        self._are_finite.append(is_finite)

    def backward_ended(self) -> None:
        """Take the residuals back where this backward was not finite."""
        if not self.is_on or not self._are_finite:
            return
        is_finite = torch.stack(self._are_finite).all()
        self._are_finite.clear()
        if is_finite.device.type == "cpu" and bool(is_finite):
            return
        for residual, before in self._held.values():
            residual.copy_(torch.where(is_finite, residual, before))

    def clear(self) -> None:
        """Forget the copies: buckets are formed anew."""
        self._held.clear()
        self._are_finite.clear()

    def _drop(self, names: tuple[str, ...]) -> None:
        """Forget copies of buckets whose parameters now lie in this one."""
        moved = set(names)
        self._held = {key: value for key, value in self._held.items() if moved.isdisjoint(key)}
