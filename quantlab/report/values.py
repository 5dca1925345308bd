"""The numbers of one artifact beside those of the baseline: value, 95% interval, ratio, verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantlab.core.result import Better, Measurement, ModelInfo, Result
from quantlab.core.statistics import (
    Interval,
    exp_interval,
    geometric_mean_interval,
    mean_interval,
    paired_ratio,
    unpaired_ratio,
)
from quantlab.report.artifacts import Artifact, Setting
from quantlab.report.metrics import (
    BENCH_METRICS,
    FLOOR_SHARE,
    MODEL_METRICS,
    PPL,
    PPL_METRICS,
    Metric,
    Verdict,
    verdict_of,
)

# No measurement is larger; squares of what is larger are no float.
_LARGEST = 1e100


class Column(NamedTuple):
    """A metric, and for a quality metric the setting under which it was measured."""

    metric: Metric
    setting: Setting | None = None


@dataclass(frozen=True)
class Value:
    """One number. `ratio` is to the baseline's; `paired`: taken round by round or window by window."""

    interval: Interval
    unit: str
    better: Better
    verdict: Verdict
    ratio: Interval | None = None
    paired: bool = False


def model_values(model: ModelInfo, base: ModelInfo) -> dict[Column, Value]:
    """Size and bits per weight, exact; what an endpoint does not tell (0) is left out."""
    values = {}
    for metric, unit in zip(MODEL_METRICS, ("bytes", "bits"), strict=True):
        own, theirs = getattr(model, metric.name), getattr(base, metric.name)
        if own:
            ratio = Interval(own / theirs, None, None) if theirs else None
            values[Column(metric)] = _value(
                metric, Interval(own, None, None), unit, "lower", ratio, is_base=model is base
            )
    return values


def speed_values(result: Result, reference: Result | None) -> dict[Column, Value]:
    """The bench metrics of one cell. Repetitions taken in one interleaved session are compared pair by pair.

    Values are geometric means, so that the ratio shown is the ratio of the values shown, and a rate that of its time.
    """
    values = {}
    in_rounds = reference is not None and interleaved(result, reference)
    for metric in BENCH_METRICS:
        if not (own := _measurement(result, metric.name)):
            continue
        theirs = _measurement(reference, metric.name)
        a, b = own.repetitions(), theirs.repetitions() if theirs else []
        paired = in_rounds and len(a) == len(b)
        ratio = None
        if b and _positive(a) and _positive(b):
            ratio = paired_ratio(a, b) if paired else unpaired_ratio(a, b)
        is_base = result is reference
        value = _geometric_mean(a)
        values[Column(metric)] = _value(metric, value, own.unit, own.better, ratio, is_base=is_base, paired=paired)
    floor, tpot = (_measurement(result, name) for name in ("tpot_floor", "tpot"))
    if floor and tpot and _positive(floor.samples) and _positive(tpot.samples):
        share = _mean(floor.samples).estimate / _geometric_mean(tpot.repetitions()).estimate
        values[Column(FLOOR_SHARE)] = Value(Interval(share, None, None), "1", "higher", "absolute")
    return values


def quality_values(artifact: Artifact, base: Artifact) -> dict[Column, Value]:
    """Perplexity of each setting against the baseline's same setting and tokens; KLD and agreement as they are.

    A later run without a parent does not take those away.
    """
    values = {}
    for setting, result in artifact.ppl.items():
        for metric in PPL_METRICS:
            told = result if metric is PPL else artifact.divergence.get(setting)
            if not (own := _measurement(told, metric.name)):
                continue
            if metric is PPL:
                value = _perplexity(result, base.ppl.get(setting))
            else:
                value = Value(_mean(own.repetitions()), own.unit, own.better, "absolute")
            values[Column(metric, setting)] = value
    return values


def interleaved(result: Result, reference: Result) -> bool:
    """Whether both were measured round by round in one bench session."""
    session = result.details.get("session")
    return session is not None and session == reference.details.get("session")


def same_tokens(result: Result, reference: Result) -> bool:
    """Whether both perplexities are known to be of the same token ids."""
    tokens = result.details.get("token_hash")
    return tokens is not None and tokens == reference.details.get("token_hash")


def _perplexity(result: Result, reference: Result | None) -> Value:
    """Its interval is from the spread of the windows; its ratio is exp of the mean difference window by window."""
    own, nll = result.measurements[PPL.name], _samples(result, "nll")
    estimate = _mean(own.samples).estimate
    interval = Interval(estimate, None, None)
    if estimate > 0 and nll:
        # The estimate is over all tokens; the windows, which may differ in length, give only the width.
        shift = math.log(estimate) - _mean(nll).estimate
        _, low, high = exp_interval(_mean([sample + shift for sample in nll]))
        interval = Interval(estimate, low, high)
    ratio, paired = None, False
    if reference is not None and same_tokens(result, reference):
        theirs, others = _samples(reference, PPL.name), _samples(reference, "nll")
        paired = len(nll) == len(others) > 0
        if paired:
            ratio = exp_interval(_mean([a - b for a, b in zip(nll, others, strict=True)]))
        elif _positive([*own.samples, *theirs]) and theirs:
            ratio = Interval(estimate / _mean(theirs).estimate, None, None)
    return _value(PPL, interval, own.unit, own.better, ratio, is_base=result is reference, paired=paired)


def _value(
    metric: Metric,
    interval: Interval,
    unit: str,
    better: Better,
    ratio: Interval | None,
    *,
    is_base: bool,
    paired: bool = False,
) -> Value:
    if is_base:
        return Value(interval, unit, better, "baseline")
    if ratio is None or not math.isfinite(ratio.estimate):
        return Value(interval, unit, better, "not_compared")
    return Value(interval, unit, better, verdict_of(metric, ratio, better), ratio, paired)


def _measurement(result: Result | None, name: str) -> Measurement | None:
    found = result.measurements.get(name) if result else None
    return found if found and found.samples else None


def _samples(result: Result, name: str) -> list[float]:
    found = _measurement(result, name)
    return found.samples if found else []


def _positive(samples: Sequence[float]) -> bool:
    return all(0 < sample < _LARGEST for sample in samples)


def _geometric_mean(samples: Sequence[float]) -> Interval:
    return geometric_mean_interval(samples) if _positive(samples) else _mean(samples)


def _mean(samples: Sequence[float]) -> Interval:
    """The mean with its interval; not a number where a sample is none (a broken model's perplexity)."""
    if not samples or not all(abs(sample) < _LARGEST for sample in samples):
        return Interval(math.nan, None, None)
    return mean_interval(samples)
