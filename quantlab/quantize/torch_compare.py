"""How far two models' logits lie apart. Only imported by children: torch and transformers take seconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from quantlab.core.artifact import safetensors_files
from quantlab.quantize.torch_model import write_probe
from quantlab.quantize.torch_work import COMPARED_TOKENS as _ROWS

Logits = np.ndarray[Any, np.dtype[np.float32]]


def divergence(reference: Logits, other: Logits) -> np.ndarray[Any, np.dtype[np.float64]]:
    """KL(reference || other) of each token in nats, from logits (tokens, n_vocab)."""
    found = []
    for first in range(0, len(reference), _ROWS):
        p, q = (torch.from_numpy(x[first : first + _ROWS]).double().log_softmax(-1) for x in (reference, other))
        found.append((p.exp() * (p - q)).sum(-1))
    # Rounding leaves identical rows a little below zero.
    return np.asarray(torch.cat(found).clamp(min=0))


def relative_error(reference: Logits, other: Logits) -> float:
    """Power of the difference of logits over the power of the reference, each token's mean taken out.

    A divergence in nats shrinks where logits are near uniform, as in a random model; this does not.
    """
    power = error = 0.0
    for first in range(0, len(reference), _ROWS):
        a, b = (x[first : first + _ROWS].astype(np.float64) for x in (reference, other))
        a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
        power, error = power + float((a**2).sum()), error + float(((a - b) ** 2).sum())
    return error / power if power else float(error > 0)


def precision(logits: Logits) -> str:
    """The narrowest dtype that holds all of these: what the model computed in."""
    narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    values = torch.from_numpy(logits[:_ROWS])
    return next((name for name, dtype in narrow.items() if torch.equal(values.to(dtype).float(), values)), "float32")


def blocks(values: np.ndarray[Any, np.dtype[np.float64]], size: int) -> list[float]:
    """Means of neighbouring values, `size` at a time; a shorter rest is left out."""
    whole = len(values) // size * size
    return [float(value) for value in values[:whole].reshape(-1, size).mean(1)]


def keep_logits(model: Any, windows: list[list[int]], folder: Path) -> list[Path]:
    """Compute each window's logits and keep them in files (read_probe): all at once would fill the memory."""
    folder.mkdir()
    kept = []
    for number, window in enumerate(windows):
        kept.append(folder / f"{number}.safetensors")
        write_probe(kept[-1], model, window)
    return kept


def altered(artifact: Path, parent: Path, names: Iterable[str]) -> str | None:
    """The first of these tensors that is not the parent's, rounded to the type that it is stored in; how it is told."""
    own, before = _tensors(artifact), _tensors(parent)
    for name in sorted(names):
        stored, original = own[name].get_tensor(name), before[name].get_tensor(name)
        if not torch.equal(stored, original.to(stored.dtype)):
            return f"its `{name}` is not that of its parent"
    return None


def disordered(artifact: Path, modules: Iterable[str], group_size: int) -> str | None:
    """The first of these gptq modules whose groups are not made of neighbouring columns; how it is told.

    transformers computes by `g_idx` whatever config.json says; vLLM leaves it unread where `desc_act` is false.
    """
    own = _tensors(artifact)
    for module in sorted(modules):
        index = own[f"{module}.g_idx"].get_tensor(f"{module}.g_idx")
        size = len(index) if group_size == -1 else group_size
        if not torch.equal(index, torch.arange(len(index), dtype=index.dtype) // size):
            return f"the columns of `{module}` are not in order, and its config.json says `desc_act` false"
    return None


def _tensors(folder: Path) -> dict[str, Any]:
    """The open file of each tensor."""
    opened = [safe_open(file, framework="pt") for file in safetensors_files(folder)]
    return {name: file for file in opened for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
