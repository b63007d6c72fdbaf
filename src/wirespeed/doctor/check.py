"""What a check is and what it says: findings with evidence, facts, and what could not be known; and how checks are run.

A check looks at one host through its ``HostView`` and yields outcomes. It never concludes from what it could not read:
that is an ``Unknown``, and a check with an unknown has not passed. The runner gives every check a deadline of its own;
a check that raises or hangs (a driver that does not answer) is an unknown too, and the others still run.

Standard library only, and no syntax above Python 3.9: this module travels to hosts that have nothing else.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, Union

from wirespeed.errors import InternalError

if TYPE_CHECKING:
    from wirespeed.doctor.inventory import HostView

Severity = Literal["critical", "warning", "notice"]
Path = Literal["tcp", "rdma", "gpu", "any"]
Status = Literal["found", "unknown", "passed", "not_applicable"]

SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "notice")
"""From worst. critical: a job fails or runs several times slower. warning: slower than it need be, or a risk under
load. notice: worth knowing or tidying; not a reason for exit code 1."""

_ID = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One thing that was seen. ``where`` is a file, a command, a counter or a place in a log."""

    where: str
    seen: str
    expected: str = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A kernel parameter and the value it should have, as ``/proc/sys`` prints it (several numbers: one space)."""

    key: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What to do. Only ``settings`` are ever applied by wirespeed; ``commands`` are printed for a person."""

    text: str
    commands: tuple[str, ...] = ()
    undo: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    caution: str = ""
    """What the commands disturb, such as "resets the link"."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, with what shows it and what mends it."""

    id: str
    """Stable, lower case, with dots and dashes: ``rdma.roce-mtu``. Suppressions name it."""
    subject: str
    """What it is about: an interface, a port, a kernel parameter, ``host``."""
    severity: Severity
    title: str
    """One sentence that a tired operator understands."""
    evidence: tuple[Evidence, ...]
    remedy: Remedy | None = None
    source: str = ""
    """Where the threshold or the rule comes from."""
    path: Path = "any"
    """Which traffic it touches. A finding of "tcp" does not slow NCCL over InfiniBand."""
    host: str = ""
    """Filled in where findings of several hosts meet."""
    limit_bit_per_s: float | None = None
    """What the subject can carry at most as it is now, where the finding says so; for predictions."""
    full_bit_per_s: float | None = None
    """What it could carry once mended."""

    def __post_init__(self) -> None:
        if _ID.fullmatch(self.id) is None or self.severity not in SEVERITIES or not self.evidence or not self.title:
            raise InternalError(
                f"got a finding {self.id!r} of severity {self.severity!r} with {len(self.evidence)} lines of evidence",
                expected=f"a dotted id, a title, one of {', '.join(SEVERITIES)}, and evidence",
            )


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Something a check needed and could not see. ``hint`` says how to make it visible."""

    what: str
    why: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something true of this host, kept to compare hosts: ``net.eth0.mtu`` = ``9000``."""

    key: str
    value: str


