"""The check after the save: an artifact is loaded in a fresh process and compared with what it was made from.

It must compute what the engine's model in memory computed, stay as near its parent as its bits allow, speak as its
parent does (torch_speech.py), and be what its config.json says (torch_schema.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quantlab.core.corpus import load_text
from quantlab.core.errors import QuantlabError, missing_extra
from quantlab.core.hf_config import text_config
from quantlab.core.progress import silent
from quantlab.core.result import Notice
from quantlab.core.statistics import mean_interval
from quantlab.quantize import torch_schema, torch_vllm
from quantlab.quantize.engines.stages import Stages
from quantlab.quantize.torch_child import set_environment
from quantlab.quantize.torch_prediction import LAYER
from quantlab.quantize.torch_schema import Stored
from quantlab.quantize.torch_source import check_numbers
from quantlab.quantize.torch_work import CHECK_TOKENS, CHECK_WINDOW_TOKENS, Checked, CheckJob
from quantlab.runtime.worker import Channel

_ENVIRONMENT = {
    "GPTQMODEL_CPU_WORKERS": "2",
    # gptqmodel's kernels compile at the first forward: ten seconds and more for one text.
    "TORCHDYNAMO_DISABLE": "1",
}
# A text that nothing here is calibrated on: as much of it that a verdict on calibration is not chance, and little
# beside a calibration, since three models compute it.
_TEXT = "builtin_eval"
# Neighbouring tokens err together: the means of such blocks are what may be treated as independent.
_BLOCK_TOKENS = 64
# Relative error of the logits against the engine's own, by what either computed in. Measured: sound artifacts 0 to 2e-6
# in float32, 4e-6 in float16, 3e-4 in bfloat16 (30 layers); the scales of one module shuffled 3e-3 (of 35 modules) to
# 4e-2 (of 210); zero points off by one, or another packing order, 0.2 to 2. 1e-4 is 0.002 nats in a trained model.
_LARGEST_ERROR = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 1e-2}
# Nats from the parent. Measured: fp8 0.03, int8 0.002 to 0.02 (models of 0.3 and 135 million parameters), codes that an
# engine ruined 1 and more. Plain rounding to 4 bits has 0.1 to 0.4, calibrated codes half of it, 1.06 of it at worst.
_LARGEST_KLD = 0.3
_WORSE_THAN_ROUNDING = 2.0
# A smaller share of rounding's divergence is no gain, however certain.
_GAIN = 0.01
_CALIBRATED = ("gptq", "awq")
# Their scales go into the norms and biases of a layer.
_FOLD = ("awq", "int8")
_WEIGHT_ONLY = (*_CALIBRATED, "rtn")


def work(spec: Any, channel: Channel) -> Checked:
    """Check one artifact; a fault is part of the answer. QuantlabError where this machine cannot tell."""
    job = msgspec.convert(spec, CheckJob)
    set_environment(job.device, **_ENVIRONMENT)
    try:
        import torch
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "torch", "torch") from None
    torch.set_num_threads(job.threads)
    checked, stages = Checked(), Stages()
    checked.fault = _find_fault(job, checked, stages, channel)
    stages.tell(checked)
    return checked


def _find_fault(job: CheckJob, checked: Checked, stages: Stages, channel: Channel) -> str | None:
    from quantlab.quantize import torch_speech
    from quantlab.quantize.torch_model import probe_ids
    from quantlab.runtime.torch.vocabulary import load_tokenizer

    artifact, parent = Path(job.artifact), Path(job.folder)
    if fault := torch_schema.find_fault(artifact, parent, job.weights):
        return fault
    text = load_text(_TEXT, "evaluation", offline=True).raw
    # What it gives the artifact's tokenizer gives too, or there is a fault.
    tokenizer = load_tokenizer(parent)
    if fault := torch_speech.find_fault(artifact, parent, tokenizer, text):
        return fault
    found = torch_schema.stored(artifact, parent)
    if fault := _tensor_fault(job, found):
        return fault
    checked.notices += torch_vllm.notices(found)
    with tempfile.TemporaryDirectory(dir=Path(job.probe).parent) as scratch:
        stages.end("files")
        comparison = _Comparison(job, found, checked, stages=stages, channel=channel, scratch=Path(scratch))
        return comparison.fault(probe_ids(tokenizer), _windows(parent, tokenizer, text))


def _tensor_fault(job: CheckJob, found: Stored) -> str | None:
    """A number that is none, columns in another order than is said, or a tensor that the method leaves alone and that
    is not the parent's.
    """
    from quantlab.quantize.torch_compare import altered, disordered

    try:
        check_numbers(Path(job.artifact), silent)
    except QuantlabError as error:
        return error.message
    says = torch_schema.weights_of(found) if found.method == "gptq" else None
    if says and not says.desc_act and (fault := disordered(Path(job.artifact), found.quantized, says.group_size)):
        return fault
    names = (found.tensors.keys() & found.parent.keys()) - {f"{module}.weight" for module in found.quantized}
    if job.method in _FOLD:
        names = {name for name in names if not LAYER.search(name)}
    return altered(Path(job.artifact), Path(job.folder), names)


def _windows(parent: Path, tokenizer: Any, text: str) -> list[list[int]]:
    """Token ids of the fixed text, in windows that the model's positions hold."""
    limit = text_config(parent).get("max_position_embeddings")
    size = min(CHECK_WINDOW_TOKENS, limit) if isinstance(limit, int) else CHECK_WINDOW_TOKENS
    ids = tokenizer.encode(text, add_special_tokens=False)[:CHECK_TOKENS]
    # Some models are lost in a text that does not begin with it.
    bos = [tokenizer.bos_token_id] if tokenizer.encode("a")[0] == tokenizer.bos_token_id else []
    return [[*bos, *ids[first : first + size - len(bos)]] for first in range(0, len(ids) - size + 1, size)]


