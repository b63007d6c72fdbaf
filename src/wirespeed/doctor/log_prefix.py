"""Who said a log line, and when: what launchers, loggers and NCCL itself put before the message.

    2026-11-29T22:06:35.123Z [1,26]<stdout>:node-a:4711:4790 [3] NCCL INFO ...
    [rank3]:[E1129 22:06:35.123456789 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught ...

Everything is searched for, nothing is expected at column 0. A time is seconds within its year, so that formats with and
without a year compare; every year counts as a leap year, zones are not known, and a job over New Year's Eve is
sorted wrongly.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PROCESS = re.compile(rb"((?:[A-Za-z0-9][\w.\-]*)?):(\d{1,10}):(\d{1,10})(?: \[(-?\d{1,4})\])?")
_PLAIN = re.compile(rb"([A-Za-z][A-Za-z.\-]*[\w.\-]*):(\d{1,10}):\d{1,10} \[(-?\d{1,4})\] ?")
"""A head without anything before it, as most are: found in a tenth of the time."""
_CLOCK = re.compile(rb"[\d\-/]*[T.]?\d*")
_GLUED = re.compile(r"^(?:GDRDMA|CUMEM|IPC|Shared|MNNVL)(?=[A-Za-z0-9])")
"""The end of another rank's channel line that ran into this one."""
_ISO = re.compile(rb"(?:19|20)\d\d[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(rb"[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_SYSLOG = re.compile(
    rb"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?"
)
_MONTHS = (b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec")
_RANKS = (
    re.compile(rb"\[1,(\d{1,6})\]<std"),  # Open MPI --tag-output: [job,rank]<stream>
    re.compile(rb"\[[Rr]ank ?(\d{1,6})\]"),
    re.compile(rb"\[[^\]\n]{0,80}Rank (\d{1,6})\]"),  # [PG ID 0 PG GUID 0(default_pg) Rank 3]
    re.compile(rb"^ *(\d{1,6}): "),  # srun --label
)
_DAYS_BEFORE = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)


class Process(NamedTuple):
    """The process that wrote a line. ``host`` is empty where the line has none."""

    host: str
    pid: int
    device: int | None


def plain_process(head: bytes) -> Process | None:
    """The process of a head that holds nothing else, or None."""
    found = _PLAIN.fullmatch(head)
    return None if found is None else Process(found[1].decode(), int(found[2]), int(found[3]))


def find_process(head: bytes) -> Process | None:
    """``host:pid:tid [device]``, the last one before the message: launchers and times may stand before it."""
    plain = plain_process(head)
    if plain is not None:
        return plain
    last = None
    for found in _PROCESS.finditer(head):
        # 22:06:35 looks like host:pid:tid too; NCCL puts the device after it.
        if found[4] is not None or _CLOCK.fullmatch(found[1]) is None:
            last = found
    if last is None:
        return None
    host, pid, _, device = last.groups()
    name = _GLUED.sub("", host.decode(errors="replace"))
    return Process("" if name.isdigit() else name, int(pid), None if device is None else int(device))


def find_rank(line: bytes) -> int | None:
    """The global rank that a launcher or torch put on the line, or None."""
    for pattern in _RANKS:
        found = pattern.search(line)
        if found is not None:
            return int(found[1])
    return None


def find_time_s(line: bytes) -> float | None:
    """When the line was written: seconds since the start of its year, or None."""
    found = _ISO.search(line) or _GLOG.search(line)
    if found is not None:
        month, *rest, fraction = found.groups()
        return _seconds(int(month), [int(one) for one in rest], fraction)
    found = _SYSLOG.search(line)
    if found is None:
        return None
    name, *rest, fraction = found.groups()
    return _seconds(_MONTHS.index(name) + 1, [int(one) for one in rest], fraction)


def _seconds(month: int, clock: list[int], fraction: bytes | None) -> float | None:
    day, hour, minute, second = clock
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second <= 60):
        return None
    part = 0.0 if fraction is None else int(fraction) / 10 ** len(fraction)
    return ((_DAYS_BEFORE[month - 1] + day - 1) * 24 + hour) * 3600.0 + minute * 60 + second + part
