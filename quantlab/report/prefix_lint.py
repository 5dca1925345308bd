"""What `quantlab prefix-cache lint` found, as a table: a row for each cause, the order that it proposes."""

from __future__ import annotations

from typing import Any

from quantlab.core import units
from quantlab.core.result import Result
from quantlab.core.text import printable
from quantlab.report.table import Entry, Head, Table


def lint_table(result: Result) -> Table:
    """The findings of one log, the costliest first."""
    d = result.details
    now, proposed = (result.measurements[name].samples[0] for name in ("hit_rate", "hit_rate_proposed"))
    body = [
        [
            Entry(finding["cause"]),
            Entry(printable(finding["part"])),
            Entry(f"{finding['requests']} of {d['requests']}"),
            Entry(units.percent(finding["lost_share"], digits=3)),
            Entry(units.percent(finding["hit_rate_after"], digits=3)),
        ]
        for finding in d["findings"]
    ]
    verdicts = [(finding["cause"], _said(finding)) for finding in d["findings"]]
    summary = f"hit rate {units.percent(now, digits=3)} of about {d['tokens']} tokens in {d['requests']} requests"
    if body:
        summary += f", {units.percent(proposed, digits=3)} in the order: {_order(d['order'])}"
    else:
        summary += ": nothing varies too early"
    heads = ["cause", "where", "requests", "tokens lost", "hit rate without it"]
    notes = [
        "replayed with a cache of any size, the requests one after another; tokens are counted as pieces of words",
        "hit rate without it: once this and the causes above it are repaired",
    ]
    return Table(
        title=f"{printable(result.label)}: what varies too early",
        heads=[Head(title, "left" if i < 2 else "right") for i, title in enumerate(heads)],
        rows=body,
        keys=2,
        verdicts=[*verdicts, (printable(result.label), summary)],
        notes=notes if body else notes[:1],
    )


def _said(finding: dict[str, Any]) -> str:
    earlier, now = (f"“{printable(' '.join(finding[name].split()))}”" for name in ("earlier", "now"))
    return f"{earlier}, then {now}: {finding['advice']}"


def _order(parts: list[dict[str, Any]]) -> str:
    """The parts in their order, with the share of requests that have the same text."""
    return ", ".join(f"{printable(part['part'])} ({part['share']:.0%})" for part in parts)
