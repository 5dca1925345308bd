"""AutoAWQ 0.2.9: awq in its classic format (4 bits, with zero points), with clipping. arXiv 2306.00978.

It runs in an environment of its own, with torch 2.6 and transformers 4.51: with later ones it saves bad models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.artifact import read_json
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.quantize import calibration
from quantlab.quantize.engines.companions import copy_companions, write_config
from quantlab.quantize.engines.stages import Stages
from quantlab.quantize.torch_child import failures_of, importing, set_environment
from quantlab.quantize.torch_work import EngineDone, EngineJob
from quantlab.runtime.worker import Channel

# How many windows go through a layer at once: bounds the memory of the search.
_WINDOWS_AT_ONCE = 4
_OTHER = "use another `--engine`"


def work(spec: Any, channel: Channel) -> EngineDone:
    """Quantize one folder; writes the artifact and its probe."""
    job = msgspec.convert(spec, EngineJob)
    assert job.weights is not None and job.calibration is not None
    if job.weights.bits != 4 or job.weights.sym or job.weights.group_size < 1:
        raise UsageError("autoawq writes 4 bits with zero points in groups, nothing else", _OTHER)
    set_environment(job.device)
    with importing("autoawq"):
        import awq
        import torch

        from quantlab.quantize.torch_model import probe_ids, write_probe
        from quantlab.runtime.torch.vocabulary import load_tokenizer

    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    _refuse_new_config(Path(job.folder))
    stages = Stages()
    tokenizer = load_tokenizer(Path(job.folder))
    windows = calibration.of_tokenizer(job.calibration, tokenizer)
    stages.end("calibration")
    with failures_of("autoawq"):
        model = awq.AutoAWQForCausalLM.from_pretrained(
            job.folder,
            torch_dtype=getattr(torch, job.dtype),
            device_map=job.device,
            trust_remote_code=False,
            local_files_only=True,
        )
        stages.end("load")
        layers = _quantize(job, model, tokenizer, windows.windows.tolist(), channel)
    engine_s = stages.skip()
    # The format is float16: also what is not quantized.
    model.model.half()
    write_probe(Path(job.probe), model.model, probe_ids(tokenizer))
    stages.end("probe")
    channel.progress("save", 0, 1)
    _save(model, Path(job.folder), Path(job.out))
    stages.end("save")
    done = EngineDone(engine_s, layers, calibration=windows.record, notices=list(windows.notices))
    stages.tell(done)
    return done


def _refuse_new_config(folder: Path) -> None:
    """The keys of transformers 5 are unknown to transformers 4.51, which would take its default rotation."""
    config = read_json(folder / "config.json")
    if "rope_parameters" in config and "rope_theta" not in config:
        raise QuantlabError(f"autoawq: its transformers 4.51 cannot read `rope_parameters` of `{folder}`", _OTHER)


def _quantize(job: EngineJob, model: Any, tokenizer: Any, windows: list[list[int]], channel: Channel) -> list[str]:
    """The engine's call: searches scales and clips, and packs in place; returns the names of what is quantized."""
    from awq.modules.linear import WQLinear_GEMM, gemm
    from awq.quantize.quantizer import AwqQuantizer
    from torch.cuda import is_available

    # It takes triton's kernel wherever triton can be imported, also where no GPU is.
    gemm.TRITON_AVAILABLE = gemm.TRITON_AVAILABLE and is_available()
    assert job.weights is not None
    kept = {model.model.get_submodule(name) for name in job.keep}

    class Quantizer(AwqQuantizer):
        """Leaves modules alone by their full names (the library looks for substrings of names within a layer)."""

        def _search_best_clip(self, layer: Any, named_linears: dict[str, Any], input_feat: Any) -> Any:
            return super()._search_best_clip(layer, _without(named_linears, kept), input_feat)

        def _apply_quant(self, module: Any, named_linears: dict[str, Any]) -> None:
            super()._apply_quant(module, _without(named_linears, kept))
            channel.progress("quantize", list(self.modules).index(module) + 1, len(self.modules))

    model.quantize(
        tokenizer,
        quant_config={
            "zero_point": True,
            "q_group_size": job.weights.group_size,
            "w_bit": 4,
            "version": "GEMM",
            "modules_to_not_convert": [],
        },
        calib_data=windows,
        max_calib_samples=len(windows),
        max_calib_seq_len=len(windows[0]),
        n_parallel_calib_samples=_WINDOWS_AT_ONCE,
        quantizer_cls=Quantizer,
    )
    return [name for name, module in model.model.named_modules() if isinstance(module, WQLinear_GEMM)]


def _without(linears: dict[str, Any], kept: set[Any]) -> dict[str, Any]:
    return {name: module for name, module in linears.items() if module not in kept}


def _save(model: Any, parent: Path, out: Path) -> None:
    import torch

    keep = [
        name for name, module in model.model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
    ]  # fmt: skip
    model.save_quantized(str(out))
    copy_companions(parent, out)
    config = {**model.quant_config.to_transformers_dict(), "modules_to_not_convert": keep or None}
    write_config(parent, out, dtype="float16", quantization=config)
