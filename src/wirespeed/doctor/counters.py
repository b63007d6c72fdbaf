"""Counters read twice: what drops, waits, errs and retransmits while traffic flows.

Absolute counters prove nothing, so these checks apply only where two readings were taken (``--during 10s`` under load).
A counter that went down was reset: it is left out. Counters of RDMA ports that are not active are not read, since some
drivers fill the kernel log when they are (gpud#1164).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.counter_rules import RULES
from wirespeed.doctor.inventory import HostView, Nic
from wirespeed.errors import MissingCapability
from wirespeed.units import format_percent, format_rate, format_size

_ETHTOOL = re.compile(
    r"^\s+((?:rx|tx)_(?:prio\d_)?pause(?:_ctrl_phy|_duration)?|rx_out_of_buffer|rx_discards_phy|rx_crc_errors_phy|"
    r"rx_pcs_symbol_err_phy|rx_corrected_bits_phy|link_down_events_phy|module_high_temp|rx_oversize_pkts_phy|"
    r"rx_out_of_range_len_phy|outbound_pci_stalled_wr|rx_no_buffer_count|rx_missed_errors|(?:rx|tx)_drops?|retrans_timeout_events|"
    r"(?:rx|tx)_(?:errors|fifo_errors))\s*:\s*(\d+)\s*$",
    re.MULTILINE,
)
_NIC_FILES = (
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "rx_dropped",
    "rx_errors",
    "rx_crc_errors",
    "rx_missed_errors",
    "rx_fifo_errors",
    "tx_dropped",
    "tx_errors",
)
_BUSY_CPU = 0.8


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Two readings, ``seconds`` apart."""

    seconds: float
    before: Mapping[str, int] = field(repr=False)
    after: Mapping[str, int] = field(repr=False)

    def grown(self, key: str) -> int | None:
        """By how much a counter grew; None where it is not in both readings or was reset."""
        if key not in self.before or key not in self.after or self.after[key] < self.before[key]:
            return None
        return self.after[key] - self.before[key]

    def matching(self, pattern: str) -> Iterator[tuple[re.Match[str], int]]:
        """Counters of a pattern that grew."""
        for key in self.after:
            match = re.fullmatch(pattern, key)
            grown = None if match is None else self.grown(key)
            if match is not None and grown:
                yield match, grown


def read_counters(view: HostView) -> dict[str, int]:
    """Every counter that a rule asks for, now. Keys are ``group.subject.name``."""
    held: dict[str, int] = {}
    _read_processors(view, held)
    for nic in view.nics:
        _read_nic(view, nic, held)
    for port in view.rdma_ports:
        if port.is_active:
            base = f"/sys/class/infiniband/{port.device}/ports/{port.port}"
            for folder in ("counters", "hw_counters"):
                for name in view.system.list_dir(f"{base}/{folder}"):
                    if name != "lifespan":
                        _read_file(view, f"{base}/{folder}/{name}", f"rdma.{port.name}.{name}", held)
    return held


def _read_processors(view: HostView, held: dict[str, int]) -> None:
    system = view.system
    _read_pairs(system.read_text("/proc/net/snmp"), "tcp", ("Tcp",), held)
    _read_pairs(system.read_text("/proc/net/netstat"), "tcp", ("TcpExt",), held)
    for cpu, line in enumerate((system.read_text("/proc/net/softnet_stat") or "").splitlines()):
        cells = line.split()
        if len(cells) >= 3 and all(re.fullmatch(r"[0-9a-f]{1,16}", cell) for cell in cells[:3]):
            for name, cell in zip(("processed", "dropped", "squeezed"), cells):  # noqa: B905 - Python 3.9
                held[f"softnet.{cpu}.{name}"] = int(cell, 16)
    for line in (system.read_text("/proc/stat") or "").splitlines():
        match = re.match(r"cpu(\d+) ([\d ]+)", line)
        if match is not None:
            ticks = [int(tick) for tick in match[2].split()]
            held[f"cpu.{match[1]}.total"] = sum(ticks[:8])
            held[f"cpu.{match[1]}.softirq"] = ticks[6] if len(ticks) > 6 else 0


