"""Bytes that really crossed the network interfaces, from the kernel's counters.

Reads ``/proc/self/net/dev`` through one open descriptor: it stays bound to the network namespace in which it was opened
and costs some 20 us a read. Loopback counts only where there is no other interface that carries traffic (ranks of one
machine). Counters include headers, acknowledgements and whatever else the host sends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from wirespeed.errors import MissingCapability


class InterfaceCounter:
    """Cumulative transmitted bytes of some interfaces (all but loopback when ``names`` is None)."""

    def __init__(self, names: Sequence[str] | None = None, *, path: str = "/proc/self/net/dev") -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as fault:
            raise MissingCapability(f"cannot read {path}: {fault.strerror}") from fault
        present = parse_net_dev(self._read())
        if names is None:
            names = [name for name in present if name != "lo"]
        missing = [name for name in names if name not in present]
        if missing:
            self.close()
            raise MissingCapability(f"no interface {missing[0]!r}", expected=f"one of {', '.join(present)}")
        self.names = tuple(names)

    def tx_bytes(self) -> int:
        """Bytes sent so far, summed over the interfaces."""
        counts = parse_net_dev(self._read())
        return sum(counts.get(name, (0, 0))[1] for name in self.names)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> str:
        chunks, offset = [], 0
        while chunk := os.pread(self._fd, 65536, offset):
            chunks.append(chunk)
            offset += len(chunk)
        return b"".join(chunks).decode(errors="replace")


def parse_net_dev(text: str) -> dict[str, tuple[int, int]]:
    """``{interface: (received bytes, transmitted bytes)}`` from the text of ``/proc/net/dev``."""
    counts = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        fields = rest.split()
        if colon and len(fields) >= 9 and fields[0].isdigit():
            counts[name.strip()] = (int(fields[0]), int(fields[8]))
    return counts


def training_interfaces(environ: dict[str, str]) -> tuple[str, ...] | None:
    """Interfaces named by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; None when neither names one exactly."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        names = environ.get(variable, "")
        if names and not names.startswith(("^", "=")):
            return tuple(names.split(","))
    return None
