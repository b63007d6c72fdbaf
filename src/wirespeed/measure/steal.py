"""How much of this machine's CPU its neighbours took: a virtual machine's figures depend on who else is there.

The kernel counts as ``steal`` the time in which a virtual CPU had work and the hypervisor ran something else. A
container that is held down by a quota does not see it here, nor does a machine whose hypervisor does not tell: a share
of 0 is no proof of quiet.
"""

from __future__ import annotations

import psutil

DISTURBING_SHARE = 0.03
"""Of all CPU time. Ranks wait for the slowest of them, so a step grows by more than the share itself."""


class StealMeter:
    """The share of CPU time that was stolen since it was made."""

    def __init__(self) -> None:
        self._start = psutil.cpu_times()

    def share(self) -> float:
        """Stolen over all CPU time since then, 0 to 1; 0 where the system does not count it."""
        now = psutil.cpu_times()
        total = sum(now) - sum(self._start) - (_guest(now) - _guest(self._start))
        stolen = getattr(now, "steal", 0.0) - getattr(self._start, "steal", 0.0)
        return max(0.0, stolen / total) if total > 0 else 0.0


def _guest(times: object) -> float:
    """Time of guests that run on this machine, which ``user`` and ``nice`` hold already."""
    return float(getattr(times, "guest", 0.0)) + float(getattr(times, "guest_nice", 0.0))
