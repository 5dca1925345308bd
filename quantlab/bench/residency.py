"""Which models of a cell can be held in memory at the same time, so that they can be measured in turns."""

from __future__ import annotations

from pathlib import Path

import psutil

from quantlab.bench.spec import BenchSpec
from quantlab.core import hardware
from quantlab.core.gguf_file import kv_bytes_per_token, read_header
from quantlab.core.hf_config import kv_values_per_token, quantization
from quantlab.core.result import ModelInfo

# Of the memory that is available, what models may take that are held at the same time.
_SHARE = 0.5
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def together(spec: BenchSpec, infos: list[ModelInfo]) -> list[list[int]]:
    """The indices of the models that are measured in turns: all, or each alone where memory is short."""
    gpu = hardware.nvidia_free_bytes() if spec.device in ("auto", "cuda") else None
    need = sum(_bytes(spec, i, info, on_gpu=gpu is not None) for i, info in enumerate(infos))
    available = psutil.virtual_memory().available if gpu is None else gpu
    if need > _SHARE * available:
        return [[i] for i in range(len(infos))]
    return [list(range(len(infos)))]


def _bytes(spec: BenchSpec, index: int, info: ModelInfo, *, on_gpu: bool) -> float:
    """Bytes of one model's weights and KV cache while the cell runs."""
    path = Path(spec.models[index].path)
    # A token has at least one byte.
    prompt = spec.prompt_tokens[0] if spec.prompt_tokens else len((spec.prompt or "").encode())
    tokens = spec.batch[0] * (prompt + spec.new_tokens)
    if not path.is_dir():
        return info.size_bytes + kv_bytes_per_token(read_header(path)) * tokens
    width = _WIDTHS.get(spec.dtype, 2 if on_gpu else 4)
    # gptqmodel's kernels for a GPU compute packed weights as they are stored; the rest is decompressed (FP8 not where
    # the GPU multiplies it, but it is counted so).
    packed = on_gpu and (quantization(path) or {}).get("quant_method") in (None, "gptq", "awq")
    unpacked = 0.0 if packed else 8 * info.size_bytes / info.bits_per_weight * width
    return max(info.size_bytes, unpacked) + kv_values_per_token(path) * width * tokens
