"""Options that several commands share, each defined once (CONTRACT: options shared by name)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantlab.cli.console import progress_display
from quantlab.cli.interrupt import ending_in_order

if TYPE_CHECKING:
    from quantlab.lab.execute import Lab

Results = Annotated[Path, typer.Option("--results", help="Folder of the results store.")]
NoSave = Annotated[bool, typer.Option("--no-save", help="Do not store the results.")]
Json = Annotated[bool, typer.Option("--json", help="Print the Results as JSON on stdout, and nothing else there.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Runtime = Annotated[
    str, typer.Option("--runtime", help="auto, torch or llamacpp: what runs a folder that both can read.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16: what torch computes in.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, max=512, help="CPU threads. [default: all cores]")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]

RESULTS = Path("runs")


@contextmanager
def laboratory(results: Path, *, no_save: bool, offline: bool) -> Iterator[Lab]:
    """A Lab whose progress is drawn on stderr; what is interrupted says that finished results are kept."""
    from quantlab.lab.execute import Lab
    from quantlab.lab.store import Store

    said = "interrupted" if no_save else f"interrupted; finished results are kept in {results}"
    with ending_in_order(said), progress_display() as progress:
        yield Lab(None if no_save else Store(results), offline=offline, progress=progress)
