"""Limits that the user sets on a comparison: `--fail-above METRIC=PERCENT`. A limit is never passed in silence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from quantlab.core.errors import QuantlabError, UsageError, unknown_name
from quantlab.core.units import change
from quantlab.report.comparison import Comparison, Row
from quantlab.report.metrics import METRICS
from quantlab.report.values import Value

LIMITABLE = tuple(metric.name for metric in METRICS if metric.words)
_ROUNDING = 1e-9


class Limit(NamedTuple):
    """`metric` must not be worse than the baseline by more than `percent`."""

    metric: str
    percent: float


def parse_limit(text: str) -> Limit:
    """Read `METRIC=PERCENT`, such as `tpot=5`; UsageError for an unknown metric or a number that is no limit."""
    metric, _, number = text.partition("=")
    metric = metric.strip()
    if metric not in LIMITABLE:
        if metric in {known.name for known in METRICS}:
            message = f"`{metric}` is a share or a difference already; it has no change against the baseline"
            raise UsageError(message, f"set a limit on one of {', '.join(LIMITABLE)}")
        raise unknown_name("metric", metric, LIMITABLE)
    try:
        percent = float(number.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not 0 <= percent < math.inf:
        raise UsageError(f"`{text}` sets no limit", f"write METRIC=PERCENT with a percentage from 0 on: `{metric}=5`")
    return Limit(metric, percent)


def crossed(comparison: Comparison, limits: Iterable[Limit]) -> list[str]:
    """A sentence for each row that is worse than the baseline by more than a limit; empty where all hold.

    What is compared is the estimate, as the user's percentage is. Raises QuantlabError where a limit cannot be
    checked: no row has a change in that metric, or some row has a value without one.
    """
    return [sentence for limit in limits for sentence in _crossed(comparison, limit)]


def _crossed(comparison: Comparison, limit: Limit) -> Iterable[str]:
    measured = [
        (row, value)
        for row in comparison.rows
        for column, value in row.values.items()
        if column.metric.name == limit.metric
    ]
    values = [(row, value) for row, value in measured if value.verdict != "baseline"]
    if not values:
        raise QuantlabError(
            f"the limit on `{limit.metric}` cannot be checked: no row has it beside the baseline",
            "measure it for the baseline and for the others, or drop the limit",
        )
    if orphan := next((row for row, _ in measured if row.artifact.label in comparison.unknown), None):
        raise QuantlabError(
            f"the limit on `{limit.metric}` cannot be checked: nothing here is the parent of `{orphan.artifact.label}`",
            "measure its parent, name a `--baseline`, or name the Results to compare",
        )
    for row, value in values:
        worse = _worse_by(value, row, limit.metric)
        if worse > limit.percent * (1 + _ROUNDING):
            assert value.ratio is not None
            yield (
                f"`{row.artifact.label}`{f' at {row.cell}' if len(comparison.cells) > 1 else ''}: {limit.metric} "
                f"{change(value.ratio.estimate)} against `{row.base.label}`, the limit is {limit.percent:g}%"
            )


def _worse_by(value: Value, row: Row, metric: str) -> float:
    """By how many percent the value is worse than the baseline (negative: better)."""
    if value.ratio is None or value.better == "none":
        raise QuantlabError(
            f"the limit on `{metric}` cannot be checked: `{row.artifact.label}` has a value that was not compared",
            "see the notes of `quantlab compare`, measure again, or name the Results to compare",
        )
    return (value.ratio.estimate - 1) * (100 if value.better == "lower" else -100)
