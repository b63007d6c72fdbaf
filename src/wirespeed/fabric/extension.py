"""Carry what was measured on a few hosts to a network that is not there yet: more hosts, other rates, several racks.

The hosts' rates and uplinks of the new fabric are declared; how the library behaves (its curves, its cost to the cores,
the codecs' speed) stays what was measured, and ``fabric.timing`` carries it over. Assumes hosts of the same kind with
the same software. Wrong where the new network differs in more than rates and shape: another transport, lossy links,
switches whose own latency matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from wirespeed.errors import DataError, UsageError
from wirespeed.fabric.parts import Figure, check_rate
from wirespeed.fabric.topology import CollectiveCurve, Fabric, Host, Uplink


def extend(
    fabric: Fabric,
    *,
    num_hosts: int,
    rate_bit_per_s: float | None = None,
    measured_line_bit_per_s: float | None = None,
    num_racks: int = 1,
    uplink_bit_per_s: float | None = None,
    name: str | None = None,
    others: Sequence[Fabric] = (),
) -> Fabric:
    """A fabric of ``num_hosts`` hosts h0, h1, ... in racks of equal size, that behave as the measured ones do.

    ``rate_bit_per_s``: of each NIC (None: as measured); ``uplink_bit_per_s``: of each rack, per direction (None: does
    not bind). Both are goodput, or, with ``measured_line_bit_per_s``, line rates: what the measured hosts' line
    rate was, so that headers take the same share of the new ones. ``others``: what was measured on networks of other
    rates; of several curves the one of the nearest rate is carried over. Raises UsageError for numbers that make no
    network, DataError where the fabric holds no measured rate.
    """
    if num_hosts < 1 or not 1 <= num_racks <= num_hosts:
        raise UsageError(f"got {num_hosts} hosts in {num_racks} racks", expected="at least one host in each rack")
    if uplink_bit_per_s is not None and num_racks == 1:
        raise UsageError("got an uplink for one rack", expected="two racks or more, which uplinks join")
    slowest = _slowest(fabric)
    share = 1.0
    if measured_line_bit_per_s is not None:
        check_rate(measured_line_bit_per_s)
        share = slowest.value / measured_line_bit_per_s
    if share > 1.05:
        raise UsageError(
            f"got a line rate of {measured_line_bit_per_s:g} bit/s for hosts measured at {slowest.value:g} bit/s",
            expected="a line rate that is no less than what was measured on it",
        )
    rate = slowest if rate_bit_per_s is None else _declared(rate_bit_per_s, share)
    first = fabric.hosts[0]
    cores = None if first.cpus is None else first.cpus
    if first.machine and cores is not None:
        cores = math.fsum(host.cpus or 0.0 for host in fabric.hosts if host.machine == first.machine) / num_hosts
    hosts = tuple(
        Host(
            name=f"h{index}", rack=f"rack{index * num_racks // num_hosts}", kind=first.kind, rate_bit_per_s=rate,
            cpus=cores, machine=first.machine,
        )
        for index in range(num_hosts)
    )  # fmt: skip
    uplinks: tuple[Uplink, ...] = ()
    if uplink_bit_per_s is not None:
        uplink = _declared(uplink_bit_per_s, share)
        uplinks = tuple(Uplink(rack=f"rack{index}", rate_bit_per_s=uplink) for index in range(num_racks))
    return Fabric(
        name=fabric.name if name is None else name,
        hosts=hosts,
        uplinks=uplinks,
        rtt_s=fabric.rtt_s,
        collectives=tuple(curve for held in (fabric, *others) for curve in _with_rate(held)),
        codecs=fabric.codecs,
    )


def _slowest(fabric: Fabric) -> Figure:
    measured = [host.rate_bit_per_s for host in fabric.hosts if host.rate_bit_per_s is not None]
    if len(measured) < len(fabric.hosts):
        raise DataError(
            f"the fabric {fabric.name!r} does not tell the rate of each host",
            expected="measured hosts",
            hint="run `wirespeed bench links` on them and calibrate with its record",
        )
    return min(measured, key=lambda figure: figure.value)


def _with_rate(fabric: Fabric) -> tuple[CollectiveCurve, ...]:
    rate_bit_per_s = _slowest(fabric).value
    return tuple(
        curve if curve.rate_bit_per_s is not None else msgspec.structs.replace(curve, rate_bit_per_s=rate_bit_per_s)
        for curve in fabric.collectives
    )


def _declared(bit_per_s: float, share: float) -> Figure:
    check_rate(bit_per_s)
    return Figure(value=bit_per_s * share, origin="declared")
