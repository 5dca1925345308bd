"""What a reader must know before believing a batching bench: each condition, its bound and the advice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from quantlab.bench import roofline
from quantlab.bench.batching.batch_sizes import BatchPoint
from quantlab.bench.batching.load import Lengths
from quantlab.bench.batching.serve import Calibrated
from quantlab.bench.batching.sla import ALONE, Answer, Judged, judged_together
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.window import SLO_PERCENTILE, left_out
from quantlab.bench.notices import FEW_REPEATS, LARGE_SPREAD
from quantlab.core import units
from quantlab.core.result import Notice
from quantlab.core.statistics import CONFIDENCE, geometric_mean_interval, relative_spread
from quantlab.runtime.mixture import MixtureRoofline
from quantlab.runtime.step_model import Roofline

_POOR_FIT = 0.15


def of_batches(spec: BatchingSpec, points: list[BatchPoint]) -> Iterator[Notice]:
    """Repetitions that are few or far apart."""
    if spec.repeats < FEW_REPEATS:
        yield Notice(
            "few-repeats",
            f"{spec.repeats} repetitions of a batch: too few to tell a gain from chance",
            f"use `--repeats {FEW_REPEATS}` or more",
        )
        return
    spreads = {point.batch: relative_spread(point.tpot_s) for point in points}
    widest = max(spreads, key=lambda batch: spreads[batch])
    if spreads[widest] > LARGE_SPREAD:
        yield Notice(
            "large-spread",
            f"TPOT at batch {widest} varies by {units.percent(spreads[widest], digits=2)} between repetitions (bound "
            f"{LARGE_SPREAD:.0%}): the knee may be another",
            "end other work on the machine, or use more `--repeats`",
        )


def deciding(together: int) -> int:
    """So many requests without a late one decide that a percentile is within its limit: 299 for one rate alone.

    `together`: the rates that the 95% confidence is to hold for (sla.py).
    """
    return math.ceil(math.log((1 - CONFIDENCE) / together) / math.log(SLO_PERCENTILE / 100))


def enough_requests(spec: BatchingSpec) -> int:
    """The fewest `--requests` of which enough are measured to decide; of mixed traffic half are interactive."""
    rates = judged_together(spec)
    return max(_of_which(deciding(rates)) if rates else 0, 2 * _of_which(deciding(1)) * ("mixed" in spec.chosen()))


def _of_which(measured: int) -> int:
    n = measured
    while n - 2 * left_out(n) < measured:
        n += 1
    return n


def of_requests(spec: BatchingSpec, measured: int, together: int = 1) -> Iterator[Notice]:
    """Too few requests for the percentile that the limits are judged by."""
    if 0 < measured < deciding(together):
        beyond = (SLO_PERCENTILE / 100) ** measured
        more = f"use `--requests {enough_requests(spec)}` or more"
        yield Notice(
            "few-requests",
            f"{measured} measured requests: their P{SLO_PERCENTILE:g} is about their largest value, and the true one "
            f"is beyond all of them with a probability of {beyond:.0%}",
            more if spec.endpoint or spec.simulate else f"{more}, or `--simulate`",
        )


def of_load(details: dict[str, Any]) -> Iterator[Notice]:
    """A load beyond capacity."""
    if details["rho"] >= 1:
        yield Notice(
            "overload",
            f"{details['rate']:.3g} requests per second are {details['rho']:.2f} of the capacity: the delay grows with "
            "the length of the run, so its mean says nothing of a longer one",
            "lower `--rate`",
        )


def of_trace(spec: BatchingSpec, drawn: Lengths) -> Iterator[Notice]:
    """Recorded requests that are fewer or shorter than was asked for."""
    if spec.trace is not None and len(drawn.prompt) < spec.n_requests():
        yield Notice(
            "short-trace",
            f"the trace has {len(drawn.prompt)} requests, {spec.n_requests()} were asked for",
            "lower `--requests`, or give a longer trace",
        )
    if drawn.cut:
        yield Notice(
            "lengths-cut",
            f"{drawn.cut} of {len(drawn.prompt)} recorded lengths were cut to eight times the mean",
            "set `--length-scale` to have every length as it is recorded",
        )


def of_calibration(found: Calibrated, label: str) -> Notice:
    """Where the times of a simulation come from."""
    poor = found.mean_relative_error > _POOR_FIT
    return Notice(
        "simulated",
        f"simulated in virtual time with a step model fitted to {found.n_steps} steps of `{label}` on this machine "
        f"(mean error {units.percent(found.mean_relative_error, digits=2)})",
        "measure again on an idle machine: the fit is poor" if poor else "",
    )


def of_roofline(steps: Roofline | MixtureRoofline) -> Notice:
    """That nothing was measured at all."""
    return roofline.notice(steps, "a preempted KV moves in no time")


def of_answer(spec: BatchingSpec, answer: Answer, judged: list[Judged]) -> Iterator[Notice]:
    """A search that saw no rate within the limits and what stands in the way, or that decided for none."""
    if answer.highest is not None and answer.highest.rate > ALONE:
        if answer.decided is None:
            yield Notice(
                "slo-not-decided",
                "no rate is known to meet the limits with 95% confidence: what was seen within them is an estimate",
                f"use `--requests {max(enough_requests(spec), 2 * spec.n_requests())}` or more",
            )
        return
    first = min((one for one in judged if not one.within), key=lambda one: one.rate, default=None)
    if first is None:
        return
    numbers = [
        f"{name} is {units.milliseconds(interval.estimate)} where {units.milliseconds(limit)} are allowed"
        for name, interval, limit in (
            (f"TTFT P{SLO_PERCENTILE:g}", first.ttft_p99, spec.ttft_slo_s),
            ("TPOT", first.tpot_mean, spec.tpot_slo_s),
        )
        if interval is not None and interval.estimate > limit
    ]
    numbers += [f"{first.unserved:.0%} of the requests are not served"] if first.unserved else []
    where = "for requests that are alone" if first.rate == ALONE else f"at {first.rate:.3g} requests per second"
    what = "nothing can meet the limits" if first.rate == ALONE else "no rate was seen to meet the limits"
    yield Notice(
        "slo-not-met", f"{what}: {where} {' and '.join(numbers)}", "relax them, or use a faster model or machine"
    )


def of_mixed(spec: BatchingSpec, details: dict[str, Any], points: list[BatchPoint]) -> Iterator[Notice]:
    """A TPOT that no policy can help, and the batch that could."""
    tpot = details["tpot_mean_interval_s"]
    if tpot is None or tpot[0] <= spec.tpot_slo_s:
        return
    fitting = [p.batch for p in points if geometric_mean_interval(p.tpot_s).estimate <= spec.tpot_slo_s]
    largest = max(fitting, default=None)
    hint = "policies order requests, they make no step faster: use a faster model or machine"
    if largest is not None and largest < spec.max_num_seqs:
        hint = f"a batch of {largest} decodes within the limit: use `--max-num-seqs {largest}`"
    yield Notice(
        "tpot-of-the-batch",
        f"TPOT is {units.milliseconds(tpot[0])} with up to {spec.max_num_seqs} sequences in a step, the limit is "
        f"{units.milliseconds(spec.tpot_slo_s)}",
        hint,
    )
