"""One row of the bench: the numbers of one draft, batch size and length, as measurements, details and a Point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from quantlab.bench.speculative import points
from quantlab.bench.speculative.cell import ADAPTIVE, Ready
from quantlab.bench.speculative.costs import Costs
from quantlab.bench.speculative.diagnosis import Point
from quantlab.bench.speculative.points import Group, pooled
from quantlab.bench.speculative.spec import SpeculativeSpec
from quantlab.core.result import Measurement
from quantlab.core.statistics import Interval
from quantlab.engine.speculative import theory

Details = dict[str, Any]


class Row(NamedTuple):
    """`point` is None where no answer has a second token, or the costs are not known."""

    point: Point | None
    measurements: dict[str, Measurement]
    details: Details


def row(spec: SpeculativeSpec, ready: Ready, groups: Sequence[Group], costs: Costs, k: int) -> Row:
    """The row of the runs of `k` (ADAPTIVE adapts)."""
    every, whole = pooled(groups, k), pooled(groups, k, whole=spec.new_tokens)
    ratio = points.speedup(groups, k)
    length = None if k == ADAPTIVE else k
    point = None if ratio is None or not costs.known else Point(
        batch=costs.batch,
        k=length,
        draft_length=whole.draft_length,
        coverage=whole.coverage,
        acceptance=every.acceptance,
        draft_cost=costs.c(whole.draft_length),
        verify_cost=costs.v(whole.draft_length),
        predicted=points.predicted(groups, k, costs, spec.new_tokens),
        speedup=ratio.estimate,
        low=ratio.low,
        high=ratio.high,
    )  # fmt: skip
    details = {
        "batch": costs.batch,
        "k": length,
        "draft_length": whole.draft_length,
        "coverage": whole.coverage,
        "rounds": len(every.rounds),
        "drafted": every.drafted,
        "tested": every.tested,
        "accepted": every.accepted,
        "new_tokens": sum(len(answer.tokens) for group in groups for answer in group.runs[k].answers),
        "expected_tokens_per_verify": points.expected_tokens_per_verify(whole),
        "speedup_interval": _listed(ratio),
        "end_to_end_speedup_interval": _listed(points.end_to_end_speedup(groups, k)),
        "categories": {name: _category(spec, [g for g in groups if g.category == name], k) for name in _names(groups)},
    }
    return Row(point, _measurements(spec, ready, groups, costs, k), details)


def best_in_theory(spec: SpeculativeSpec, ready: Ready, groups: Sequence[Group], costs: Costs) -> Details:
    """The K that acceptance, costs and the share of rounds with a draft let expect to be best; 0: none pays.

    It is sought up to the largest measured, and to what can be drafted in a row.
    """
    every, whole = (
        points.Pooled([r for k in spec.k for r in pooled(groups, k, whole=most).rounds])
        for most in (None, spec.new_tokens)
    )
    if every.acceptance is None or not costs.known:
        return {"theory_best_k": 0, "theory_speedup": None}
    most = spec.longest_draft(ready.most_draft)
    # Answers may be too short for a whole round.
    coverage = (whole if whole.rounds else every).coverage
    best, speedup = theory.best_k(every.acceptance, costs.steps, most, coverage)
    return {"theory_best_k": best, "theory_speedup": speedup}


def _measurements(
    spec: SpeculativeSpec, ready: Ready, groups: Sequence[Group], costs: Costs, k: int
) -> dict[str, Measurement]:
    """By the contract's names; one sample a group of prompts where nothing else is said in points.py."""
    apart = [pooled([group], k) for group in groups]
    tokens = [pooled([group], k, whole=spec.new_tokens).tokens_per_verify for group in groups]
    whole = pooled(groups, k, whole=spec.new_tokens)
    pairs = points.pairs(groups, k)
    expected = points.predicted(groups, k, costs, spec.new_tokens)
    found = {
        "acceptance_rate": Measurement("share", "higher", [p.acceptance for p in apart if p.acceptance is not None]),
        "acceptance_rate_per_position": Measurement("share", "higher", pooled(groups, k).acceptance_by_position()),
        "mean_tokens_per_verify": Measurement("tokens", "higher", [n for n in tokens if n is not None]),
        "predicted_speedup": Measurement("ratio", "higher", [] if expected is None else [expected]),
        "speedup": Measurement("ratio", "higher", [plain / fast for plain, fast in pairs]),
        "tpot": _seconds([points.tpot_s(group.runs[k]) for group in groups]),
        "tpot_plain": _seconds([points.tpot_s(group.runs[0]) for group in groups]),
        "ttft": _seconds([points.ttft_s(group.runs[k]) for group in groups]),
        "ttft_plain": _seconds([points.ttft_s(group.runs[0]) for group in groups]),
        "draft_bytes": Measurement("bytes", "lower", [float(ready.draft_bytes)]),
    }
    if costs.known:
        found["draft_cost_ratio"] = Measurement("steps", "lower", [costs.c(whole.draft_length)])
        found["verify_cost_ratio"] = Measurement("steps", "lower", [costs.v(whole.draft_length)])
    if spec.temperature == 0:
        same = [float(equal) for group in groups for equal in points.identical(group, k).values()]
        found["output_identity"] = Measurement("share", "higher", same)
    return {name: measured for name, measured in found.items() if measured.samples}


def _seconds(samples: Sequence[float | None]) -> Measurement:
    return Measurement("s", "lower", [sample for sample in samples if sample is not None])


def _names(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(group.category for group in groups))


def _category(spec: SpeculativeSpec, groups: list[Group], k: int) -> Details:
    whole = pooled(groups, k, whole=spec.new_tokens)
    return {
        "prompts": len({prompt for group in groups for prompt in group.prompts}),
        "acceptance_rate": pooled(groups, k).acceptance,
        "coverage": whole.coverage,
        "tokens_per_verify": whole.tokens_per_verify,
        "speedup_interval": _listed(points.speedup(groups, k)),
    }


def _listed(ratio: Interval | None) -> list[float | None]:
    return [None, None, None] if ratio is None else list(ratio)
