"""What an artifact says of itself, from config.json and the headers of its tensors: no torch, no weights read.

The formats: gptq is AutoGPTQ's (github.com/AutoGPTQ/AutoGPTQ, qlinear), awq is AutoAWQ's "gemm"
(github.com/casper-hansen/AutoAWQ), compressed-tensors is github.com/vllm-project/compressed-tensors. What vLLM's
kernels make of them is in torch_vllm.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.artifact import read_json, safetensors_files, safetensors_header
from quantlab.core.errors import QuantlabError
from quantlab.core.hf_config import quantization, text_config
from quantlab.quantize.torch_leak import leak
from quantlab.quantize.torch_work import Weights

Header = tuple[str, tuple[int, ...]]
# The tensor that a module with codes has, and a plain one has not.
_CODES = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_scale"}
_FLOATS = {"F16", "BF16"}
_SCALES = {"F16", "BF16", "F32"}
# Rotary tables of old checkpoints, which are computed and not loaded.
_BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
# Keys of config.json that quantizing changes.
_OWN_KEYS = ("quantization_config", "dtype", "torch_dtype", "transformers_version")


class Stored(msgspec.Struct, frozen=True):
    """An artifact as its headers show it.

    `linears` are the (out_features, in_features) of the parent's Linear modules in layers; `quantized` those of them
    that hold codes here; `parent` all tensors of the parent.
    """

    config: dict[str, Any]
    tensors: dict[str, Header]
    parent: dict[str, Header]
    linears: dict[str, tuple[int, int]]
    quantized: list[str]

    @property
    def method(self) -> str:
        """gptq, awq or compressed-tensors."""
        return str(self.config.get("quant_method"))

    @property
    def scheme(self) -> dict[str, Any]:
        """compressed-tensors: what its one group of modules is stored as."""
        groups = list((self.config.get("config_groups") or {}).values())
        if len(groups) != 1 or not isinstance(groups[0], dict) or not isinstance(groups[0].get("weights"), dict):
            raise QuantlabError("its `quantization_config` has no single group of modules in `config_groups`")
        return groups[0]

    def leaves(self, module: str) -> dict[str, Header]:
        """The tensors of one module by their last name."""
        return {n.rpartition(".")[2]: t for n, t in self.tensors.items() if n.rpartition(".")[0] == module}


def stored(artifact: Path, parent: Path) -> Stored:
    """Read config.json and the headers; QuantlabError says why they are no artifact of a torch method."""
    config = quantization(artifact)
    if config is None:
        raise QuantlabError("its config.json has no `quantization_config`: loaders would take codes for weights")
    if config.get("quant_method") not in _CODES:
        raise QuantlabError(f"its `quant_method` is {config.get('quant_method')!r}, not one of {', '.join(_CODES)}")
    tensors, before = _headers(artifact), _headers(parent)
    linears = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, (_, shape) in before.items()
        if name.endswith(".weight") and len(shape) == 2 and re.search(r"\.\d+\.", name)
    }
    code = _CODES[str(config["quant_method"])]
    return Stored(config, tensors, before, linears, [name for name in linears if f"{name}.{code}" in tensors])


def find_fault(artifact: Path, parent: Path, asked: Weights | None) -> str | None:
    """What config.json or a tensor's shape says that is not so, or None."""
    try:
        found = stored(artifact, parent)
        faults = [_settings(found, asked), _names(found, text_config(parent).get("tie_word_embeddings"))]
        faults += [
            _rules(found.config),
            _claims(found),
            _shapes(found),
            leak(artifact, parent),
            _config_fault(artifact, parent),
        ]
        return next(filter(None, faults), None)
    except QuantlabError as error:
        return error.message
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"its `quantization_config` cannot be read: {error!r}"


def _rules(config: dict[str, Any]) -> str | None:
    """What loaders read in it that no artifact of ours has: rules for single modules, other packing, a KV of codes."""
    # A module that is excluded is seen in its tensors.
    if rules := [rule for rule in config.get("dynamic") or {} if not rule.startswith("-:")]:
        return f"its `dynamic` has a rule of its own for `{rules[0]}`"
    if config.get("pack_dtype") not in (None, "int32"):
        return f"its `pack_dtype` is {config['pack_dtype']!r}, and codes are packed into int32"
    return "its `kv_cache_scheme` claims a quantized KV cache" if config.get("kv_cache_scheme") else None


