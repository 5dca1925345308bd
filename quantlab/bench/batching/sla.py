"""Part (c): the highest arrival rate that still meets the limits on latency, found by bisection, and its goodput.

The limits are TTFT at P99 and TPOT on average over the requests. At one rate both have a bootstrap interval over the
requests: the rate `meets` where both upper ends are within their limits, `fails` where a lower end is beyond its own,
and else is `undecided`. A request that is rejected or lost fails a rate where more than one in a hundred is. Every rate
has the same pattern of arrivals and the same lengths, so that rates differ in the load alone. The answer is the highest
rate that meets, between it and the lowest that fails what is undecided. Loads that were measured before are judged
first: the bisection begins between them. Where no load meets, requests are served one by one, each alone (the rate 0):
what they miss, no rate can meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.window import SLO_PERCENTILE, Window, tpot_mean, ttft_p99
from quantlab.core.statistics import Interval, bootstrap_interval

Verdict = Literal["meets", "fails", "undecided"]

# The lowest load that is tried before requests alone, and the highest: no load of 1 can last, and one that meets the
# limits meets them because the run was short.
_LOWEST, _HIGHEST = 0.2, 0.98
ALONE = 0.0
# The bisection ends when the rate is known to this share of the capacity.
_RESOLUTION = 0.06


class Judged(NamedTuple):
    """One rate: its verdict and the intervals behind it."""

    rate: float
    verdict: Verdict
    ttft_p99: Interval | None
    tpot_mean: Interval | None
    goodput: Interval
    unserved: float


class Answer(NamedTuple):
    """The highest rate that meets the limits (ALONE: not even the lowest that was tried), and the lowest that fails.

    None: there is none.
    """

    highest: Judged | None
    lowest_failing: Judged | None


def judge(spec: BatchingSpec, rate: float, window: Window, *, rejections: bool = True) -> Judged:
    """Whether the measured requests of one rate meet the limits; without `rejections` those that were let in."""
    ttft, tpot = ttft_p99(window), tpot_mean(window)
    met = window.met(spec.ttft_slo_s, spec.tpot_slo_s)
    share = bootstrap_interval(met) if met else Interval(0.0, None, None)
    scaled = Interval(*(None if end is None else end * window.arrival_rate for end in share))  # type: ignore[arg-type]
    records = window.records
    unserved = sum(r.status != "finished" for r in records) / len(records) if records else 1.0
    failed = unserved if rejections or not records else sum(r.status == "failed" for r in records) / len(records)
    verdicts = {_against(ttft, spec.ttft_slo_s)}
    # Answers of one token have no TPOT to judge.
    if tpot is not None:
        verdicts.add(_against(tpot, spec.tpot_slo_s))
    if failed > 1 - SLO_PERCENTILE / 100 or "fails" in verdicts:
        verdict: Verdict = "fails"
    else:
        verdict = "undecided" if "undecided" in verdicts else "meets"
    return Judged(rate, verdict, ttft, tpot, scaled, unserved)


def _against(interval: Interval | None, limit: float) -> Verdict:
    if interval is None:
        return "fails"
    if interval.low is None or interval.high is None:
        return "fails" if interval.estimate > limit else "undecided"
    if interval.high <= limit:
        return "meets"
    return "fails" if interval.low > limit else "undecided"


class Search:
    """Bisection as an iterator of rates: measure each, `tell` its judgement, and go on until it ends."""

    def __init__(self, mu: float, known: Sequence[Judged] = ()) -> None:
        self._mu = mu
        self.judged = [judged for judged in known if judged.rate < mu or judged.verdict != "meets"]

    def _low(self) -> float | None:
        """The highest rate that meets, with none below it that does not."""
        high = self._high()
        return max(
            (j.rate for j in self.judged if j.verdict == "meets" and (high is None or j.rate < high)), default=None
        )

    def _high(self) -> float | None:
        return min((j.rate for j in self.judged if j.verdict != "meets"), default=None)

    def rates(self) -> Iterator[float]:
        """The rates to measure; each must be told before the next is asked for."""
        top = _HIGHEST * self._mu
        if self._high() is None and all(judged.rate < top for judged in self.judged):
            yield top
        if self._low() is None:
            high = self._high()
            yield min(_LOWEST * self._mu, math.inf if high is None else high / 2)
        if self._low() is None:
            yield ALONE
        while (low := self._low()) is not None and (high := self._high()) is not None:
            if high - low <= _RESOLUTION * self._mu:
                return
            yield (low + high) / 2

    def tell(self, judged: Judged) -> None:
        """The judgement of the rate that was asked for last."""
        self.judged.append(judged)

    def answer(self) -> Answer:
        """What is known by now."""
        low = self._low()
        fails = [judged for judged in self.judged if judged.verdict == "fails"]
        return Answer(
            next((judged for judged in self.judged if judged.rate == low), None),
            min(fails, key=lambda judged: judged.rate, default=None),
        )


def steps_at_most() -> int:
    """Rates that a search measures at most."""
    n, width = 3, _HIGHEST - _LOWEST
    while width > _RESOLUTION:
        n, width = n + 1, width / 2
    return n


def details(judged: Judged) -> dict[str, Any]:
    """What the row of one rate says of the limits."""
    return {
        "verdict": judged.verdict,
        "goodput_interval": list(judged.goodput),
        "share_unserved": judged.unserved,
    }


def summary(spec: BatchingSpec, answer: Answer) -> dict[str, Any]:
    """The answer in words and numbers."""
    highest, failing = answer
    return {
        "ttft_slo_s": spec.ttft_slo_s,
        "tpot_slo_s": spec.tpot_slo_s,
        "ttft_at": f"P{SLO_PERCENTILE:g}",
        "tpot_at": "mean",
        # 0: requests that are alone meet the limits, and no rate was seen to.
        "highest_rate": highest.rate if highest else None,
        "goodput": highest.goodput.estimate if highest and highest.rate else None,
        "lowest_failing_rate": failing.rate if failing else None,
        # Not the limits but the capacity is what ends it.
        "capacity_binds": highest is not None and failing is None,
    }
