"""What the tensors of a quantized Hugging Face folder stand for: the weights behind codes, scales and zero points.

Read from names, types and shapes; config.json decides only what they leave open, so that a wrong config is seen.
Layouts: classic gptq `qweight` (in x bits / 32, out) and awq `qweight` (in, out x bits / 32) with `qzeros`, `scales`
(groups, out) and gptq's `g_idx` (in), as AutoGPTQ and AutoAWQ write them; compressed-tensors' `weight_packed`
(out, ceil(in x bits / 32)) with `weight_shape`, or an 8-bit `weight`, with `weight_scale` and `weight_zero_point`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_ROLES = {
    "qweight": "codes", "weight_packed": "codes", "weight": "codes",
    "scales": "scales", "weight_scale": "scales", "weight_scale_inv": "scales", "weight_global_scale": "scales",
    "qzeros": "zero_points", "weight_zero_point": "zero_points",
    "g_idx": "indices", "weight_g_idx": "indices", "weight_shape": "shape",
    "input_scale": "activation_scales", "input_zero_point": "activation_scales",
    "input_global_scale": "activation_scales",
}  # fmt: skip
_EIGHT_BITS = {"I8": "INT8", "F8_E4M3": "FP8_E4M3", "F8_E5M2": "FP8_E5M2"}
_INTEGER_BITS = {"I16": 16, "I32": 32, "I64": 64}
_BITS = range(2, 9)


class Stored(msgspec.Struct, frozen=True):
    """One tensor of the model as it was before quantization, or one that was left alone.

    `name` and `shape` (out, in) are those of the unquantized tensor; `kind` is "GPTQ-INT4", "AWQ-INT4", "INT4", "INT8",
    "FP8_E4M3", or the plain type as safetensors spells it. `parts` are bytes: {"plain"}, or "codes", "scales",
    "zero_points", "indices" (g_idx), "shape", "activation_scales". `groups` is the number of scales along `in`, where
    each row of weights has its own.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parts: dict[str, int]
    groups: int | None = None

    @property
    def params(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of everything that stands for these weights."""
        return sum(self.parts.values())

    @property
    def quantized(self) -> bool:
        """Whether codes and scales stand for the weights."""
        return "codes" in self.parts

    @property
    def module(self) -> str:
        """The name of the module that holds the tensor."""
        return self.name.rpartition(".")[0]


def quantization_entry(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization that a config.json describes, or None for plain weights."""
    text = config.get("text_config")
    merged = dict(config) | text if isinstance(text, dict) else config
    # The second is what compressed-tensors wrote before transformers read it.
    found = merged.get("quantization_config") or merged.get("compression_config")
    return found if isinstance(found, dict) else None


def named_method(entry: Mapping[str, Any] | None) -> str:
    """The method of the contract that a quantization entry tells of: awq, gptq, fp8, int8, rtn, none.

    compressed-tensors stores codes alike, whoever chose them: only GPTQ orders columns (`actorder`). What tells no more
    than that codes are stored is told as "rtn", the least that it can be; "none" is for plain weights alone.
    """
    if entry is None:
        return "none"
    named = {"gptq": "gptq", "awq": "awq", "fp8": "fp8", "fbgemm_fp8": "fp8"}.get(str(entry.get("quant_method")))
    if named is not None:
        return named
    group: dict[str, Any] = next(iter(groups_of(entry)), {"weights": {}})
    weights, whole_bytes = group["weights"], group["weights"].get("num_bits") == 8
    if whole_bytes and weights.get("type") == "float":
        return "fp8"
    if whole_bytes and isinstance(group.get("input_activations"), dict):
        return "int8"
    return "gptq" if weights.get("actorder") else "rtn"


def groups_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The config groups of compressed-tensors that say how weights are stored."""
    named = entry.get("config_groups")
    groups = list(named.values()) if isinstance(named, dict) else []
    return [group for group in groups if isinstance(group, dict) and isinstance(group.get("weights"), dict)]


def weight_shapes(file: Path, header: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What the `weight_shape` tensors of a safetensors file with this header say: module -> (out, in).

    The shape of the codes leaves open how much of their last integer is padding.
    """
    found = {}
    with file.open("rb") as opened:
        data_at = 8 + int.from_bytes(opened.read(8), "little")
        for name, entry in header.items():
            module, _, leaf = name.rpartition(".")
            begin, end = entry["data_offsets"]
            if leaf != "weight_shape" or entry["dtype"] not in ("I32", "I64") or end - begin > 64:
                continue
            opened.seek(data_at + begin)
            data, width = opened.read(end - begin), _INTEGER_BITS[entry["dtype"]] // 8
            values = (data[at : at + width] for at in range(0, len(data), width))
            found[module] = tuple(int.from_bytes(value, "little", signed=True) for value in values)
    return found


def stored_tensors(
    config: Mapping[str, Any], header: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> list[Stored]:
    """Every tensor of a folder as what it stands for.

    `header` holds the entries of all its safetensors files: a module's codes and scales may lie in two of them.
    `shapes` are those of `weight_shapes`. What is no known layout is told as it is stored.
    """
    entry = quantization_entry(config) or {}
    modules: dict[str, dict[str, Any]] = {}
    for name, tensor in header.items():
        module, _, leaf = name.rpartition(".")
        if leaf in _ROLES:
            modules.setdefault(module, {})[leaf] = tensor
    found: list[Stored] = []
    used: set[str] = set()
    for module, parts in modules.items():
        for codes in [leaf for leaf, role in _ROLES.items() if role == "codes" and leaf in parts]:
            # Codes of another layout beside these are tensors of their own.
            one = {leaf: tensor for leaf, tensor in parts.items() if leaf == codes or _ROLES[leaf] != "codes"}
            weights = _classic(module, one, entry) or _compressed(module, one, entry, (shapes or {}).get(module))
            if weights is not None:
                found.append(weights)
                used |= {f"{module}.{leaf}" if module else leaf for leaf in one}
                break
    found += [
        Stored(name, tensor["dtype"], tuple(tensor["shape"]), {"plain": _size(tensor)})
        for name, tensor in header.items()
        if name not in used
    ]
    return found


def _classic(module: str, parts: Mapping[str, Any], entry: Mapping[str, Any]) -> Stored | None:
    """One of gptq and awq: which of them, and the bits, by the shapes of scales and zero points."""
    codes, scales = parts.get("qweight"), parts.get("scales")
    bits = _classic_bits(parts, entry)
    if codes is None or scales is None or bits is None or not (_matrix(codes) and _matrix(scales)):
        return None
    (rows, columns), params = codes["shape"], 8 * _size(codes) // bits
    version = str(entry.get("version", "")).lower()
    groups: int | None = scales["shape"][0]
    if entry.get("quant_method") == "awq" and version.startswith("gemv"):
        # gemv packs along `in` and pads the scales; gemv_fast interleaves four rows.
        shape = (rows, params // rows) if version == "gemv" else (params // columns, columns)
        layout, groups = "AWQ", None
    elif "g_idx" in parts or scales["shape"][1] == columns:
        layout, shape = "GPTQ", (columns, params // columns)
    else:
        layout, shape = "AWQ", (params // rows, rows)
    return Stored(f"{module}.weight", f"{layout}-INT{bits}", shape, _parts(parts), groups)


def _classic_bits(parts: Mapping[str, Any], entry: Mapping[str, Any]) -> int | None:
    codes, scales, zeros, index = (parts.get(leaf) for leaf in ("qweight", "scales", "qzeros", "g_idx"))
    if codes is None or codes["dtype"] not in _INTEGER_BITS:
        return None
    width = _INTEGER_BITS[codes["dtype"]]
    told = entry.get("bits", entry.get("w_bit"))
    if scales and zeros and zeros["dtype"] == codes["dtype"] and _matrix(scales) and _matrix(zeros):
        told = width * zeros["shape"][1] / scales["shape"][1]
    elif index and _matrix(codes) and len(index["shape"]) == 1 and _size(index):
        told = width * codes["shape"][0] / index["shape"][0]
    return int(told) if isinstance(told, int | float) and told in _BITS else None


def _compressed(
    module: str, parts: Mapping[str, Any], entry: Mapping[str, Any], shape: tuple[int, ...] | None
) -> Stored | None:
    """compressed-tensors, and 8-bit weights of other writers that have a scale."""
    scales = [parts[leaf] for leaf, role in _ROLES.items() if role == "scales" and leaf in parts]
    packed, plain = parts.get("weight_packed"), parts.get("weight")
    if packed is not None and packed["dtype"] in ("I32", "U8") and scales and packed["shape"]:
        codes = packed
        kind, whole = _unpacked(packed, scales[0], entry, shape)
    elif plain is not None and plain["dtype"] in _EIGHT_BITS and scales:
        codes = plain
        kind, whole = _EIGHT_BITS[plain["dtype"]], tuple(plain["shape"])
    else:
        return None
    by_row = len(scales[0]["shape"]) == len(codes["shape"]) and scales[0]["shape"][:-1] == codes["shape"][:-1]
    return Stored(f"{module}.weight", kind, whole, _parts(parts), scales[0]["shape"][-1] if by_row and whole else None)


def _unpacked(
    packed: Mapping[str, Any], scale: Mapping[str, Any], entry: Mapping[str, Any], shape: tuple[int, ...] | None
) -> tuple[str, tuple[int, ...]]:
    """(kind, shape) of the weights behind `weight_packed`."""
    *rows, held = packed["shape"]
    if packed["dtype"] == "U8":
        # Two 4-bit floats a byte: NVFP4 scales them in FP8, MXFP4 in powers of two.
        return ("NVFP4" if scale["dtype"].startswith("F8") else "MXFP4"), (*rows, 2 * held)
    told = [b for group in groups_of(entry) if isinstance(b := group["weights"].get("num_bits"), int) and b in _BITS]
    columns = shape[-1] if shape else 0
    # What the config says first: few columns fill as many integers at several numbers of bits.
    fitting = [bits for bits in [*told, 4, *_BITS] if columns > 0 and -(-columns * bits // 32) == held]
    if fitting:
        return f"INT{fitting[0]}", (*rows, columns)
    bits = told[0] if told else 4
    return f"INT{bits}", (*rows, 32 * held // bits)


def _parts(parts: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for leaf, tensor in parts.items():
        found[_ROLES[leaf]] = found.get(_ROLES[leaf], 0) + _size(tensor)
    return found


def _matrix(tensor: Mapping[str, Any]) -> bool:
    return len(tensor["shape"]) == 2 and all(tensor["shape"])


def _size(tensor: Mapping[str, Any]) -> int:
    begin, end = tensor["data_offsets"]
    return int(end - begin)
