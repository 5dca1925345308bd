"""gptqmodel: gptq and awq in their classic formats, which transformers and vLLM load.

GPTQ: arXiv 2210.17323. AWQ: arXiv 2306.00978.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

from quantlab.core.artifact import safetensors_files, safetensors_header
from quantlab.core.errors import QuantlabError
from quantlab.core.result import Notice
from quantlab.quantize.calibration import Calibration
from quantlab.quantize.engines import gptqmodel_state
from quantlab.quantize.engines.gptqmodel_state import Layers
from quantlab.quantize.engines.layer_types import give_own_inputs
from quantlab.quantize.engines.packed import (
    Quantized,
    act_group_aware,
    excluded,
    gptq_entry,
    linears,
    note_rounded,
    note_used,
    run,
)  # fmt: skip
from quantlab.quantize.torch_child import failures_of
from quantlab.quantize.torch_work import EngineDone, EngineJob
from quantlab.runtime.worker import Channel


def work(spec: Any, channel: Channel) -> EngineDone:
    """Quantize one folder; writes the artifact and its probe."""

    def quantize(job: EngineJob, tokenizer: Any, windows: Calibration, done: EngineDone) -> Quantized:
        engine = load(job, tokenizer)
        dense = quantize_loaded(job, engine, windows, channel, done)
        channel.progress("save", 0, 1)
        return Quantized(engine.model, dense, _config(job, engine, list(dense)))

    return run(spec, quantize, "gptqmodel")


def load(job: EngineJob, tokenizer: Any) -> Any:
    """The model as the engine holds it before the run, with all that the run depends on."""
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.models import loader

    # Its own loader gives a tokenizer without a pad token one, at times an id that the model has no row for.
    loader.load_hf_tokenizer = lambda *args, **kwargs: tokenizer
    assert job.weights is not None
    settings: dict[str, Any] = {
        "bits": job.weights.bits,
        "group_size": job.weights.group_size,
        "sym": job.weights.sym,
        "method": job.method,
        "device": job.device,
        "dynamic": excluded(job.keep) or None,
        # Finished layers stay in memory: the files would be as large as the model.
        "offload_to_disk": False,
    }
    if job.method == "gptq":
        # Scales by least squares instead of by the largest weight: KL divergence 0.059 instead of 0.068 (symmetric),
        # 0.050 instead of 0.057 (not), with desc_act 0.058 instead of 0.083; 4 bits, six layers of SmolLM2-135M.
        # The engine's damping of 0.05 is left: the paper's 0.01 gave 0.077, 0.1 the same.
        order = {"desc_act": job.weights.desc_act, "act_group_aware": act_group_aware(job)}
        settings |= {"format": "gptq", "mse": 2.0, **order}
    else:
        from quantlab.quantize.engines.gptqmodel_awq import amend

        amend()
        settings |= {"format": "gemm"}
    config = QuantizeConfig(**settings)
    with failures_of("gptqmodel"):
        engine = GPTQModel.load(job.folder, config, dtype=getattr(torch, job.dtype), trust_remote_code=False)
    _refuse_other_names(job, engine.model)
    give_own_inputs(engine.model)
    return engine


def _refuse_other_names(job: EngineJob, model: Any) -> None:
    """Some fused modules it splits: what it would save then no loader of that model takes."""
    stored = {name for file in safetensors_files(Path(job.folder)) for name in safetensors_header(file)}
    if other := [name for name in linears(model, []) if f"{name}.weight" not in stored]:
        raise QuantlabError(
            f"gptqmodel splits modules of this architecture: the model has no `{other[0]}`",
            "use `--engine llmcompressor`",
        )


def quantize_loaded(
    job: EngineJob, engine: Any, windows: Calibration, channel: Channel, done: EngineDone
) -> dict[str, Any]:
    """The engine's call. Returns the Linear modules with their quantized weights, not yet packed, by their names.

    Those of layers that an earlier run finished are unpacked again.
    """
    import torch

    wanted, dtype = linears(engine.model, job.keep), getattr(torch, job.dtype)
    with contextlib.ExitStack() as files:
        layers = None
        if job.state is not None:
            kept = gptqmodel_state.kept(Path(job.state), windows.record["sha256"], dtype)
            layers = files.enter_context(kept)
        dense = _watch(job, engine, channel, layers)
        _call(job, engine, windows, done)
    if layers is not None:
        dense |= layers.dense
        done.continued_after = layers.first
        done.notices += layers.notices
    if left := [name for name in wanted if name not in dense]:
        done.notices.append(
            Notice("layers-left-out", f"the engine left {len(left)} modules as they are (first: `{left[0]}`)")
        )
    _read_log(engine.quant_log, list(dense), done, windows.windows.size)
    # They come as threads finish them.
    return {name: dense[name] for name in wanted if name in dense}


def _call(job: EngineJob, engine: Any, windows: Calibration, done: EngineDone) -> None:
    from gptqmodel import BACKEND

    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows.windows.tolist()]
    backend = BACKEND.GPTQ_TORCH if job.method == "gptq" else BACKEND.AWQ_TORCH
    started = time.perf_counter()
    with failures_of("gptqmodel"):
        engine.quantize(rows, calibration_sort=None, batch_size=1, backend=backend)
    done.engine_s = time.perf_counter() - started


def _watch(job: EngineJob, engine: Any, channel: Channel, layers: Layers | None) -> dict[str, Any]:
    """Report finished layers; what is returned fills with the quantized Linear modules as they are before packing."""
    from gptqmodel.looper.awq_processor import AWQProcessor
    from gptqmodel.looper.gptq_processor import GPTQProcessor

    from quantlab.runtime.torch.unpack import linear_of

    dense: dict[str, Any] = {}
    processor = GPTQProcessor if job.method == "gptq" else AWQProcessor
    finalize = processor.submodule_finalize

    def keep_then_finalize(self: Any, module: Any, model: Any, **kwargs: Any) -> None:
        module.stream_sync()
        dense[module.full_name] = linear_of(module.weight.data, module.bias)
        finalize(self, module, model, **kwargs)

    processor.submodule_finalize = keep_then_finalize
    total, stage = engine.model.config.get_text_config().num_hidden_layers, f"{job.method} layer"
    first = layers.first if layers is not None else 0
    if first:
        stage += f" (continues at layer {first + 1} of {total})" if first < total else " (all are finished)"

    def layer_complete(layer_idx: int, submodule_finalized: bool) -> None:
        if not submodule_finalized:
            channel.progress(stage, layer_idx + 1 - first, total - first)

    engine.layer_callback = layer_complete
    channel.progress(stage, 0, total - first)
    return dense


def _read_log(entries: list[dict[str, Any]], layers: list[str], done: EngineDone, given: int) -> None:
    """Losses by module, and whether all `given` tokens were used."""
    names: dict[tuple[str, str], str] = {}
    for name in layers:
        if match := re.match(r".+?\.(\d+)\.(.+)$", name):
            names[match[1], match[2]] = name
    rounded = []
    for entry in entries:
        name, loss = names[str(entry["layer"]), entry["module"]], entry["loss"]
        if "fallback" in loss:
            rounded.append(name)
        elif loss != "not applicable":
            done.losses[name] = float(loss)
    note_rounded(done, rounded)
    note_used(done, max(int(entry["samples"]) for entry in entries), given)


def _config(job: EngineJob, engine: Any, layers: list[str]) -> dict[str, Any]:
    """The quantization_config that says what was written; the engine's own also tells how it was run."""
    import gptqmodel

    assert job.weights is not None
    quantizer, config = [f"gptqmodel:{gptqmodel.__version__}"], engine.quantize_config
    if job.method == "gptq":
        return gptq_entry(job, layers, quantizer, damp_percent=config.damp_percent)
    return {
        "quant_method": "awq",
        "bits": job.weights.bits,
        "group_size": job.weights.group_size,
        "zero_point": not job.weights.sym,
        "version": "gemm",
        "format": "gemm",
        "lm_head": False,
        "pack_dtype": "int32",
        "modules_to_not_convert": job.keep or None,
        "meta": {"quantizer": quantizer},
    }
