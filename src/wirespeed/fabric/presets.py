"""Published hardware: what NICs and device links really carry, each figure with its source and date.

A NIC's rate is what a point-to-point transfer with enough streams reaches, not its line rate; what one stream, and what
the best collective reaches, stand in its transport. Figures marked ``assumed`` are scaled from a neighbour. Latencies
per step of GPU collectives are those of NCCL's own tuner. Prices are guesses of 2026 for a port with its cable and its
share of a switch: assumptions to be replaced: ``price=`` in a
one-line fabric, ``price`` of a host in fabric.toml. All of it is wrong for a network that is set up wrongly, and
`wirespeed bench` finds that out.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from wirespeed.errors import UsageError
from wirespeed.fabric.parts import Figure, Island, Protocol, Transport
from wirespeed.spec.workload import Origin

E6 = "FEATURES E6, a published comparison for 128 MB of gradients (undated): 100GbE TCP against InfiniBand HDR"
DDL = "HKBU ddl-benchmarks, results of 2020-05-29 (arXiv 2005.13247): ring bus bandwidth over 8 to 32 GPUs"
MG_WFBP = "MG-WFBP distributed_optimizer.py, read 2026: measured all-reduce start-up, per ring step"
NCCL_TUNING = "NVIDIA/nccl src/graph/tuning.cc and topo.h, read 2026"
BYTEPS = "BytePS, OSDI 2020: point-to-point RDMA 90 Gbit/s on 100GbE"
FRAMES = "IEEE 802.3 framing: 1448 payload bytes of 1538 on the wire"
SLOW_START = "RFC 6928 (2013): ten segments of 1448 bytes"
IBTA = "InfiniBand roadmap of the IBTA, read 2026: line rate of four lanes"
BETWEEN = "our guess, 2026: between InfiniBand and TCP"
SCALED = "scaled from the next slower generation (our guess, 2026)"

NET_PROTOCOLS = (
    Protocol(name="LL", hop_s=2.7e-6, factor=0.5),
    Protocol(name="LL128", hop_s=4.0e-6, factor=0.92),
    Protocol(name="Simple", hop_s=14e-6),
)
NVLINK_PROTOCOLS = (
    Protocol(name="LL", hop_s=0.6e-6, factor=0.5),
    Protocol(name="LL128", hop_s=1.9e-6, factor=0.92),
    Protocol(name="Simple", hop_s=3.4e-6),
)
PCIE_PROTOCOLS = (
    Protocol(name="LL", hop_s=1.0e-6, factor=0.5),
    Protocol(name="LL128", hop_s=2.5e-6, factor=0.92),
    Protocol(name="Simple", hop_s=5.7e-6),
)
LAUNCH_S = 6.6e-6
"""NCCL's base latency of a ring (tuning.cc, LL)."""


@dataclass(frozen=True, kw_only=True)
class NicPreset:
    """A NIC: line rate, what it carries, how messages travel, and what a port costs (assumed)."""

    name: str
    line_bit_per_s: float
    rate: Figure
    transport: Transport
    price: float


def _figure(value: float, source: str, origin: Origin = "declared") -> Figure:
    return Figure(value=value, origin=origin, source=source)


def _tcp(  # one row of the table below
    name: str, gbit_per_s: float, rate: Figure, *, hop_s: Figure, price: float, flow: Figure | None = None
) -> NicPreset:
    transport = Transport(
        name=name,
        latency_s=hop_s,
        launch_s=0.0,
        switch_s=1e-6,
        flow_bit_per_s=flow,
        window_bytes=None,
        first_window_bytes=10 * 1448,
        buffer_bytes=None,
        timeout_s=0.2,
    )
    return NicPreset(name=name, line_bit_per_s=gbit_per_s * 1e9, rate=rate, transport=transport, price=price)


