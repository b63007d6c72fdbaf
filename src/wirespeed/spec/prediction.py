"""Prediction: what a strategy is expected to give, where the time goes, and how sure that is."""

from __future__ import annotations

from typing import Literal

import msgspec

from wirespeed.spec.strategy import Strategy

Resource = Literal["compute", "codec", "bandwidth", "latency"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank under one strategy.

    ``exposed_s``: communication (codec and wire) that is not hidden behind compute. ``lower_bound_s``: no schedule of
    this strategy can be faster than this (compute, or its bytes at the link's rate). ``binding`` is the resource that
    would shorten the step most if it were free. ``is_in_range`` is False where a curve had to be extrapolated.
    """

    strategy: Strategy
    step_s: float
    compute_s: float
    codec_s: float
    wire_s: float
    exposed_s: float
    wire_bytes: int
    lower_bound_s: float
    binding: Resource
    is_in_range: bool
    uncertainty: float | None = None
