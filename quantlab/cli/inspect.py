"""`quantlab inspect PATH`: what is really stored."""

from __future__ import annotations

from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.show import show_inspection, show_results


def inspect(
    model: Annotated[str, typer.Argument(metavar="PATH", help="Folder, .gguf file, Hub id or `demo`.")],
    offline: opt.Offline = False,
    as_json: opt.Json = False,
) -> None:
    """Show stored types, bits per weight, sizes, scheme, kernel, tokenizer and template checks."""
    from quantlab.lab.steps import inspect_step

    with opt.laboratory(opt.RESULTS, no_save=True, offline=offline) as lab:
        [result] = lab.execute(inspect_step(lab.model(model)))
    if as_json:
        show_results([result], as_json=True)
    else:
        show_inspection(result)
