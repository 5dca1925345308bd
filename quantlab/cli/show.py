"""How commands show Results: a table on stdout and warnings on stderr, or JSON and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantlab.cli.console import print_notices, say, warn
from quantlab.core import units
from quantlab.core.errors import UsageError, unknown_name
from quantlab.core.files import write_text

if TYPE_CHECKING:
    from quantlab.core.result import Result, TensorType
    from quantlab.quantize.spec import Prediction
    from quantlab.report.comparison import Comparison
    from quantlab.report.table import Table

# What draws curves; the other formats are of one table.
CURVE_FORMATS = ("table", "md")


def show_results(results: list[Result], *, as_json: bool) -> None:
    """Show the Results of one command: compared with one another, or as JSON (one object, or a list of several)."""
    if as_json:
        from quantlab.lab.store import encode

        write_out(encode(results[0] if len(results) == 1 else results))
        return
    from quantlab.report.comparison import compare

    curves, others = apart(results)
    if others or not curves:
        _print_table(compare(others))
    if curves:
        from quantlab.report.curves import tabulate_curves

        _print_tables(tabulate_curves(curves))
    # What bench, ppl and curves warned of is in the notes under the table.
    said = [result for result in others if result.kind not in ("bench", "ppl")]
    print_notices([(result.label, notice) for result in said for notice in result.warnings])


@contextmanager
def show_batching(*, as_json: bool) -> Iterator[list[Result]]:
    """Show the Results that were put into the list, also where an error ends the command: what is finished counts."""
    done: list[Result] = []
    try:
        yield done
    finally:
        if done:
            show_results(done, as_json=as_json)


def show_comparison(comparison: Comparison, format_: str, out: Path | None, curves: Sequence[Table] = ()) -> None:
    """Show a comparison as `table` or in one of report's formats, on stdout or in a file (a table as Markdown).

    Curves follow it where the format is one for people.
    """
    from quantlab.report.render import FORMATS

    if format_ != "table" and format_ not in FORMATS:
        raise unknown_name("format", format_, ("table", *FORMATS))
    if format_ == "table" and out is None:
        _print_table(comparison)
        _print_tables(curves)
        return
    form = "md" if format_ == "table" else format_
    text = FORMATS[form](comparison)
    if curves and form == "md":
        text = f"{text}\n{_as_markdown(curves)}"
    elif curves:
        warn(f"results of curves are left out: they are shown by the formats {' and '.join(CURVE_FORMATS)}")
    if out is None:
        write_out(text)
    else:
        write_text(out, text)


def show_curves(curves: Sequence[Table], format_: str, out: Path | None) -> None:
    """Show curves alone, on stdout or in a file (as Markdown)."""
    if format_ not in CURVE_FORMATS:
        raise UsageError(
            f"these results are curves, and `--format {format_}` has none",
            f"use {' or '.join(CURVE_FORMATS)}; every number is in the files of the results",
        )
    if out is not None:
        write_text(out, _as_markdown(curves))
    elif format_ == "md":
        write_out(_as_markdown(curves))
    else:
        _print_tables(curves)


def _as_markdown(tables: Sequence[Table]) -> str:
    from quantlab.report.render import markdown

    return "\n".join(f"## {table.title}\n\n{markdown(table)}" for table in tables)


def keep_copies(results: list[Result], stem: Path) -> None:
    """Write Markdown and JSON copies of the table of `results` beside it, and say where."""
    from quantlab.report.comparison import compare
    from quantlab.report.render import FORMATS

    curves, others = apart(results)
    paths = []
    if others:
        comparison = compare(others)
        paths = [stem.with_name(f"{stem.name}.{format_}") for format_ in ("md", "json")]
        for path in paths:
            write_text(path, FORMATS[path.suffix[1:]](comparison))
    for kind in dict.fromkeys(result.kind for result in curves):
        from quantlab.report.curves import tabulate_curves

        paths.append(stem.with_name(f"{stem.name}-{kind}.md"))
        write_text(paths[-1], _as_markdown(tabulate_curves([result for result in curves if result.kind == kind])))
    warn(f"copies: {', '.join(map(str, paths))}")


def show_prediction(prediction: Prediction, *, as_json: bool) -> None:
    """Show what a dry run says."""
    if as_json:
        import msgspec

        write_out(msgspec.json.format(msgspec.json.encode(prediction), indent=2).decode() + "\n")
        return
    say(f"size          {units.size(prediction.size_bytes, None)}, {prediction.bits_per_weight:.2f} bits per weight")
    say(f"peak memory   {units.size(prediction.peak_process_bytes, None)}")
    say(f"disk          {units.size(prediction.disk_bytes, None)}, while it is made")
    if prediction.peak_device_bytes:
        say(f"on the device {units.size(prediction.peak_device_bytes, None)}")
    known = (
        "not known beforehand"
        if prediction.quantize_s is None
        else f"{prediction.quantize_s:.1f} s, loading and checking come on top"
    )
    say(f"quantizing    {known}")
    _say_types(prediction.tensor_types)
    print_notices([("dry run", notice) for notice in prediction.warnings])


def show_inspection(result: Result) -> None:
    """Show what is stored, then what must be said of it."""
    model = result.model
    say(f"{result.label}: {model.format}, {units.size(model.size_bytes, None)}")
    say(f"{model.bits_per_weight:.2f} bits per weight")
    say(f"sha256  {model.sha256}")
    _say_types(model.tensor_types)
    _say_details(result.details)
    print_notices([(result.label, notice) for notice in result.warnings])


def _say_types(types: dict[str, TensorType]) -> None:
    total = sum(stored.params for stored in types.values())
    for name, stored in types.items():
        say(f"  {name:<8} {stored.count:>5} tensors  {stored.params / total:>7.2%} of the weights")


def _say_details(details: dict[str, Any], indent: str = "") -> None:
    for name, value in details.items():
        if isinstance(value, dict):
            say(f"{indent}{name}:")
            _say_details(value, indent + "  ")
        else:
            say(f"{indent}{name}: {value}")


def apart(results: list[Result]) -> tuple[list[Result], list[Result]]:
    """Points of curves, which are not compared, and the others."""
    from quantlab.report.curves import KINDS

    curves = [result for result in results if result.kind in KINDS]
    return curves, [result for result in results if result.kind not in KINDS]


def _print_tables(tables: Sequence[Table]) -> None:
    from rich.console import Console
    from rich.text import Text

    from quantlab.cli.tables import render_terminal

    console = Console(file=sys.stdout)
    for table in tables:
        console.print(Text(table.title, style="bold"))
        render_terminal(table, console)
        console.print()


def _print_table(comparison: Comparison) -> None:
    from rich.console import Console

    from quantlab.cli.tables import render_terminal
    from quantlab.report.table import tabulate

    render_terminal(tabulate(comparison), Console(file=sys.stdout))


def write_out(text: str) -> None:
    """Write to stdout as it is: the renderers have escaped what came from outside."""
    sys.stdout.write(text)
