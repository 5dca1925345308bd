"""What vLLM makes of an artifact: the reasons for which its loaders or its kernels refuse it.

Read from vLLM's main branch of 2026, in vllm/model_executor: layers/quantization/{auto_gptq,auto_awq}.py, its
compressed_tensors/, utils/gptq_utils.py and utils/marlin_utils.py, kernels/linear/mixed_precision/. vLLM itself is not
run here: it needs an environment of its own, and mostly a GPU.

- gptq: `bits`, `group_size`, `desc_act` and `sym` must stand in the config; only (4, symmetric) and (8, symmetric) have
  a type; `checkpoint_format` is not read. A module has codes where a string of `modules_in_block_to_quantize` is part
  of its name and no `-:` pattern of `dynamic` matches it.
- awq: `bits` (4), `group_size` and `zero_point` must stand in the config. A module is left alone where a string of
  `modules_to_not_convert` is part of its name.
- compressed-tensors: pack-quantized has 4 or 8 bits per group or channel, and no quantized activations; float-quantized
  and int-quantized have 8 bits, symmetric, per tensor or channel (floats per block too), with quantized activations.
- Marlin takes groups of 32, 64, 128 or a whole row, in_features in steps of 128 and out_features in steps of 64, zero
  points in 4 bits only. Where a shape does not fit, Exllama takes symmetric codes with groups, in float16.
- q, k and v are one module, gate and up another: all parts have codes, or none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from quantlab.core.result import Notice
from quantlab.quantize.torch_schema import Stored, matches, weights_of

# (out_features, in_features) of Linear modules by their names.
Shapes = Mapping[str, tuple[int, int]]

# What vLLM computes as one matrix, by its parts (packed_modules_mapping of its models).
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_GROUPS = (-1, 32, 64, 128)
_MARLIN_IN, _MARLIN_OUT = 128, 64
FP8_BLOCK = 128


def notices(found: Stored) -> list[Notice]:
    """`vllm-refuses` for each reason; where vLLM loads it `marlin-tiles`, if a slower kernel computes some of it."""
    reasons = [_excluded(found), split(found.linears, found.quantized), _scheme(found)]
    if not reasons[-1]:
        reasons.append(_kernel(found))
    hint = "transformers loads it; for vLLM quantize again with other options"
    refused = [Notice("vllm-refuses", reason, hint) for reason in reasons if reason]
    weights_only = weights_of(found) is not None and not _quantizes_inputs(found)
    return refused or (tiles(found.linears, found.quantized) if weights_only else [])


def split(linears: Shapes, quantized: Collection[str]) -> str | None:
    """The first module of vLLM's that would have codes in some of its parts only; what it says of it."""
    for prefix, parts in _fused_modules(linears):
        if len({f"{prefix}.{part}" in quantized for part in parts}) > 1:
            return f"vLLM computes {', '.join(parts)} of `{prefix}` as one module, and only some of them are quantized"
    return None


def tiles(linears: Shapes, quantized: Collection[str]) -> list[Notice]:
    """`marlin-tiles` where vLLM's fast kernel for weights of integers does not take all shapes."""
    if not (outside := [module for module in quantized if not _fills_tiles(linears, module)]):
        return []
    rows, columns = _fused_rows(linears, outside[0]), linears[outside[0]][1]
    return [
        Notice(
            "marlin-tiles",
            f"{len(outside)} of {len(quantized)} modules do not fill the tiles of vLLM's Marlin kernel ({_MARLIN_IN} x "
            f"{_MARLIN_OUT}; first `{outside[0]}`, {columns} x {rows}): slower kernels compute them, or none",
            "nothing to do for transformers and quality",
        )
    ]


def quantizes(found: Stored, module: str) -> bool:
    """Whether vLLM, by config.json, loads this Linear module from codes."""
    config = found.config
    if found.method == "gptq":
        names = [name for block in config.get("modules_in_block_to_quantize") or [[module]] for name in block]
        patterns = [p.removeprefix("-:") for p in config.get("dynamic") or {} if p.startswith("-:")]
        return any(name in module for name in names) and not any(re.match(p, module) for p in patterns)
    if found.method == "awq":
        return not any(name in module for name in config.get("modules_to_not_convert") or [])
    return not any(matches(pattern, module) for pattern in config.get("ignore") or [])


