"""Results -> one row per artifact, each number against the baseline with its 95% interval and a verdict.

Speed is compared only between runs of one machine and one way of running, perplexity only on the same tokens of the
same windows; what cannot be compared is shown without a change, and a note says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantlab.core.errors import QuantlabError
from quantlab.core.result import Result
from quantlab.core.text import printable
from quantlab.report.artifacts import KINDS, Artifact, Cell, baseline_of, join, started
from quantlab.report.conditions import check_conditions
from quantlab.report.metrics import BENCH_METRICS, METRICS
from quantlab.report.values import Column, Value, interleaved, model_values, quality_values, same_tokens, speed_values


@dataclass(frozen=True)
class Row:
    """One artifact at one cell of the bench (None where it has no bench)."""

    artifact: Artifact
    cell: Cell | None
    values: dict[Column, Value]
    # Whether another cell's row has shown the numbers that do not depend on the cell.
    repeated: bool


@dataclass(frozen=True)
class Comparison:
    """Rows, the baseline's first (in each cell); the columns that any row fills; what a reader must know."""

    baseline: str
    rows: list[Row]
    columns: list[Column]
    cells: list[Cell]
    notes: list[str]


def compare(results: Iterable[Result], *, baseline: str | None = None, allow_env_diff: bool = False) -> Comparison:
    """Compare all artifacts of `results` with the one labelled `baseline` (by default the unquantized one).

    Raises UsageError for an unknown baseline, QuantlabError where there is nothing to compare, or where speeds were
    measured under unlike conditions and `allow_env_diff` is not given.
    """
    usable, notes = _usable(list(results))
    artifacts = join(usable)
    base = baseline_of(artifacts, baseline)
    artifacts = [base, *(artifact for artifact in artifacts if artifact is not base)]
    notes += check_conditions(artifacts, allow_env_diff=allow_env_diff)
    cells = list(dict.fromkeys(cell for artifact in artifacts for cell in artifact.bench))
    rows = [row for artifact in artifacts for row in _rows(artifact, base)]
    if len(cells) > 1:
        rows.sort(key=lambda row: cells.index(row.cell) if row.cell else -1)
    filled = {column: None for row in rows for column in row.values}
    columns = sorted(filled, key=lambda column: METRICS.index(column.metric))
    notes += [note for row in rows for note in _not_compared(row, base)]
    notes += [*_not_interleaved(artifacts, base), *_histories(artifacts), *_warnings(artifacts)]
    return Comparison(base.label, rows, columns, cells, list(dict.fromkeys(notes)))


def _rows(artifact: Artifact, base: Artifact) -> Iterable[Row]:
    model, quality = model_values(artifact.model, base.model), quality_values(artifact, base)
    if not artifact.bench:
        yield Row(artifact, None, model | quality, repeated=False)
    for i, (cell, result) in enumerate(artifact.bench.items()):
        speed = speed_values(result, base.bench.get(cell))
        yield Row(artifact, cell, model | speed | quality, repeated=i > 0)


def _usable(results: list[Result]) -> tuple[list[Result], list[str]]:
    """The finished Results of the kinds that a row joins, and a note on failures that no later run repaired."""
    usable = [result for result in results if result.status == "ok" and result.kind in KINDS]
    newest = {(result.kind, result.label): result for result in sorted(results, key=started)}
    failed = [r for r in newest.values() if r.status == "failed" and r.kind in KINDS]
    names = ", ".join(f"{result.kind} of `{printable(result.label)}`" for result in failed)
    if not usable:
        said = f": {names} failed" if names else ""
        raise QuantlabError(
            f"no finished Results to compare{said}", "make some with `quantlab bench` or `quantlab ppl`"
        )
    return usable, [f"failed and left out: {names}"] if names else []


def _not_compared(row: Row, base: Artifact) -> Iterable[str]:
    """Why numbers of a row stand without a change."""
    name, other = f"`{row.artifact.label}`", f"`{base.label}`"
    for column, value in row.values.items():
        metric, setting = column
        if value.verdict != "not_compared" or not metric.shown:
            continue
        if setting and setting not in base.ppl:
            yield f"PPL of {name} is not compared: {other} has none of this protocol, text and windows ({setting})"
        elif setting and not same_tokens(row.artifact.ppl[setting], base.ppl[setting]):
            yield f"PPL of {name} is not compared: its token ids are not known to be those of {other} ({setting})"
        elif metric in BENCH_METRICS and row.cell not in base.bench:
            yield f"speed of {name} at {row.cell} is not compared: {other} has no bench of this cell"
        else:
            yield f"{metric.title} of {name} is not compared: a sample of it or of {other} is missing or not above 0"


def _not_interleaved(artifacts: list[Artifact], base: Artifact) -> Iterable[str]:
    names = {
        f"`{artifact.label}`": None
        for artifact in artifacts
        for cell, result in artifact.bench.items()
        if artifact is not base and cell in base.bench and not interleaved(result, base.bench[cell])
    }
    if names:
        listed = ", ".join(names)
        yield f"not interleaved with `{base.label}`, so the machine's drift is not in the intervals: {listed}"


def _histories(artifacts: list[Artifact]) -> Iterable[str]:
    """What a reader must know of the weights, such as "dequantized from Q4_1"."""
    told: dict[str, list[str]] = {}
    for artifact in artifacts:
        if artifact.model.note:
            told.setdefault(printable(artifact.model.note), []).append(f"`{artifact.label}`")
    for note, labels in told.items():
        yield f"{', '.join(labels)}: {note}"


def _warnings(artifacts: list[Artifact]) -> Iterable[str]:
    """What bench and ppl warned of when they measured, once, with the labels it was said of."""
    said: dict[str, list[str]] = {}
    for artifact in artifacts:
        for result in (*artifact.bench.values(), *artifact.ppl.values()):
            for warning in result.warnings:
                text = f"{warning.message}: {warning.hint}" if warning.hint else warning.message
                said.setdefault(printable(text), []).append(f"`{artifact.label}`")
    for message, labels in said.items():
        yield f"warned while measuring {', '.join(dict.fromkeys(labels))}: {message}"
