"""Results -> one row per artifact, each number against the baseline with its 95% interval and a verdict.

Speed is compared only between runs of one machine and one way of running, perplexity only on the same tokens of the
same windows; what cannot be compared is shown without a change, and a note says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantlab.core.errors import QuantlabError
from quantlab.core.notices import folded
from quantlab.core.result import Notice, Result
from quantlab.core.text import printable
from quantlab.report.artifacts import KINDS, Artifact, Cell, join, labelled, started
from quantlab.report.beside import parents_beside
from quantlab.report.conditions import check_conditions
from quantlab.report.metrics import BENCH_METRICS, METRICS
from quantlab.report.parents import baselines, in_groups, named
from quantlab.report.values import Column, Value, interleaved, model_values, quality_values, same_tokens, speed_values

# More labels than these are not repeated in a note that is of every row.
_FEW = 3


@dataclass(frozen=True)
class Row:
    """One artifact at one cell of the bench (None where it has no bench)."""

    artifact: Artifact
    # What its changes are against: the artifact itself where it has no other.
    base: Artifact
    cell: Cell | None
    values: dict[Column, Value]
    # Whether another cell's row has shown the numbers that do not depend on the cell.
    repeated: bool


@dataclass(frozen=True)
class Comparison:
    """Rows in groups of one origin, the baseline first (in each cell); the columns that any row fills; notes.

    `baseline` is that of the largest group. `unknown`: labels of quantized artifacts whose parent is not here.
    """

    baseline: str
    rows: list[Row]
    columns: list[Column]
    cells: list[Cell]
    notes: list[str]
    unknown: frozenset[str] = frozenset()


def compare(results: Iterable[Result], *, baseline: str | None = None, allow_env_diff: bool = False) -> Comparison:
    """Compare each artifact of `results` with its parent, or all with the one labelled `baseline`.

    Raises UsageError for an unknown baseline, QuantlabError where there is nothing to compare, or where speeds were
    measured under unlike conditions and `allow_env_diff` is not given.
    """
    usable, notes = _usable(list(results))
    artifacts = join([*usable, *parents_beside(usable)])
    found = named(labelled(artifacts, baseline), artifacts) if baseline is not None else baselines(artifacts)
    groups = in_groups(artifacts, found.of)
    artifacts = [artifact for group in groups for artifact in group]
    notes += check_conditions(groups, allow_env_diff=allow_env_diff)
    cells = list(dict.fromkeys(cell for artifact in artifacts for cell in artifact.bench))
    rows = []
    for group in groups:
        of_group = [row for artifact in group for row in _rows(artifact, found.of[artifact.label])]
        if len(cells) > 1:
            of_group.sort(key=lambda row: _place(row, cells))
        rows += of_group
    filled = {column: None for row in rows for column in row.values}
    columns = sorted(filled, key=lambda column: METRICS.index(column.metric))
    notes += [*found.notes, *_not_compared(rows)]
    notes += [*_not_interleaved(rows), *_histories(artifacts), *_warnings(artifacts)]
    return Comparison(groups[0][0].label, rows, columns, cells, list(dict.fromkeys(notes)), found.unknown)


def _place(row: Row, cells: list[Cell]) -> int:
    """Rows of one cell stand together; of those that have none the baseline is first, the others last."""
    if row.cell is not None:
        return cells.index(row.cell)
    return -1 if row.artifact is row.base else len(cells)


def _rows(artifact: Artifact, base: Artifact) -> Iterable[Row]:
    model, quality = model_values(artifact.model, base.model), quality_values(artifact, base)
    if not artifact.bench:
        yield Row(artifact, base, None, model | quality, repeated=False)
    for i, (cell, result) in enumerate(artifact.bench.items()):
        speed = speed_values(result, base.bench.get(cell))
        yield Row(artifact, base, cell, model | speed | quality, repeated=i > 0)


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


def _not_compared(rows: list[Row]) -> Iterable[str]:
    """Why numbers stand without a change, each reason once."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        base, other = row.base, f"`{row.base.label}`"
        for (metric, setting), value in row.values.items():
            if value.verdict != "not_compared" or not metric.shown:
                continue
            name = f"`{row.artifact.label}`"
            if setting and setting not in base.ppl:
                what, why = "PPL", f"{other} has none of this protocol, text and windows ({setting})"
            elif setting and not same_tokens(row.artifact.ppl[setting], base.ppl[setting]):
                what, why = "PPL", f"its token ids are not known to be those of {other} ({setting})"
            elif metric in BENCH_METRICS and row.cell not in base.bench:
                what, why = "speed", f"{other} has no bench of this cell"
                name += f" at {row.cell}"
            else:
                what, why = metric.title, f"a sample of it or of {other} is missing or not above 0"
            reasons.setdefault((what, why), {})[name] = None
    for (what, why), names in reasons.items():
        yield f"{what} of {', '.join(names)} is not compared: {why}"


def _not_interleaved(rows: list[Row]) -> Iterable[str]:
    apart: dict[str, dict[str, None]] = {}
    for row in rows:
        result, theirs = (a.bench.get(row.cell) if row.cell else None for a in (row.artifact, row.base))
        if row.artifact is not row.base and result and theirs and not interleaved(result, theirs):
            apart.setdefault(row.base.label, {})[f"`{row.artifact.label}`"] = None
    for base, names in apart.items():
        yield f"not interleaved with `{base}`, so the machine's drift is not in the intervals: {', '.join(names)}"


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
    said = []
    for artifact in artifacts:
        of_quality = [
            *artifact.ppl.values(),
            *(r for r in artifact.divergence.values() if r not in artifact.ppl.values()),
        ]
        for result in (*artifact.bench.values(), *of_quality):
            said += [(artifact.label, _renamed(notice, result.label, artifact.label)) for notice in result.warnings]
    everyone = [artifact.label for artifact in artifacts]
    for labels, notice in folded(said):
        names = "all" if labels == everyone and len(labels) > _FEW else ", ".join(f"`{label}`" for label in labels)
        text = f"{notice.message}: {notice.hint}" if notice.hint else notice.message
        yield f"warned while measuring {names}: {printable(text)}"


def _renamed(notice: Notice, label: str, shown: str) -> Notice:
    """With the label that the table gives the model."""
    message, hint = (text.replace(f"`{label}`", f"`{shown}`") for text in (notice.message, notice.hint))
    return Notice(notice.code, message, hint)
