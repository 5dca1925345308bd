"""optimum: gptq as transformers' GPTQConfig calls it, with gptqmodel's solver beneath. arXiv 2210.17323.

Its own `GPTQQuantizer.save()` must not be used: it writes the zero points of one format under the name of another.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from quantlab.quantize.calibration import Calibration
from quantlab.quantize.engines.layer_types import give_own_inputs
from quantlab.quantize.engines.packed import (
    Quantized,
    act_group_aware,
    gptq_entry,
    linears,
    names_in_layer,
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
        made = _quantize(job, tokenizer, windows, channel, done)
        channel.progress("save", 0, 1)
        return made

    return run(spec, quantize, "optimum.gptq")


def _quantize(job: EngineJob, tokenizer: Any, windows: Calibration, channel: Channel, done: EngineDone) -> Quantized:
    """Load and quantize in one call, as GPTQConfig does; the engine's own time is that of its part of it."""
    import torch
    from transformers import AutoModelForCausalLM, GPTQConfig

    assert job.weights is not None
    settings = GPTQConfig(
        bits=job.weights.bits,
        group_size=job.weights.group_size,
        sym=job.weights.sym,
        desc_act=job.weights.desc_act,
        act_group_aware=act_group_aware(job),
        tokenizer=tokenizer,
        dataset=[{"input_ids": [ids], "attention_mask": [[1] * len(ids)]} for ids in windows.windows.tolist()],
        modules_in_block_to_quantize=_sequence(job),
    )
    seen = _Seen(channel, done)
    seen.watch()
    with failures_of("optimum"):
        model = AutoModelForCausalLM.from_pretrained(
            job.folder,
            dtype=getattr(torch, job.dtype),
            device_map=job.device,
            quantization_config=settings,
            local_files_only=True,
            trust_remote_code=False,
        )
    note_rounded(done, seen.rounded)
    note_used(done, seen.tokens, windows.windows.size)
    return Quantized(model, seen.dense, _config(job, model, seen))


def _sequence(job: EngineJob) -> list[list[str]] | None:
    """The modules of a layer one by one without those that are kept; None for all."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not job.keep:
        return None
    config = AutoConfig.from_pretrained(job.folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = names_in_layer(linears(model, job.keep))
    # Seen before the run (torch_plan.py).
    assert names is not None
    return [[name] for name in names]


class _Seen:
    """What is to be known of optimum's run: its functions are wrapped, for it reports nothing."""

    def __init__(self, channel: Channel, done: EngineDone) -> None:
        self.dense: dict[str, Any] = {}
        self.rounded: list[str] = []
        self.tokens = 0
        self.quantizer: Any = None
        self._channel, self._done = channel, done
        self._names: dict[Any, str] = {}

    def watch(self) -> None:
        """Wrap; once in a process."""
        from optimum.gptq import quantizer as optimum

        quantize, pack = optimum.GPTQQuantizer.quantize_model, optimum.GPTQQuantizer.pack_model
        seen = self

        def quantize_model(self: Any, model: Any, tokenizer: Any = None) -> Any:
            seen.quantizer = self
            seen._names = {module: name for name, module in model.named_modules()}
            give_own_inputs(model)
            started = time.perf_counter()
            model = quantize(self, model, tokenizer)
            seen._done.engine_s = time.perf_counter() - started
            return model

        def pack_model(self: Any, model: Any, quantizers: dict[str, Any]) -> None:
            seen.dense.update({name: model.get_submodule(name) for name in quantizers})
            pack(self, model, quantizers)

        class Solver(optimum.GPTQ):
            def fasterquant(self, *args: Any, **kwargs: Any) -> Any:
                found = super().fasterquant(*args, **kwargs)
                seen._note(seen._names[self.module], found[4], self.nsamples)
                return found

        optimum.GPTQQuantizer.quantize_model = quantize_model
        optimum.GPTQQuantizer.pack_model = pack_model
        optimum.GPTQ = Solver
        optimum.tqdm = self._blocks

    def _note(self, name: str, loss: Any, tokens: int) -> None:
        self.tokens = max(self.tokens, tokens)
        if isinstance(loss, float):
            self._done.losses[name] = loss
        else:
            self.rounded.append(name)

    def _blocks(self, items: Iterable[Any], desc: str = "", **_: Any) -> Iterator[Any]:
        """In place of tqdm: the outer of optimum's two loops goes over the layers."""
        items, outer = list(items), "blocks" in desc
        for i, item in enumerate(items):
            if outer:
                self._channel.progress("gptq layer", i, len(items))
            yield item


def _config(job: EngineJob, model: Any, seen: _Seen) -> dict[str, Any]:
    """The quantization_config, and zero points less one as it says; optimum's own holds the calibration text."""
    import gptqmodel
    from gptqmodel.utils.model import hf_convert_gptq_v2_to_v1_format
    from optimum.version import __version__

    made = seen.quantizer
    # It refuses weights with zero points of their own, which torch_spec.py does before the run.
    _, converted = hf_convert_gptq_v2_to_v1_format(
        model, made.sym, made.bits, made.quant_linear, made.format, made.meta
    )
    assert converted
    quantizer = [f"optimum:{__version__}", f"gptqmodel:{gptqmodel.__version__}"]
    return gptq_entry(job, list(seen.dense), quantizer, damp_percent=made.damp_percent)
