"""How commands show Results: a table on stdout and warnings on stderr, or JSON and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quantlab.cli.console import print_notices, warn
from quantlab.core.errors import unknown_name
from quantlab.core.files import write_text

if TYPE_CHECKING:
    from quantlab.core.result import Result
    from quantlab.report.comparison import Comparison

FORMATS = ("table", "md", "csv", "json", "html")


def show_results(results: list[Result], *, as_json: bool) -> None:
    """Show the Results of one command: compared with one another, or as JSON (one object, or a list of several)."""
    if as_json:
        from quantlab.lab.store import encode

        write_out(encode(results[0] if len(results) == 1 else results))
        return
    from quantlab.report.comparison import compare

    _print_table(compare(results))
    print_notices([(result.label, notice) for result in results for notice in result.warnings])


def show_comparison(comparison: Comparison, format_: str, out: Path | None) -> None:
    """Show a comparison in one of FORMATS, on stdout or in a file."""
    if format_ not in FORMATS:
        raise unknown_name("format", format_, FORMATS)
    if format_ == "table" and out is None:
        _print_table(comparison)
    elif out is None:
        write_out(rendered(comparison, format_))
    else:
        write_text(out, rendered(comparison, "md" if format_ == "table" else format_))


def rendered(comparison: Comparison, format_: str) -> str:
    """A comparison as a text of md, csv, json or html."""
    from quantlab.report import render
    from quantlab.report.table import tabulate

    if format_ == "json":
        return render.json_text(comparison)
    if format_ == "csv":
        return render.csv_text(comparison)
    table = tabulate(comparison)
    return render.markdown(table) if format_ == "md" else render.html_page(table)


def keep_copies(results: list[Result], stem: Path) -> None:
    """Write Markdown and JSON copies of the table of `results` beside it, and say where."""
    from quantlab.report.comparison import compare

    comparison = compare(results)
    paths = [stem.with_name(f"{stem.name}.{format_}") for format_ in ("md", "json")]
    for path in paths:
        write_text(path, rendered(comparison, path.suffix[1:]))
    warn(f"copies: {', '.join(map(str, paths))}")


def _print_table(comparison: Comparison) -> None:
    from rich.console import Console

    from quantlab.cli.tables import render_terminal
    from quantlab.report.table import tabulate

    render_terminal(tabulate(comparison), Console(file=sys.stdout))


def write_out(text: str) -> None:
    """Write to stdout as it is: the renderers have escaped what came from outside."""
    sys.stdout.write(text)
