"""Text to numbers and back."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed import units
from wirespeed.errors import UsageError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("25 MiB", 26_214_400),
        ("25MiB", 26_214_400),
        ("1GB", 1_000_000_000),
        ("1 GiB", 1_073_741_824),
        ("64k", 65_536),
        ("1.5 KB", 1500),
        ("1e3 B", 1000),
        (" 0 ", 0),
    ],
)
def test_size_is_binary_with_an_i_and_decimal_without(text: str, num_bytes: int):
    assert units.parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "bit_per_s"),
    [
        ("1 Gbit/s", 1e9),
        ("1gbit", 1e9),
        ("100mbit", 1e8),
        ("25gbps", 25e9),
        ("25 Gbps", 25e9),
        ("10 Gb/s", 10e9),
        ("3 GB/s", 24e9),
        ("1 B/s", 8.0),
        ("56kbit/s", 56e3),
        ("9600 bit/s", 9600.0),
    ],
)
def test_rate_is_in_bits_unless_it_says_bytes(text: str, bit_per_s: float):
    assert units.parse_rate(text) == bit_per_s


@pytest.mark.parametrize("text", ["1 GB/S", "1 gbyte/s", "1", "1 Gbit/h", "Gbit/s", "1 GiB/s", "0 bit/s", "0mbit"])
def test_rate_whose_unit_would_be_a_guess_is_refused(text: str):
    with pytest.raises(UsageError, match="got rate"):
        units.parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20 us", 20e-6), ("20µs", 20e-6), ("1.5ms", 1.5e-3), ("5m", 300.0), ("2h", 7200.0), ("1d", 86400.0), ("0s", 0.0)],
)
def test_duration_reads_units_of_people(text: str, seconds: float):
    assert units.parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("text", "ratio"), [("1%", 0.01), ("0.01", 0.01), ("100 %", 1.0), ("0", 0.0)])
def test_ratio_is_a_fraction_or_a_percentage(text: str, ratio: float):
    assert units.parse_ratio(text) == ratio


@pytest.mark.parametrize("text", ["101%", "1.01", "-1%", "1 ms", "", "x"])
def test_ratio_outside_0_to_1_is_refused(text: str):
    with pytest.raises(UsageError, match="got ratio"):
        units.parse_ratio(text)


PARSERS = [units.parse_size, units.parse_rate, units.parse_duration, units.parse_ratio]


@pytest.mark.parametrize("parse", PARSERS)
@given(text=st.one_of(st.text(), st.from_regex(r"[-+]?[0-9.]{1,6}(e[0-9]{1,4})? ?[a-zA-Z/%]{0,6}", fullmatch=True)))
def test_any_text_gives_a_finite_number_or_a_usage_error(parse, text: str):
    try:
        value = parse(text)
    except UsageError:
        return
    assert math.isfinite(value)
    assert value >= 0


@pytest.mark.parametrize("text", ["1e308 GB", "1e400", "-1 B", "1 XB", "nan", "inf B", ""])
def test_size_that_no_machine_holds_is_refused(text: str):
    with pytest.raises(UsageError, match="got size"):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (26_214_400, "25 MiB"),
        (1_048_575, "1 MiB"),
        (43_200_000, "41.2 MiB"),
        (5 * 1024**4, "5120 GiB"),
    ],
)
def test_size_is_shown_in_binary_units(num_bytes: int, text: str):
    assert units.format_size(num_bytes) == text


@pytest.mark.parametrize(
    ("bit_per_s", "text"),
    [(1e9, "1 Gbit/s"), (999.7e6, "1 Gbit/s"), (956e6, "956 Mbit/s"), (2.5e12, "2500 Gbit/s"), (0, "0 bit/s")],
)
def test_rate_is_shown_in_three_digits_and_never_with_an_exponent(bit_per_s: float, text: str):
    assert units.format_rate(bit_per_s) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.468, "468 ms"),
        (20e-6, "20 us"),
        (0.9999, "1 s"),
        (119.6, "120 s"),
        (120, "2 m 00 s"),
        (3661, "1 h 01 m"),
        (0, "0 s"),
        (-0.5, "-500 ms"),
        (math.nan, "nan s"),
        (math.inf, "inf s"),
    ],
)
def test_duration_is_shown_in_three_digits(seconds: float, text: str):
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(("fraction", "text"), [(0.125, "12.5 %"), (0, "0 %"), (12.34, "1234 %"), (9.997, "1000 %")])
def test_percent_is_never_shown_with_an_exponent(fraction: float, text: str):
    assert units.format_percent(fraction) == text


@given(st.floats(min_value=1, max_value=1e15))
def test_shown_size_reads_back_within_its_four_digits(num_bytes: float):
    assert units.parse_size(units.format_size(num_bytes)) == pytest.approx(num_bytes, rel=5.1e-4, abs=0.5)


@given(st.floats(min_value=1e-3, max_value=1e15))
def test_shown_rate_reads_back_within_its_three_digits(bit_per_s: float):
    assert units.parse_rate(units.format_rate(bit_per_s)) == pytest.approx(bit_per_s, rel=5.1e-3)


@given(st.floats(min_value=1e-9, max_value=119))
def test_shown_duration_reads_back_within_its_three_digits(seconds: float):
    assert units.parse_duration(units.format_duration(seconds)) == pytest.approx(seconds, rel=5.1e-3)


@given(st.floats(min_value=1, max_value=1e15), st.sampled_from([units.format_size, units.format_rate]))
def test_shown_number_is_short_and_has_one_unit(value: float, show):
    assert re.fullmatch(r"[0-9.]{1,7} [A-Za-z/]+", show(value))