def _read_nic(view: HostView, nic: Nic, held: dict[str, int]) -> None:
    base = f"/sys/class/net/{nic.name}"
    for name in _NIC_FILES:
        _read_file(view, f"{base}/statistics/{name}", f"nic.{nic.name}.{name}", held)
    _read_file(view, f"{base}/carrier_down_count", f"nic.{nic.name}.carrier_down_count", held)
    if nic.is_physical and nic.is_up:
        try:
            said = view.system.run(["ethtool", "-S", nic.name], timeout_s=3.0).stdout
        except MissingCapability:
            return
        for name, value in _ETHTOOL.findall(said):
            held[f"nic.{nic.name}.{name}"] = int(value)


def _read_file(view: HostView, path: str, key: str, held: dict[str, int]) -> None:
    value = view.system.read_int(path)
    if value is not None:
        held[key] = value


def _read_pairs(text: str | None, group: str, prefixes: tuple[str, ...], held: dict[str, int]) -> None:
    """Alternating lines of names and values with the same prefix; columns differ by kernel."""
    lines = (text or "").splitlines()
    for names, values in zip(lines[::2], lines[1::2]):  # noqa: B905 - Python 3.9
        prefix = names.split(":", 1)[0]
        if prefix in prefixes and values.startswith(prefix + ":"):
            for name, value in zip(names.split()[1:], values.split()[1:]):  # noqa: B905 - Python 3.9
                if value.lstrip("-").isdigit():
                    held[f"{group}.{prefix}.{name}"] = int(value)


def _not_watched(view: HostView) -> str | None:
    return None if view.delta is not None else "counters were not watched: add --during 10s while traffic flows"


@check("counters.growth", "errors, drops, pauses and waits that grow under load", applies=_not_watched)
def growth(view: HostView) -> Iterator[Outcome]:
    """Each rule on each counter; one finding per rule and subject."""
    delta = view.delta
    assert delta is not None
    for rule in RULES:
        seen: set[str] = set()
        for match, grown in delta.matching(rule.pattern):
            subject, name = match[1], match[2]
            if grown / delta.seconds <= rule.per_s or subject in seen:
                continue
            seen.add(subject)
            words = {"subject": subject, "name": name, "grown": grown}
            yield Finding(
                id=rule.id,
                subject=subject,
                severity=rule.severity,
                title=rule.title.format(**words),
                evidence=(
                    Evidence(
                        where=match[0],
                        seen=f"+{grown} in {delta.seconds:.3g} s",
                        expected=f"at most {rule.per_s:g} per s" if rule.per_s else "no growth",
                    ),
                ),
                remedy=Remedy(text=rule.remedy.format(**words)),
                source=rule.source,
                path=rule.path,
            )


@check("counters.retransmits", "TCP retransmissions under load", applies=_not_watched)
def retransmits(view: HostView) -> Iterator[Outcome]:
    """Share of segments sent again: 0.01 % is worth a look, 0.1 % is bad; time-outs are worse."""
    delta = view.delta
    assert delta is not None
    sent, again = delta.grown("tcp.Tcp.OutSegs"), delta.grown("tcp.Tcp.RetransSegs")
    if sent is None or again is None:
        yield Unknown(what="TCP retransmissions", why="/proc/net/snmp has no Tcp counters")
        return
    if sent < 10_000:
        yield Unknown(
            what="TCP retransmissions",
            why=f"only {sent} segments were sent while watched",
            hint="watch while the job runs",
        )
        return
    share = again / sent
    yield Fact(key="counters.retransmitted", value=format_percent(share))
    if share <= 1e-4:
        return
    worse = {name: delta.grown(f"tcp.TcpExt.{name}") or 0 for name in ("TCPLostRetransmit", "TCPTimeouts")}
    yield Finding(
        id="counters.retransmits",
        subject="tcp",
        severity="warning" if share > 1e-3 or worse["TCPTimeouts"] > 0 else "notice",
        title=f"{format_percent(share)} of TCP segments were sent again.",
        evidence=(
            Evidence(
                where="/proc/net/snmp RetransSegs / OutSegs", seen=f"{again} of {sent}", expected="at most 0.01 %"
            ),
            Evidence(where="/proc/net/netstat", seen=", ".join(f"{name} +{value}" for name, value in worse.items())),
        ),
        remedy=Remedy(
            text="find the drop: rx_out_of_buffer and softnet drops on receivers, discards on switch ports, a rate "
            "limit"
        ),
        source="0.01 % and 0.1 %: own recommendation",
        path="tcp",
    )


