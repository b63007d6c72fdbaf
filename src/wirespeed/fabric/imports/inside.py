"""What a file says of one host's inside: its devices, what joins them, its NICs."""

from __future__ import annotations

import msgspec

from wirespeed.fabric.parts import Figure, Island
from wirespeed.fabric.presets import ISLANDS

NVLINKS = {70: ("nvlink2", 20.0), 80: ("nvlink3", 20.0), 90: ("nvlink4", 20.6), 100: ("nvlink5", 40.1)}
"""Per compute capability: the generation, and GB/s per link and direction (NVIDIA/nccl topo.h)."""


class Inside(msgspec.Struct, frozen=True, kw_only=True):
    """One host. ``nic_line_bit_per_s`` is the fastest NIC's line rate; ``notes`` say what was guessed or left out."""

    num_devices: int
    num_nics: int
    island: Island | None
    nic_line_bit_per_s: float | None = None
    notes: tuple[str, ...] = ()


def nvlink_island(num_links: int, sm: int, num_devices: int, *, source: str) -> Island:
    """Devices joined by ``num_links`` NVLinks each, of the generation of compute capability ``sm``."""
    generation = max((known for known in NVLINKS if known <= sm), default=70)
    name, gbyte_per_s = NVLINKS[generation]
    return Island(
        name=f"{name}x{num_links}",
        rate_bit_per_s=Figure(value=num_links * gbyte_per_s * 8e9, origin="declared", source=source),
        num_devices=num_devices,
        protocols=ISLANDS[name].protocols,
    )


def pcie_island(generation: int, num_devices: int, *, source: str) -> Island:
    """Devices that share a PCIe root of generation 3, 4, 5 or later (as 5)."""
    preset = ISLANDS[f"pcie{min(5, max(3, generation))}"]
    rate = Figure(
        value=preset.rate_bit_per_s.value, origin="assumed", source=f"{source}; {preset.rate_bit_per_s.source}"
    )
    return msgspec.structs.replace(preset, rate_bit_per_s=rate, num_devices=num_devices)
