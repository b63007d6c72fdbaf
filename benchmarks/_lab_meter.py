"""What every link of a lab carries while something runs: byte counters of the kernel, read every few hundredths.

A link's utilisation is what it carried in a window over what its shaper lets pass. What binds a run is read from these
counters and the machine's busy cores, never from a model; the rule is ``verdict``.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from wirespeed.lab import Lab

PERIOD_S = 0.04
ACTIVE = 0.1
"""Of a link's rate: below it a window counts as a pause between runs."""
FULL = 0.9
"""Of the rate: a link that carries so much while anything is under way is the limit."""
HALF = 0.5
"""Of the rate: the least that a link which binds carries; below it messages, and not bytes, take the time."""
BUSY = 0.9
"""Of the cores: as good as all of them, with the meter itself and the kernel's ticks in the count."""


@dataclass(frozen=True)
class Reading:
    """Medians over the windows with traffic: the busiest NIC, the busiest uplink and the machine's cores, 0 to 1."""

    nic: float
    uplink: float
    cores: float
    windows: int
    active: int
    mean_nic: float = 0.0
    mean_uplink: float = 0.0
    """Of all windows from the first with traffic to the last."""

    @property
    def verdict_of_steps(self) -> str:
        """The same for steps that compute as well: the link that is busy for half of the time, on average."""
        busiest, name = max((self.mean_nic, "host NIC"), (self.mean_uplink, "rack uplink"))
        return name if busiest >= HALF else "none"

    @property
    def verdict(self) -> str:
        """``host NIC``, ``rack uplink`` or ``none`` (messages or cores take the time)."""
        busiest, name = max((self.nic, "host NIC"), (self.uplink, "rack uplink"))
        if not self.active or busiest < HALF:
            return "none"
        if busiest < FULL and self.cores >= BUSY:
            return "none"
        return name


class Meter:
    """Reads a lab's counters while it is used as a context manager; ``reading`` afterwards."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._ended = threading.Event()
        self._rows: list[tuple[float, float, dict[str, tuple[int, int]]]] = []
        self._sleepers: list[Any] = []

    def __enter__(self) -> Meter:
        spec = self._lab.spec
        self._files = {}
        for host in self._lab.hosts:
            # A process inside the host, through whose /proc entry its counters are read from outside.
            sleeper = self._lab.popen(host.name, ["sleep", "600"])
            self._sleepers.append(sleeper)
            self._files[host.name] = Path(f"/proc/{sleeper.pid}/net/dev")
        keeper = self._lab.status().keeper_pid
        self._rates = {host.name: spec.rate_bit_per_s for host in self._lab.hosts}
        self._uplinks = Path(f"/proc/{keeper}/net/dev") if spec.uplink_bit_per_s is not None else None
        deadline = time.monotonic() + 5
        while any("eth0" not in path.read_text() for path in self._files.values()) and time.monotonic() < deadline:
            time.sleep(0.01)  # the sleeper has not entered its host yet
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for sleeper in self._sleepers:
            sleeper.kill()
            sleeper.wait()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            counters = {}
            for name, path in self._files.items():
                counters.update(_counters(path, {"eth0": name}))
            if self._uplinks is not None:
                named = {f"{side}{rack}": f"{side}{rack}" for rack in range(self._lab.spec.racks) for side in _SIDES}
                counters.update(_counters(self._uplinks, named))
            times = psutil.cpu_times()
            busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
            self._rows.append((time.monotonic(), busy, counters))

    @property
    def reading(self) -> Reading:
        """The medians over all windows with traffic."""
        rate, uplink = self._lab.spec.rate_bit_per_s / 8, (self._lab.spec.uplink_bit_per_s or 0) / 8
        nics, ups, cores = [], [], []
        every: list[tuple[float, float]] = []
        last = 0
        # Two periods to a window: the shaper's bursts and the reading's own delay matter less.
        for before, after in zip(self._rows, self._rows[2:], strict=False):
            lasted_s = after[0] - before[0]
            nic = up = 0.0
            for name, (received, sent) in after[2].items():
                was = before[2].get(name)
                if was is None:
                    continue
                if name.startswith(_SIDES):
                    up = max(up, (sent - was[1]) / lasted_s / uplink)
                else:
                    nic = max(nic, (sent - was[1]) / lasted_s / rate, (received - was[0]) / lasted_s / rate)
            if nics or max(nic, up) >= ACTIVE:
                every.append((nic, up))
            if max(nic, up) >= ACTIVE:
                last = len(every)
                nics.append(nic)
                ups.append(up)
                cores.append((after[1] - before[1]) / lasted_s / (psutil.cpu_count() or 1))
        if not nics:
            return Reading(0.0, 0.0, 0.0, max(0, len(self._rows) - 2), 0)
        return Reading(
            *(round(statistics.median(values), 3) for values in (nics, ups, cores)), len(self._rows) - 2, len(nics),
            *(round(statistics.fmean(pair[side] for pair in every[:last]), 3) for side in (0, 1)),
        )  # fmt: skip


_SIDES = ("up", "down")


def _counters(path: Path, names: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Bytes received and sent by each interface, under the name that it gets."""
    found = {}
    try:
        text = path.read_text()
    except OSError:
        return {}
    for line in text.splitlines():
        interface, colon, rest = line.partition(":")
        name = names.get(interface.strip()) if colon else None
        if name is not None:
            fields = rest.split()
            found[name] = (int(fields[0]), int(fields[8]))
    return found