def _rdma(
    name: str, gbit_per_s: float, rate: Figure, *, latency_s: Figure, share: float, switch_s: float, price: float
) -> NicPreset:
    transport = Transport(
        name=name,
        latency_s=latency_s,
        protocols=NET_PROTOCOLS,
        launch_s=LAUNCH_S,
        switch_s=switch_s,
        collective_share=share,
    )
    return NicPreset(name=name, line_bit_per_s=gbit_per_s * 1e9, rate=rate, transport=transport, price=price)


_ONE_STREAM = _figure(20e9, f"{DDL}; 15 to 21 Gbit/s over one socket")
_NDR = "nccl-tests issue 290, read 2026: collectives reach 46 to 48 GB/s per NIC"
_HDR = "nccl-tests issue 119, read 2026: collectives reach 24 GB/s per NIC"

NICS: dict[str, NicPreset] = {
    preset.name: preset
    for preset in (
        _tcp("1g", 1, _figure(1e9 * 1448 / 1538, FRAMES), hop_s=_figure(70e-6, MG_WFBP), price=40),
        _tcp("10g", 10, _figure(9.7e9, DDL), hop_s=_figure(33e-6, MG_WFBP), price=250),
        _tcp("25g", 25, _figure(23.5e9, SCALED, "assumed"), hop_s=_figure(25e-6, SCALED, "assumed"), price=450,
             flow=_ONE_STREAM),
        _tcp("100g", 100, _figure(69.6e9, E6), hop_s=_figure(15e-6, f"{E6}: 10 to 20 us"), price=1400,
             flow=_ONE_STREAM),
        _tcp("200g", 200, _figure(139e9, SCALED, "assumed"), hop_s=_figure(15e-6, SCALED, "assumed"), price=2400,
             flow=_ONE_STREAM),
        _tcp("400g", 400, _figure(278e9, SCALED, "assumed"), hop_s=_figure(15e-6, SCALED, "assumed"), price=4000,
             flow=_ONE_STREAM),
        _rdma("25g-roce", 25, _figure(22.5e9, SCALED, "assumed"), latency_s=_figure(2.5e-6, SCALED, "assumed"),
              share=0.9, switch_s=0.6e-6, price=600),
        _rdma("100g-roce", 100, _figure(90e9, BYTEPS), latency_s=_figure(2e-6, BETWEEN, "assumed"),
              share=0.9, switch_s=0.6e-6, price=1700),
        _rdma("200g-roce", 200, _figure(180e9, SCALED, "assumed"), latency_s=_figure(2e-6, SCALED, "assumed"),
              share=0.9, switch_s=0.6e-6, price=2800),
        _rdma("400g-roce", 400, _figure(368e9, SCALED, "assumed"), latency_s=_figure(2e-6, SCALED, "assumed"),
              share=0.95, switch_s=0.6e-6, price=4600),
        _rdma("100g-ib", 100, _figure(100e9, f"{IBTA}, EDR: 12.5 GB/s"), share=0.96, switch_s=0.13e-6,
              price=1600, latency_s=_figure(1.2e-6, SCALED, "assumed")),
        _rdma("200g-ib", 200, _figure(200e9, f"{E6}: 25 GB/s; {_HDR}"), share=0.96, switch_s=0.13e-6, price=2900,
              latency_s=_figure(1.2e-6, E6)),
        _rdma("400g-ib", 400, _figure(400e9, f"{IBTA}, NDR: 50 GB/s; {_NDR}"), share=0.94, switch_s=0.13e-6,
              price=5200, latency_s=_figure(1.2e-6, SCALED, "assumed")),
        _rdma("800g-ib", 800, _figure(800e9, f"{IBTA}, XDR: 100 GB/s; {SCALED}", "assumed"), share=0.94,
              switch_s=0.13e-6, price=9500, latency_s=_figure(1.2e-6, SCALED, "assumed")),
    )
}  # fmt: skip

