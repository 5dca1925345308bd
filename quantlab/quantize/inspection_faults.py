"""Where config.json or the record of a quantized folder says something else than its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quantlab.core.artifact import Record
from quantlab.core.packed import Stored, groups_of
from quantlab.core.result import Notice
from quantlab.core.text import printable
from quantlab.quantize.inspection_scheme import bits, group_size

_LAYOUTS = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": ""}
_AGAIN = "download the folder again, or quantize again: loaders read what config.json says"


def contradictions(entry: Mapping[str, Any] | None, stored: list[Stored]) -> Iterator[Notice]:
    """`config-content` for each thing in which config.json and the tensors differ."""
    codes = [tensor for tensor in stored if tensor.quantized]
    if unknown := [t for t in stored if not t.quantized and t.kind[0] in "IU" and len(t.shape) > 1]:
        yield Notice(
            "unknown-codes",
            f"{len(unknown)} tensors of integers are in no layout known here (first `{printable(unknown[0].name)}`): "
            "each integer counts as one weight",
            "bits per weight may be wrong",
        )
    if entry is None:
        if codes:
            yield _content(f"{len(codes)} modules hold codes, and config.json has no `quantization_config`")
        return
    named = printable(str(entry.get("quant_method", "an unknown method")))
    if not codes:
        if not unknown:
            yield _content(f"config.json names {named}, and no tensor holds codes")
        return
    said = [_layout(entry, codes), *_numbers(entry, codes), _zero_points(entry, codes), *_modules(entry, stored)]
    for sentence in said:
        if sentence:
            yield _content(sentence)


def asked_beside_got(record: Record, stored: list[Stored]) -> Iterator[Notice]:
    """`asked-got` where the record asks for other bits or another group than most modules have."""
    codes = [tensor for tensor in stored if tensor.quantized]
    for option, value_of in (("bits", lambda t: bits(t.kind)), ("group_size", group_size)):
        asked = record.asked.get(option)
        if not isinstance(asked, int):
            continue
        other = [t for t in codes if not _same(asked, value_of(t), t)]
        if other:
            yield Notice(
                "asked-got",
                f"{option} {asked} was asked, and {len(other)} of {len(codes)} modules have {value_of(other[0])} "
                f"(first `{printable(other[0].module)}`)",
                "compare it with artifacts of what it holds",
            )


def _same(asked: int, got: int | None, tensor: Stored) -> bool:
    return got is None or got == asked or (asked == -1 and got == tensor.shape[-1])


def _content(sentence: str) -> Notice:
    return Notice("config-content", sentence, _AGAIN)


def _layout(entry: Mapping[str, Any], codes: list[Stored]) -> str | None:
    layout = _LAYOUTS.get(str(entry.get("quant_method")))
    if layout is None:
        return None
    other = [t for t in codes if (t.kind.split("-")[0] if "-" in t.kind else "") != layout]
    if not other:
        return None
    return (
        f"config.json names {printable(str(entry['quant_method']))}, and {len(other)} of {len(codes)} modules are laid "
        f"out as {other[0].kind} (first `{printable(other[0].module)}`)"
    )


def _numbers(entry: Mapping[str, Any], codes: list[Stored]) -> Iterator[str]:
    """Bits and groups, where config.json says one number for all modules."""
    groups = groups_of(entry)
    rules = entry.get("dynamic")
    if len(groups) > 1 or (isinstance(rules, dict) and any(not str(rule).startswith("-:") for rule in rules)):
        return
    says = groups[0]["weights"] if groups else entry
    number = says.get("num_bits") if groups else says.get("bits", says.get("w_bit"))
    if isinstance(number, int) and (other := [t for t in codes if bits(t.kind) != number]):
        yield _differ(f"{number} bits", f"{bits(other[0].kind)} bits", other, codes)
    floats = groups and says.get("type") == "float"
    if groups and (other := [t for t in codes if ("FP" in t.kind) != floats]):
        yield _differ("floats" if floats else "integers", other[0].kind, other, codes)
    size = says.get("group_size")
    if not isinstance(size, int) or size == 0 or (groups and says.get("strategy") != "group"):
        return
    other = [t for t in codes if t.groups is not None and t.groups != (1 if size < 0 else -(-t.shape[-1] // size))]
    if other:
        yield _differ(
            f"groups of {size}" if size > 0 else "whole rows", f"groups of {group_size(other[0])}", other, codes
        )


def _differ(told: str, got: str, other: list[Stored], codes: list[Stored]) -> str:
    return (
        f"config.json says {told}, and {len(other)} of {len(codes)} modules have {got} (first "
        f"`{printable(other[0].module)}`)"
    )


def _zero_points(entry: Mapping[str, Any], codes: list[Stored]) -> str | None:
    groups = groups_of(entry)
    if len(groups) != 1 or not isinstance(groups[0]["weights"].get("symmetric"), bool):
        return None
    symmetric = groups[0]["weights"]["symmetric"]
    other = [t for t in codes if ("zero_points" in t.parts) == symmetric]
    told, got = ("symmetric", "zero points") if symmetric else ("asymmetric", "no zero points")
    return _differ(told, got, other, codes) if other else None


def _modules(entry: Mapping[str, Any], stored: list[Stored]) -> Iterator[str]:
    """Modules of layers that config.json excludes and that hold codes, or the other way round."""
    kinds = {t.module.rpartition(".")[2] for t in stored if t.quantized}
    inside = [t for t in stored if re.search(r"\.\d+\.", t.name) and t.name.endswith(".weight")]
    # Norms and embeddings are nobody's business: only what holds codes in some layer is a Linear for sure.
    linear = [t for t in inside if t.module.rpartition(".")[2] in kinds]
    for excluded, quantized, sentence in (
        (False, False, "config.json claims {n} modules as quantized that hold plain weights (first `{first}`)"),
        (True, True, "{n} modules hold codes that config.json excludes from quantization (first `{first}`)"),
    ):
        found = [t.module for t in linear if t.quantized == quantized and _excluded(entry, t.module) == excluded]
        if found:
            yield sentence.format(n=len(found), first=printable(found[0]))


def _excluded(entry: Mapping[str, Any], module: str) -> bool:
    """Whether config.json leaves a Linear module of a layer in plain weights, for transformers or for vLLM."""
    names = [*_strings(entry.get("ignore")), *_strings(entry.get("modules_to_not_convert"))]
    rules = entry.get("dynamic")
    names += [f"re:{rule[2:]}" for rule in _strings(list(rules) if isinstance(rules, dict) else [])
              if rule.startswith("-:")]  # fmt: skip
    if any(_matches(name, module) for name in names):
        return True
    blocks = entry.get("modules_in_block_to_quantize")
    inside = [name for block in (blocks if isinstance(blocks, list) else []) for name in _strings(block)]
    return bool(inside) and not any(name in module for name in inside)


def _matches(name: str, module: str) -> bool:
    if not name.startswith("re:"):
        return f".{name}." in f".{module}."
    try:
        return re.match(name[3:], module) is not None
    except re.error:
        return False


def _strings(value: Any) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []
