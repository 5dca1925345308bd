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
        str, typer.Option("--utilization", help="Loads as shares of the measured capacity, where no rate is given.")
    ] = "0.5,0.7,0.8,0.9",
    mixed_utilization: Annotated[float, typer.Option(help="Load of the mixed traffic.")] = 0.95,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Of each load. [default: 48, simulated 2000]")
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="FILE of recorded traffic: Azure CSV, Mooncake JSONL.")
    ] = None,
    length_scale: Annotated[
        float | None, typer.Option(help="Of a trace. [default: to a mean of --prompt-tokens]")
    ] = None,
    burstiness: Annotated[float, typer.Option(help="1 is Poisson, less is bursty (as vLLM).")] = 1.0,
    policy: Annotated[str, typer.Option(help="fcfs, admission, priority, preemption or guarded (all three).")] = "fcfs",
    ttft_slo: Annotated[str, typer.Option("--ttft-slo", help="Limit of TTFT P99: 500ms or 0.5s.")] = "500ms",
    tpot_slo: Annotated[str, typer.Option("--tpot-slo", help="Limit of the mean TPOT: 50ms.")] = "50ms",
    ageing: Annotated[str, typer.Option(help="How long a batch request lets interactive ones overtake.")] = "5s",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", "-p", help="Mean prompt length.")] = 32,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", help="Mean answer length.")] = 16,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths are within 1 ± this of their mean.")] = 0.5,
    batch: Annotated[str, typer.Option("--batch", "-b", help="Batch sizes of the first part.")] = "1,2,4,8,16",
    repeats: Annotated[int, typer.Option("--repeats", "-r", help="Repetitions of each batch size.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", help="Repetitions before them, discarded.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in a step.")] = 8,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a step; prompts are cut to it.")] = 128,
    kv_budget_tokens: Annotated[int | None, typer.Option(help="Tokens in the KV cache. [default: no limit]")] = None,
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
    """Measure what batching gains, what load costs, and how much load meets limits on latency."""
    from quantlab.lab.steps import batching_step, loadable

    options = {
        "served_model": served_model, "utilization": utilization, "mixed_utilization": mixed_utilization,
        "requests": requests, "trace": trace, "length_scale": length_scale, "burstiness": burstiness, "policy": policy,
        "ttft_slo": ttft_slo, "tpot_slo": tpot_slo, "ageing": ageing, "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens, "random_range_ratio": random_range_ratio, "batch": batch, "repeats": repeats,
        "warmup": warmup, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
        "kv_budget_tokens": kv_budget_tokens, "simulate": simulate, "bandwidth": bandwidth,
        "flops": flops, "runtime": runtime, "device": device, "dtype": dtype, "threads": threads, "seed": seed,
        "rate": rate, "parts": parts,
    }  # fmt: skip
    with opt.laboratory(results, no_save=no_save, offline=offline) as lab:
        step = batching_step(loadable(lab, model, options), options)
        with show_batching(as_json=as_json) as done:
            # One by one: what came before an error is shown.
            for result in lab.results(step):
                done.append(result)
