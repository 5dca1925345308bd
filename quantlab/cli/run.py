"""`quantlab run RECIPE`: all steps of a recipe, resumed where a killed run stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.show import keep_copies, show_results


def run(
    path: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, such as recipes/cpu-lab.yaml.")],
    force: opt.Force = False,
    offline: opt.Offline = False,
    results: opt.Results = opt.RESULTS,
    as_json: opt.Json = False,
) -> None:
    """Run every step that has no finished result yet, then print the table and keep Markdown and JSON copies."""
    from quantlab.lab.recipe import read_recipe, run_recipe

    recipe = read_recipe(path)
    with opt.laboratory(results, no_save=False, offline=offline) as lab:
        done = run_recipe(recipe, lab, force=force)
    show_results(done, as_json=as_json)
    keep_copies(done, results / "tables" / recipe.name)
