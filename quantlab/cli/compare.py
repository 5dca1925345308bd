"""`quantlab compare [RESULT...]`: one table with deltas and verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.console import print_error
from quantlab.cli.show import apart, show_comparison, show_curves
from quantlab.core.errors import LimitError, QuantlabError, UsageError
from quantlab.core.files import check_output

if TYPE_CHECKING:
    from quantlab.core.result import Result
    from quantlab.report.table import Table


def compare(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[RESULT...]", help="Result files or folders. [default: the store]")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Label to compare with. [default: each one's parent]")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="table, md, csv, json or html.")] = "table",
    fail_above: Annotated[
        list[str] | None,
        typer.Option("--fail-above", help="METRIC=PERCENT: exit 3 when a row is worse by more; repeatable."),
    ] = None,
    allow_env_diff: Annotated[
        bool, typer.Option("--allow-env-diff", help="Compare speed between machines or settings that differ.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write to a file instead of stdout (a table as Markdown).")
    ] = None,
    force: opt.Force = False,
    results: opt.Results = opt.RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Join stored results into one table: size, speed, memory and quality against the parent."""
    from quantlab.lab.store import load_results
    from quantlab.report.comparison import compare as join
    from quantlab.report.limits import crossed, parse_limit

    if out is not None:
        check_output(out, force=force)
    limits = [parse_limit(text) for text in fail_above or []]
    format_ = "json" if as_json else format_
    curves, others = apart(load_results(paths or [results]))
    if curves and not others:
        if limits:
            raise UsageError("`--fail-above` is of a table, and these results are curves", "leave it out")
        show_curves(_tables(curves, baseline), format_, out)
        return
    comparison = join(others, baseline=baseline, allow_env_diff=allow_env_diff)
    try:
        tables = _tables(curves)
    except QuantlabError as error:
        # No reason to withhold the table.
        print_error(error)
        tables = []
    show_comparison(comparison, format_, out, tables)
    if broken := crossed(comparison, limits):
        raise LimitError("; ".join(broken), "the limit is `--fail-above`")


def _tables(curves: list[Result], baseline: str | None = None) -> list[Table]:
    from quantlab.report.curves import tabulate_stored_curves

    try:
        return tabulate_stored_curves(curves, baseline)
    except (LookupError, TypeError, ValueError) as error:
        kinds = " and ".join(sorted({result.kind for result in curves}))
        raise QuantlabError(
            f"stored Results of {kinds} cannot be shown: they lack what this version shows ({error!r})",
            "name the Results to compare, or measure again into another `--results`",
        ) from error
