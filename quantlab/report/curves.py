"""Results that are rows of tables of their own, and are not compared with others: which kinds, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quantlab.core.result import Result
from quantlab.report.batching import tabulate_batching
from quantlab.report.batching_compare import tabulate_stored
from quantlab.report.prefix_cache import tabulate_prefix_cache
from quantlab.report.speculative import newest_speculative, tabulate_speculative
from quantlab.report.table import Table

_TABLES: dict[str, Callable[[Sequence[Result]], list[Table]]] = {
    "batching": tabulate_batching,
    "speculative": tabulate_speculative,
    "prefix-cache": tabulate_prefix_cache,
}
KINDS = tuple(_TABLES)


def tabulate_curves(results: Sequence[Result]) -> list[Table]:
    """The tables of Results of one or several of KINDS, kind by kind."""
    of_kinds = {kind: [result for result in results if result.kind == kind] for kind in _TABLES}
    return [table for kind, of_kind in of_kinds.items() if of_kind for table in _TABLES[kind](of_kind)]


def tabulate_stored_curves(results: Iterable[Result], baseline: str | None = None) -> list[Table]:
    """The tables of what is stored; `baseline` is a model of batching Results."""
    every = list(results)
    batching = [result for result in every if result.kind == "batching"]
    tables = tabulate_stored(batching, baseline) if batching else []
    for kind, tabulate in (("speculative", tabulate_speculative), ("prefix-cache", tabulate_prefix_cache)):
        tables += tabulate(newest_speculative(result for result in every if result.kind == kind))
    return tables
