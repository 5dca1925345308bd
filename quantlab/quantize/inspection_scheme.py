"""How the weights of a quantized folder are stored, in words, and which kernels can compute them.

Bits, groups and layout come from the tensors, the rest from config.json; inspection_faults.py says where they differ.
Kernels are those of gptqmodel 7.6 and compressed-tensors 0.19, which transformers uses, and of vLLM.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from quantlab.core.packed import Stored, groups_of

_MARLIN = "Marlin on CUDA of compute capability 8.0 or more, torch elsewhere: decided at load"
_NO_MARLIN = "torch or Triton (Marlin takes 4 or 8 bits, symmetric, groups of 32, 64, 128 or a row): decided at load"

_UNPACKED = "transformers decompresses it to 16 or 32 bits at the first forward"
_MARLIN_GROUPS = (32, 64, 128)
_LAYER = re.compile(r"\.(\d+)\.")


def scheme(entry: Mapping[str, Any], stored: Iterable[Stored], method: str) -> str:
    """Such as "W4A16 gptq, group 64, symmetric, desc_act no"; `method` is what the record or config.json tells."""
    main = _main(stored)
    group = next(iter(groups_of(entry)), {})
    inputs = group.get("input_activations")
    if main.kind.startswith("FP8"):
        words = [f"fp8 {main.kind.removeprefix('FP8_')}", _strategy(main, group), _activations(inputs)]
    else:
        words = [
            f"W{bits(main.kind)}A{_input_bits(inputs)} {method}",
            _strategy(main, group),
            "symmetric" if _symmetric(entry, main) else "asymmetric",
        ]
        if isinstance(inputs, dict):
            words.append(_activations(inputs))
    if entry.get("quant_method") == "gptq":
        words.append(f"desc_act {'yes' if entry.get('desc_act') else 'no'}")
    kinds = dict.fromkeys(tensor.kind for tensor in stored if tensor.quantized and tensor.kind != main.kind)
    return ", ".join([*words, *(f"mixed with {kind}" for kind in kinds)])


def file_format(entry: Mapping[str, Any]) -> str:
    """The format of the files, and its version."""
    version = entry.get("checkpoint_format") or entry.get("version") or entry.get("format")
    if entry.get("quant_method") == "compressed-tensors":
        version = entry.get("format")
    named = entry.get("quant_method", "unknown")
    return f"{named} {version}" if version and version != named else str(named)


def kernels(entry: Mapping[str, Any], stored: Iterable[Stored]) -> dict[str, str]:
    """For each stored type the kernels that are possible; which of them runs is decided at load."""
    found: dict[str, str] = {}
    for tensor in stored:
        if not tensor.quantized:
            found.setdefault(tensor.kind, "torch")
        elif tensor.kind.startswith("GPTQ"):
            group = group_size(tensor)
            fits = bits(tensor.kind) in (4, 8) and _symmetric(entry, tensor)
            fits = fits and (group in _MARLIN_GROUPS or group == tensor.shape[-1])
            found[tensor.kind] = _MARLIN if fits else found.get(tensor.kind, _NO_MARLIN)
        elif tensor.kind.startswith("AWQ"):
            found[tensor.kind] = _MARLIN
        elif tensor.kind.startswith("FP8"):
            found[tensor.kind] = f"FP8 on CUDA of compute capability 8.9 or more (vLLM), weight-only below; {_UNPACKED}"
        elif tensor.kind == "INT8" and any(isinstance(g.get("input_activations"), dict) for g in groups_of(entry)):
            found[tensor.kind] = f"INT8 on CUDA of compute capability 7.5 or more and on CPUs (vLLM); {_UNPACKED}"
        elif tensor.kind.startswith("INT"):
            found[tensor.kind] = f"Marlin on CUDA of compute capability 8.0 or more (vLLM); {_UNPACKED}"
        else:
            found[tensor.kind] = "decided at load"
    return found


def sizes(stored: Iterable[Stored], files_bytes: int) -> dict[str, int]:
    """Bytes of codes, scales, zero points and what is not quantized; the rest of the files is their headers."""
    found: dict[str, int] = defaultdict(int)
    for tensor in sorted(stored, key=lambda tensor: not tensor.quantized):
        for part, size in sorted(tensor.parts.items()):
            found[f"{part}_bytes"] += size
    return {**found, "metadata_bytes": files_bytes - sum(found.values())}


def matrices_left(stored: Iterable[Stored]) -> list[str]:
    """The modules whose matrix is not quantized, layers of one name together: `model.layers.{0,4}.mlp.down_proj`."""
    layers: dict[str, list[str]] = {}
    for tensor in stored:
        if tensor.quantized or len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
            continue
        found = _LAYER.search(tensor.name)
        numbers = layers.setdefault(_LAYER.sub(".{}.", tensor.module, count=1), [])
        numbers += [found[1]] if found else []
    return [
        name.replace("{}", numbers[0] if len(numbers) == 1 else f"{{{','.join(sorted(numbers, key=int))}}}", 1)
        for name, numbers in layers.items()
    ]


def bits(kind: str) -> int:
    """The bits of one weight of a stored type."""
    return int(re.findall(r"\d+", kind)[0])


def group_size(tensor: Stored) -> int | None:
    """How many weights of a row share a scale; None where scales are not by row, or no group fills the row."""
    if not tensor.groups:
        return None
    return -(-tensor.shape[-1] // tensor.groups)


def _main(stored: Iterable[Stored]) -> Stored:
    """A tensor of the type that most quantized weights have."""
    params: dict[str, int] = defaultdict(int)
    first: dict[str, Stored] = {}
    for tensor in stored:
        if tensor.quantized:
            params[tensor.kind] += tensor.params
            first.setdefault(tensor.kind, tensor)
    return first[max(params, key=params.__getitem__)]


def _strategy(tensor: Stored, group: Mapping[str, Any]) -> str:
    weights = group.get("weights", {})
    if weights.get("strategy") == "block" and isinstance(weights.get("block_structure"), list):
        return f"blocks of {' x '.join(map(str, weights['block_structure']))}"
    if tensor.groups is None:
        return f"per {weights.get('strategy', 'tensor or block')}"
    size = group_size(tensor)
    return "per channel" if size == tensor.shape[-1] else f"group {size}"


def _symmetric(entry: Mapping[str, Any], tensor: Stored) -> bool:
    # Classic formats always store zero points.
    if entry.get("quant_method") == "awq":
        return not entry.get("zero_point", True)
    if entry.get("quant_method") == "gptq":
        return bool(entry.get("sym", True))
    return "zero_points" not in tensor.parts


def _input_bits(inputs: Any) -> Any:
    return inputs.get("num_bits", 16) if isinstance(inputs, dict) else 16


def _activations(inputs: Any) -> str:
    if not isinstance(inputs, dict):
        return "weights only"
    return f"{'dynamic' if inputs.get('dynamic') else 'static'} per {inputs.get('strategy', 'tensor')}"
