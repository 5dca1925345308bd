"""What is amended in gptqmodel's AWQ (arXiv 2306.00978): its work on a CPU, and gemma.

The search minimizes the engine's own errors.
"""

from __future__ import annotations

from typing import Any

from quantlab.quantize.torch_work import AWQ_SEARCH_TOKENS

# Exponents of the mean activation, with the mean weight below it (AutoAWQ's scales) and alone (the paper's). Of 20 of
# the first kind alone, a dozen of the 24 attentions of Qwen2.5-Coder-0.5B are worse than unscaled.
_TRIALS = [(step / 10, True) for step in range(10)] + [((step + 1) / 10, False) for step in range(10)]


def amend() -> None:
    """Change gptqmodel's classes; once in a process."""
    import torch
    from gptqmodel.looper.awq_processor import AWQProcessor
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    # It refuses float32, which is the fast type of a CPU, though it packs and computes from it.
    AwqTorchLinear.SUPPORTS_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
    AWQProcessor._compute_best_scale = best_scale
    # No weight is clipped. The engine looks at what clipping costs a group's output; these errors add up over the
    # groups, while those of rounding cancel. On Qwen2.5-Coder-0.5B it makes a worse model than plain rounding: loss
    # +0.128 nats, without it +0.040 (rounding +0.074), divergence 0.098, without it 0.090 (0.093). The demo model would
    # gain: divergence 0.146, without it 0.162 (0.343). Groups of 64, measured on 8 x 1024 tokens of WikiText test.
    AWQProcessor._search_best_clip = lambda *_: []
    _amend_pairs()
    _amend_gemma()


def best_scale(  # noqa: PLR0917 - as the engine calls it
    processor: Any, x: Any, w_mean: Any, x_mean: Any, module: Any, linears: Any, reference: Any, kwargs: Any
) -> tuple[Any, float]:
    """The scale of each input channel of `linears` with the least error of `module`'s output, and that error.

    `x` (samples, tokens, channels) is what goes in, `reference` what came out of each sample. The engine's own
    search on a CPU in float32 restores weights from a copy that is none, and so tries each scale on the ruins of the
    one before.
    """
    import torch

    n, whole = max(1, AWQ_SEARCH_TOKENS["gptqmodel"] // x.shape[1]), len(x)
    x, kwargs = x[:n], {name: _first(value, n, whole) for name, value in kwargs.items()}
    originals = [linear.weight.detach().clone() for linear in linears]
    w_mean, x_mean = (mean.flatten().float().to(originals[0].device) for mean in (w_mean, x_mean))
    unscaled = torch.ones_like(x_mean)
    best, least = unscaled, float("inf")
    for scales in (
        unscaled,
        *(_scales(w_mean if weighted else None, x_mean, exponent) for exponent, weighted in _TRIALS),
    ):
        for linear, original in zip(linears, originals, strict=True):
            linear.weight.copy_(original * scales)
            processor._pseudo_quantize_tensor_into(linear.weight, linear.weight)
            linear.weight.div_(scales)
        outputs = processor._iter_module_forward_outputs(x, module, kwargs)
        error = sum((got.float() - wanted.to(got.device).float()).square().sum().item()
                    for got, wanted in zip(outputs, reference[:n], strict=True))  # fmt: skip
        if error < least:
            best, least = scales, error
    for linear, original in zip(linears, originals, strict=True):
        linear.weight.copy_(original)
    if least == float("inf"):
        raise ValueError("AWQ found no scale with a finite error")
    return best.to(originals[0].dtype).cpu(), least / sum(wanted.numel() for wanted in reference[:n])


def _scales(w_mean: Any | None, x_mean: Any, exponent: float) -> Any:
    """Equation 4 of the paper; with `w_mean`, the mean weight beside the mean activation, as in AutoAWQ."""
    scales = x_mean.pow(exponent)
    if w_mean is not None:
        scales = scales / (w_mean.pow(1 - exponent) + 1e-4)
    scales = scales.clamp(min=1e-4)
    scales = scales / (scales.max() * scales.min()).sqrt()
    scales[~scales.isfinite()] = 1
    return scales


def _first(value: Any, n: int, whole: int) -> Any:
    """The first `n` samples of what belongs to `whole` samples."""
    import torch

    if isinstance(value, torch.Tensor):
        return value[:n] if value.ndim and len(value) == whole else value
    return type(value)(_first(item, n, whole) for item in value) if isinstance(value, (list, tuple)) else value


def _amend_pairs() -> None:
    """Where all that a norm feeds is kept, the engine divides that norm for the next modules, which it does not feed.

    For those that it does feed, the output of a whole attention or MLP is compared.
    """
    from gptqmodel.models.base import BaseQModel
    from torch.nn import Linear

    find = BaseQModel.awq_get_modules_for_scaling

    def pairs(self: Any, module: Any, features: Any, kwargs: Any) -> list[dict[str, Any]]:
        found = find(self, module, features, kwargs)
        return [pair for pair in found if isinstance(pair["prev_op"], Linear) or "module2inspect" in pair]

    BaseQModel.awq_get_modules_for_scaling = pairs


def _amend_gemma() -> None:
    """Before gemma's MLP stands another norm than before llama's, and gemma3's norms multiply by 1 + weight.

    As it is, the engine divides the wrong norm, and the model is garbage.
    """
    from gptqmodel.models.definitions.gemma2 import Gemma2QModel
    from gptqmodel.models.definitions.gemma3 import Gemma3QModel
    from gptqmodel.quantization.awq.quantize import scale
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    scale.Gemma2RMSNorm = (Gemma2RMSNorm, Gemma3RMSNorm)
    for definition in (Gemma2QModel, Gemma3QModel):
        *path, layer = definition.module_tree
        tree = {"pre_feedforward_layernorm": ("pre_feedforward_layernorm:!",), "mlp": layer["mlp"]}
        definition.module_tree = [*path, {name: layer[name] for name in ("input_layernorm", "self_attn")} | tree]
        # The search would ask for positions without saying for which kind of layer (see layer_types.py).
        definition.awq_preserve_explicit_position_embeddings = True
