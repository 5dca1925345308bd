"""Results -> one row per artifact, each number against the baseline with its 95% interval and a verdict.

Speed is compared only between runs of one machine and one way of running, perplexity only on the same tokens of the
same windows; what cannot be compared is shown without a change, and a note says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantlab.core.errors import QuantlabError
from quantlab.core.result import Better, Measurement, Result
from quantlab.core.statistics import Interval, mean_interval, paired_ratio, unpaired_ratio
from quantlab.core.text import printable
from quantlab.report.artifacts import KINDS, Artifact, Cell, Setting, baseline_of, join, started
from quantlab.report.conditions import check_conditions
from quantlab.report.metrics import EXACT, FLOOR_SHARE, METRICS, PPL, Metric, sentence, verdict_of

Verdict = str


class Column(NamedTuple):
    """A metric, and for the quality metrics the setting under which it was measured."""

    metric: Metric
    setting: Setting | None = None


@dataclass(frozen=True)
class Value:
    """One number of a row. `ratio` is to the baseline's number; `paired`: from interleaved repetitions or windows."""

    interval: Interval
    unit: str
    better: Better
    verdict: Verdict
    ratio: Interval | None = None
    paired: bool = False


@dataclass(frozen=True)
class Row:
    """One artifact at one cell of the bench (None where it has no bench)."""

    artifact: Artifact
    cell: Cell | None
    values: dict[Column, Value]
    # Whether an earlier row (another cell) has shown the numbers that do not depend on the cell.
    repeated: bool = False


@dataclass(frozen=True)
class Comparison:
    """Rows, the baseline's first; the columns that any row fills; what a reader must know."""

    baseline: str
    rows: list[Row]
    columns: list[Column]
    cells: list[Cell]
    notes: list[str]


def compare(
    results: Iterable[Result], *, baseline: str | None = None, allow_env_diff: bool = False
) -> Comparison:
    """Compare all artifacts of `results` with the one labelled `baseline` (by default the unquantized one).

    Raises UsageError for an unknown baseline, QuantlabError where nothing can be compared, or where speed was
    measured under unlike conditions and `allow_env_diff` is not given.
    """
    usable, notes = _usable(list(results))
    artifacts = join(usable)
    base = baseline_of(artifacts, baseline)
    artifacts = [base, *(artifact for artifact in artifacts if artifact is not base)]
    notes += check_conditions(artifacts, allow_env_diff=allow_env_diff)
    cells = list(dict.fromkeys(cell for artifact in artifacts for cell in artifact.bench))
    rows: list[Row] = []
    for artifact in artifacts:
        constant = {**_model_values(artifact, base), **_quality_values(artifact, base, notes)}
        for cell in artifact.bench or [None]:
            values = constant | _speed_values(artifact, base, cell, notes)
            rows.append(Row(artifact, cell, values, repeated=bool(rows) and rows[-1].artifact is artifact))
    if len(cells) > 1:
        rows.sort(key=lambda row: cells.index(row.cell) if row.cell else -1)
    notes += _warnings(artifacts)
    return Comparison(base.label, rows, _columns(rows), cells, list(dict.fromkeys(notes)))


def verdict_sentence(column: Column, value: Value) -> str | None:
    """The verdict of one value in words; None where nothing was compared."""
    if value.ratio is None:
        return None
    return sentence(column.metric, *value.ratio, value.verdict)


def _usable(results: list[Result]) -> tuple[list[Result], list[str]]:
    """The finished Results of the kinds a row joins, and a note on runs that failed and were not repeated since."""
    usable = [result for result in results if result.status == "ok" and result.kind in KINDS]
    newest: dict[tuple[str, str], Result] = {}
    for result in usable:
        key = (result.kind, result.label)
        if key not in newest or started(result) >= started(newest[key]):
            newest[key] = result
    failed = []
    for result in results:
        later = newest.get((result.kind, result.label))
        if result.status == "failed" and (later is None or started(later) < started(result)):
            failed.append(f"{result.kind} of `{printable(result.label)}`")
    if not usable:
        said = f": all {len(failed)} failed" if failed else ""
        raise QuantlabError(f"there are no Results to compare{said}", "make some with `quantlab bench` or `quantlab ppl`")
    return usable, [f"failed and left out: {', '.join(dict.fromkeys(failed))}"] if failed else []


def _model_values(artifact: Artifact, base: Artifact) -> dict[Column, Value]:
    values = {}
    for metric in METRICS:
        if metric.source != "model" or not (own := getattr(artifact.model, metric.name)):
            continue
        theirs = getattr(base.model, metric.name)
        better = EXACT[metric.name]
        interval = Interval(own, None, None)
        unit = "bytes" if metric.name == "size_bytes" else "bits"
        if artifact is base:
            value = Value(interval, unit, better, "baseline")
        elif not theirs:
            value = Value(interval, unit, better, "not_compared")
        else:
            ratio = Interval(own / theirs, None, None)
            value = Value(interval, unit, better, verdict_of(metric, ratio, better), ratio)
        values[Column(metric)] = value
    return values


