"""Plain rounding to the nearest of equally spaced values: the floor that a calibrated method must beat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quantlab.quantize.torch_work import Weights

# Rows at once: an embedding-sized matrix in float32 beside its codes would double the memory.
_ROWS = 4096


@torch.inference_mode()
def round_linears(model: Any, names: Iterable[str], weights: Weights, stored: torch.dtype) -> None:
    """Replace the weights of the named modules by what plain rounding stores of them, in place.

    Raises AttributeError for a name that the model does not have.
    """
    for name in names:
        weight = model.get_submodule(name).weight
        for first in range(0, len(weight), _ROWS):
            weight[first : first + _ROWS] = rounded(weight[first : first + _ROWS], weights, stored)


def rounded(weight: torch.Tensor, weights: Weights, stored: torch.dtype) -> torch.Tensor:
    """The values (out_features, in_features) that codes of `bits` with a scale per group can hold, nearest to `weight`.

    The scale, rounded to `stored`, spans the group's largest magnitude (symmetric) or its range with zero in it.
    """
    levels = 2**weights.bits - 1
    size = weight.shape[1] if weights.group_size == -1 else weights.group_size
    groups = weight.float().reshape(len(weight), -1, size)
    if weights.sym:
        scale = groups.abs().amax(-1, keepdim=True) * 2 / levels
    else:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / levels
    scale = scale.to(stored).float()
    # A group of zeros has no scale.
    scale = torch.where(scale == 0, 1, scale)
    zero = torch.full_like(scale, (levels + 1) // 2) if weights.sym else (-low / scale).round().clamp(0, levels)
    codes = ((groups / scale).round() + zero).clamp(0, levels)
    return ((codes - zero) * scale).reshape(weight.shape).to(weight.dtype)
