"""What a GGUF file in llama.cpp is: its main type, and what a token reads of it."""

from __future__ import annotations

import collections
from typing import Any

from quantlab.core.gguf_file import TensorInfo


def main_type(tensors: list[TensorInfo]) -> str:
    """The type that holds most weights."""
    params: collections.Counter[str] = collections.Counter()
    for tensor in tensors:
        params[tensor.type] += tensor.params
    return params.most_common(1)[0][0]


def bytes_read(tensors: list[TensorInfo], metadata: dict[str, Any]) -> int:
    """The bytes of weights that one token reads.

    The token embedding is a lookup of one row, unless it is also the output matrix (tied); of a layer's experts
    only those used are read.
    """
    arch = metadata.get("general.architecture", "")
    experts, used = metadata.get(f"{arch}.expert_count", 0), metadata.get(f"{arch}.expert_used_count", 0)
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    total = 0.0
    for tensor in tensors:
        if tensor.name == "token_embd.weight" and not tied:
            total += tensor.size_bytes / tensor.shape[1]
        elif "_exps." in tensor.name and experts:
            total += tensor.size_bytes * used / experts
        else:
            total += tensor.size_bytes
    return int(total)
