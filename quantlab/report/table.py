"""A comparison as a table of strings: what every format draws. Nothing here is escaped for any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quantlab.core import units
from quantlab.core.text import printable
from quantlab.report.artifacts import Artifact, Setting
from quantlab.report.comparison import Comparison, Row
from quantlab.report.conditions import runtime_name
from quantlab.report.lessons import lessons
from quantlab.report.metrics import BENCH_METRICS, DEVICE_MEMORY, FLOOR_SHARE, SIZE, Metric, sentence
from quantlab.report.values import Column, Value


class Head(NamedTuple):
    """A column's title and the side it is set to."""

    title: str
    justify: Literal["left", "right"] = "right"


class Entry(NamedTuple):
    """What a cell says: the value, its change against the baseline, and whether that is good, bad or neither."""

    text: str = ""
    change: str = ""
    tone: Literal["good", "bad", ""] = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.change})" if self.change else self.text


@dataclass(frozen=True)
class Table:
    """Rows of entries under their heads; the first `keys` columns name a row. `verdicts`: (name of a row, sentence)."""

    title: str
    heads: list[Head]
    rows: list[list[Entry]]
    keys: int = 1
    verdicts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tabulate(comparison: Comparison) -> Table:
    """The default table: a row for each artifact and cell, only columns that have a value."""
    several = len(comparison.cells) > 1
    keys = [Head("model", "left"), *([Head("tokens x batch", "left")] if several else [])]
    columns = [column for column in comparison.columns if _is_shown(column.metric, comparison)]
    titles = column_names(columns, lambda metric: metric.title)
    facts = _facts(comparison)
    rows = []
    for row in comparison.rows:
        names = [Entry(row.artifact.label), *([Entry(str(row.cell or ""))] if several else [])]
        told = [Entry(fact(row.artifact)) for fact in facts.values()]
        rows.append([*names, *told, *(_entry(column, row.values.get(column)) for column in columns)])
    return Table(
        title=f"against {comparison.baseline}",
        heads=[*keys, *(Head(title, "left") for title in facts), *(Head(title) for title in titles.values())],
        rows=rows,
        keys=len(keys),
        verdicts=[(_row_name(row, several), said) for row in comparison.rows if (said := _verdicts(row))],
        notes=[*_legend(comparison), *comparison.notes, *lessons(comparison)],
    )


def _facts(comparison: Comparison) -> dict[str, Callable[[Artifact], str]]:
    """Columns of words, where they tell rows apart: a GGUF row's label names its type, the others need the method."""
    artifacts = [row.artifact for row in comparison.rows]
    facts: dict[str, Callable[[Artifact], str]] = {}
    if {artifact.model.method for artifact in artifacts} - {"none", "gguf"}:
        facts["method"] = lambda artifact: printable(artifact.model.method)
    if len({_runtime(artifact) for artifact in artifacts} - {""}) > 1:
        facts["runtime"] = _runtime
    return facts


def _runtime(artifact: Artifact) -> str:
    return runtime_name(artifact.runtime) if artifact.runtime else ""


def _is_shown(metric: Metric, comparison: Comparison) -> bool:
    """Whether the default table has a column for it; a device's memory only where a device was used."""
    if metric is DEVICE_MEMORY:
        values = [row.values.get(Column(metric)) for row in comparison.rows]
        return any(value is not None and value.interval.estimate > 0 for value in values)
    return metric.shown


def _entry(column: Column, value: Value | None) -> Entry:
    if value is None:
        return Entry()
    estimate, low, high = value.interval
    half_width = None if low is None or high is None else (high - low) / 2
    text = column.metric.show(estimate, half_width)
    if value.verdict == "not_compared":
        return Entry(text, "-")
    if value.ratio is None:
        return Entry(text)
    mark = "≈ " if value.verdict == "not_distinguishable" else ""
    tone: Literal["good", "bad", ""] = (
        "good" if value.verdict == "better" else "bad" if value.verdict == "worse" else ""
    )
    return Entry(text, mark + units.change(value.ratio.estimate), tone)


def column_names(columns: list[Column], name: Callable[[Metric], str]) -> dict[Column, str]:
    """A name for each column; a quality metric measured in several settings gets what tells the settings apart."""
    settings = list(dict.fromkeys(column.setting for column in columns if column.setting))
    differing = [field for field in Setting._fields if len({getattr(setting, field) for setting in settings}) > 1]
    short = {setting: ", ".join(f"{field} {getattr(setting, field)}" for field in differing) for setting in settings}
    return {
        column: f"{name(column.metric)} ({short[column.setting]})"
        if column.setting and differing
        else name(column.metric)
        for column in columns
    }


def _verdicts(row: Row) -> str:
    """What the row's stated metrics amount to; numbers that another row of the artifact has said are left out."""
    said = []
    for column, value in row.values.items():
        stated = column.metric.stated or column.metric is SIZE
        if value.ratio is None or not stated or (row.repeated and column.metric not in BENCH_METRICS):
            continue
        said.append(sentence(column.metric, value.ratio, value.verdict))
    return "; ".join(said)


def _row_name(row: Row, several: bool) -> str:
    return f"{row.artifact.label} at {row.cell}" if several and row.cell else row.artifact.label


def _legend(comparison: Comparison) -> list[str]:
    """How to read the numbers; only the parts that this table needs."""
    shown = {column for column in comparison.columns if _is_shown(column.metric, comparison)}
    values = [value for row in comparison.rows for column, value in row.values.items() if column in shown]
    parts = [f"changes are against `{comparison.baseline}`"] if any(value.ratio for value in values) else []
    if any(value.interval.low is not None for value in values):
        parts.append("± is the 95% interval of the mean (of speeds the geometric mean)")
    if any(value.verdict == "not_distinguishable" for value in values):
        parts.append("≈ is not distinguishable at 95%")
    if any(value.verdict == "not_compared" for value in values):
        parts.append("(-) is not compared")
    if any(column.metric is FLOOR_SHARE for column in comparison.columns):
        parts.append("floor share is the part of TPOT that reading weights and KV cache at full bandwidth would take")
    if any(column.metric.name == "tpot_generate" for column in comparison.columns):
        parts.append("TPOT generate is that of transformers' own `generate`")
    parts.append("1 MB is 10^6 bytes")
    legend = ["; ".join(parts)]
    if len(comparison.cells) == 1:
        prompt, new, batch = ("?" if n is None else n for n in comparison.cells[0])
        legend.append(f"speed: {prompt} prompt tokens, {new} new tokens, batch {batch}")
    ways = {runtime_name(row.artifact.runtime, device=True): None for row in comparison.rows if row.artifact.runtime}
    if len(ways) == 1 and (way := next(iter(ways))).startswith("torch"):
        legend.append(f"computed by {way}")
    data = {s: r.details.get("data_label") for row in comparison.rows for s, r in row.artifact.ppl.items()}
    legend += [f"quality: {setting}{f', {printable(str(name))}' if name else ''}" for setting, name in data.items()]
    return legend
