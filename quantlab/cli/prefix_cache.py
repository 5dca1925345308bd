"""`quantlab prefix-cache MODEL`: what a prefix cache saves, and why it missed. `lint FILE`: what breaks prefixes."""

from __future__ import annotations

from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.group import MEASURE, measuring_beside
from quantlab.cli.show import show_batching, show_results

app = measuring_beside("lint", "Measure what a prefix cache saves, and why it missed.")


@app.command(MEASURE, epilog="Logs of requests are checked by `quantlab prefix-cache lint FILE`.")
def prefix_cache(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, or the URL of a server (http://HOST/v1).")],
    served_model: Annotated[str | None, typer.Option("--model", help="Name of the model at an endpoint.")] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            "--scenario", help="system-prompt,few-shot,chat,rag,timestamp-first,timestamp-last. [default: all]"
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="FILE of recorded traffic with hash_ids (Mooncake JSONL).")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Measured ones. [default: 8, of a trace 32, simulated 2000]")
    ] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", "-r", help="Repetitions. [default: 3]")] = None,
    warmup: Annotated[int | None, typer.Option("--warmup", help="Repetitions before, discarded. [default: 1]")] = None,
    prefix_tokens: Annotated[int | None, typer.Option(help="What requests may share. [default: 512]")] = None,
    suffix_tokens: Annotated[int | None, typer.Option(help="What each has of its own. [default: 16]")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", "-n", help="Of an answer. [default: 8]")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens of a block. [default: 16]")] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="BYTES of KV that the cache may hold: 64MB. [default: all it needs]")
    ] = None,
    tiers: Annotated[
        bool | None, typer.Option("--tiers/--no-tiers", help="Also RAM and disk against computing. [default: tiers]")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="In virtual time, with fitted step times.")] = False,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes/s of a device to simulate, with --flops.")] = None,
    flops: Annotated[float | None, typer.Option(help="FLOP/s of a device to simulate.")] = None,
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
    """Measure hit rate, TTFT cold and warm, KV saved by sharing and tiers, beside theory; say why prompts missed."""
    from quantlab.lab.prefix_cache import prefix_cache_step
    from quantlab.lab.steps import loadable

    options = {
        "served_model": served_model, "scenario": scenario, "trace": trace, "requests": requests, "repeats": repeats,
        "warmup": warmup, "prefix_tokens": prefix_tokens, "suffix_tokens": suffix_tokens, "new_tokens": new_tokens,
        "block_tokens": block_tokens, "budget": budget, "tiers": tiers, "simulate": simulate, "bandwidth": bandwidth,
        "flops": flops, "runtime": runtime, "device": device, "dtype": dtype, "threads": threads, "seed": seed,
    }  # fmt: skip
    with opt.laboratory(results, no_save=no_save, offline=offline) as lab:
        step = prefix_cache_step(loadable(lab, model, options), options)
        with show_batching(as_json=as_json) as done:
            # One by one: what came before an error is shown.
            for result in lab.results(step):
                done.append(result)


@app.command("lint")
def lint(
    log: Annotated[
        str, typer.Argument(metavar="PROMPTS", help="FILE of requests, one a line: OpenAI messages, prompts or texts.")
    ],
    block_tokens: Annotated[int | None, typer.Option(help="Tokens of a block. [default: 16]")] = None,
    results: opt.Results = opt.RESULTS,
    no_save: opt.NoSave = False,
    as_json: opt.Json = False,
) -> None:
    """Find what varies too early in a log of requests, and what the hit rate would be without it."""
    from quantlab.lab.prefix_cache import lint_step

    with opt.laboratory(results, no_save=no_save, offline=True) as lab:
        show_results(lab.execute(lint_step(log, block_tokens)), as_json=as_json)