def _config_fault(artifact: Path, parent: Path) -> str | None:
    """Whether config.json is the parent's in all but what quantizing changes, and no program code came along."""
    own, before = (
        {k: v for k, v in read_json(f / "config.json").items() if k not in _OWN_KEYS} for f in (artifact, parent)
    )
    for name in sorted(own.keys() | before.keys()):
        if own.get(name) != before.get(name) or (name in own) != (name in before):
            says, said = (config.get(name, "nothing") for config in (own, before))
            return f"its config.json has `{name}` {says!r}, its parent's {said!r}"
    if code := [file.name for file in sorted(artifact.glob("*.py")) if not (parent / file.name).is_file()]:
        return f"it holds program code, `{code[0]}`"
    return None


def weights_of(found: Stored) -> Weights | None:
    """Bits, group and symmetry that config.json states; None for floats."""
    config = found.config
    if found.method == "gptq":
        return Weights(config["bits"], config["group_size"], config["sym"], config["desc_act"])
    if found.method == "awq":
        return Weights(config["bits"], config["group_size"], not config["zero_point"])
    weights = found.scheme["weights"]
    if weights["type"] != "int":
        return None
    return Weights(weights["num_bits"], weights.get("group_size") or -1, weights["symmetric"])


def _headers(folder: Path) -> dict[str, Header]:
    found: dict[str, Header] = {}
    for file in safetensors_files(folder):
        for name, entry in safetensors_header(file).items():
            if name in found:
                raise QuantlabError(f"two files hold the tensor `{name}`")
            found[name] = (entry["dtype"], tuple(entry["shape"]))
    return found


def _settings(found: Stored, asked: Weights | None) -> str | None:
    """The keys that transformers and vLLM read, and whether they say what was asked."""
    config = found.config
    if found.method == "gptq":
        if missing := [key for key in ("bits", "group_size", "sym", "desc_act") if config.get(key) is None]:
            return f"its `quantization_config` lacks {', '.join(missing)}"
        for key in ("checkpoint_format", "format"):
            # gptq_v2 stores zero points as they are, gptq minus one; vLLM's Marlin reads neither field.
            if config.get(key) not in (None, "gptq"):
                return f"its `{key}` is {config[key]!r}, and the classic format is 'gptq'"
    if found.method == "awq":
        if missing := [key for key in ("bits", "group_size", "zero_point") if config.get(key) is None]:
            return f"its `quantization_config` lacks {', '.join(missing)}"
        if str(config.get("version", config.get("format"))).lower() != "gemm":
            return f"its awq `version` is {config.get('version')!r}, and only 'gemm' is loaded everywhere"
    says = weights_of(found)
    if asked is not None and says != asked:
        return f"its config.json says {_spoken(says)}, and {_spoken(asked)} was asked"
    return None


def _spoken(weights: Weights | None) -> str:
    if weights is None:
        return "floats"
    said = f"{weights.bits} bits, group {weights.group_size}, {'symmetric' if weights.sym else 'with zero points'}"
    return said + (", desc_act" if weights.desc_act else "")


def _names(found: Stored, tied: Any) -> str | None:
    """Whether the tensors are those of the parent, with codes for the weights of quantized modules.

    `tied` is what config.json says of the head; where it is silent, transformers knows, and will miss a head it needs.
    """
    if not found.quantized:
        return "it holds no quantized module"
    packed = {f"{module}.{leaf}" for module in found.quantized for leaf in found.leaves(module)}
    codes = {f"{module}.weight" for module in found.quantized}
    before = {name for name in found.parent if not _BUFFERS.search(name)}
    extra = sorted(name for name in found.tensors.keys() - before - packed if not _BUFFERS.search(name))
    if tied and (head := [name for name in extra if name.endswith("lm_head.weight")]):
        return f"it stores the tied head a second time, as `{head[0]}`"
    if extra:
        return f"it holds `{extra[0]}`, which its parent does not have"
    lost = sorted(before - found.tensors.keys() - codes)
    # A parent may hold its tied head twice.
    if lost := [name for name in lost if tied is False or not name.endswith("lm_head.weight")]:
        return f"it lost `{lost[0]}`"
    return None


def _claims(found: Stored) -> str | None:
    """Whether the modules that config.json claims as quantized are those that hold codes."""
    # The head stays in 16 bits: many loaders have no kernel for one with codes.
    if found.config.get("lm_head") or (found.method == "compressed-tensors" and claims(found, "lm_head")):
        return "its config.json claims the head as quantized, and no codes of it are stored"
    for module in found.linears:
        claimed, packed = claims(found, module), module in found.quantized
        if claimed and not packed:
            return f"its config.json claims `{module}` as quantized, and no codes of it are stored"
        if packed and not claimed:
            return f"it stores codes of `{module}`, which its config.json excludes from quantization"
    return None


