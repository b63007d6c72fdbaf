"""All checks of one host, and the plain document that they end in.

``examine`` is what both the command and the packed file on another host run; ``as_document`` turns its results into
dicts that ``json`` writes and ``reports.HostReport`` reads.

Standard library only: this module travels to hosts that have nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wirespeed.doctor import (
    advice,
    counters,
    fabric_manager,
    gpu,
    host,
    launch,
    network,
    nic,
    pci,
    rank_ports,
    rdma,
    roce,
    sockets,
    tcp,
    traffic_class,
)
from wirespeed.doctor.check import Check, CheckResult, run_checks
from wirespeed.doctor.counters import Delta, read_counters
from wirespeed.doctor.inventory import HostView
from wirespeed.doctor.recorded import RecordedSystem, Recorder
from wirespeed.errors import UsageError
from wirespeed.system import System

CHECKS: tuple[Check, ...] = (
    *host.CHECKS, *nic.CHECKS, *pci.CHECKS, *rdma.CHECKS, *roce.CHECKS, *traffic_class.CHECKS, *fabric_manager.CHECKS,
    *gpu.CHECKS, *launch.CHECKS, *network.CHECKS, *rank_ports.CHECKS, *tcp.CHECKS, *advice.CHECKS, *sockets.CHECKS,
    *counters.CHECKS,
)  # fmt: skip
MAX_DURING_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to look at, and what the caller knows. ``only``: prefixes of checks' names, such as ``rdma``."""

    during_s: float | None = None
    """Watch counters for so long."""
    rtt_s: float | None = None
    rate_bit_per_s: float | None = None
    peers: tuple[str, ...] = ()
    """Addresses of the job's other hosts."""
    address: str | None = None
    """The address by which they know this host."""
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.during_s is not None and not 0 < self.during_s <= MAX_DURING_S:
            raise UsageError(
                f"got {self.during_s:g} s to watch counters", expected=f"above 0 and at most {MAX_DURING_S:g} s"
            )


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What one host's checks said."""

    host: str
    is_root: bool
    during_s: float | None
    checks: tuple[CheckResult, ...]


def examine(
    system: System, question: Question | None = None, *, wait: Callable[[float], None] = time.sleep
) -> Examination:
    """Run the checks on a host.

    Where the question asks for it, counters are read, ``wait`` is called, and they are read again. Raises UsageError
    for a prefix that no check has.
    """
    question = Question() if question is None else question
    chosen = select(question.only)
    view = HostView(
        system,
        rtt_s=question.rtt_s,
        rate_bit_per_s=question.rate_bit_per_s,
        peers=question.peers,
        address=question.address,
    )
    if isinstance(system, RecordedSystem):
        view.delta = _recorded_delta(system)
    elif question.during_s is not None:
        before, started_at = read_counters(view), time.monotonic()
        wait(question.during_s)
        seconds, after = time.monotonic() - started_at, read_counters(view)
        view.delta = Delta(seconds=seconds, before=before, after=after)
        if isinstance(system, Recorder):
            system.held["watched"] = {"seconds": seconds, "before": before, "after": after}
    checks = run_checks(chosen, view)
    seconds_watched = None if view.delta is None else round(view.delta.seconds, 3)
    return Examination(host=view.name, is_root=view.is_root, during_s=seconds_watched, checks=checks)


def _recorded_delta(system: RecordedSystem) -> Delta | None:
    held = system.watched
    return None if held is None else Delta(seconds=held["seconds"], before=held["before"], after=held["after"])


def select(only: Sequence[str]) -> tuple[Check, ...]:
    """The checks whose names start with one of the prefixes; all where there is none."""
    for prefix in only:
        if not any(_is_under(check.name, prefix) for check in CHECKS):
            subjects = sorted({check.name.split(".")[0] for check in CHECKS})
            raise UsageError(f"got check {prefix!r}", expected=f"a name or a subject: {', '.join(subjects)}")
    return tuple(c for c in CHECKS if not only or any(_is_under(c.name, prefix) for prefix in only))


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def as_document(examination: Examination) -> dict[str, Any]:
    """Plain dicts and lists."""
    return asdict(examination)