def _excluded(found: Stored) -> str | None:
    wrong = [module for module in found.linears if quantizes(found, module) != (module in found.quantized)]
    return f"vLLM reads config.json otherwise than transformers for `{wrong[0]}`" if wrong else None


def _fused_modules(linears: Shapes) -> list[tuple[str, tuple[str, ...]]]:
    prefixes = dict.fromkeys(module.rpartition(".")[0] for module in linears)
    return [
        (prefix, parts)
        for prefix in prefixes
        for parts in FUSED
        if all(f"{prefix}.{part}" in linears for part in parts)
    ]


def _fused_rows(linears: Shapes, module: str) -> int:
    """The out_features of the module that vLLM makes of this one and those beside it."""
    prefix, _, part = module.rpartition(".")
    parts = next((parts for parts in FUSED if part in parts), (part,))
    return sum(linears[name][0] for name in (f"{prefix}.{part}" for part in parts) if name in linears)


def _fills_tiles(linears: Shapes, module: str) -> bool:
    return not (linears[module][1] % _MARLIN_IN or _fused_rows(linears, module) % _MARLIN_OUT)


def _quantizes_inputs(found: Stored) -> bool:
    return found.method == "compressed-tensors" and bool(found.scheme.get("input_activations"))


def _scheme(found: Stored) -> str | None:
    weights = weights_of(found)
    if found.method == "gptq" and weights is not None and (weights.bits not in (4, 8) or not weights.sym):
        kind = "symmetric" if weights.sym else "asymmetric"
        return f"vLLM has no kernel for gptq of {weights.bits} bits, {kind}: it takes 4 or 8 bits, symmetric"
    if found.method == "awq" and weights is not None and weights.bits != 4:
        return f"vLLM takes awq of 4 bits, not of {weights.bits}"
    if found.method == "compressed-tensors":
        return _compressed(found.scheme, found.scheme.get("format") or found.config.get("format"))
    return None


def _compressed(scheme: dict[str, Any], form: Any) -> str | None:
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    if form == "pack-quantized":
        if inputs or weights["strategy"] not in ("group", "channel") or weights["num_bits"] not in (4, 8):
            return f"vLLM takes pack-quantized weights of 4 or 8 bits, not of {weights['num_bits']}"
        if weights["num_bits"] == 8 and not weights["symmetric"]:
            return "vLLM has no kernel for 8 bits with zero points"
        return None
    whole = ("tensor", "channel", "block") if weights["type"] == "float" else ("tensor", "channel")
    fits = weights["num_bits"] == 8 and weights["symmetric"] and weights["strategy"] in whole
    fits = fits and form in ("float-quantized", "int-quantized", "naive-quantized") and inputs is not None
    return None if fits else f"vLLM has no scheme for {form} weights per {weights['strategy']}"


def _kernel(found: Stored) -> str | None:
    weights = weights_of(found)
    if weights is None:
        return _blocks(found)
    if weights.group_size not in _GROUPS:
        return f"vLLM's kernels take groups of 32, 64, 128 or a whole row, not of {weights.group_size}"
    # Shapes of awq that Marlin does not take go to AutoAWQ's own kernels.
    if found.method == "awq" or _quantizes_inputs(found):
        return None
    half = all(kind != "BF16" for kind, _ in found.tensors.values())
    if half and weights.sym and weights.group_size > 0:
        return None
    why = "zero points" if not weights.sym else "whole rows" if half else "bfloat16"
    for module in found.quantized:
        if not _fills_tiles(found.linears, module):
            rows, columns = _fused_rows(found.linears, module), found.linears[module][1]
            return (
                f"`{module}` ({rows} x {columns}) does not fit vLLM's Marlin kernel (out_features in steps of "
                f"{_MARLIN_OUT}, in_features of {_MARLIN_IN}), and its other kernels do not take {why}; newer ones pad"
            )
    return None


def _blocks(found: Stored) -> str | None:
    if found.scheme["weights"]["strategy"] != "block":
        return None
    for prefix, parts in _fused_modules(found.linears):
        for part in parts:
            if (module := f"{prefix}.{part}") in found.quantized and found.linears[module][0] % FP8_BLOCK:
                return (
                    f"vLLM fuses {', '.join(parts)} of `{prefix}`, and {FP8_BLOCK} does not divide their out_features"
                )
    return None
