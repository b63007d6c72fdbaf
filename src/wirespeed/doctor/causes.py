"""A cause: a finding with how well the evidence supports it, and what else could explain the same lines.

``weight`` orders causes of one kind: 0.9 and above where the log names the cause itself, 0.6 to 0.9 where one
explanation fits what was seen and the usual others do not, below where several fit. It is a rank, not a probability.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from wirespeed.doctor.check import Evidence, Finding, Path, Remedy, Severity

Kind = Literal["failure", "program", "transport", "capability", "setting"]
"""failure: the job stopped. program: the ranks themselves cost the time, not what joins them. transport: NCCL takes a
slower path than it could. capability: the path gives less than it should. setting: wrong or risky, without a visible
effect here."""

KINDS: tuple[Kind, ...] = ("failure", "program", "transport", "capability", "setting")


class WhatItGives(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted step once the cause is removed. ``basis`` says from what."""

    step_s: float
    now_s: float
    basis: str
    is_bound: bool = False
    """No better than this, as against simulated."""

    @property
    def gain(self) -> float:
        """The share of the present step that is saved."""
        return 1 - self.step_s / self.now_s if self.now_s > 0 else 0.0


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One explanation of what is wrong."""

    finding: Finding
    kind: Kind
    weight: float
    alternatives: str = ""
    """What else would look the same, and what would tell them apart."""
    gives: WhatItGives | None = None

    @property
    def id(self) -> str:
        """Of its finding."""
        return self.finding.id


def make_cause(
    identifier: str,
    title: str,
    evidence: Iterable[Evidence],
    *,
    kind: Kind,
    weight: float,
    fix: str,
    commands: tuple[str, ...] = (),
    undo: tuple[str, ...] = (),
    caution: str = "",
    severity: Severity = "warning",
    subject: str = "job",
    path: Path = "rdma",
    source: str = "",
    alternatives: str = "",
    host: str = "",
    limit_bit_per_s: float | None = None,
    full_bit_per_s: float | None = None,
) -> Cause:
    """A cause with its finding and remedy."""
    held = tuple(dict.fromkeys(evidence))
    return Cause(
        finding=Finding(
            id=identifier,
            subject=subject,
            severity=severity,
            title=title,
            evidence=held[:6],
            remedy=Remedy(text=fix, commands=commands, undo=undo, caution=caution),
            source=source,
            path=path,
            host=host,
            limit_bit_per_s=limit_bit_per_s,
            full_bit_per_s=full_bit_per_s,
        ),
        kind=kind,
        weight=weight,
        alternatives=alternatives,
    )


def rank_causes(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """What stopped the job first, then the program, the transport, what the path can do, settings; each by weight.

    Of causes with one id the strongest stays; of links each, since several may be slow.
    """
    best: dict[tuple[str, str], Cause] = {}
    for cause in causes:
        key = (cause.id, cause.finding.subject if cause.id.startswith("link.") else "")
        known = best.get(key)
        if known is None or cause.weight > known.weight:
            best[key] = cause
    return tuple(sorted(best.values(), key=lambda c: (KINDS.index(c.kind), -c.weight, c.id)))


def names(hosts: Iterable[str], *, limit: int = 4) -> str:
    """Hosts for a sentence: the first few and how many more; "a host" where the log names none."""
    held = [host for host in dict.fromkeys(hosts) if host]
    if not held:
        return "a host"
    rest = len(held) - limit
    return ", ".join(held[:limit]) + (f" and {rest} more" if rest > 0 else "")
