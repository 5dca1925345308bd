"""llm-compressor: fp8, int8, rtn, awq and gptq in the compressed-tensors format."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.hf_config import text_config
from quantlab.core.result import Notice
from quantlab.quantize import calibration
from quantlab.quantize.engines.companions import copy_companions, stored_dtype, write_config
from quantlab.quantize.engines.stages import Stages
from quantlab.quantize.torch_child import failures_of, importing, set_environment
from quantlab.quantize.torch_work import EngineDone, EngineJob
from quantlab.runtime.worker import Channel


def work(spec: Any, channel: Channel) -> EngineDone:
    """Quantize one folder; writes the artifact and its probe."""
    job = msgspec.convert(spec, EngineJob)
    set_environment(job.device, LLM_COMPRESSOR_LOG_LEVEL="ERROR")
    with importing("llmcompressor"):
        import llmcompressor  # noqa: F401
        import torch
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    with failures_of("llmcompressor"):
        return _quantize(job, channel)


def _quantize(job: EngineJob, channel: Channel) -> EngineDone:
    import torch

    from quantlab.quantize.engines.llmcompressor_recipe import recipes
    from quantlab.quantize.torch_model import load_model, probe_ids, write_probe
    from quantlab.runtime.torch.vocabulary import load_tokenizer

    folder, stages = Path(job.folder), Stages()
    tokenizer = load_tokenizer(folder)
    windows = calibration.of_tokenizer(job.calibration, tokenizer) if job.calibration else None
    stages.end("calibration")
    model = load_model(folder, dtype=getattr(torch, job.dtype), device=job.device)
    steps, losses = recipes(job, model), _watch(channel, model)
    stages.end("load")
    engine_s = _oneshot(model, tokenizer, steps, windows)
    stages.skip()
    stored = getattr(torch, stored_dtype(text_config(folder)))
    _round_to(model, stored)
    write_probe(Path(job.probe), model, probe_ids(tokenizer))
    stages.end("probe")
    channel.progress("save", 0, 1)
    layers = _save(model, folder, Path(job.out), stored)
    stages.end("save")
    done = EngineDone(engine_s, layers, losses, calibration=windows.record if windows else None)
    done.notices = [*(windows.notices if windows else []), *_notices(job, steps, windows)]
    stages.tell(done)
    return done


def _oneshot(model: Any, tokenizer: Any, steps: list[list[Any]], windows: Any) -> float:
    """The engine's calls, which quantize `model` in place; returns the seconds of them."""
    import torch
    from compressed_tensors.offload import remove_dispatch
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        # Pinned memory serves copies to an accelerator; where none is, torch refuses to pin.
        IntermediatesCache.pin_memory = lambda *args, **kwargs: None
    batches, started = _batches(windows), time.perf_counter()
    for modifiers in steps:
        names = {type(modifier).__name__ for modifier in modifiers}
        oneshot(
            model=model,
            tokenizer=tokenizer,
            recipe=modifiers,
            dataset=batches,
            use_loss_mask="Awq" in names and not windows.mask.all(),
            # What only scales leaves each layer computing what it did: it need not be computed again.
            propagate_error="GPTQModifier" in names,
        )
    engine_s = time.perf_counter() - started
    # Plain modules again: the engine wraps every parameter, and splits a tied head from its embedding.
    remove_dispatch(model)
    model.tie_weights()
    return engine_s


def _notices(job: EngineJob, steps: list[list[Any]], windows: Any) -> list[Notice]:
    notices = []
    if windows is not None and job.method != "awq" and not windows.mask.all():
        what = f"llmcompressor's {job.method} counts every token of the conversations, not the answers alone"
        notices.append(Notice("calibration-mask", what))
    if job.method == "int8" and len(steps) == 1:
        what = "llmcompressor has no SmoothQuant for this architecture: activations are rounded to 8 bits as they are"
        notices.append(Notice("not-smoothed", what, "measure it with `quantlab ppl`, or use `--method fp8`"))
    modifiers = [modifier for step in steps for modifier in step]
    rounded = [name for modifier in modifiers for name in getattr(modifier, "_rtn_fallback_module_names", [])]
    if rounded:
        what = f"{len(rounded)} modules were rounded, GPTQ found no solution: {', '.join(rounded[:3])}"
        notices.append(Notice("gptq-rounded", what, "give more calibration samples"))
    return notices


def _batches(windows: Any) -> Any:
    """One window a batch, in their order: the library shuffles, pads and cuts none of them."""
    import torch
    from torch.utils.data import DataLoader

    if windows is None:
        return None
    rows = [
        {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.int64),
         "loss_mask": torch.tensor(mask)}
        for ids, mask in zip(windows.windows.astype("int64"), windows.mask.astype("int64"), strict=True)
    ]  # fmt: skip
    return DataLoader(rows, batch_size=1)


def _watch(channel: Channel, model: Any) -> dict[str, float]:
    """Report each finished layer; returns where the error that GPTQ logs of each module is kept."""
    from llmcompressor.core import LifecycleCallbacks
    from llmcompressor.utils.metric_logging import CompressionLogger

    names = {module: name for name, module in model.named_modules()}
    finish, log = LifecycleCallbacks.sequential_epoch_end, CompressionLogger.set_results
    count, total, losses = 0, model.config.get_text_config().num_hidden_layers + 1, {}

    def finished(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result = finish(*args, **kwargs)
        # Each modifier that looks at samples goes through all layers, and what follows them.
        done, count = count % total + 1, count + 1
        channel.progress("quantize" if count <= total else f"quantize, pass {(count - 1) // total + 1}", done, total)
        return result

    def logged(self: Any, name: str | None = None, loss: float | None = None) -> None:
        if loss is not None:
            losses[names[self.module]] = float(loss)
        log(self, name, loss)

    LifecycleCallbacks.sequential_epoch_end = staticmethod(finished)
    CompressionLogger.set_results = logged
    channel.progress("quantize", 0, total)
    return losses


def _round_to(model: Any, dtype: Any) -> None:
    """Round what is stored as it is to the values that `dtype` holds, so that the probe is of what is written.

    Weights with codes stay as they are: the codes are computed from them and from the rounded scales.
    """
    import torch
    from compressed_tensors.quantization.utils import is_module_quantized

    with torch.no_grad():
        for module in model.modules():
            for name, value in module.named_parameters(recurse=False):
                if value.dtype == torch.float32 and not (name == "weight" and is_module_quantized(module)):
                    value.copy_(value.to(dtype))


def _save(model: Any, parent: Path, out: Path, dtype: Any) -> list[str]:
    """Write codes, scales and the rest in `dtype`, with what is the parent's; returns the names of what has codes."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import is_module_quantized

    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    for value in model.parameters():
        if value.dtype == torch.float32:
            value.data = value.data.to(dtype)
    type(model).save_pretrained(model, out)
    copy_companions(parent, out)
    write_config(parent, out, dtype=str(dtype).removeprefix("torch."))
    compressor.update_config(str(out))
    return [name for name, module in model.named_modules() if is_module_quantized(module)]