class _Comparison:
    """The artifact, its parent, and its parent rounded on the same tokens: never two models in memory."""

    def __init__(
        self, job: CheckJob, found: Stored, checked: Checked, *, stages: Stages, channel: Channel, scratch: Path
    ) -> None:
        import torch

        self.job, self.found, self.checked, self.channel, self.scratch = job, found, checked, channel, scratch
        self.stages = stages
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.stored = torch.bfloat16 if any(kind == "BF16" for kind, _ in found.tensors.values()) else torch.float16
        # Products of 16 bits are slow on a CPU.
        self.dtype = torch.float32 if self.device == "cpu" else self.stored

    def fault(self, probe: list[int], windows: list[list[int]]) -> str | None:
        """What makes the artifact useless, or None; `checked` receives what was measured.

        `probe`: the token ids of what the engine's model should have computed.
        """
        from quantlab.quantize.torch_compare import keep_logits
        from quantlab.quantize.torch_model import load_model
        from quantlab.runtime.torch.load import FolderError

        self.channel.progress("check", 0, 3)
        artifact = Path(self.job.artifact)
        try:
            model = load_model(artifact, dtype=self.dtype, device=self.device, exact=True, strict=True)
        except FolderError as error:
            return error.message
        self.stages.end("load")
        if fault := self._engine_fault(model, probe):
            return fault
        own = keep_logits(model, windows, self.scratch / "artifact")
        del model
        _give_back()
        self.stages.end("artifact")
        self.channel.progress("check", 1, 3)
        self._measure(windows, own)
        self.channel.progress("check", 3, 3)
        return self._parent_fault()

    def _engine_fault(self, model: Any, probe: list[int]) -> str | None:
        """Whether what was saved computes what the engine's model in memory did."""
        from quantlab.quantize.torch_compare import divergence, precision, relative_error
        from quantlab.quantize.torch_model import logits_of, read_probe

        ids, engine = read_probe(Path(self.job.probe))
        if ids != probe:
            return "the engine computed other token ids than its tokenizer gives for the test text"
        own = logits_of(model, ids)
        for logits, whose in ((engine, "the logits of the engine's model"), (own, "its logits")):
            if not np.isfinite(logits).all():
                bad = int((~np.isfinite(logits).all(axis=1)).argmax())
                return f"{whose} are not finite (token {bad} of the test text)"
            if np.ptp(logits[-1]) == 0:
                return f"{whose} are all alike"
        if engine.shape != own.shape:
            return f"it has {own.shape[1]} logits a token, the engine's model {engine.shape[1]}"
        self.checked.kld_engine = float(divergence(engine, own).mean())
        error = relative_error(engine, own)
        bound = max(_LARGEST_ERROR[dtype] for dtype in (precision(engine), str(self.dtype).removeprefix("torch.")))
        if error > bound:
            return (
                f"it does not compute what the engine computed: its logits differ by {error:.2g} of their power "
                f"(at most {bound:g}), KL divergence {self.checked.kld_engine:.3g} nats"
            )
        return None

    def _measure(self, windows: list[list[int]], own: list[Path]) -> None:
        """Divergence of the artifact from its parent, and that of plain rounding at the same bits."""
        from quantlab.quantize.rounding import round_linears
        from quantlab.quantize.torch_compare import blocks, divergence, keep_logits
        from quantlab.quantize.torch_model import load_model, logits_of, read_probe

        checked = self.checked
        model = load_model(Path(self.job.folder), dtype=self.dtype, device=self.device)
        before = keep_logits(model, windows, self.scratch / "parent")
        kld = np.concatenate([divergence(read_probe(a)[1], read_probe(b)[1]) for a, b in zip(before, own, strict=True)])
        checked.kld_parent, checked.kld_parent_blocks = float(kld.mean()), blocks(kld, _BLOCK_TOKENS)
        self.stages.end("parent")
        self.channel.progress("check", 2, 3)
        weights = torch_schema.weights_of(self.found)
        if self.job.method in _WEIGHT_ONLY and weights is not None:
            round_linears(model, self.found.quantized, weights, self.stored)
            pairs = zip(before, windows, strict=True)
            kld = np.concatenate([divergence(read_probe(file)[1], logits_of(model, window)) for file, window in pairs])
            checked.kld_rounding, checked.kld_rounding_blocks = float(kld.mean()), blocks(kld, _BLOCK_TOKENS)
            self.stages.end("rounding")

    def _parent_fault(self) -> str | None:
        kld, rounding = self.checked.kld_parent, self.checked.kld_rounding
        if not np.isfinite(kld):
            return "its logits are not finite on the evaluation text"
        if rounding is None:
            if kld > _LARGEST_KLD:
                return f"it is far from its parent: KL divergence {kld:.3g} nats (at most {_LARGEST_KLD:g})"
            return None
        if kld > max(_LARGEST_KLD, _WORSE_THAN_ROUNDING * rounding):
            return (
                f"it is far worse than plain rounding at the same bits: KL divergence from the parent {kld:.3g} nats, "
                f"of plain rounding {rounding:.3g}"
            )
        if self.job.method in _CALIBRATED:
            self.checked.notices += _verdict(self.checked)
        return None


def _give_back() -> None:
    """Return the memory of a model that is no longer used.

    glibc keeps what several threads of a load freed, in a heap for each: the next model would lie beside it.
    """
    # Modules of the libraries know each other in circles.
    gc.collect()
    # Other C libraries have no such call.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _verdict(checked: Checked) -> list[Notice]:
    """A warning unless calibration is certainly better than rounding on the same tokens (paired, 95%)."""
    pairs = list(zip(checked.kld_parent_blocks, checked.kld_rounding_blocks, strict=True))
    better = mean_interval([own - (1 - _GAIN) * rounding for own, rounding in pairs])
    if better.high is not None and better.high < 0:
        return []
    loss = mean_interval([own - (1 + _GAIN) * rounding for own, rounding in pairs])
    how = "worse than" if loss.low is not None and loss.low > 0 else "not distinguishable from"
    return [
        Notice(
            "not-better-than-rounding",
            f"calibration did not pay: KL divergence from the parent {checked.kld_parent:.4g} nats, {how} plain "
            f"rounding at the same bits with {checked.kld_rounding:.4g}",
            "use `--method rtn`, which needs no text, or more and other calibration text, or another `--engine`",
        )
    ]
