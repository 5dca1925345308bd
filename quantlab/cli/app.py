"""The table of contents of the command line, and the one place where errors are printed."""

from __future__ import annotations

import os
import sys

import typer

from quantlab.cli import bench, compare, doctor, inspect, ppl, quantize, run
from quantlab.cli.console import print_error, warn
from quantlab.core.errors import QuantlabError

app = typer.Typer(
    name="quantlab",
    help="From a model to a table an engineer can act on: quantize, bench, ppl, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("doctor")(doctor.doctor)
app.command("quantize")(quantize.quantize)
app.command("inspect")(inspect.inspect)
app.command("bench")(bench.bench)
app.command("ppl")(ppl.ppl)
app.command("compare")(compare.compare)
app.command("run")(run.run)


@app.callback(invoke_without_command=True)
def _version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        from quantlab import __version__

        print(f"quantlab {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; exit codes: 0 done, 1 failed, 2 wrong use, 3 a limit of the user was crossed."""
    try:
        app()
    except QuantlabError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        warn("interrupted; finished results are kept")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the pipe (`| head`) has gone; Python must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


if __name__ == "__main__":
    main()