Outcome = Union[Finding, Unknown, Fact]  # noqa: UP007 - evaluated, and | between types is younger than Python 3.9


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check said. ``why`` is set where it does not apply."""

    name: str
    about: str
    status: Status
    duration_s: float
    findings: tuple[Finding, ...] = ()
    unknowns: tuple[Unknown, ...] = ()
    facts: tuple[Fact, ...] = ()
    why: str = ""


class Check(Protocol):
    """What the runner needs of a check."""

    @property
    def name(self) -> str:
        """Subject and topic, such as ``nic.link``."""

    @property
    def about(self) -> str:
        """One line: what it looks at."""

    @property
    def deadline_s(self) -> float:
        """After so long its answer is "unknown"."""

    def why_not(self, view: HostView) -> str | None:
        """Why it does not apply to this host, or None where it does. Cheap: reads no more than the inventory."""

    def run(self, view: HostView) -> Iterable[Outcome]:
        """Look, and say what was found."""


@dataclass(frozen=True, kw_only=True)
class FunctionCheck:
    """A check made of functions; see ``check``."""

    name: str
    about: str
    deadline_s: float
    looks: Callable[[HostView], Iterable[Outcome]]
    applies: Callable[[HostView], str | None] | None = None

    def why_not(self, view: HostView) -> str | None:
        """Why it does not apply to this host, or None."""
        return None if self.applies is None else self.applies(view)

    def run(self, view: HostView) -> Iterable[Outcome]:
        """Look, and say what was found."""
        return self.looks(view)


def check(
    name: str,
    about: str,
    *,
    deadline_s: float = 5.0,
    applies: Callable[[HostView], str | None] | None = None,
) -> Callable[[Callable[[HostView], Iterable[Outcome]]], FunctionCheck]:
    """Make a generator of outcomes a check."""

    def make(looks: Callable[[HostView], Iterable[Outcome]]) -> FunctionCheck:
        return FunctionCheck(name=name, about=about, deadline_s=deadline_s, looks=looks, applies=applies)

    return make


def run_checks(checks: Sequence[Check], view: HostView, *, max_parallel: int = 4) -> tuple[CheckResult, ...]:
    """Run every check, a few at a time, each to its own deadline; results in the order of ``checks``.

    A thread that hangs in the kernel cannot be ended from outside. It is left behind as a daemon thread, which does not
    keep the process alive, and its place is given to the next check.
    """
    results: list[CheckResult | None] = [None] * len(checks)
    waiting = list(enumerate(checks))
    running: dict[int, _Attempt] = {}
    wake = threading.Condition()
    while waiting or running:
        while waiting and len(running) < max_parallel:
            index, next_check = waiting.pop(0)
            running[index] = _Attempt(next_check, view, wake)
        with wake:
            if not any(attempt.is_over for attempt in running.values()):
                wake.wait(max(0.0, min(attempt.ends_at for attempt in running.values()) - time.monotonic()))
        for index in [i for i, attempt in running.items() if attempt.is_over]:
            results[index] = running.pop(index).conclude()
    return tuple(result for result in results if result is not None)


class _Attempt:
    """One check on its own thread."""

    def __init__(self, check_: Check, view: HostView, wake: threading.Condition) -> None:
        self.check = check_
        self.started_at = time.monotonic()
        self.ends_at = self.started_at + check_.deadline_s
        self._result: CheckResult | None = None
        self._wake = wake
        threading.Thread(target=self._work, args=(view,), daemon=True, name=f"check {check_.name}").start()

    @property
    def is_over(self) -> bool:
        return self._result is not None or time.monotonic() >= self.ends_at

    def conclude(self) -> CheckResult:
        """What it said, or that it said nothing in time."""
        duration_s = time.monotonic() - self.started_at
        result = self._result
        if result is not None:
            return result
        late = Unknown(
            what=self.check.about,
            why=f"no answer within {self.check.deadline_s:g} s",
            hint="a driver or a tool hangs: look for tasks in state D with `ps -eo pid,stat,wchan:30,comm`",
        )
        return _result_of(self.check, [late], duration_s)

    def _work(self, view: HostView) -> None:
        try:
            view.take_denied()
            why = self.check.why_not(view)
            outcomes = [] if why is not None else list(self.check.run(view))
            hidden = _hidden(self.check, outcomes, view.take_denied())
            # What was denied may be just what makes it apply.
            why, outcomes = (None, hidden) if why is not None and hidden else (why, [*outcomes, *hidden])
            result = _result_of(self.check, outcomes, time.monotonic() - self.started_at, why)
        except Exception as fault:  # a bug in one check must not hide what the others say
            broken = Unknown(
                what=self.check.about,
                why=f"the check itself failed: {type(fault).__name__}: {fault}",
                hint="a bug of wirespeed's own: please report it with `wirespeed doctor host --record FILE`",
            )
            result = _result_of(self.check, [broken], time.monotonic() - self.started_at)
        with self._wake:
            self._result = result
            self._wake.notify_all()


def _hidden(check_: Check, outcomes: Iterable[Outcome], denied: Sequence[str]) -> list[Outcome]:
    """One unknown for all that was denied to a check and that it does not speak of itself."""
    told = [outcome.why + outcome.what for outcome in outcomes if isinstance(outcome, Unknown)]
    silent = [name for name in denied if not any(name in text for text in told)]
    if not silent:
        return []
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    return [Unknown(what=check_.about, why=f"{silent[0]}{more} may not be read", hint="run as root")]


def _result_of(check_: Check, outcomes: Iterable[Outcome], duration_s: float, why: str | None = None) -> CheckResult:
    held = list(outcomes)
    findings = tuple(outcome for outcome in held if isinstance(outcome, Finding))
    unknowns = tuple(outcome for outcome in held if isinstance(outcome, Unknown))
    status: Status = "found" if findings else "unknown" if unknowns else "passed"
    return CheckResult(
        name=check_.name,
        about=check_.about,
        status=status if why is None else "not_applicable",
        duration_s=round(duration_s, 6),
        findings=findings,
        unknowns=unknowns,
        facts=tuple(outcome for outcome in held if isinstance(outcome, Fact)),
        why="" if why is None else why,
    )


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """By severity, then in the order given."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def on_host(finding: Finding, host: str) -> Finding:
    """The finding, said of a host."""
    return replace(finding, host=host)
