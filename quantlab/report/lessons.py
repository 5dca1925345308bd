"""What a comparison teaches, in sentences computed from its numbers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quantlab.core import units
from quantlab.core.text import printable
from quantlab.report.artifacts import Artifact
from quantlab.report.comparison import Comparison, Row
from quantlab.report.metrics import FLOOR_SHARE, PPL, SIZE, TPOT
from quantlab.report.values import Column

# The type that a label ends on (`demo-from-Q4_1-F16` asked for F16). A main type is known of legacy and K-quants.
_LABEL_TYPE = re.compile(r"(?<![A-Z0-9])(Q\d_(?:K|0|1)|I?Q\d_[A-Z]+|BF16|F16|F32)(?![A-Z0-9])")
_MAIN_TYPE = re.compile(r"Q\d_(?:K|0|1)")
QUALITY_FOOTER = "Perplexity is not downstream quality: models of equal perplexity can differ on tasks."


def lessons(comparison: Comparison) -> list[str]:
    """Sentences in the order of the rows; the fixed one on perplexity last, where there is a perplexity."""
    found = [*_contents(comparison)]
    found += [sentence for row in comparison.rows for sentence in _of_row(row, comparison)]
    found += _indistinct_perplexities(comparison)
    if any(column.metric is PPL for column in comparison.columns):
        found.append(QUALITY_FOOTER)
    return found


def _of_row(row: Row, comparison: Comparison) -> Iterable[str]:
    size, tpot = row.values.get(Column(SIZE)), row.values.get(Column(TPOT))
    if size and tpot and size.ratio and tpot.ratio and size.verdict == "better" and tpot.verdict == "worse":
        cell = f" at {row.cell}" if len(comparison.cells) > 1 else ""
        sentence = (
            f"`{row.artifact.label}` is {units.change(size.ratio.estimate).lstrip('-')} smaller than "
            f"`{row.base.label}` and {units.change(tpot.ratio.estimate).lstrip('+')} slower a token{cell}"
        )
        if share := row.values.get(Column(FLOOR_SHARE)):
            read = units.percent(share.interval.estimate, digits=2)
            sentence += f": reading weights and KV cache at full bandwidth would take {read} of that time"
        yield sentence


def asked_type(artifact: Artifact) -> str | None:
    """The GGUF type that the quantize Result asked for, else the one that the label names; None for a folder.

    A folder's label may name the GGUF that its weights come from (`demo-from-Q4_1`).
    """
    if artifact.model.format != "gguf":
        return None
    asked = artifact.quantize.spec.get("type") if artifact.quantize else None
    named = _LABEL_TYPE.findall((asked if isinstance(asked, str) else artifact.label).upper())
    return named[-1] if named and _MAIN_TYPE.fullmatch(named[-1]) else None


def _contents(comparison: Comparison) -> Iterable[str]:
    """Label against content: most weights are stored as another type than the one asked for."""
    labels: dict[str, list[str]] = {}
    for row in comparison.rows:
        if not row.repeated and (kind := asked_type(row.artifact)) and (said := _content(row.artifact, kind)):
            labels.setdefault(said, []).append(f"`{row.artifact.label}`")
    for said, of in labels.items():
        yield f"{', '.join(of)}: {said}"


def _content(artifact: Artifact, kind: str) -> str | None:
    types = {name: t.params for name, t in artifact.model.tensor_types.items()}
    total = sum(types.values())
    if not total or types.get(kind, 0) >= total / 2:
        return None
    main = max(types, key=lambda name: types[name])
    held, most = (units.percent(types.get(name, 0) / total, digits=2) for name in (kind, main))
    return (
        f"{held} of the weights are stored as the {kind} that was asked for, {most} as "
        f"{printable(main)}: {artifact.model.bits_per_weight:.2f} bits per weight in all"
    )


def _indistinct_perplexities(comparison: Comparison) -> Iterable[str]:
    for column in comparison.columns:
        if column.metric is not PPL:
            continue
        rows = [row for row in comparison.rows if not row.repeated and column in row.values]
        names: dict[str, list[str]] = {}
        for row in rows:
            if row.values[column].verdict == "not_distinguishable":
                names.setdefault(row.base.label, []).append(f"`{row.artifact.label}`")
        for base, labels in names.items():
            yield (
                f"the perplexity of {', '.join(labels)} cannot be told from that of `{base}` "
                f"({column.setting}): take more windows, or read KLD and same top (`quantlab ppl --against`)"
            )
