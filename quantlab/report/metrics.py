"""The columns of a comparison: where each number comes from, how it reads, and in which words it differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from quantlab.core import units
from quantlab.core.result import Better
from quantlab.core.statistics import Interval

# What a difference from the baseline amounts to. `no_interval`: few repetitions have no uncertainty; `not_compared`:
# the two numbers do not measure the same thing, or the baseline has none; `differs`: neither direction is better;
# `absolute`: the value is a share or a difference already.
Verdict = Literal[
    "baseline", "better", "worse", "same", "differs", "not_distinguishable", "no_interval", "not_compared", "absolute"
]


class Metric(NamedTuple):
    """One quantity of a row.

    `name` is the contract's; `show` writes a value and the half width of its interval; `words` say what lies below
    and above the baseline, None where the value is no matter of ratios. `stated`: its verdict is worth a sentence.
    What is not `shown` has no column in the table; JSON, CSV and limits know it.
    """

    name: str
    title: str
    show: Callable[[float, float | None], str]
    words: tuple[str, str] | None
    stated: bool = False
    shown: bool = True


def _plain(value: float, half_width: float | None) -> str:
    return units.measured(value, half_width)


def _rate(value: float, half_width: float | None) -> str:
    return units.measured(value, half_width, 3)


def _bits(value: float, _: float | None) -> str:
    return f"{value:.2f}"


def _floor_share(value: float, _: float | None) -> str:
    return units.percent(value, digits=2)


SIZE = Metric("size_bytes", "size", units.size, ("smaller", "larger"))
BITS = Metric("bits_per_weight", "bits/weight", _bits, ("lower", "higher"))
MODEL_METRICS = (SIZE, BITS)
DEVICE_MEMORY = Metric("peak_device_bytes", "peak device memory", units.size, ("smaller", "larger"), shown=False)
TPOT = Metric("tpot", "TPOT", units.milliseconds, ("faster", "slower"), stated=True)
# An interval whose ends differ by more is not worth its digits.
_HOPELESS = 100
BENCH_METRICS = (
    Metric("peak_process_bytes", "peak memory", units.size, ("smaller", "larger")),
    Metric("ttft", "TTFT", units.milliseconds, ("faster", "slower"), stated=True),
    TPOT,
    # The same requests in transformers' own loop: what is above TPOT is no kernel's.
    Metric("tpot_generate", "TPOT generate", units.milliseconds, ("faster", "slower")),
    Metric("output_throughput", "output tok/s", _rate, ("lower", "higher"), stated=True),
    Metric("decode_throughput", "decode tok/s", _rate, ("lower", "higher")),
    Metric("prefill_throughput", "prefill tok/s", _rate, ("lower", "higher"), shown=False),
    Metric("e2el", "E2EL", units.milliseconds, ("faster", "slower"), shown=False),
    DEVICE_MEMORY,
)
# Derived: tpot_floor / tpot, the part of a token's time that reading the weights alone would take.
FLOOR_SHARE = Metric("tpot_floor_share", "floor share", _floor_share, None)
PPL = Metric("ppl", "PPL", _plain, ("lower", "higher"), stated=True)
PPL_METRICS = (
    PPL,
    Metric("kld_mean", "KLD", _plain, None),
    Metric("top1_agreement", "same top", units.percent, None),
)
METRICS = (*MODEL_METRICS, *BENCH_METRICS, FLOOR_SHARE, *PPL_METRICS)


def verdict_of(metric: Metric, ratio: Interval, better: Better) -> Verdict:
    """The code of a ratio to the baseline. The model's own numbers are exact, the others have an interval."""
    if metric in MODEL_METRICS:
        if ratio.estimate == 1:
            return "same"
    elif ratio.low is None:
        return "no_interval"
    elif not ratio.excludes(1):
        return "not_distinguishable"
    if better == "none":
        return "differs"
    return "better" if (ratio.estimate < 1) == (better == "lower") else "worse"


def is_hopeless(interval: Interval) -> bool:
    """Whether an interval is so wide that its ends tell no more than that: noise, not a number."""
    return bool(interval.low is not None and interval.high and interval.high > _HOPELESS * interval.low)


def sentence(metric: Metric, ratio: Interval, verdict: Verdict) -> str:
    """The verdict in words: `TPOT 1.31x faster, 95% CI 1.24-1.38`; perplexity in percent, as it moves by few."""
    assert metric.words is not None
    estimate, low, high = ratio
    word = metric.words[estimate >= 1]
    if metric is PPL:
        amount = f"{units.change(estimate).lstrip('+-')} {word}"
        interval = (
            f"95% CI {units.change(low)} to {units.change(high)}" if low and high else "no interval from so few windows"
        )
    else:
        if estimate < 1 and verdict != "not_distinguishable":
            estimate, low, high = 1 / estimate, high and 1 / high, low and 1 / low
        digits = units.decimals_for(min(high - low, 2 * abs(low - 1), 2 * abs(high - 1)) / 2 if low and high else None)
        amount = f"{estimate:.{digits}f}x {word}"
        interval = (
            f"95% CI {low:.{digits}f}-{high:.{digits}f}" if low and high else "no interval from so few repetitions"
        )
    if verdict == "same":
        return f"{metric.title} the same"
    if verdict == "not_distinguishable":
        wide = f"95% CI wider than {_HOPELESS}x" if is_hopeless(ratio) else interval
        return f"{metric.title} not distinguishable, {wide}"
    return f"{metric.title} {amount}" if metric in MODEL_METRICS else f"{metric.title} {amount}, {interval}"
