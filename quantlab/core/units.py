"""SI values as a person reads them. Inside everything is seconds, bytes and ratios; only here they become text.

Sizes are decimal: 1 MB is 10^6 bytes, 1 GB is 10^9 bytes.
"""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def significant(value: float, digits: int) -> str:
    """`value` in fixed notation with at least `digits` significant digits; integer digits are never rounded away."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exponent = _exponent(value, digits)
    if not -5 <= exponent < 12:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def measured(value: float, half_width: float | None, digits: int = 4) -> str:
    """A value with its uncertainty, `24.50 ± 1.66`: the uncertainty decides how many decimals are worth showing.

    The uncertainty has two significant digits, three where it starts with 1. One sample has none (None), and equal
    samples (0) show none: then the value has `digits` significant digits.
    """
    if not half_width or not math.isfinite(half_width) or not math.isfinite(value):
        return significant(value, digits)
    exponent = _exponent(half_width, 2)
    leading_one = half_width < 1.995 * 10.0**exponent
    decimals = max(0, (2 if leading_one else 1) - exponent)
    return f"{value:.{decimals}f} ± {half_width:.{decimals}f}"


def size(value: float, half_width: float | None = None) -> str:
    """Bytes in decimal units, three significant digits: `98.4 MB`."""
    unit = 0
    while abs(value) >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value /= 1000
        half_width = half_width and half_width / 1000
        unit += 1
    return f"{measured(value, half_width, 3)} {_BYTE_UNITS[unit]}"


def milliseconds(value_s: float, half_width_s: float | None = None) -> str:
    """Seconds as milliseconds, three significant digits: `23.7 ms`."""
    return f"{measured(value_s * 1e3, half_width_s and half_width_s * 1e3, 3)} ms"


def percent(share: float, half_width: float | None = None, digits: int = 4) -> str:
    """A share of one: `86.18%`."""
    return f"{measured(share * 100, half_width and half_width * 100, digits)}%"


def change(ratio: float) -> str:
    """A ratio as a change in percent, `-64%`: two significant digits, and none past a hundredth of a percent."""
    value = (ratio - 1) * 100
    if not math.isfinite(value):
        return f"{value:+g}%"
    text = f"{value:+.{0 if abs(value) >= 9.95 else 1 if abs(value) >= 0.995 else 2}f}"
    return "0%" if float(text) == 0 else f"{text}%"


def decimals_for(half_width: float | None) -> int:
    """Decimals with which a ratio near 1 still shows an uncertainty of `half_width`: 2 to 5."""
    if not half_width or not math.isfinite(half_width):
        return 2
    return min(5, max(2, -math.floor(math.log10(half_width))))


def _exponent(value: float, digits: int) -> int:
    """The decimal exponent of `value` after rounding to `digits` significant digits (9.996 may become 10.0)."""
    return int(f"{abs(value):.{digits - 1}e}".partition("e")[2])