NIC_NAMES = {
    "edr": "100g-ib", "hdr": "200g-ib", "ndr": "400g-ib", "xdr": "800g-ib", "1gbe": "1g", "10gbe": "10g",
    "25gbe": "25g", "100gbe": "100g", "200gbe": "200g", "400gbe": "400g", "1g-tcp": "1g", "10g-tcp": "10g",
    "25g-tcp": "25g", "100g-tcp": "100g", "200g-tcp": "200g", "400g-tcp": "400g",
}  # fmt: skip


def _island(name: str, gbyte_per_s: float, devices: int, source: str, origin: Origin = "declared") -> Island:
    is_bus = name.startswith("pcie")
    return Island(
        name=name,
        kind="bus" if is_bus else "switch",
        rate_bit_per_s=_figure(gbyte_per_s * 8e9, source, origin),
        num_devices=devices,
        protocols=PCIE_PROTOCOLS if is_bus else NVLINK_PROTOCOLS,
    )


_PCIE = f"{NCCL_TUNING}: 12 GB/s per direction of gen3 x16, both directions of one root counted together"

ISLANDS: dict[str, Island] = {
    island.name: island
    for island in (
        _island("pcie3", 24, 4, _PCIE),
        _island("pcie4", 48, 8, f"{_PCIE}, twice gen3", "assumed"),
        _island("pcie5", 96, 8, f"{_PCIE}, four times gen3", "assumed"),
        _island("nvlink2", 120, 8, "V100: 6 links of 20 GB/s as for A100", "assumed"),
        _island("nvlink3", 240, 8, f"{NCCL_TUNING}: A100, 12 links of 20 GB/s"),
        _island("nvlink4", 370.8, 8, f"{NCCL_TUNING}: H100, 18 links of 20.6 GB/s"),
        _island("nvlink5", 721.8, 8, f"{NCCL_TUNING}: B200, 18 links of 40.1 GB/s"),
        _island("nvlink5-72", 721.8, 72, f"{NCCL_TUNING}: B200, 18 links of 40.1 GB/s; 72 devices as one host"),
    )
}

CURRENCY = "USD"


def nic(name: str) -> NicPreset:
    """A NIC by name or alias, such as 400g-ib, ndr or 10GbE. Raises UsageError, naming what there is."""
    plain = name.lower()
    held = NICS.get(NIC_NAMES.get(plain, plain))
    if held is None:
        raise UsageError(
            f"got the unknown NIC {name!r}",
            expected=", ".join(NICS),
            hint=_nearest(plain, [*NICS, *NIC_NAMES], "or give the rate itself, such as rate=40Gbit/s rtt=30us"),
        )
    return held


def island(name: str) -> Island:
    """An island by name. Raises UsageError, naming what there is."""
    held = ISLANDS.get(name.lower())
    if held is None:
        raise UsageError(
            f"got the unknown island {name!r}",
            expected=f"none, {', '.join(ISLANDS)}",
            hint=_nearest(name.lower(), list(ISLANDS), "or describe it in [[islands]] of a fabric.toml"),
        )
    return held


def _nearest(name: str, known: list[str], otherwise: str) -> str:
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise


@dataclass(frozen=True, kw_only=True)
class TransferRow:
    """What one NIC does with a message between two hosts: rate with enough streams, latency, time."""

    nic: str
    bytes_per_s: float
    latency_s: float
    seconds: float
    source: str


def transfer_table(size_bytes: int, names: tuple[str, ...] = ("100g", "200g-ib")) -> tuple[TransferRow, ...]:
    """The time of one message between two hosts per NIC, with enough streams: latency plus bytes over the rate."""
    rows = []
    for name in names:
        held = nic(name)
        rate = held.rate.value / 8
        rows.append(
            TransferRow(
                nic=held.name,
                bytes_per_s=rate,
                latency_s=held.transport.latency_s.value,
                seconds=held.transport.latency_s.value + size_bytes / rate,
                source=f"{held.rate.source}; latency: {held.transport.latency_s.source}",
            )
        )
    return tuple(rows)


GRADIENTS_BYTES = 128 * 10**6
"""The message of E6's table."""
