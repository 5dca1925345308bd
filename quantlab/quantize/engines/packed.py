"""What the engines gptqmodel and optimum share: gptqmodel's packed modules, in memory and on disk."""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.hf_config import text_config
from quantlab.core.result import Notice
from quantlab.quantize import calibration
from quantlab.quantize.calibration import Calibration
from quantlab.quantize.engines.companions import copy_companions, stored_dtype, write_config
from quantlab.quantize.engines.stages import Stages
from quantlab.quantize.torch_child import importing, set_environment
from quantlab.quantize.torch_work import EngineDone, EngineJob

_ENVIRONMENT = {
    # Fewer than its two loader threads and gptqmodel does not start.
    "GPTQMODEL_CPU_WORKERS": "2",
    # Packing is compiled at first use (30 s, a compiler, a cache in the home folder); without, it takes seconds.
    "GPTQMODEL_DISABLE_PACK_EXT": "1",
}


class Quantized(msgspec.Struct):
    """A model with packed modules, its Linear modules as they were before packing by name, and its config entry."""

    model: Any
    dense: dict[str, Any]
    config: dict[str, Any]


# Loads and quantizes: (job, tokenizer, calibration, what to fill in) -> the quantized model.
Quantize = Callable[[EngineJob, Any, Calibration, EngineDone], Quantized]


def run(spec: Any, quantize: Quantize, package: str) -> EngineDone:
    """Do a job with `quantize`; writes the artifact and its probe. Raises QuantlabError without `package`."""
    job = msgspec.convert(spec, EngineJob)
    given = {name: getattr(job, name) for name in ("folder", "out", "probe", "state")}
    job = msgspec.structs.replace(job, **{name: str(Path(path).resolve()) for name, path in given.items() if path})
    prepare(job, package)
    # gptqmodel writes a folder `logs` where it stands.
    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        try:
            return _run(job, quantize)
        finally:
            os.chdir(job.out)


def prepare(job: EngineJob, package: str) -> None:
    """Set what gptqmodel and torch read when they are imported, and import them."""
    set_environment(job.device, **_ENVIRONMENT)
    with importing(package.partition(".")[0]):
        import gptqmodel  # noqa: F401
        import torch
        from gptqmodel.utils import logger

        __import__(package)

    logger.setup_logger().setLevel("ERROR")
    # No progress bars: the last lines of the log are what a crash is explained with.
    logger._suppress_live_renderables = lambda: True
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)


def _run(job: EngineJob, quantize: Quantize) -> EngineDone:
    import torch

    from quantlab.quantize.torch_model import probe_ids, write_probe
    from quantlab.runtime.torch.vocabulary import load_tokenizer

    assert job.calibration is not None
    folder, out, stages = Path(job.folder), Path(job.out), Stages()
    tokenizer = load_tokenizer(folder)
    windows = calibration.of_tokenizer(job.calibration, tokenizer)
    stages.end("calibration")
    done = EngineDone(engine_s=0.0, layers=[], calibration=dict(windows.record), notices=list(windows.notices))
    if not windows.mask.all():
        # A mask with holes would hide tokens from attention too.
        message = "the engine counts every token of a conversation, also those outside of answers"
        done.notices.append(Notice("calibration-mask", message))
    made = quantize(job, tokenizer, windows, done)
    stages.end("load")
    stages.seconds["load"] -= done.engine_s
    done.layers = list(made.dense)
    dtype = getattr(torch, stored_dtype(text_config(folder)))
    _write_weights(made.model, out, dtype)
    copy_companions(folder, out)
    write_config(folder, out, dtype=str(dtype).removeprefix("torch."), quantization=made.config)
    stages.end("save")
    # What the engine computed, before it was packed: the check's difference is that of packing.
    for name, linear in made.dense.items():
        made.model.set_submodule(name, linear)
    _cast(made.model.to(job.device), getattr(torch, job.dtype))
    write_probe(Path(job.probe), made.model, probe_ids(tokenizer))
    stages.end("probe")
    stages.tell(done)
    return done


def _cast(model: Any, dtype: Any) -> None:
    """Change the type of all parameters; what packed modules hold are buffers."""
    for value in model.parameters():
        value.data = value.data.to(dtype)


def _write_weights(model: Any, out: Path, dtype: Any) -> None:
    """Round what is not quantized to `dtype`, and write everything.

    The libraries' own writers store float32 beside the codes, and pass the config through transformers' checks, which
    refuse what gptqmodel makes of gemma3's.
    """
    from huggingface_hub import save_torch_state_dict

    _cast(model, dtype)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        for name in model._tied_weights_keys:
            state.pop(name, None)
    save_torch_state_dict(state, out, metadata={"format": "pt"})


def act_group_aware(job: EngineJob) -> bool:
    """Whether columns are taken in desc_act's order as far as the plain layout of groups allows: better, and free."""
    assert job.weights is not None
    return not job.weights.desc_act and job.weights.group_size > 0


def excluded(keep: list[str]) -> dict[str, Any]:
    """The rules by which gptqmodel leaves modules alone."""
    return {f"-:^{re.escape(name)}$": {} for name in keep}


def gptq_entry(job: EngineJob, layers: list[str], quantizer: list[str], *, damp_percent: float) -> dict[str, Any]:
    """The quantization_config of classic gptq, which stores zero points less one."""
    assert job.weights is not None
    entry = {
        "quant_method": "gptq",
        "bits": job.weights.bits,
        "group_size": job.weights.group_size,
        "sym": job.weights.sym,
        "desc_act": job.weights.desc_act,
        "format": "gptq",
        "checkpoint_format": "gptq",
        "damp_percent": damp_percent,
        "true_sequential": True,
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": quantizer, "act_group_aware": act_group_aware(job)},
    }
    if job.keep:
        # vLLM and gptqmodel read the first, transformers the second: it compares the ends of names.
        entry |= {"dynamic": excluded(job.keep), "modules_in_block_to_quantize": [names_in_layer(layers) or layers]}
    return entry


def linears(model: Any, keep: list[str]) -> list[str]:
    """The names of the Linear modules but the head and `keep`, in the model's order."""
    import torch

    kept = {model.get_output_embeddings(), *(model.get_submodule(name) for name in keep)}
    named = model.named_modules()
    return [name for name, module in named if isinstance(module, torch.nn.Linear) and module not in kept]


def names_in_layer(layers: list[str]) -> list[str] | None:
    """What modules are called within their layer; None where the layers differ."""
    by_layer: dict[str, list[str]] = defaultdict(list)
    for name in layers:
        match = re.match(r"(.+?\.\d+)\.(.+)", name)
        assert match is not None
        by_layer[match[1]].append(match[2])
    first, *others = by_layer.values()
    return first if all(sorted(other) == sorted(first) for other in others) else None


def note_rounded(done: EngineDone, rounded: list[str]) -> None:
    """Say which modules calibration did not reach."""
    if rounded:
        done.notices.append(
            Notice(
                "gptq-rounded",
                f"{len(rounded)} modules were rounded: too few tokens reached them, or GPTQ found no finite solution "
                f"(first: `{rounded[0]}`)",
                "give more, and more varied, calibration text; look whether the model's weights are finite",
            )
        )


def note_used(done: EngineDone, used: int, given: int) -> None:
    """Record how many tokens of calibration were used; say where it was not all."""
    assert done.calibration is not None
    done.calibration["tokens"] = used
    if used != given:
        done.notices.append(Notice("calibration-dropped", f"the engine used {used} of {given} calibration tokens"))
