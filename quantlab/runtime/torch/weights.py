"""What a loaded torch model holds: kernels by the class of the layer, bytes in memory, bytes read for a token."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import torch

from quantlab.core.artifact import safetensors_files, safetensors_header

_WIDE = {"F64", "F32", "F16", "BF16"}


def kernels(model: Any) -> dict[str, int]:
    """Layers that multiply by a matrix, by part of the model and class: {"attention Linear": 120, ...}."""
    counts: collections.Counter[str] = collections.Counter()
    for name, module in model.named_modules():
        if _multiplies(module):
            counts[f"{_part(name)} {type(module).__name__}"] += 1
    return dict(counts)


def weight_bytes(model: Any) -> int:
    """Bytes of all weights in memory now; shared storage counts once."""
    return sum(_tensors(model).values())


def bytes_read_per_token(model: Any) -> int:
    """Bytes of the weights that one decoded token reads, of what is really held.

    A lookup of the embedding reads one row; tied to the head, the head reads all of it. Of experts those used are read.
    """
    config = model.config.get_text_config()
    n_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    used = getattr(config, "num_experts_per_tok", None) or 1
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embedding
    total = 0.0
    for (name, key), size in _tensors(model).items():
        if key == embedding.data_ptr() and not tied:
            total += size / embedding.shape[0]
        elif ".experts." in name:
            total += size * used / n_experts
        else:
            total += size
    return int(total)


def decompressed(folder: Path, model: Any) -> dict[str, int]:
    """Layers that are stored quantized and held in 16 or 32 bits, by the type that is stored."""
    held = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Module)}
    counts: collections.Counter[str] = collections.Counter()
    for file in safetensors_files(folder):
        for name, entry in safetensors_header(file).items():
            owner, _, leaf = name.rpartition(".")
            if leaf not in ("weight", "weight_packed", "qweight") or entry["dtype"] in _WIDE:
                continue
            weight = getattr(held.get(owner), "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dtype.is_floating_point and weight.element_size() >= 2:
                counts[entry["dtype"]] += 1
    return dict(counts)


def _multiplies(module: Any) -> bool:
    """Whether it holds a matrix of its own, or one for each expert; masks are kept with four dimensions."""
    tensors = [t for _, t in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
    return not isinstance(module, torch.nn.Embedding) and any(tensor.dim() in (2, 3) for tensor in tensors)


def _part(name: str) -> str:
    if "lm_head" in name or name == "output":
        return "lm_head"
    if "attn" in name or "attention" in name:
        return "attention"
    if "mlp" in name or "expert" in name or "feed_forward" in name:
        return "mlp"
    return "other"


def _tensors(model: Any) -> dict[tuple[str, int], int]:
    """Bytes of each storage of weights, by a name and its address; rotary tables are no weights."""
    found: dict[int, tuple[str, int]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "rotary" in name or name.endswith("inv_freq") or not tensor.numel():
            continue
        size = math.prod(tensor.shape) * tensor.element_size()
        found.setdefault(tensor.data_ptr(), (name, size))
    return {(name, key): size for key, (name, size) in found.items()}
