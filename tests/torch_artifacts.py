"""Artifacts of gptq, awq and compressed-tensors, packed by numpy from the definitions of the formats."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

# The order of AutoAWQ's eight columns in an int32 (awq/modules/linear/gemm.py).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def codes(weight: np.ndarray, bits: int, group: int, sym: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (out, in), float16 scales and zero points (out, groups): weight is about (code - zero) x scale."""
    top, size = 2**bits - 1, weight.shape[1] if group == -1 else group
    blocks = weight.astype(np.float64).reshape(len(weight), -1, size)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    if sym:
        high = np.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).astype(np.float16)
    wide = scales.astype(np.float64)
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if sym else np.rint(-low / wide).clip(0, top)
    found = (np.rint(blocks / wide[..., None]) + zeros[..., None]).clip(0, top)
    return found.reshape(weight.shape).astype(np.uint32), scales, zeros.astype(np.uint32)


def dequantized(found: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    size = found.shape[1] // scales.shape[1]
    wide, zero = (np.repeat(x.astype(np.float64), size, 1) for x in (scales, zeros))
    return ((found - zero) * wide).astype(np.float32)


def pack(values: np.ndarray, bits: int, axis: int, order: Iterable[int] | None = None) -> np.ndarray:
    """Neighbours along `axis` in int32, the first in the lowest bits; 3 bits cross the borders of words."""
    n = 32 // math.gcd(bits, 32)
    rows = np.moveaxis(values.astype(np.uint32), axis, 0)
    rows = np.pad(rows, [(0, -len(rows) % n), (0, 0)]).reshape(-1, n, rows.shape[1])
    rows = rows[:, list(order or range(n))].reshape(-1, 1, rows.shape[2])
    stream = rows >> np.arange(bits, dtype=np.uint32)[:, None] & 1
    words = stream.reshape(-1, 32, rows.shape[2]) << np.arange(32, dtype=np.uint32)[:, None]
    return np.ascontiguousarray(np.moveaxis(words.sum(1, dtype=np.uint32), 0, axis)).view(np.int32)


def packed_linear(form: str, weight: np.ndarray, bits: int, group: int, sym: bool) -> dict[str, np.ndarray]:
    """The tensors of one Linear module by their leaf."""
    found, scales, zeros = codes(weight, bits, group, sym)
    if form == "gptq":
        size = weight.shape[1] if group == -1 else group
        return {
            "qweight": pack(found.T, bits, 0),
            # Version 1 of the format stores zero points minus one.
            "qzeros": pack(zeros.T - 1 & 2**bits - 1, bits, 1),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": (np.arange(weight.shape[1]) // size).astype(np.int32),
        }
    if form == "awq":
        return {
            "qweight": pack(found.T, bits, 1, AWQ_ORDER),
            "qzeros": pack(zeros.T, bits, 1, AWQ_ORDER),
            "scales": np.ascontiguousarray(scales.T),
        }
    if form == "int8":
        return {"weight": (found.astype(np.int16) - 128).astype(np.int8), "weight_scale": scales}
    tensors = {
        "weight_packed": pack(found, bits, 1),
        "weight_scale": scales,
        "weight_shape": np.array(weight.shape, np.int64),
    }
    return tensors if sym else tensors | {"weight_zero_point": pack(zeros, bits, 0)}


def quantization_config(form: str, bits: int, group: int, sym: bool, keep: list[str]) -> dict[str, Any]:
    if form == "gptq":
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False}
        config |= {"checkpoint_format": "gptq", "lm_head": False}
        if keep:
            kinds = {name.split(".", 3)[3] for name in keep}
            inner = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
            config["modules_in_block_to_quantize"] = [[name for name in inner if name not in kinds]]
            config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in keep}
        return config
    if form == "awq":
        config = {"quant_method": "awq", "bits": bits, "group_size": group, "zero_point": not sym, "version": "gemm"}
        return config | {"modules_to_not_convert": keep or None}
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "dynamic": False}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    name = "int-quantized" if form == "int8" else "pack-quantized"
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": name}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": [*keep, "lm_head"],
    }


def write_artifact(
    out: Path, parent: Path, form: str, *, bits: int = 4, group: int = 32, sym: bool = True, keep: str = "$^"
) -> dict[str, np.ndarray]:
    """Quantize `parent` by plain rounding; returns its tensors as an engine would have them in memory."""
    out.mkdir()
    for name in _COMPANIONS:
        if (parent / name).is_file():
            shutil.copyfile(parent / name, out / name)
    stored, memory, kept = {}, {}, []
    for name, value in load_file(parent / "model.safetensors").items():
        module, memory[name] = name.removesuffix(".weight"), value.astype(np.float16).astype(np.float32)
        stored[name] = value.astype(np.float16)
        if value.ndim == 2 and ".layers." in name:
            if re.search(keep, module):
                kept.append(module)
                continue
            del stored[name]
            memory[name] = dequantized(*codes(value, bits, group, sym))
            parts = packed_linear(form, value, bits, group, sym)
            stored |= {f"{module}.{leaf}": tensor for leaf, tensor in parts.items()}
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    config = json.loads((parent / "config.json").read_text()) | {"dtype": "float16"}
    config["quantization_config"] = quantization_config(form, bits, group, sym, kept)
    (out / "config.json").write_text(json.dumps(config))
    return memory
