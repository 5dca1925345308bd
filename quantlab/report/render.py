"""A comparison as Markdown, CSV, JSON or HTML. Every text from outside is escaped for its format."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable
from string import Template
from typing import Any

import msgspec

from quantlab.core.text import printable
from quantlab.report.artifacts import Cell, Setting, against_of
from quantlab.report.comparison import Comparison, Row
from quantlab.report.metrics import PPL, sentence
from quantlab.report.table import Entry, Table, column_names, tabulate
from quantlab.report.values import Column, Value

_MARKDOWN = re.compile(r"[\\`*\[\]<>|!&~#]|(?<!\w)_|_(?!\w)")
# Spreadsheets take the wide forms too.
_FORMULA_STARTS = tuple("=+-@＝＋－＠")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>quantlab: $title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #1b1f24; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .45rem; border-bottom: 1px solid #d5d9de; text-align: right; white-space: nowrap; }
thead th { border-bottom: 2px solid #59636e; }
.left { text-align: left; }
small { display: block; color: #59636e; }
small.good { color: #1a7f37; }
small.bad { color: #b42318; }
</style>
</head>
<body>
<h1>quantlab: $title</h1>
<div class="wide">
<table>
<thead><tr>$heads</tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>
$verdicts<h2>Notes</h2>
<ul>
$notes
</ul>
</body>
</html>
""")


def markdown(table: Table) -> str:
    """A GitHub table, the verdicts and the notes as lists."""
    lines = [[_md(head.title) for head in table.heads]]
    lines.append(["---" if head.justify == "left" else "---:" for head in table.heads])
    lines += [[_md(str(entry)) for entry in row] for row in table.rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    if table.verdicts:
        text += "\n" + "".join(f"- **{_md(name)}**: {_md(said)}\n" for name, said in table.verdicts)
    return text + "\n" + "".join(f"- {_with_code(note, _md, '`{}`')}\n" for note in table.notes)


def html_page(table: Table) -> str:
    """One self-contained page without scripts."""
    sides = [' class="left"' if head.justify == "left" else "" for head in table.heads]
    heads = [f'<th scope="col"{side}>{html.escape(h.title)}</th>' for h, side in zip(table.heads, sides, strict=True)]
    rows = ["".join(f"<td{s}>{_html(e)}</td>" for e, s in zip(row, sides, strict=True)) for row in table.rows]
    verdicts = [f"<li><b>{html.escape(name)}</b>: {html.escape(said)}</li>" for name, said in table.verdicts]
    notes = [f"<li>{_with_code(html.escape(note), str, '<code>{}</code>')}</li>" for note in table.notes]
    return _PAGE.substitute(
        title=html.escape(table.title),
        heads="".join(heads),
        rows="\n".join(f"<tr>{row}</tr>" for row in rows),
        verdicts="<h2>Verdicts</h2>\n<ul>\n" + "\n".join(verdicts) + "\n</ul>\n" if verdicts else "",
        notes="\n".join(notes),
    )


def json_text(comparison: Comparison) -> str:
    """{"baseline", "rows", "notes"}: raw numbers, ratios, limits, verdict codes; what is no number is null.

    The baseline is that of most rows; each row names its own.
    """
    names = column_names(comparison.columns, lambda metric: metric.name)
    rows = [
        {
            **_identity(row),
            "metrics": {names[column]: _plain(row, column, value) for column, value in row.values.items()},
        }
        for row in comparison.rows
    ]
    document = {"baseline": comparison.baseline, "rows": rows, "notes": tabulate(comparison).notes}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def csv_text(comparison: Comparison) -> str:
    """A line for each row: raw numbers in SI units, and beside each its ratio to the baseline with 95% limits."""
    names = column_names(comparison.columns, lambda metric: metric.name)
    lines: list[dict[str, Any]] = [_identity(row) for row in comparison.rows]
    heads = list(lines[0])
    for column, name in names.items():
        fields = [name, f"{name}_ratio", f"{name}_ratio_low", f"{name}_ratio_high"]
        for line, row in zip(lines, comparison.rows, strict=True):
            if value := row.values.get(column):
                numbers = (value.interval.estimate, *(value.ratio or ()))
                line |= {head: x for head, x in zip(fields, numbers, strict=False) if x is not None}
        heads += [head for head in fields if any(head in line for line in lines)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_spreadsheet, heads))
    writer.writerows([_spreadsheet(line.get(head)) for head in heads] for line in lines)
    return out.getvalue()


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "md": lambda comparison: markdown(tabulate(comparison)),
    "csv": csv_text,
    "json": json_text,
    "html": lambda comparison: html_page(tabulate(comparison)),
}


def _identity(row: Row) -> dict[str, Any]:
    artifact = row.artifact
    cell = row.cell._asdict() if row.cell else dict.fromkeys(Cell._fields)
    ran = {
        "runtime" if name == "name" else name: printable(getattr(artifact.runtime, name)) if artifact.runtime else None
        for name in ("name", "device", "dtype")
    }
    named = {"label": artifact.label, "sha256": artifact.sha256, "method": printable(artifact.model.method)}
    return {**named, "baseline": row.base.label, **ran, **cell}


def _plain(row: Row, column: Column, value: Value) -> dict[str, Any]:
    return {
        "value": value.interval.estimate,
        "low": value.interval.low,
        "high": value.interval.high,
        "unit": value.unit,
        "better": value.better,
        "ratio": value.ratio._asdict() if value.ratio else None,
        "paired": value.paired,
        "verdict": value.verdict,
        "text": sentence(column.metric, value.ratio, value.verdict) if value.ratio else None,
        **_against(row, column),
        "setting": {**column.setting._asdict(), **_measured_text(row, column.setting)} if column.setting else None,
    }


def _measured_text(row: Row, setting: Setting) -> dict[str, Any]:
    """What else a reader must know to repeat a perplexity."""
    details = row.artifact.ppl[setting].details
    told = {name: details.get(name) for name in ("scored_tokens", "bos", "text_hash", "token_hash")}
    return {name: printable(value) if isinstance(value, str) else value for name, value in told.items()}


def _against(row: Row, column: Column) -> dict[str, Any]:
    """The model whose distribution a divergence is from; nothing for other metrics."""
    if column.metric is PPL or column.setting is None:
        return {}
    return {"against": against_of(row.artifact.divergence[column.setting])._asdict()}


def _md(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", text)


def _html(entry: Entry) -> str:
    text = html.escape(entry.text)
    tone = f' class="{entry.tone}"' if entry.tone else ""
    return f"{text}<small{tone}>{html.escape(entry.change)}</small>" if entry.change else text


def _with_code(text: str, escape: Callable[[str], str], code: str) -> str:
    """Escape a note, but let what stands between backticks be code; a label may bring backticks of its own."""
    parts = text.split("`")
    if len(parts) % 2 == 0 or "" in parts[1::2]:
        return escape(text)
    return "".join(code.format(part) if i % 2 else escape(part) for i, part in enumerate(parts))


def _spreadsheet(value: Any) -> str:
    """A CSV cell that no spreadsheet takes for a formula (OWASP, CSV injection); numbers stay numbers."""
    if not isinstance(value, str):
        return "" if value is None else repr(value)
    return f"'{value}" if value.lstrip().startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(value) else value
