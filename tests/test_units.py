"""How numbers read: decimal sizes, milliseconds, an uncertainty that decides the digits."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.core import units
from quantlab.core.text import printable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (98_400_000, "98.4 MB"),
        (270_884_736, "271 MB"),
        (999_499_999, "999 MB"),
        (999_999_999, "1.00 GB"),
        (1_240_000_000, "1.24 GB"),
        (7.5e18, "7500 PB"),
    ],
)
def test_sizes_are_decimal(value, text):
    assert units.size(value) == text


def test_size_with_uncertainty_shares_the_unit():
    assert units.size(312_000_000, 4_200_000) == "312.0 ± 4.2 MB"


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (24.49900, 1.65908, "24.50 ± 1.66"),
        (24.499, 0.42, "24.50 ± 0.42"),
        (24.499, 4.2, "24.5 ± 4.2"),
        (24.499, 131.0, "24 ± 131"),
        (0.05703, 0.000236, "0.05703 ± 0.00024"),
        (24.499, 0.0999, "24.499 ± 0.100"),
        (24.499, 0.0, "24.50"),
        (24.499, None, "24.50"),
        (24.499, math.inf, "24.50"),
        (math.nan, None, "nan"),
        (math.inf, 1.0, "inf"),
        (0.0, None, "0"),
        (1234567.8, None, "1234568"),
        (0.00000123456, None, "1.235e-06"),
        (9.99996, None, "10.00"),
    ],
)
def test_the_uncertainty_decides_the_digits(value, half, text):
    assert units.measured(value, half) == text


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_an_uncertainty_is_never_shown_as_zero(value, half):
    number, _, shown = units.measured(value, half).partition(" ± ")
    assert float(shown) == pytest.approx(half, rel=0.06)
    assert len(number.partition(".")[2]) == len(shown.partition(".")[2])
    assert abs(float(number) - value) <= 0.51 * 10.0 ** -len(number.partition(".")[2]) + 1e-6


@given(st.floats(1e-4, 1e11), st.integers(1, 6))
def test_significant_digits_hold_the_value(value, digits):
    assert float(units.significant(value, digits)) == pytest.approx(value, rel=0.51 * 10.0 ** (1 - digits))


@pytest.mark.parametrize(
    ("seconds", "half", "text"),
    [
        (0.0237, None, "23.7 ms"),
        (3.853, None, "3853 ms"),
        (0.02124, 0.0011, "21.24 ± 1.10 ms"),
        (0.00004, None, "0.0400 ms"),
    ],
)
def test_seconds_read_as_milliseconds(seconds, half, text):
    assert units.milliseconds(seconds, half) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.36, "-64%"),
        (1.0, "0%"),
        (1.00001, "0%"),
        (1.0038, "+0.38%"),
        (1.0346, "+3.5%"),
        (1.0997, "+10%"),
        (0.9004, "-10%"),
        (24.0, "+2300%"),
        (math.inf, "+inf%"),
        (math.nan, "+nan%"),
    ],
)
def test_ratios_read_as_changes(ratio, text):
    assert units.change(ratio) == text


@given(st.floats(0.001, 1000))
def test_a_change_has_the_sign_of_the_ratio(ratio):
    text = units.change(ratio)
    assert re.fullmatch(r"0%|[+-]\d+(\.\d+)?%", text)
    assert (text[0] == "+") == (ratio > 1 and text != "0%")


def test_shares_read_as_percent():
    assert units.percent(0.861764) == "86.18%"
    assert units.percent(0.3438, digits=2) == "34%"
    assert units.percent(0.861764, 0.0213) == "86.2 ± 2.1%"


@pytest.mark.parametrize(("half", "decimals"), [(None, 2), (0.0, 2), (0.7, 2), (0.07, 2), (0.004, 3), (1e-9, 5)])
def test_ratios_get_decimals_for_their_interval(half, decimals):
    assert units.decimals_for(half) == decimals


@given(st.text())
def test_printable_text_moves_no_cursor(text):
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


def test_printable_text_keeps_what_can_be_read():
    assert printable("模型 Q4_K_M ±") == "模型 Q4_K_M ±"
    assert printable("a\x1b[31m\nb\u202ec\udc80") == "a\\x1b[31m\\nb\\u202ec\\udc80"