def _speed_values(artifact: Artifact, base: Artifact, cell: Cell | None, notes: list[str]) -> dict[Column, Value]:
    if cell is None:
        return {}
    result, reference = artifact.bench[cell], base.bench.get(cell)
    if reference is None and base.bench:
        notes.append(f"`{base.label}` has no bench of {cell}: the speed of that cell is shown without a change")
    elif reference is None:
        notes.append(f"`{base.label}` has no bench: speed is shown without a change")
    interleaved = reference is not None and _interleaved(result, reference)
    if reference is not None and not interleaved:
        notes.append(
            f"`{artifact.label}` was not interleaved with `{base.label}`: "
            "the drift of the machine between the two runs is not in its intervals"
        )
    values = {}
    for metric in METRICS:
        measurement = result.measurements.get(metric.name)
        if metric.source != "bench" or measurement is None or not measurement.samples:
            continue
        theirs = reference.measurements.get(metric.name) if reference else None
        values[Column(metric)] = _compared(metric, measurement, theirs, is_base=artifact is base, paired=interleaved)
    if share := _floor_share(result):
        values[Column(FLOOR_SHARE)] = share
    return values


def _compared(
    metric: Metric, own: Measurement, theirs: Measurement | None, *, is_base: bool, paired: bool
) -> Value:
    a, b = own.repetitions(), theirs.repetitions() if theirs else []
    interval = mean_interval(a) if all(map(math.isfinite, a)) else Interval(math.nan, None, None)
    if is_base:
        return Value(interval, own.unit, own.better, "baseline")
    if not b or not _positive(a) or not _positive(b):
        return Value(interval, own.unit, own.better, "not_compared")
    paired = paired and len(a) == len(b)
    ratio = paired_ratio(a, b) if paired else unpaired_ratio(a, b)
    return Value(interval, own.unit, own.better, verdict_of(metric, ratio, own.better), ratio, paired)


def _interleaved(result: Result, reference: Result) -> bool:
    session = result.details.get("session")
    return session is not None and session == reference.details.get("session")


def _positive(samples: Sequence[float]) -> bool:
    return all(math.isfinite(sample) and sample > 0 for sample in samples)


def _floor_share(result: Result) -> Value | None:
    floor, tpot = (result.measurements.get(name) for name in ("tpot_floor", "tpot"))
    if not floor or not tpot or not _positive(floor.samples) or not _positive(tpot.samples) or not floor.samples:
        return None
    share = mean_interval(floor.samples).estimate / mean_interval(tpot.repetitions()).estimate
    return Value(Interval(share, None, None), "1", "higher", "absolute")


def _quality_values(artifact: Artifact, base: Artifact, notes: list[str]) -> dict[Column, Value]:
    values = {}
    for setting, result in artifact.ppl.items():
        reference = base.ppl.get(setting)
        for metric in METRICS:
            measurement = result.measurements.get(metric.name)
            if metric.source != "ppl" or measurement is None or not measurement.samples:
                continue
            if metric is PPL:
                value = _perplexity(result, reference, is_base=artifact is base)
                if value.verdict == "not_compared":
                    notes.append(_why_not(artifact, base, setting, result))
            else:
                interval = mean_interval(measurement.repetitions())
                value = Value(interval, measurement.unit, measurement.better, "absolute")
            values[Column(metric, setting)] = value
    return values


def _perplexity(result: Result, reference: Result | None, *, is_base: bool) -> Value:
    """Perplexity, its interval from the spread of the windows, and its ratio to the reference window by window."""
    own = result.measurements[PPL.name]
    estimate = mean_interval(own.samples).estimate
    nll = _windows(result)
    spread = mean_interval(nll) if nll else Interval(0.0, None, None)
    # The windows give the interval; the estimate is what was measured over all tokens.
    limits = (None if x is None else estimate * math.exp(x - spread.estimate) for x in spread[1:])
    interval = Interval(estimate, *limits)
    if is_base:
        return Value(interval, own.unit, own.better, "baseline")
    tokens = result.details.get("token_hash")
    if reference is None or tokens is None or tokens != reference.details.get("token_hash"):
        return Value(interval, own.unit, own.better, "not_compared")
    theirs = mean_interval(reference.measurements[PPL.name].samples).estimate
    ratio = Interval(estimate / theirs, None, None)
    paired = len(nll) == len(_windows(reference)) > 0
    if paired:
        ratio = ratio_of_means(nll, _windows(reference))
    return Value(interval, own.unit, own.better, verdict_of(PPL, ratio, own.better), ratio, paired)
