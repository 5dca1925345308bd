"""`quantlab ppl MODEL...`: perplexity, and with --against the divergence from the parent."""

from __future__ import annotations

from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.show import show_results


def ppl(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models to measure, one after another.")],
    data: Annotated[str, typer.Option("--data", help="wikitext2, a NAME of calib_data, or a text file.")] = "wikitext2",
    protocol: Annotated[str, typer.Option("--protocol", help="hf, llama.cpp, seed or stride.")] = "hf",
    n_ctx: Annotated[int | None, typer.Option("--n-ctx", "-c", min=3, help="Window. [default: the protocol's]")] = None,
    stride: Annotated[int | None, typer.Option("--stride", min=1, help="Step of protocol `stride`.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N windows.")] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Parent: adds its perplexity, KL divergence from it and top-token agreement."),
    ] = None,
    runtime: opt.Runtime = "auto",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    threads: opt.Threads = None,
    offline: opt.Offline = False,
    results: opt.Results = opt.RESULTS,
    no_save: opt.NoSave = False,
    as_json: opt.Json = False,
) -> None:
    """Measure perplexity on identical token ids."""
    from quantlab.lab.steps import ppl_step

    options = {
        "data": data,
        "protocol": protocol,
        "n_ctx": n_ctx,
        "stride": stride,
        "limit": limit,
        "runtime": runtime,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "offline": offline,
    }
    with opt.laboratory(results, no_save=no_save, offline=offline) as lab:
        named = [*models, against] if against else models
        subjects = lab.runnables(named, options)[: len(models)]
        parents = [lab.parent(against, model, options) if against else None for model in subjects]
        if len(subjects) > 1:
            # The parent's own row: its divergence from itself is zero by definition.
            parents = [
                parent if parent is None or parent.sha256 != model.sha256 else None
                for parent, model in zip(parents, subjects, strict=True)
            ]
        steps = [
            ppl_step(model, {**options, "against": parent}) for model, parent in zip(subjects, parents, strict=True)
        ]
        done = [result for step in steps for result in lab.execute(step)]
    show_results(done, as_json=as_json)
