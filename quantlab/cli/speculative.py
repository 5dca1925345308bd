"""`quantlab speculative TARGET`: what a draft gains, beside what theory expects, and why where it does not pay."""

from __future__ import annotations

from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.group import MEASURE, measuring_beside
from quantlab.cli.show import show_batching, show_results

app = measuring_beside("train", "Measure what a draft gains and why not, or train one.")


@app.command(MEASURE, epilog="Heads are trained by `quantlab speculative train TARGET --help`.")
def speculative(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A model, or the URL of a server (http://HOST/v1).")],
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", help="MODEL, self:TYPE (its own copy), ngram, medusa:PATH, eagle:PATH; repeatable."),
    ] = None,
    k: Annotated[str | None, typer.Option("-k", help="Draft tokens: 1,2,4,8. [default: 1,2,4,8]")] = None,
    adaptive: Annotated[
        bool | None, typer.Option("--adaptive/--no-adaptive", help="Also a length that adapts. [default: adaptive]")
    ] = None,
    batch: Annotated[str | None, typer.Option("--batch", "-b", help="Sequences at once: 1,4. [default: 1]")] = None,
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="FILE of prompts (Spec-Bench JSONL). [default: built in]")
    ] = None,
    categories: Annotated[str | None, typer.Option(help="Of the prompts: code,chat. [default: all]")] = None,
    prompts_per_category: Annotated[int | None, typer.Option(help="The first of each. [default: 4]")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", "-n", help="Of an answer. [default: 64]")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of an answer.")] = False,
    n_ctx: Annotated[int | None, typer.Option("--n-ctx", "-c", help="Tokens of a sequence. [default: 2048]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: 0]")] = None,
    prompt_lookup_max: Annotated[int | None, typer.Option(help="Longest n-gram of ngram. [default: 3]")] = None,
    prompt_lookup_min: Annotated[int | None, typer.Option(help="Shortest n-gram of ngram. [default: 1]")] = None,
    served_model: Annotated[str | None, typer.Option("--model", help="Name of the model at an endpoint.")] = None,
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
    """Measure acceptance, costs and speed-up of drafts, and say what binds where they do not pay."""
    from quantlab.lab.speculative import found, speculative_step

    options = {
        "draft": draft, "k": k, "adaptive": adaptive, "batch": batch, "prompts": prompts, "categories": categories,
        "prompts_per_category": prompts_per_category, "new_tokens": new_tokens, "ignore_eos": ignore_eos,
        "n_ctx": n_ctx, "temperature": temperature, "prompt_lookup_max": prompt_lookup_max,
        "prompt_lookup_min": prompt_lookup_min, "served_model": served_model, "runtime": runtime, "device": device,
        "dtype": dtype, "threads": threads, "seed": seed,
    }  # fmt: skip
    with opt.laboratory(results, no_save=no_save, offline=offline) as lab:
        step = speculative_step(*found(lab, target, options), options)
        with show_batching(as_json=as_json) as done:
            # One by one: what came before an error is shown.
            for result in lab.results(step):
                done.append(result)


@app.command("train")
def train(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder that torch runs, a Hub id or demo.")],
    method: Annotated[str, typer.Option("--method", "-m", help="medusa or eagle.")] = "medusa",
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="[default: artifacts/TARGET-METHOD.safetensors]")
    ] = None,
    calib: Annotated[
        list[str] | None, typer.Option("--calib", help="NAME|PATH of texts to begin from; repeatable.")
    ] = None,
    calib_samples: Annotated[int | None, typer.Option(help="Windows. [default: 256]")] = None,
    calib_length: Annotated[
        int | None, typer.Option(help="Tokens of a window; an eighth is text. [default: 128]")
    ] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Tokens drafted in a row. [default: 4]")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the windows. [default: 6]")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Ids that are drafted, the most frequent. [default: 8192]")
    ] = None,
    force: opt.Force = False,
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
    """Train Medusa heads or an EAGLE layer for a target, on its own answers to calibration text."""
    from quantlab.lab.speculative import heads_step

    options = {
        "method": method, "out": out, "calib": calib, "calib_samples": calib_samples, "calib_length": calib_length,
        "heads": heads, "epochs": epochs, "draft_vocab": draft_vocab, "force": force, "runtime": runtime,
        "device": device, "dtype": dtype, "threads": threads, "seed": seed,
    }  # fmt: skip
    with opt.laboratory(results, no_save=no_save, offline=offline) as lab:
        show_results(lab.execute(heads_step(lab, target, options)), as_json=as_json)
