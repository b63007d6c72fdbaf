"""Faults of a running lab: a pulled cable, a slow link, two hosts cut off from each other, and repairs."""

from __future__ import annotations

from wirespeed.errors import UsageError
from wirespeed.lab import layout
from wirespeed.lab.control import FaultKind, HostStatus
from wirespeed.lab.wiring import Link, Wiring


class Faults:
    """The faults of one lab, applied to its wiring. Applying one twice is the same as once."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._down: set[str] = set()
        self._partitions: set[frozenset[str]] = set()

    def link(self, host: str) -> Link:
        """The link of a host, or UsageError."""
        link = self._wiring.links.get(host)
        if link is None:
            last = len(self._wiring.links) - 1
            raise UsageError(f"got host {host!r}", expected="h0" if last == 0 else f"one of h0 to h{last}")
        return link

    def apply(self, host: str, kind: FaultKind, rate_bit_per_s: float | None, other: str | None) -> None:
        """Apply one fault. ``up`` undoes ``down``; ``heal`` undoes everything that was done to the host.

        ``host`` may be a rack (``rack0``) whose uplink is shaped: for it ``rate`` and ``heal`` are known.
        """
        if self._wiring.has_uplink(host):
            self._apply_to_uplink(host, kind, rate_bit_per_s)
            return
        self.link(host)
        if (kind == "rate") != (rate_bit_per_s is not None):
            raise UsageError(f"got fault {kind!r} and rate {rate_bit_per_s}", expected="a rate with `rate` only")
        if (kind == "partition") != (other is not None):
            raise UsageError(
                f"got fault {kind!r} and other host {other}", expected="another host with `partition` only"
            )
        if kind in ("down", "up"):
            self._set_link(host, up=kind == "up")
        elif rate_bit_per_s is not None:
            layout.check_rate("rate", rate_bit_per_s)
            self._wiring.set_rate(host, rate_bit_per_s)
        elif other is not None:
            self.link(other)
            if other == host:
                raise UsageError(f"got a partition of {host} from itself", expected="two hosts")
            self._wiring.set_partition(host, other, cut=True)
            self._partitions.add(frozenset((host, other)))
        else:
            self._heal(host)

    def _apply_to_uplink(self, rack: str, kind: FaultKind, rate_bit_per_s: float | None) -> None:
        full = self._wiring.spec.uplink_bit_per_s
        if kind not in ("rate", "heal") or (kind == "rate") != (rate_bit_per_s is not None) or full is None:
            raise UsageError(f"got fault {kind!r} for the uplink of {rack}", expected="rate RATE or heal")
        if rate_bit_per_s is not None:
            layout.check_rate("rate", rate_bit_per_s)
        self._wiring.set_uplink_rate(rack, full if rate_bit_per_s is None else rate_bit_per_s)

    def _set_link(self, host: str, *, up: bool) -> None:
        self._wiring.set_link(host, up=up)
        if up:
            self._down.discard(host)
        else:
            self._down.add(host)

    def _heal(self, host: str) -> None:
        self._set_link(host, up=True)
        self._wiring.set_rate(host, self._wiring.spec.rate_bit_per_s)
        for pair in [pair for pair in self._partitions if host in pair]:
            one, two = sorted(pair)
            self._wiring.set_partition(one, two, cut=False)
            self._partitions.remove(pair)

    def host_status(
        self,
        host: str,
        rates: tuple[float | None, float | None],
        processes: tuple[int, ...],
        by_class: tuple[tuple[int, int], tuple[int, int]] | None,
    ) -> HostStatus:
        """A host with its faults, its rates (as read back: sending, receiving), its processes and its classes."""
        link = self._wiring.links[host]
        sends, receives = rates
        apart = [next(iter(pair - {host})) for pair in self._partitions if host in pair]
        return HostStatus(
            name=host,
            rack=link.host.rack,
            address=link.host.address,
            is_up=host not in self._down,
            sends_bit_per_s=sends,
            receives_bit_per_s=receives,
            partitioned_from=tuple(sorted(apart)),
            processes=processes,
            sent_by_class=None if by_class is None else by_class[0],
            received_by_class=None if by_class is None else by_class[1],
        )