@check("counters.softirq", "processors busy with packets", applies=_not_watched)
def softirq(view: HostView) -> Iterator[Outcome]:
    """One processor above 80 % in softirq is the limit of whatever it serves."""
    delta = view.delta
    assert delta is not None
    shares = {}
    for match, total in delta.matching(r"cpu\.(\d+)\.(total)"):
        shares[match[1]] = (delta.grown(f"cpu.{match[1]}.softirq") or 0) / total
    if not shares:
        yield Unknown(what="softirq share", why="/proc/stat has no processor counters")
        return
    cpu = max(shares, key=lambda name: shares[name])
    yield Fact(key="counters.softirq", value=f"{format_percent(shares[cpu])} on processor {cpu}")
    if shares[cpu] > _BUSY_CPU:
        yield Finding(
            id="counters.softirq-bound",
            subject=f"cpu {cpu}",
            severity="warning",
            title=f"Processor {cpu} spends {format_percent(shares[cpu])} of its time on packets: it is the limit.",
            evidence=(
                Evidence(
                    where="/proc/stat softirq",
                    seen=format_percent(shares[cpu]),
                    expected=f"below {format_percent(_BUSY_CPU)}",
                ),
            ),
            remedy=Remedy(
                text="spread interrupts over more queues and processors near the NIC; switch on GRO; a larger MTU"
            ),
            source="80 %: own recommendation",
            path="tcp",
        )


@check("counters.use", "how full links are", applies=_not_watched)
def use(view: HostView) -> Iterator[Outcome]:
    """Rates as facts. IB data counters count words of 4 bytes; wait is time with data but no credit."""
    delta = view.delta
    assert delta is not None
    for nic in view.physical_nics:
        for way in ("rx", "tx"):
            grown = delta.grown(f"nic.{nic.name}.{way}_bytes")
            if grown is not None:
                yield Fact(
                    key=f"counters.{nic.name}.{way}", value=_shown(grown * 8 / delta.seconds, nic.speed_bit_per_s)
                )
    for port in view.rdma_ports:
        for way, name in (("rx", "port_rcv_data"), ("tx", "port_xmit_data")):
            grown = delta.grown(f"rdma.{port.name}.{name}")
            if grown is not None:
                yield Fact(
                    key=f"counters.{port.name}.{way}", value=_shown(grown * 32 / delta.seconds, port.rate_bit_per_s)
                )
        waited, sent = delta.grown(f"rdma.{port.name}.port_xmit_wait"), delta.grown(f"rdma.{port.name}.port_xmit_data")
        if waited and sent and waited > sent:
            yield Finding(
                id="counters.rdma-congested",
                subject=port.name,
                severity="notice",
                title=f"{port.name} had data but no credit for longer than it was sending: the fabric behind it is "
                "congested.",
                evidence=(
                    Evidence(
                        where=f"rdma.{port.name}.port_xmit_wait",
                        seen=f"+{waited} ticks",
                        expected="below port_xmit_data's words",
                    ),
                    Evidence(where=f"rdma.{port.name}.port_xmit_data", seen=f"+{sent} words ({format_size(4 * sent)})"),
                ),
                remedy=Remedy(text="look for the slow receiver or the uplink that many share; adaptive routing"),
                source="InfiniBand specification, PortXmitWait",
                path="rdma",
            )


def _shown(bit_per_s: float, rate: float | None) -> str:
    return format_rate(bit_per_s) + ("" if rate is None else f" ({format_percent(bit_per_s / rate)})")


CHECKS = (growth, retransmits, softirq, use)
