"""What another network would give: a fabric with other NICs, RDMA in place of TCP, and which hosts to upgrade first.

A changed fabric keeps its shape and its uplinks' oversubscription is kept by scaling uplinks with the NICs where every
host changes. Measured curves are dropped with the network they were measured on. Upgrading some hosts of a ring helps
only once its slowest link is faster; hosts through which more traffic passes (parameter servers, aggregators, roots)
come first, and the order says so with numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np

from wirespeed.errors import UsageError
from wirespeed.fabric.parts import Figure
from wirespeed.fabric.presets import NICS, nic
from wirespeed.fabric.topology import Fabric


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an upgrade: the hosts that change, and the seconds after it. ``gain`` is on the step before."""

    hosts: tuple[str, ...]
    seconds: float
    gain: float
    price: float | None = None


def with_nic(fabric: Fabric, name: str, hosts: Collection[str] | None = None) -> Fabric:
    """The fabric with NICs of preset ``name`` in ``hosts`` (None: all). Raises UsageError for unknown names.

    Where all hosts change, uplinks grow by the same factor: a network is bought for its NICs.
    """
    preset = nic(name)
    known = {host.name for host in fabric.hosts}
    wanted = known if hosts is None else set(hosts)
    if not wanted <= known:
        raise UsageError(f"got host {sorted(wanted - known)[0]!r}", expected="a host of the fabric")
    changed = []
    factors = []
    for host in fabric.hosts:
        if host.name not in wanted:
            changed.append(host)
            continue
        if host.rate_bit_per_s is not None:
            factors.append(preset.rate.value / host.rate_bit_per_s.value)
        price = None if host.price is None else preset.price * host.num_nics
        changed.append(
            msgspec.structs.replace(host, rate_bit_per_s=preset.rate, transport=preset.transport.name, price=price)
        )
    transports = {transport.name: transport for transport in fabric.transports}
    transports[preset.transport.name] = preset.transport
    used = {host.transport for host in changed}
    scale = float(np.median(factors)) if factors and wanted == known else 1.0

    def grown(figure: Figure) -> Figure:
        source = f"scaled with the NICs to {name}"
        return figure if scale == 1 else Figure(value=figure.value * scale, origin="assumed", source=source)

    switches = tuple(
        msgspec.structs.replace(switch, rate_bit_per_s=grown(switch.rate_bit_per_s))
        if switch.rate_bit_per_s is not None
        else switch
        for switch in fabric.switches
    )
    return msgspec.structs.replace(
        fabric,
        hosts=tuple(changed),
        transports=tuple(transport for key, transport in transports.items() if key in used),
        switches=switches,
        uplinks=tuple(
            msgspec.structs.replace(uplink, rate_bit_per_s=grown(uplink.rate_bit_per_s)) for uplink in fabric.uplinks
        ),
        rtt_s=None,
        collectives=(),
    )


def rdma_sibling(fabric: Fabric) -> str | None:
    """The RoCE preset of the same line rate as the fabric's TCP NICs; None where there is none."""
    names = {host.transport for host in fabric.hosts}
    if len(names) != 1:
        return None
    sibling = f"{names.pop()}-roce"
    return sibling if sibling in NICS else None


def upgrade_order(
    fabric: Fabric,
    name: str,
    seconds: Callable[[Fabric], float],
    *,
    load: Callable[[Fabric], Sequence[float]] | None = None,
    max_steps: int = 8,
) -> tuple[Upgrade, ...]:
    """Which hosts to move to NIC ``name`` first, greedily: the set whose upgrade saves most per host, then the next.

    ``seconds`` costs a fabric (a step, an exchange). Hosts that are alike (rate, transport and ``load``, the seconds of
    each host's own traffic) change together, because changing one of several equal bottlenecks saves nothing.
    Stops where nothing is left or nothing more is saved.
    """
    if max_steps < 1:
        raise UsageError(f"got {max_steps} steps", expected="1 or more")
    preset = nic(name)
    now = fabric
    before_s = seconds(fabric)
    steps: list[Upgrade] = []
    done: set[str] = set()
    while len(steps) < max_steps:
        loads = [0.0] * len(now.hosts) if load is None else list(load(now))
        classes: dict[tuple[float, str, float], list[str]] = {}
        for host, own_s in zip(now.hosts, loads, strict=True):
            rate = 0.0 if host.rate_bit_per_s is None else host.rate_bit_per_s.value
            if host.name not in done and rate < preset.rate.value:
                classes.setdefault((rate, host.transport, round(own_s, 9)), []).append(host.name)
        best: tuple[float, float, list[str]] | None = None
        for hosts in classes.values():
            after_s = seconds(with_nic(now, name, hosts))
            saved = (before_s - after_s) / len(hosts)
            if best is None or saved > best[0]:
                best = (saved, after_s, hosts)
        if best is None or best[1] >= before_s * (1 - 1e-6):
            break
        _, after_s, hosts = best
        now = with_nic(now, name, hosts)
        done |= set(hosts)
        price = None if now.hosts[0].price is None else preset.price * len(hosts)
        steps.append(Upgrade(hosts=tuple(hosts), seconds=after_s, gain=1 - after_s / before_s, price=price))
        before_s = after_s
    return tuple(steps)


def star_traffic_s(fabric: Fabric, centres: Collection[str], size_bytes: float) -> list[float]:
    """Seconds that each host's NICs are busy when ``centres`` (parameter servers, aggregators) serve all others.

    Every other host sends ``size_bytes`` to the centres in equal parts and gets as many back; directions overlap.
    Raises UsageError for a centre that is no host.
    """
    names = [host.name for host in fabric.hosts]
    unknown = sorted(set(centres) - set(names))
    if unknown or not centres:
        raise UsageError(f"got centres {sorted(centres)}", expected="one or more hosts of the fabric")
    others = len(names) - len(set(centres))
    found = []
    for host in fabric.hosts:
        if host.rate_bit_per_s is None:
            raise UsageError(f"got host {host.name!r} without a rate", expected="the rate of each host")
        own = others * size_bytes / len(set(centres)) if host.name in centres else size_bytes
        found.append(8 * own / (host.rate_bit_per_s.value * host.num_nics))
    return found
