"""`quantlab bench MODEL...`: memory, TTFT, TPOT, ITL and throughput for each model and cell."""

from __future__ import annotations

from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.show import show_results


def bench(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models; several run interleaved.")],
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", "-p", help="Prompt lengths: 128,512. [default: 512, or all of --prompt]")
    ] = "",
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=1, help="Tokens to generate.")] = 128,
    batch: Annotated[str, typer.Option("--batch", "-b", help="Sequences at once: 1,4.")] = "1",
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1, help="Measured repetitions.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Repetitions before them, discarded.")] = 1,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Prompt TEXT or @FILE instead of built-in text.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Generate all tokens, whatever the model says.")
    ] = True,
    runtime: opt.Runtime = "auto",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    offline: opt.Offline = False,
    results: opt.Results = opt.RESULTS,
    no_save: opt.NoSave = False,
    as_json: opt.Json = False,
) -> None:
    """Measure speed and memory, with warm-up, interleaved repetitions and every sample kept."""
    from quantlab.bench.spec import parse_sizes
    from quantlab.lab.steps import bench_steps

    options = {
        "new_tokens": new_tokens,
        "batch": parse_sizes(batch, "--batch"),
        "repeats": repeats,
        "warmup": warmup,
        "ignore_eos": ignore_eos,
        "runtime": runtime,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "seed": seed,
        "prompt": prompt,
    }
    if prompt_tokens:
        options["prompt_tokens"] = parse_sizes(prompt_tokens, "--prompt-tokens")
    with opt.laboratory(results, no_save=no_save, offline=offline) as lab:
        steps = list(bench_steps(lab.runnables(models, options), options))
        done = [result for step in steps for result in lab.execute(step)]
    show_results(done, as_json=as_json)
