"""`quantlab quantize MODEL --method gguf`: a model goes in, a checked artifact comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.console import say
from quantlab.cli.show import show_prediction, show_results


def quantize(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, Hub id (org/name[@revision]) or `demo`.")],
    method: Annotated[str, typer.Option("--method", "-m", help="gguf.")],
    type_: Annotated[str, typer.Option("--type", help="GGUF type: Q4_K_M, Q8_0, IQ4_XS, F16, ...")] = "Q4_K_M",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="[default: artifacts/MODEL-TYPE.gguf]")] = None,
    calib: Annotated[
        list[str] | None,
        typer.Option("--calib", help="Calibration set NAME|PATH[:WEIGHT]; repeat to mix. Only used with --imatrix."),
    ] = None,
    calib_samples: Annotated[
        int | None, typer.Option("--calib-samples", min=1, help="Samples. [default: what the texts give, up to 128]")
    ] = None,
    calib_length: Annotated[int, typer.Option("--calib-length", min=16, help="Tokens of a sample.")] = 512,
    outtype: Annotated[
        str, typer.Option("--outtype", help="GGUF that a folder becomes first: F16, BF16, F32.")
    ] = "F16",
    imatrix: Annotated[
        bool, typer.Option("--imatrix/--no-imatrix", help="Weigh errors by an importance matrix.")
    ] = False,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", help="Keep tensors matching this pattern in 16 bits; repeatable.")
    ] = None,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Quantize input that is already quantized.")
    ] = False,
    converter: Annotated[
        Path | None, typer.Option("--converter", help="Your own convert_hf_to_gguf.py, for what ours does not know.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Predict size, memory and time; write nothing.")] = False,
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
