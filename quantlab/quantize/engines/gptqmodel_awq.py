"""What is amended in gptqmodel's AWQ (arXiv 2306.00978): its work on a CPU, and gemma.

The search minimizes the engine's own errors.
"""

from __future__ import annotations

from typing import Any

# One of 21 scales is chosen: 4096 tokens tell which. All tokens make up the mean activation of the channels.
# Each trial is a forward pass of attention or MLP over what is given.
_SEARCH_TOKENS = 4096
# Exponents of the mean activation, with the mean weight below it (AutoAWQ's scales) and alone (the paper's). Of 20 of
# the first kind alone, a dozen of the 24 attentions of Qwen2.5-Coder-0.5B are worse than unscaled.
_TRIALS = [(step / 10, True) for step in range(10)] + [((step + 1) / 10, False) for step in range(10)]
# As in AutoAWQ: the clipping error is measured on this many tokens, 10 steps down to half of the largest weight.
_CLIP_TOKENS, _CLIP_STEPS, _CLIP_GRID = 512, 10, 20
# Whether a row is clipped at all is one question a row, and is asked of more tokens.
_ROW_TOKENS = 2048


def amend() -> None:
    """Change gptqmodel's classes; once in a process."""
    import torch
    from gptqmodel.looper.awq_processor import AWQProcessor
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    # It refuses float32, which is the fast type of a CPU, though it packs and computes from it.
    AwqTorchLinear.SUPPORTS_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
    AWQProcessor._compute_best_scale = best_scale
    AWQProcessor._compute_best_clip = best_clip
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

    n, whole = max(1, _SEARCH_TOKENS // x.shape[1]), len(x)
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


def best_clip(processor: Any, weight: Any, features: Any) -> Any:
    """The largest magnitude left to each group of each row, (rows, groups, 1).

    The bounds of a row are those with the least errors of each group's output, where they also lessen the error of the
    whole row's. The engine looks at groups alone, whose clipping errors add up while rounding errors cancel: on
    Qwen2.5-Coder-0.5B its bounds cost more than they gain.
    """
    rows, columns = weight.shape
    group = processor.qcfg.group_size if processor.qcfg.group_size > 0 else columns
    tokens = features.reshape(-1, columns)
    w = weight.float().reshape(rows, -1, group)
    largest = w.abs().amax(-1, keepdim=True)
    bounds = _bounds_of_groups(processor, w, largest, _some(tokens, _CLIP_TOKENS).to(w))
    x = _some(tokens, _ROW_TOKENS).to(w)
    clipped, unclipped = (_row_errors(processor, w, bound, x) for bound in (bounds, largest))
    return bounds.where((clipped < unclipped)[:, None, None], largest).to(weight.dtype)


def _some(tokens: Any, n: int) -> Any:
    return tokens[:: max(1, len(tokens) // n)]


def _bounds_of_groups(processor: Any, w: Any, largest: Any, tokens: Any) -> Any:
    """The engine multiplies elementwise and sums; a matrix product a group is the same in a hundredth of the time."""
    import torch

    x = tokens.reshape(len(tokens), -1, w.shape[-1]).transpose(0, 1)
    best, least = largest.clone(), torch.full_like(largest, torch.inf)
    for step in range(_CLIP_STEPS):
        bound = largest * (1 - step / _CLIP_GRID)
        # (groups, tokens, rows): mean square over the tokens.
        error = torch.bmm(x, _change(processor, w, bound).permute(1, 2, 0)).square().mean(1).T.unsqueeze(-1)
        better = error < least
        least[better], best[better] = error[better], bound[better]
    return best


def _row_errors(processor: Any, w: Any, bound: Any, tokens: Any) -> Any:
    """Mean square of the change of each output, (rows,)."""
    return (tokens @ _change(processor, w, bound).flatten(1).T).square().mean(0)


def _change(processor: Any, w: Any, bound: Any) -> Any:
    """What clipping and rounding change of the weights, (rows, groups, columns of a group)."""
    import torch

    rounded = torch.empty_like(w)
    processor._pseudo_quantize_tensor_into(w.clamp(-bound, bound), rounded)
    return rounded.sub_(w)


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
