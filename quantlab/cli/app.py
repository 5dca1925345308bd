"""The table of contents of the command line, and the one place where errors are printed."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import typer

from quantlab.cli import (
    batching,
    bench,
    compare,
    doctor,
    engines,
    inspect,
    ppl,
    prefix_cache,
    quantize,
    run,
    speculative,
)
from quantlab.cli.console import print_error
from quantlab.core.errors import QuantlabError
from quantlab.core.files import os_error
from quantlab.runtime.process import pause_together

app = typer.Typer(
    name="quantlab",
    help="From a model to a table an engineer can act on: quantize, bench, ppl, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich would take `[default: 128]` and `org/name[@revision]` for markup, and drop them.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("doctor")(doctor.doctor)
app.command("quantize")(quantize.quantize)
app.add_typer(engines.app, name="engines")
app.command("inspect")(inspect.inspect)
app.command("bench")(bench.bench)
app.command("ppl")(ppl.ppl)
app.command("batching")(batching.batching)
app.add_typer(speculative.app, name="speculative")
app.add_typer(prefix_cache.app, name="prefix-cache")
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that has no `≈` gets an escape, not a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    pause_together()
    try:
        app()
    except QuantlabError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of the pipe (`| head`) has gone; Python must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        # What no room expects: a full disk behind stdout, a path that may not even be looked at.
        print_error(os_error(error, Path(error.filename or "output")))
        sys.exit(1)


if __name__ == "__main__":
    main()
