"""Quantized modules packed here, from the descriptions of their formats: the oracle of what their tensors stand for."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYER = "model.layers.0.mlp.down_proj"
Tensors = dict[str, tuple[str, np.ndarray]]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Write the `bits` of each code of a row one after another, lowest bit first, into int32; the last is filled up.

    The dense layout of gptq (3 bits included) and compressed-tensors; awq shuffles codes within an int32.
    """
    flat = (codes[..., None] >> np.arange(bits)) & 1
    flat = flat.reshape(len(codes), -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat.astype(np.uint8), axis=1, bitorder="little").view("<i4")


def gptq(rows: int, columns: int, bits: int, groups: int, module: str = LAYER) -> Tensors:
    """A module as AutoGPTQ stores it: codes packed along in_features, zero points along out_features."""
    codes = np.arange(rows * columns).reshape(columns, rows) % 2**bits
    return {
        f"{module}.qweight": ("I32", pack(codes.T, bits).T),
        f"{module}.qzeros": ("I32", pack(np.ones((groups, rows), int), bits)),
        f"{module}.scales": ("F16", np.ones((groups, rows), "<f2")),
        f"{module}.g_idx": ("I32", (np.arange(columns) * groups // columns).astype("<i4")),
    }


def awq(rows: int, columns: int, bits: int, groups: int, module: str = LAYER) -> Tensors:
    """A module as AutoAWQ's gemm stores it: both packed along out_features."""
    codes = np.arange(rows * columns).reshape(columns, rows) % 2**bits
    return {
        f"{module}.qweight": ("I32", pack(codes, bits)),
        f"{module}.qzeros": ("I32", pack(np.ones((groups, rows), int), bits)),
        f"{module}.scales": ("F16", np.ones((groups, rows), "<f2")),
    }


def packed_ints(rows: int, columns: int, bits: int, groups: int, module: str = LAYER, *, zeros: bool = True) -> Tensors:
    """A module of compressed-tensors' pack-quantized."""
    codes = np.arange(rows * columns).reshape(rows, columns) % 2**bits
    found: Tensors = {
        f"{module}.weight_packed": ("I32", pack(codes, bits)),
        f"{module}.weight_scale": ("F16", np.ones((rows, groups), "<f2")),
        f"{module}.weight_shape": ("I64", np.array([rows, columns], "<i8")),
    }
    if zeros:
        found[f"{module}.weight_zero_point"] = ("I32", pack(np.ones((groups, rows), int), bits).T)
    return found


def header(tensors: Tensors) -> dict[str, Any]:
    found, end = {}, 0
    for name, (kind, values) in tensors.items():
        found[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    return found
