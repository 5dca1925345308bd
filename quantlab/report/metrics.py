"""The columns of a comparison: where each number comes from, how it reads, and in which words it differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from quantlab.core import units
from quantlab.core.result import Better

# What a difference from the baseline amounts to. `no_interval`: one repetition has no uncertainty; `not_compared`:
# the two numbers do not measure the same thing, or the baseline has none; `differs`: neither direction is better;
# `absolute`: the value is a share or a difference already.
Verdict = Literal[
    "baseline", "better", "worse", "same", "differs", "not_distinguishable", "no_interval", "not_compared", "absolute"
]


class Metric(NamedTuple):
    """One quantity of a row.

    `name` is the contract's; `show` writes a value and the half width of its interval; `words` say what lies below
    and above the baseline, None where the value is no matter of ratios. `stated`: its verdict is worth a sentence.
    """

    name: str
    title: str
    source: Literal["model", "bench", "ppl"]
    show: Callable[[float, float | None], str]
    words: tuple[str, str] | None
    stated: bool = False


def _plain(value: float, half_width: float | None) -> str:
    return units.measured(value, half_width)


def _rate(value: float, half_width: float | None) -> str:
    return units.measured(value, half_width, 3)


def _floor_share(value: float, _: float | None) -> str:
    return units.percent(value, digits=2)


SIZE = Metric("size_bytes", "size", "model", units.size, ("smaller", "larger"))
BITS = Metric("bits_per_weight", "bits/weight", "model", _rate, ("lower", "higher"))
TPOT = Metric("tpot", "TPOT", "bench", units.milliseconds, ("faster", "slower"), stated=True)
# Derived: tpot_floor / tpot, the part of a token's time that the memory bus alone would take.
FLOOR_SHARE = Metric("tpot_floor_share", "of floor", "bench", _floor_share, None)
PPL = Metric("ppl", "PPL", "ppl", _plain, ("lower", "higher"), stated=True)
METRICS = (
    SIZE,
    BITS,
    Metric("peak_process_bytes", "peak memory", "bench", units.size, ("smaller", "larger")),
    Metric("ttft", "TTFT", "bench", units.milliseconds, ("faster", "slower"), stated=True),
    TPOT,
    Metric("output_throughput", "output tok/s", "bench", _rate, ("lower", "higher"), stated=True),
    Metric("decode_throughput", "decode tok/s", "bench", _rate, ("lower", "higher")),
    FLOOR_SHARE,
    PPL,
    Metric("kld_mean", "KLD", "ppl", _plain, None),
    Metric("top1_agreement", "same top", "ppl", units.percent, None),
)
# The model's own numbers are exact, and less is better.
EXACT: dict[str, Better] = {SIZE.name: "lower", BITS.name: "lower"}


def verdict_of(metric: Metric, ratio: float, low: float | None, high: float | None, better: Better) -> Verdict:
    """The code of a ratio to the baseline with its 95% limits."""
    if metric.name in EXACT:
        if ratio == 1:
            return "same"
    elif low is None or high is None:
        return "no_interval"
    elif low <= 1 <= high:
        return "not_distinguishable"
    if better == "none":
        return "differs"
    return "better" if (ratio < 1) == (better == "lower") else "worse"


def sentence(metric: Metric, ratio: float, low: float | None, high: float | None, verdict: Verdict) -> str:
    """The verdict in words: `TPOT 1.31x faster, 95% CI 1.24-1.38`; perplexity in percent, as it moves by few."""
    if verdict == "same":
        return f"{metric.title} the same"
    assert metric.words is not None
    word = metric.words[ratio >= 1]
    if metric is PPL:
        amount = f"{units.change(ratio).lstrip('+-')} {word}"
        interval = f"95% CI {units.change(low)} to {units.change(high)}" if low and high else "no interval"
    else:
        if ratio < 1 and verdict != "not_distinguishable":
            ratio, low, high = 1 / ratio, high and 1 / high, low and 1 / low
        digits = units.decimals_for((high - low) / 2 if low and high else None)
        amount = f"{ratio:.{digits}f}x {word}"
        interval = f"95% CI {low:.{digits}f}-{high:.{digits}f}" if low and high else "no interval from one repetition"
    if verdict == "not_distinguishable":
        return f"{metric.title} not distinguishable, {interval}"
    if metric.name in EXACT:
        return f"{metric.title} {amount}"
    return f"{metric.title} {amount}, {interval}"
