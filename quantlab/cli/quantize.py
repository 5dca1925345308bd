"""`quantlab quantize MODEL --method awq|gptq|fp8|int8|rtn|gguf`: a model goes in, a checked artifact comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.console import say
from quantlab.cli.show import show_prediction, show_results


def quantize(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, Hub id (org/name[@revision]) or `demo`.")],
    method: Annotated[str, typer.Option("--method", "-m", help="awq, gptq, fp8, int8, rtn or gguf.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="[default: artifacts/MODEL-VARIANT, with .gguf for gguf]")
    ] = None,
    bits: Annotated[int | None, typer.Option("--bits", help="Bits of a weight. [default: 4, of int8 8]")] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", help="Weights that share a scale; -1: a whole row. [default: 128]")
    ] = None,
    sym: Annotated[
        bool | None, typer.Option("--sym/--no-sym", help="Without zero points. [default: gptq and rtn yes, awq no]")
    ] = None,
    desc_act: Annotated[
        bool, typer.Option("--desc-act/--no-desc-act", help="gptq: columns in the order of their activations.")
    ] = False,
    scheme: Annotated[str | None, typer.Option("--scheme", help="fp8: dynamic, static or block.")] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="The library that does it; see `quantlab engines`.")
    ] = None,
    type_: Annotated[str, typer.Option("--type", help="gguf: Q4_K_M, Q8_0, IQ4_XS, F16, ... [default: Q4_K_M]")] = "",
    imatrix: Annotated[
        bool, typer.Option("--imatrix/--no-imatrix", help="gguf: weigh errors by an importance matrix.")
    ] = False,
    calib: Annotated[
        list[str] | None,
        typer.Option("--calib", help="Calibration set NAME|PATH[:WEIGHT]; repeat to mix. [default: texts of our own]"),
    ] = None,
    calib_samples: Annotated[
        int | None, typer.Option("--calib-samples", min=1, help="Samples. [default: what the texts give, up to 128]")
    ] = None,
    calib_length: Annotated[int, typer.Option("--calib-length", min=16, help="Tokens of a sample.")] = 512,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="Keep tensors or modules matching this pattern in 16 bits; repeatable."),
    ] = None,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", "--requantize", help="Quantize input that is already quantized.")
    ] = False,
    outtype: Annotated[
        str, typer.Option("--outtype", help="gguf: what a folder becomes first: F16, BF16, F32.")
    ] = "F16",
    converter: Annotated[
        Path | None,
        typer.Option("--converter", help="gguf: your own convert_hf_to_gguf.py, for what ours does not know."),
    ] = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Predict size, memory, disk and time; write nothing.")
    ] = False,
    force: opt.Force = False,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    offline: opt.Offline = False,
    results: opt.Results = opt.RESULTS,
    no_save: opt.NoSave = False,
    as_json: opt.Json = False,
) -> None:
    """Write a quantized artifact, check it, and print its row."""
    from quantlab.lab.steps import quantize_step
    from quantlab.quantize.methods import dry_run as predict

    with opt.laboratory(results, no_save=no_save, offline=offline) as lab:
        step = quantize_step(
            lab.model(model),
            {
                "method": method,
                "bits": bits,
                "group_size": group_size,
                "sym": sym,
                "desc_act": desc_act,
                "scheme": scheme,
                "engine": engine,
                "type": type_,
                "out": str(out) if out else "",
                "calib": calib or [],
                "calib_samples": calib_samples,
                "calib_length": calib_length,
                "outtype": outtype,
                "imatrix": imatrix,
                "skip": skip or [],
                "allow_requantize": allow_requantize,
                "converter": str(converter) if converter else None,
                "device": device,
                "dtype": dtype,
                "force": force,
                "threads": threads,
                "seed": seed,
                "offline": offline,
            },
        )
        if not dry_run:
            done = lab.execute(step)
        else:
            prediction = predict(step.spec, lab.progress)
    if dry_run:
        show_prediction(prediction, as_json=as_json)
    else:
        show_results(done, as_json=as_json)
        if not as_json:
            say(f"written to {step.spec.out}")
