"""All checks of one host, and the plain document that they end in.

``examine`` is what both the command and the packed file on another host run; ``as_document`` turns its results into
dicts that ``json`` writes and ``reports.HostReport`` reads.

Standard library only: this module travels to hosts that have nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

from wirespeed.doctor import advice, counters, gpu, host, launch, network, nic, pci, rdma, sockets, tcp
from wirespeed.doctor.check import Check, CheckResult, run_checks
from wirespeed.doctor.counters import Delta, read_counters
from wirespeed.doctor.inventory import HostView
from wirespeed.doctor.recorded import RecordedSystem, Recorder
from wirespeed.errors import UsageError
from wirespeed.system import System

CHECKS: tuple[Check, ...] = (
    *host.CHECKS, *nic.CHECKS, *pci.CHECKS, *rdma.CHECKS, *gpu.CHECKS, *launch.CHECKS, *network.CHECKS,
    *tcp.CHECKS, *advice.CHECKS, sockets.live_connections, *counters.CHECKS,
)  # fmt: skip
MAX_DURING_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What one host's checks said."""

    host: str
    is_root: bool
    during_s: Optional[float]
    checks: tuple[CheckResult, ...]


def examine(
    system: System,
    *,
    during_s: Optional[float] = None,
    rtt_s: Optional[float] = None,
    peers: Sequence[str] = (),
    only: Sequence[str] = (),
    wait: Callable[[float], None] = time.sleep,
) -> Examination:
    """Run the checks on a host. ``only``: prefixes of names, such as ``rdma`` or ``nic.link``.

    With ``during_s`` counters are read, ``wait`` is called, and they are read again. Raises UsageError for a prefix that
    no check has.
    """
    chosen = select(only)
    if during_s is not None and not 0 < during_s <= MAX_DURING_S:
        raise UsageError(f"got --during {during_s:g} s", expected=f"above 0 and at most {MAX_DURING_S:g} s")
    view = HostView(system, rtt_s=rtt_s, peers=peers)
    if isinstance(system, RecordedSystem):
        view.delta = _recorded_delta(system)
    elif during_s is not None:
        before, started_at = read_counters(view), time.monotonic()
        wait(during_s)
        seconds, after = time.monotonic() - started_at, read_counters(view)
        view.delta = Delta(seconds=seconds, before=before, after=after)
        if isinstance(system, Recorder):
            system.held["watched"] = {"seconds": seconds, "before": before, "after": after}
    checks = run_checks(chosen, view)
    seconds_watched = None if view.delta is None else round(view.delta.seconds, 3)
    return Examination(host=view.name, is_root=view.is_root, during_s=seconds_watched, checks=checks)


def _recorded_delta(system: RecordedSystem) -> Optional[Delta]:
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
