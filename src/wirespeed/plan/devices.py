"""Devices by name: vendor figures of dense peaks and memory, with the share of them that training reaches.

Peaks are data-sheet figures without sparsity. The shares of Ampere and Hopper are calibrated, one number per
architecture, on published training throughput (docs/validation: Narayanan et al. 2021 on A100, Megatron Core 0.8 on
H100); the others are assumed equal to the nearest architecture. A power cap, a hot rack or a PCIe card lowers them:
give ``device=NAME,matrix_share=0.6`` or measure a step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from wirespeed.errors import UsageError
from wirespeed.spec.device import Device
from wirespeed.units import GIB, parse_rate, parse_size

_AMPERE_SHARE = 0.74
_HOPPER_SHARE = 0.58
_OLDER_SHARE = 0.8


def _device(
    name: str,
    *,
    tera: dict[str, float],
    gib: float,
    gb_per_s: float,
    share: float,
    source: str,
) -> Device:
    return Device(
        name=name,
        flop_per_s={dtype: value * 1e12 for dtype, value in tera.items()},
        memory_bytes=gib * GIB,
        memory_bytes_per_s=gb_per_s * 1e9,
        matrix_share=share,
        source=source,
    )


def _tensor_core(bits16: float, fp32: float, tf32: float | None = None, fp8: float | None = None) -> dict[str, float]:
    rates = {"fp32": fp32, "fp16": bits16, "bf16": bits16}
    if tf32 is not None:
        rates["tf32"] = tf32
    if fp8 is not None:
        rates |= {"fp8": fp8, "int8": fp8}
    return rates


_ALL = (
    _device(
        "k80",
        tera={"fp32": 4.37},
        gib=12,
        gb_per_s=240,
        share=_OLDER_SHARE,
        source="NVIDIA Tesla K80 brief, 2015, half",
    ),
    _device(
        "p100",
        tera={"fp32": 10.6, "fp16": 21.2},
        gib=16,
        gb_per_s=732,
        share=_OLDER_SHARE,
        source="NVIDIA P100 SXM2, 2016",
    ),
    _device(
        "v100",
        tera={"fp32": 15.7, "fp16": 125.0},
        gib=32,
        gb_per_s=900,
        share=_OLDER_SHARE,
        source="NVIDIA V100 SXM2 data sheet, 2018",
    ),
    _device(
        "2080ti",
        tera={"fp32": 13.45, "fp16": 53.8},
        gib=11,
        gb_per_s=616,
        share=_OLDER_SHARE,
        source="NVIDIA Turing whitepaper, 2018",
    ),
    _device(
        "t4", tera={"fp32": 8.1, "fp16": 65.0}, gib=16, gb_per_s=320, share=0.6, source="NVIDIA T4 data sheet, 2019"
    ),
    _device(
        "a10", tera=_tensor_core(125, 31.2, 62.5), gib=24, gb_per_s=600, share=0.6, source="NVIDIA A10 data sheet, 2021"
    ),
    _device(
        "a100-40g",
        tera=_tensor_core(312, 19.5, 156),
        gib=40,
        gb_per_s=1555,
        share=_AMPERE_SHARE,
        source="NVIDIA A100 SXM 40 GB data sheet, 2020",
    ),
    _device(
        "a100",
        tera=_tensor_core(312, 19.5, 156),
        gib=80,
        gb_per_s=2039,
        share=_AMPERE_SHARE,
        source="NVIDIA A100 SXM 80 GB data sheet, 2021",
    ),
    _device(
        "l40s",
        tera=_tensor_core(362, 91.6, 183, 733),
        gib=48,
        gb_per_s=864,
        share=0.6,
        source="NVIDIA L40S data sheet, 2023",
    ),
    _device(
        "4090",
        tera=_tensor_core(165, 82.6, 82.6, 330),
        gib=24,
        gb_per_s=1008,
        share=0.7,
        source="NVIDIA Ada whitepaper, 2022",
    ),
    _device(
        "h100",
        tera=_tensor_core(989.4, 66.9, 494.7, 1978.9),
        gib=80,
        gb_per_s=3350,
        share=_HOPPER_SHARE,
        source="NVIDIA H100 SXM data sheet, 2023",
    ),
    _device(
        "h100-pcie",
        tera=_tensor_core(756, 51.2, 378, 1513),
        gib=80,
        gb_per_s=2000,
        share=0.55,
        source="NVIDIA H100 PCIe data sheet, 2023",
    ),
    _device(
        "h200",
        tera=_tensor_core(989.4, 66.9, 494.7, 1978.9),
        gib=131,
        gb_per_s=4800,
        share=_HOPPER_SHARE,
        source="NVIDIA H200 data sheet, 2024 (141 GB)",
    ),
    _device(
        "b200",
        tera=_tensor_core(2250, 75, 1120, 4500),
        gib=167,
        gb_per_s=8000,
        share=_HOPPER_SHARE,
        source="NVIDIA DGX B200 data sheet, 2024 (180 GB)",
    ),
    _device(
        "mi300x",
        tera=_tensor_core(1307.4, 163.4, 653.7, 2614.9),
        gib=192,
        gb_per_s=5300,
        share=0.5,
        source="AMD MI300X data sheet, 2023",
    ),
    # A core of a server CPU at 2.5 GHz with 512-bit vectors does 80 GFLOP/s; memory is a socket's over its cores.
    _device(
        "cpu-core", tera={"fp32": 0.08}, gib=4, gb_per_s=8, share=0.6, source="assumed: one core of a server of 2021"
    ),
)
DEVICES: dict[str, Device] = {device.name: device for device in _ALL}
_ALIASES = {
    "a100-80g": "a100",
    "a100-80gb": "a100",
    "a100-sxm": "a100",
    "h100-sxm": "h100",
    "rtx4090": "4090",
    "h800": "h100",
}
_PARSERS: dict[str, Callable[[str], float]] = {
    "matrix_share": float,
    "memory_share": float,
    "memory": lambda text: float(parse_size(text)),
    "memory_rate": lambda text: parse_rate(text) / 8,
}
_FIELDS = {"memory": "memory_bytes", "memory_rate": "memory_bytes_per_s"}


def find_device(text: str) -> Device:
    """A device by name, with changes after commas: ``a100``, ``h100,matrix_share=0.5``, ``a100,memory=40GiB``."""
    name, *changes = (part.strip() for part in text.lower().split(","))
    device = DEVICES.get(_ALIASES.get(name, name))
    if device is None:
        raise UsageError(f"got device {name!r}", expected=f"one of {', '.join(sorted(DEVICES))}")
    for change in changes:
        key, equals, value = change.partition("=")
        parse = _PARSERS.get(key)
        if parse is None or not equals:
            raise UsageError(f"got {change!r} for device {name}", expected=f"{' or '.join(_PARSERS)}, as KEY=VALUE")
        try:
            held = parse(value)
        except ValueError:
            raise UsageError(f"got {change!r} for device {name}", expected=f"a number for {key}") from None
        device = msgspec.structs.replace(device, **{_FIELDS.get(key, key): held})
    return device
