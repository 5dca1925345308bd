"""A Hugging Face folder in torch, as engines and the check open it: local files only, never remote code.

Only imported by children: torch and transformers take seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from quantlab.core.errors import QuantlabError
from quantlab.quantize.torch_work import PROBE_TOKENS
from quantlab.runtime.torch import load

# English, Chinese and code, so that most of a vocabulary's kinds of tokens are met.
PROBE = (
    "The river rises in the hills above the town, runs past the old mill, and reaches the sea after forty miles. "
    "In 1887 a bridge of 12 arches was built; it cost £3,450. 河水从山里流出，经过村庄，流进大海。"
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2\n\nQ: What is the capital of France?\nA: Paris."
)


def load_model(folder: Path, *, dtype: torch.dtype, device: str, exact: bool = False, strict: bool = False) -> Any:
    """The causal language model of a folder; errors and `exact` and `strict` as in runtime/torch/load.py."""
    return load.load_model(
        folder, load.load_config(folder), dtype, load.device_named(device), exact=exact, strict=strict
    )


def probe_ids(tokenizer: Any) -> list[int]:
    """The token ids of the fixed text, special tokens as the tokenizer adds them."""
    return list(tokenizer(PROBE)["input_ids"][:PROBE_TOKENS])


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The float32 logits (tokens, n_vocab) of one sequence."""
    device = next(model.parameters()).device
    output = model(input_ids=torch.tensor([ids], device=device), use_cache=False)
    return np.asarray(output.logits[0].float().cpu())


def write_probe(path: Path, model: Any, ids: list[int]) -> None:
    """Keep what a model in memory computes on one sequence."""
    save_file({"ids": np.array(ids, np.int32), "logits": logits_of(model, ids)}, path)


def read_probe(path: Path) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float32]]]:
    """Token ids and float32 logits (tokens, n_vocab) that `write_probe` kept."""
    kept = load_file(path)
    if set(kept) != {"ids", "logits"}:
        raise QuantlabError(f"`{path}` holds no logits", "quantize again")
    return kept["ids"].tolist(), kept["logits"]
