"""Parse and format sizes, rates, durations and ratios: the only module that converts between text and numbers.

GiB is 2^30 and GB is 10^9. Rates are bits per second unless the text says bytes (``MB/s``). Both the spelling of
people (``1 Gbit/s``) and that of tc (``1gbit``) are read. A bare number is refused where its unit would be a guess.
"""

from __future__ import annotations

import math
import re

from wirespeed.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S(?:.*\S)?)?\s*")

_SIZES = {
    "b": 1, "byte": 1, "bytes": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4,
    "k": KIB, "m": MIB, "g": GIB,
}  # fmt: skip
_DURATIONS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0,
    "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(f"got {what} {text!r}", expected=f"a number and a unit, such as {example}")
    value = float(match.group(1))
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"got {what} {text!r}", expected="a finite number that is not negative")
    return value, match.group(2) or ""


def _within(value: float, text: str, what: str) -> float:
    if not math.isfinite(value):
        raise UsageError(f"got {what} {text!r}", expected="a number that a machine can hold")
    return value


def parse_size(text: str) -> int:
    """Bytes from ``"25 MiB"``, ``"1GB"`` or ``"4096"`` (a bare number is bytes). ``k``, ``m``, ``g`` are binary."""
    value, unit = _split(text, "size", '"25 MiB"')
    factor = 1 if unit == "" else _SIZES.get(unit.lower())
    if factor is None:
        raise UsageError(f"got size {text!r}", expected="a unit of B, KB, MB, GB, KiB, MiB or GiB")
    return round(_within(value * factor, text, "size"))


def parse_rate(text: str) -> float:
    """Bits per second from ``"1 Gbit/s"``, ``"100mbit"``, ``"25gbps"`` or ``"3 GB/s"`` (bytes). Zero is refused."""
    value, unit = _split(text, "rate", '"1 Gbit/s"')
    # Only "b/s" and "B/s" depend on case: bits and bytes. "B/S" could be either and is refused.
    match = re.fullmatch(r"([kKmMgGtT]?)(b/s|B/s)", unit) or re.fullmatch(
        r"([kmgt]?)(bit/s|bits/s|bit|bps)", unit.lower()
    )
    if match is None:
        raise UsageError(f"got rate {text!r}", expected='a rate with its unit, such as "1 Gbit/s" or "100mbit"')
    factor = _PREFIXES[match.group(1).lower()] * (8 if match.group(2) == "B/s" else 1)
    rate_bit_per_s = _within(value * factor, text, "rate")
    if rate_bit_per_s <= 0:
        raise UsageError(
            f"got rate {text!r}",
            expected="a rate above zero",
            hint="use `lab fault HOST down` to stop a link",
        )
    return rate_bit_per_s


def parse_duration(text: str) -> float:
    """Seconds from ``"20 us"``, ``"1.5ms"``, ``"5m"`` (minutes) or ``"2h"``."""
    value, unit = _split(text, "duration", '"5 ms"')
    factor = _DURATIONS.get(unit.lower())
    if factor is None:
        raise UsageError(f"got duration {text!r}", expected="a unit of us, ms, s, m (minutes) or h")
    return _within(value * factor, text, "duration")


def parse_ratio(text: str) -> float:
    """A fraction from ``"1%"`` or ``"0.01"``, within 0 to 1."""
    value, unit = _split(text, "ratio", '"1%"')
    if unit not in ("", "%"):
        raise UsageError(f"got ratio {text!r}", expected='a fraction such as "0.01" or "1%"')
    ratio = value / 100 if unit == "%" else value
    if ratio > 1:
        raise UsageError(f"got ratio {text!r}", expected="at most 1 (100%)")
    return ratio


def exact_percent(fraction: float) -> str:
    """The shortest percentage that ``parse_ratio`` reads back as this very fraction, such as ``1%``."""
    percentages = (f"{fraction * 100:.{digits}g}" for digits in range(1, 18))
    exact = next((text for text in percentages if "e" not in text and float(text) / 100 == fraction), None)
    return f"{fraction!r}" if exact is None else f"{exact}%"


def exact_size(num_bytes: int) -> str:
    """The size in the largest unit that holds it in whole numbers, such as ``4MiB``; ``parse_size`` reads it back."""
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    factor, unit = next(((factor, unit) for factor, unit in units if num_bytes % factor == 0), (1, "B"))
    return f"{num_bytes // factor}{unit}"


def _scaled(value: float, steps: list[tuple[float, str]], digits: int) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {next(unit for factor, unit in steps if factor == 1)}"
    # The unit is that of the rounded value: 999.9 Mbit/s to three digits is 1 Gbit/s.
    rounded = abs(float(f"{value:.{digits}g}"))
    factor, unit = next((step for step in steps if rounded >= step[0]), steps[-1])
    return f"{_digits(value / factor, digits)} {unit}"


def _digits(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text


def format_size(num_bytes: float) -> str:
    """``"25 MiB"``: binary units, four significant digits."""
    return _scaled(num_bytes, [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")], 4)


def format_rate(bit_per_s: float) -> str:
    """``"1 Gbit/s"``: decimal units, three significant digits."""
    return _scaled(bit_per_s, [(1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")], 3)


def format_duration(seconds: float) -> str:
    """``"1.25 ms"``: three significant digits; minutes and hours above 120 s."""
    if 120 <= seconds < math.inf:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {rest:02d} s"
    return _scaled(seconds, [(1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")], 3)


def format_percent(fraction: float) -> str:
    """``"12.5 %"`` with at most three significant digits."""
    return f"{_digits(fraction * 100, 3)} %"
