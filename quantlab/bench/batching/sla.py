"""Part (c): the highest arrival rate that still meets the limits on latency, found by bisection, and its goodput.

The limits are TTFT at P99 and TPOT on average over the requests. At one rate is judged

- what was seen: P99 of TTFT and mean of TPOT are `within` their limits, or not
- what is decided: the rate `meets` where at most one request in a hundred is late even at the upper limit of that
  share, and TPOT is within at the upper limit of its mean; it `fails` where a lower limit is beyond; else it is
  `undecided`. The limits of the share are the wider ones of the exact ones for independent requests and of a bootstrap
  that keeps neighbours together.

With 95% confidence no rate of the loads and the search is decided wrongly, however many are tried: each of the m rates
that they may judge has 0.05 / m of the error (Bonferroni, for the most that the search may try). A rate either
meets the limits or does not, so that only one of the two verdicts can be wrong: `meets` needs both limits and `fails`
one of them, so the error of `fails` is halved between the two. To decide that a rate meets a P99, 299 requests are the
fewest for one rate, 537 for a search, 568 for one after four loads.

A request that is rejected or lost is late. Every rate has the same pattern of arrivals and the same lengths, so that
rates differ in the load alone. The bisection follows what was seen; the answer is the highest rate seen within the
limits, and about it the highest that is decided to meet them and the lowest that is decided to fail; a few more rates
bring these two nearer to it, as far as the number of requests decides anything. Loads that were
measured before are judged first: the bisection begins between them. Where no load is within, requests are served one
by one, each alone (the rate 0): what they miss, no rate can meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.window import SLO_PERCENTILE, Window, tpot_mean, ttft_p99
from quantlab.core.statistics import CONFIDENCE, Interval, bootstrap_interval, share_interval

Verdict = Literal["meets", "fails", "undecided"]

# The lowest load that is tried before requests alone, and the highest: no load of 1 can last, and one that meets the
# limits meets them because the run was short.
_LOWEST, _HIGHEST = 0.2, 0.98
ALONE = 0.0
# Of a hundred requests one may be late.
_ALLOWED = 1 - SLO_PERCENTILE / 100
# The bisection ends when the rate is known to this share of the capacity.
_RESOLUTION = 0.06
# Rates that are tried on either side of the answer for what is decided.
_TIGHTENINGS = 2


class Judged(NamedTuple):
    """One rate: what was seen, the verdict, and the numbers behind them. `late`: the share of late requests."""

    rate: float
    within: bool
    verdict: Verdict
    ttft_p99: Interval | None
    tpot_mean: Interval | None
    late: Interval
    goodput: Interval
    unserved: float
    # What the verdict was reached with, and the mean of TPOT at that confidence.
    confidence: float
    tpot_judged: Interval | None


class Answer(NamedTuple):
    """The highest rate seen within the limits (ALONE: not even the lowest that was tried), and what is decided.

    `decided` is the highest rate that meets them, `lowest_failing` the lowest that fails. None: there is none.
    """

    highest: Judged | None
    decided: Judged | None
    lowest_failing: Judged | None


def judge(spec: BatchingSpec, rate: float, window: Window, *, rejections: bool = True, together: int = 1) -> Judged:
    """Whether the measured requests of one rate meet the limits; without `rejections` those that were let in.

    `together`: the rates that the confidence is to hold for.
    """
    confidence = 1 - (1 - CONFIDENCE) / together
    ttft, tpot = ttft_p99(window), tpot_mean(window)
    met = window.met(spec.ttft_slo_s, spec.tpot_slo_s)
    share = bootstrap_interval(met) if met else Interval(0.0, None, None)
    scaled = Interval(*(None if end is None else end * window.arrival_rate for end in share))  # type: ignore[arg-type]
    judged = [r for r in window.records if rejections or r.status != "rejected"]
    late = _late([r.status != "finished" or (r.ttft_s or 0.0) > spec.ttft_slo_s for r in judged], confidence)
    lost = sum(r.status != "finished" for r in judged) > _ALLOWED * len(judged)
    seen = not lost and ttft is not None and ttft.estimate <= spec.ttft_slo_s
    verdicts = {_against(late, _ALLOWED)}
    tpot_judged = tpot_mean(window, confidence)
    # Answers of one token have no TPOT to judge.
    if tpot is not None and tpot_judged is not None:
        verdicts.add(_against(tpot_judged, spec.tpot_slo_s))
        seen = seen and tpot.estimate <= spec.tpot_slo_s
    verdict: Verdict = "meets"
    if "fails" in verdicts or "undecided" in verdicts:
        verdict = "fails" if "fails" in verdicts else "undecided"
    return Judged(rate, seen, verdict, ttft, tpot, late, scaled, window.unserved, confidence, tpot_judged)


def _late(late: Sequence[bool], confidence: float = CONFIDENCE) -> Interval:
    """The share of late requests, which come in the order of time; everyone where there is none.

    The upper limit errs with 1 - `confidence`, the lower one with half of it.
    """
    if not late:
        return Interval(1.0, 1.0, 1.0)
    low = share_interval(sum(late), len(late), (1 + confidence) / 2).low
    exact = share_interval(sum(late), len(late), confidence)._replace(low=low)
    if all(late) or not any(late):
        return exact
    drawn = bootstrap_interval([float(one) for one in late], confidence=confidence)
    if drawn.low is None or drawn.high is None or exact.low is None or exact.high is None:
        return exact
    return Interval(exact.estimate, min(exact.low, drawn.low), max(exact.high, drawn.high))


def _against(interval: Interval, limit: float) -> Verdict:
    if interval.low is None or interval.high is None:
        return "fails" if interval.estimate > limit else "undecided"
    if interval.high <= limit:
        return "meets"
    return "fails" if interval.low > limit else "undecided"


class Search:
    """Bisection as an iterator of rates: measure each, `tell` its judgement, and go on until it ends."""

    def __init__(self, mu: float, known: Sequence[Judged] = ()) -> None:
        self._mu = mu
        self.judged = [judged for judged in known if judged.rate < mu or not judged.within]

    def _low(self) -> float | None:
        """The highest rate within the limits, with none below it that is not."""
        high = self._high()
        return max((j.rate for j in self.judged if j.within and (high is None or j.rate < high)), default=None)

    def _high(self) -> float | None:
        """The lowest rate that is not within them; what is beyond the capacity tells nothing of what is below."""
        return min((j.rate for j in self.judged if not j.within and j.rate <= self._mu), default=None)

    def rates(self) -> Iterator[float]:
        """The rates to measure; each must be told before the next is asked for."""
        top = _HIGHEST * self._mu
        if self._high() is None and all(judged.rate < top for judged in self.judged if judged.rate <= self._mu):
            yield top
        if self._low() is None:
            high = self._high()
            yield min(_LOWEST * self._mu, math.inf if high is None else high / 2)
        if self._low() is None:
            yield ALONE
        while (low := self._low()) is not None and (high := self._high()) is not None:
            if high - low <= _RESOLUTION * self._mu:
                break
            yield (low + high) / 2
        if self._low():
            yield from self._tightened()

    def _tightened(self) -> Iterator[float]:
        """Rates between what is decided to meet and the next, then what is decided to fail and the one before it."""
        for _ in range(_TIGHTENINGS):
            decided = self.answer().decided
            if decided is None:
                break
            not_yet = min((j.rate for j in self.judged if j.rate > decided.rate), default=decided.rate)
            if not_yet - decided.rate > _RESOLUTION * self._mu:
                yield (decided.rate + not_yet) / 2
        for _ in range(_TIGHTENINGS):
            failing = self.answer().lowest_failing
            if failing is None:
                break
            not_yet = max((j.rate for j in self.judged if j.rate < failing.rate), default=failing.rate)
            if failing.rate - not_yet > _RESOLUTION * self._mu:
                yield (failing.rate + not_yet) / 2

    def tell(self, judged: Judged) -> None:
        """The judgement of the rate that was asked for last."""
        self.judged.append(judged)

    def answer(self) -> Answer:
        """What is known by now."""
        low = self._low()
        failing = min((j for j in self.judged if j.verdict == "fails"), key=lambda j: j.rate, default=None)
        meeting = [j for j in self.judged if j.verdict == "meets" and (failing is None or j.rate < failing.rate)]
        return Answer(
            next((judged for judged in self.judged if judged.rate == low), None),
            max(meeting, key=lambda judged: judged.rate, default=None),
            failing,
        )


def steps_at_most() -> int:
    """Rates that a search measures at most."""
    n, width = 3, _HIGHEST - _LOWEST
    while width > _RESOLUTION:
        n, width = n + 1, width / 2
    return n + 2 * _TIGHTENINGS


def judged_together(spec: BatchingSpec) -> int:
    """Rates of one bench that are judged at most: those of the loads, and those of the search."""
    parts = spec.chosen()
    loads = len(spec.rate or spec.utilization) if "load" in parts else 0
    return loads + (steps_at_most() if "sla" in parts else 0)


def details(judged: Judged) -> dict[str, Any]:
    """What the row of one rate says of the limits."""
    return {
        "verdict": judged.verdict,
        "within": judged.within,
        # Of the two intervals that follow, one for each limit.
        "verdict_confidence": judged.confidence,
        "tpot_judged_interval_s": None if judged.tpot_judged is None else list(judged.tpot_judged),
        "late_interval": list(judged.late),
        "ttft_verdict": _against(judged.late, _ALLOWED),
        # What is served one by one has no rate of arrivals.
        "goodput_interval": list(judged.goodput) if judged.rate != ALONE else None,
        "share_unserved": judged.unserved,
    }


def summary(spec: BatchingSpec, answer: Answer, judged: Sequence[Judged]) -> dict[str, Any]:
    """The answer in words and numbers."""
    highest, decided, failing = answer
    beyond = any(not one.within for one in judged)
    return {
        "ttft_slo_s": spec.ttft_slo_s,
        "tpot_slo_s": spec.tpot_slo_s,
        "ttft_at": f"P{SLO_PERCENTILE:g}",
        "tpot_at": "mean",
        # 0: requests that are alone meet the limits, and no rate was seen to.
        "highest_rate": highest.rate if highest else None,
        "decided_rate": decided.rate if decided else None,
        "goodput": highest.goodput.estimate if highest and highest.rate else None,
        "lowest_failing_rate": failing.rate if failing else None,
        # Not the limits but the capacity is what ends it.
        "capacity_binds": highest is not None and not beyond,
    }