def claims(found: Stored, module: str) -> bool:
    """Whether transformers, by config.json, loads this Linear module from codes."""
    config = found.config
    if found.method == "gptq":
        inside = config.get("modules_in_block_to_quantize")
        names = [name for block in inside for name in block] if inside else None
        return names is None or any(module.endswith(name) for name in names)
    if found.method == "awq":
        kept = config.get("modules_to_not_convert") or []
        return not any(re.match(name, module) or module.endswith(name) for name in kept)
    targets, kept = found.scheme["targets"], config.get("ignore") or []
    aimed = "Linear" in targets or any(matches(pattern, module) for pattern in targets)
    return aimed and not any(matches(pattern, module) for pattern in kept)


def matches(pattern: str, module: str) -> bool:
    """compressed-tensors' rule: a full name, or a regular expression after `re:`."""
    return bool(re.match(pattern[3:], module)) if pattern.startswith("re:") else pattern == module


def _shapes(found: Stored) -> str | None:
    for name, (kind, shape) in found.tensors.items():
        if name in found.parent and name.rpartition(".")[0] not in found.quantized:
            if shape != found.parent[name][1]:
                return f"`{name}` has the shape {list(shape)}, in its parent {list(found.parent[name][1])}"
            if len(shape) == 2 and kind not in _FLOATS:
                return f"`{name}` is stored as {kind}, and what is not quantized belongs in 16 bits"
    for module in found.quantized:
        leaves = found.leaves(module)
        for leaf, kinds, shape in _expected(found, module):
            if leaf not in leaves:
                return f"`{module}` lacks `{leaf}`"
            kind, got = leaves[leaf]
            if kind not in kinds:
                return f"`{module}.{leaf}` is stored as {kind}, not {' or '.join(sorted(kinds))}"
            if got != shape:
                return f"`{module}.{leaf}` has the shape {list(got)}, and its config.json means {list(shape)}"
    return None


def _expected(found: Stored, module: str) -> Iterator[tuple[str, set[str], tuple[int, ...]]]:
    """Leaf, possible types and shape of each tensor that a quantized module must have."""
    rows, columns = found.linears[module]
    if found.method == "compressed-tensors":
        form = found.scheme.get("format") or found.config["format"]
        yield from _expected_compressed(found.scheme, form, rows, columns)
        return
    bits, group = found.config["bits"], found.config["group_size"]
    groups = 1 if group == -1 else math.ceil(columns / group)
    yield "scales", _FLOATS, (groups, rows)
    yield "qzeros", {"I32"}, (groups, rows * bits // 32)
    if found.method == "awq":
        yield "qweight", {"I32"}, (columns, rows * bits // 32)
    else:
        yield "qweight", {"I32"}, (columns * bits // 32, rows)
        yield "g_idx", {"I32"}, (columns,)


def _expected_compressed(
    scheme: dict[str, Any], form: str, rows: int, columns: int
) -> Iterator[tuple[str, set[str], tuple[int, ...]]]:
    weights = scheme["weights"]
    bits, strategy = weights["num_bits"], weights["strategy"]
    if strategy == "tensor":
        scale: tuple[int, ...] = (1,)
    elif strategy == "block":
        height, width = weights["block_structure"]
        scale = (math.ceil(rows / height), math.ceil(columns / width))
    else:
        scale = (rows, math.ceil(columns / weights["group_size"]) if strategy == "group" else 1)
    yield "weight_scale", _SCALES, scale
    if form == "pack-quantized":
        yield "weight_packed", {"I32"}, (rows, math.ceil(columns * bits / 32))
        yield "weight_shape", {"I64"}, (2,)
        if not weights["symmetric"]:
            yield "weight_zero_point", {"I32"}, (math.ceil(rows * bits / 32), scale[1])
        if weights.get("actorder") == "group":
            yield "weight_g_idx", {"I32"}, (columns,)
    else:
        yield "weight", {"F8_E4M3" if weights["type"] == "float" else "I8"}, (rows, columns)
    inputs = scheme.get("input_activations")
    if inputs and not inputs["dynamic"]:
        yield "input_scale", _SCALES, (1,)
