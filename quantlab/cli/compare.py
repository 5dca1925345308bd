"""`quantlab compare [RESULT...]`: one table with deltas and verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.show import show_comparison
from quantlab.core.errors import LimitError
from quantlab.core.files import check_output


def compare(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[RESULT...]", help="Result files or folders. [default: the store]")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Label to compare with. [default: the parent]")
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
    comparison = join(load_results(paths or [results]), baseline=baseline, allow_env_diff=allow_env_diff)
    show_comparison(comparison, "json" if as_json else format_, out)
    if broken := crossed(comparison, limits):
        raise LimitError("; ".join(broken), "the limit is `--fail-above`")
