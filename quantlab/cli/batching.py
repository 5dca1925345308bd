"""`quantlab batching MODEL`: throughput against TPOT, load against delay, capacity under limits, mixed traffic."""

from __future__ import annotations

from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.show import show_batching


def batching(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, or the URL of a server (http://HOST/v1).")],
    served_model: Annotated[str | None, typer.Option("--model", help="Name of the model at an endpoint.")] = None,
    parts: Annotated[
        str | None, typer.Option("--parts", help="batch,load,sla,mixed; of an endpoint load,sla. [default: all]")
    ] = None,
    rate: Annotated[str | None, typer.Option("--rate", help="Arrivals per second: 0.5,1,2.")] = None,
    utilization: Annotated[
        str | None,
        typer.Option("--utilization", help="Loads as shares of the measured capacity. [default: 0.5,0.7,0.8,0.9]"),
    ] = None,
    mixed_utilization: Annotated[float | None, typer.Option(help="Load of the mixed traffic. [default: 0.95]")] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Of each load. [default: 48, simulated 2000]")
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="FILE of recorded traffic: Azure CSV, Mooncake JSONL.")
    ] = None,
    length_scale: Annotated[
        float | None, typer.Option(help="Of a trace. [default: to a mean of --prompt-tokens]")
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="1 is Poisson, less is bursty (as vLLM). [default: 1]")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Of load and sla: fcfs, or admission, which rejects what would miss --ttft-slo. [default: fcfs]"
        ),
    ] = None,
    ttft_slo: Annotated[
        str | None, typer.Option("--ttft-slo", help="Limit of TTFT P99: 500ms or 0.5s. [default: 500ms]")
    ] = None,
    tpot_slo: Annotated[str | None, typer.Option("--tpot-slo", help="Limit of the mean TPOT. [default: 50ms]")] = None,
    ageing: Annotated[
        str | None, typer.Option(help="How long a batch request lets interactive ones overtake. [default: 5s]")
    ] = None,
    fallback: Annotated[
        str | None, typer.Option(help="A smaller MODEL: mixed then also answers with it what would be rejected.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", "-p", help="Mean prompt length. [default: 32]")
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option("--new-tokens", "-n", help="Mean answer length; the part batch has 32 at least. [default: 16]"),
    ] = None,
    random_range_ratio: Annotated[
        float | None, typer.Option(help="Lengths are within 1 ± this of their mean. [default: 0.5]")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", help="Batch sizes of the part batch. [default: 1,2,4,8,16]")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", "-r", help="Repetitions of each batch size. [default: 3]")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", help="Repetitions before them, discarded. [default: 1]")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a step. [default: 8]")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a step; prompts are cut to it. [default: 128]")
    ] = None,
    kv_budget_tokens: Annotated[int | None, typer.Option(help="Tokens in the KV cache. [default: no limit]")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="In virtual time, with fitted step times.")] = False,
    replicas: Annotated[int | None, typer.Option(help="Engines of a simulated fleet. [default: 1]")] = None,
    router: Annotated[
        str | None, typer.Option(help="Of a fleet: least-loaded, round-robin, prefix-aware. [default: least-loaded]")
    ] = None,
    prefix_cache_tokens: Annotated[
        int | None, typer.Option(help="Prefix cache of each simulated engine, with a --trace that has hash_ids.")
    ] = None,
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
    """Measure what batching gains, what load costs, and how much load meets limits on latency."""
    from quantlab.lab.steps import batching_models, batching_step

    options = {
        "served_model": served_model, "utilization": utilization, "mixed_utilization": mixed_utilization,
        "requests": requests, "trace": trace, "length_scale": length_scale, "burstiness": burstiness, "policy": policy,
        "ttft_slo": ttft_slo, "tpot_slo": tpot_slo, "ageing": ageing, "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens, "random_range_ratio": random_range_ratio, "batch": batch, "repeats": repeats,
        "warmup": warmup, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
        "kv_budget_tokens": kv_budget_tokens, "simulate": simulate, "replicas": replicas, "router": router,
        "prefix_cache_tokens": prefix_cache_tokens, "bandwidth": bandwidth,
        "flops": flops, "runtime": runtime, "device": device, "dtype": dtype, "threads": threads, "seed": seed,
        "rate": rate, "parts": parts, "fallback": fallback,
    }  # fmt: skip
    with opt.laboratory(results, no_save=no_save, offline=offline) as lab:
        step = batching_step(*batching_models(lab, model, options))
        with show_batching(as_json=as_json) as done:
            # One by one: what came before an error is shown.
            for result in lab.results(step):
                done.append(result)
