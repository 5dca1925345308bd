"""A comparison as a table of strings: what every format draws. Nothing here is escaped for any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quantlab.core import units
from quantlab.core.statistics import Interval
from quantlab.core.text import printable
from quantlab.report.artifacts import Setting, against_of
from quantlab.report.comparison import Comparison, Row
from quantlab.report.conditions import runtime_name
from quantlab.report.lessons import lessons
from quantlab.report.metrics import BENCH_METRICS, DEVICE_MEMORY, FLOOR_SHARE, SIZE, Metric, is_hopeless, sentence
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
        told = [Entry(fact(row)) for fact in facts.values()]
        rows.append([*names, *told, *(_entry(column, row.values.get(column)) for column in columns)])
    return Table(
        title=f"against {', '.join(_bases(comparison) or [comparison.baseline])}",
        heads=[*keys, *(Head(title, "left") for title in facts), *(Head(title) for title in titles.values())],
        rows=rows,
        keys=len(keys),
        verdicts=[(_row_name(row, several), said) for row in comparison.rows if (said := _verdicts(row))],
        notes=[*_legend(comparison), *comparison.notes, *lessons(comparison)],
    )


def _facts(comparison: Comparison) -> dict[str, Callable[[Row], str]]:
    """Columns of words, where they tell rows apart: a GGUF row's label names its type, the others need the method."""
    facts: dict[str, Callable[[Row], str]] = {}
    if len(_bases(comparison)) > 1:
        facts["against"] = lambda row: "" if row.base is row.artifact else row.base.label
    if {row.artifact.model.method for row in comparison.rows} - {"none", "gguf"}:
        facts["method"] = lambda row: printable(row.artifact.model.method)
    if len({_runtime(row) for row in comparison.rows} - {""}) > 1:
        facts["runtime"] = _runtime
    return facts


def _bases(comparison: Comparison) -> list[str]:
    """The models that others are compared with."""
    return list(dict.fromkeys(row.base.label for row in comparison.rows if row.base is not row.artifact))


def _runtime(row: Row) -> str:
    return runtime_name(row.artifact.runtime) if row.artifact.runtime else ""


def _is_shown(metric: Metric, comparison: Comparison) -> bool:
    """Whether the default table has a column for it; a device's memory only where a device was used."""
    if metric is DEVICE_MEMORY:
        values = [row.values.get(Column(metric)) for row in comparison.rows]
        return any(value is not None and value.interval.estimate > 0 for value in values)
    return metric.shown


def _entry(column: Column, value: Value | None) -> Entry:
    if value is None:
        return Entry()
    text = _with_interval(column.metric, value.interval)
    if value.verdict == "not_compared":
        return Entry(text, "-")
    if value.ratio is None:
        return Entry(text)
    mark = "≈ " if value.verdict == "not_distinguishable" else "? " if _is_chance(column, value) else ""
    tone: Literal["good", "bad", ""] = (
        "good" if value.verdict == "better" else "bad" if value.verdict == "worse" else ""
    )
    return Entry(text, mark + units.change(value.ratio.estimate), tone)


def _is_chance(column: Column, value: Value) -> bool:
    """Whether a change may be chance for all that is known; bytes do not vary from one repetition to the next."""
    return value.verdict == "no_interval" and column.metric.words != SIZE.words


def _with_interval(metric: Metric, interval: Interval) -> str:
    estimate, low, high = interval
    if low is None or high is None:
        return metric.show(estimate, None)
    if is_hopeless(interval):
        return f"{metric.show(estimate, None)} [?]"
    if _is_lopsided(interval):
        return f"{metric.show(estimate, None)} [{metric.show(low, None)}, {metric.show(high, None)}]"
    return metric.show(estimate, (high - low) / 2)


def _is_lopsided(interval: Interval) -> bool:
    """Whether one side of the interval is more than twice the other, so that `±` would tell a wrong one."""
    estimate, low, high = interval
    return low is not None and high is not None and high - estimate > 2 * (estimate - low)


def column_names(columns: list[Column], name: Callable[[Metric], str]) -> dict[Column, str]:
    """A name for each column; a quality metric measured in several settings gets what tells the settings apart."""
    settings = list(dict.fromkeys(column.setting for column in columns if column.setting))
    differing = [field for field in Setting._fields if len({getattr(setting, field) for setting in settings}) > 1]
    if all(setting.stride == setting.n_ctx for setting in settings):
        # Windows that do not overlap, as told by their size.
        differing = [field for field in differing if field != "stride"]
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
    parts = []
    if any(value.ratio for value in values):
        bases = _bases(comparison)
        parts.append(
            f"changes are against `{bases[0]}`" if len(bases) == 1 else "changes are against the model in that column"
        )
    if any(_is_lopsided(value.interval) and not is_hopeless(value.interval) for value in values):
        parts.append("[ ] is the 95% interval where it is lopsided")
    if any(is_hopeless(value.interval) for value in values):
        parts.append("[?] is one wider than a hundredfold")
    if any(value.interval.low is not None for value in values):
        parts.append("± is the 95% interval of the mean (of speeds the geometric mean)")
    if any(value.verdict == "not_distinguishable" for value in values):
        parts.append("≈ is not distinguishable at 95%")
    if any(_is_chance(column, v) for row in comparison.rows for column, v in row.values.items() if column in shown):
        parts.append("? has too few repetitions or windows to be told from chance")
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
    legend += _references(comparison)
    data = {s: r.details.get("data_label") for row in comparison.rows for s, r in row.artifact.ppl.items()}
    legend += [f"quality: {setting}{f', {printable(str(name))}' if name else ''}" for setting, name in data.items()]
    return legend


def _references(comparison: Comparison) -> list[str]:
    """Whose distribution KLD and same top are measured from."""
    labels = {row.artifact.sha256: row.artifact.label for row in comparison.rows if row.artifact.sha256}
    of: dict[str, dict[str, None]] = {}
    for row in comparison.rows:
        for result in row.artifact.divergence.values():
            against = against_of(result)
            if not against.label:
                continue
            name = labels.get(against.sha256 or "") or against.label
            of.setdefault(name, {})[f"`{row.artifact.label}`"] = None
    if len(of) == 1:
        return [f"KLD and same top are against `{next(iter(of))}`"]
    return [f"KLD and same top of {', '.join(names)} are against `{against}`" for against, names in of.items()]
