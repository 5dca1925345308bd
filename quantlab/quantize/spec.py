"""What quantize and inspect are asked to do, checked before any work."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from quantlab.core.errors import UsageError, unknown_name
from quantlab.core.model import ModelFile
from quantlab.core.result import Notice, TensorType

# The module that does each method.
_TORCH = "quantlab.quantize.torch_method"
METHODS: dict[str, str] = {
    "gguf": "quantlab.quantize.gguf",
    "awq": _TORCH, "gptq": _TORCH, "fp8": _TORCH, "int8": _TORCH, "rtn": _TORCH,
}  # fmt: skip

OutType = Literal["F16", "BF16", "F32"]
WIDE_TYPES: tuple[str, ...] = get_args(OutType)

# llama-quantize's names of the file types, and llama.h's numbers of them (LLAMA_FTYPE_*).
TYPES = {
    "F32": 0, "F16": 1, "BF16": 32,
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q1_0": 40, "Q2_0": 41, "MXFP4_MOE": 38,
    "Q2_K": 10, "Q2_K_S": 21, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16,
    "Q5_K_M": 17, "Q6_K": 18, "IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29,
    "IQ3_XXS": 23, "IQ3_XS": 22, "IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37,
}  # fmt: skip
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

# Types of which llama.cpp stores some tensors so low that it refuses to do so without an importance matrix
# (tensor_requires_imatrix in llama-quant.cpp).
NEED_IMATRIX = frozenset(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S"))


class QuantizeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One artifact to write. `calib` holds NAME|PATH[:WEIGHT]; `skip` regular expressions on names of tensors (gguf)
    or modules (the torch methods) that stay in 16 bits. `calib_samples` None: as many as the texts give, at most 128.

    gguf alone: `type`; `imatrix`; `outtype`, the type of the GGUF that a folder is converted to before it is
    quantized; `converter`, an upstream convert_hf_to_gguf.py to use for that. The torch methods alone: `bits`;
    `group_size`, weights of a row that share a scale, -1 for the whole row; `sym`, no zero points; `desc_act`, columns
    in the order of their activations (gptq); `scheme` of fp8; `engine`; `device` and `dtype` of the run. None, "" and
    auto stand for the method's own, which check_spec puts in.
    """

    model: ModelFile
    out: str
    method: str = "gguf"
    type: str = ""
    force: bool = False
    imatrix: bool = False
    calib: list[str] = []
    calib_samples: int | None = None
    calib_length: int = 512
    skip: list[str] = []
    allow_requantize: bool = False
    outtype: str = "F16"
    converter: str | None = None
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool = False
    scheme: str | None = None
    engine: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0
    offline: bool = False


class Prediction(msgspec.Struct, frozen=True):
    """What a dry run says of a quantize run.

    `quantize_s` is the arithmetic alone, from this machine's speed: reading, checking and writing come on top, and so
    do a conversion and an importance matrix. None where it is not known beforehand. `disk_bytes`: the output and the
    temporary files beside it, at their most.
    """

    size_bytes: int
    bits_per_weight: float
    tensor_types: dict[str, TensorType]
    peak_process_bytes: int
    disk_bytes: int
    quantize_s: float | None
    warnings: list[Notice]
    peak_device_bytes: int = 0


class InspectSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model to look at."""

    model: ModelFile


def check_spec(spec: QuantizeSpec) -> QuantizeSpec:
    """The spec with its names in their proper spelling and its defaults put in.

    Raises UsageError for what no model could satisfy, and for an option that the method does not have.
    """
    if spec.method not in METHODS:
        raise unknown_name("method", spec.method, METHODS)
    if spec.calib_length < 16 or (spec.calib_samples is not None and spec.calib_samples < 1):
        raise UsageError(
            f"{spec.calib_samples} calibration samples of {spec.calib_length} tokens",
            "give at least 1 sample of at least 16 tokens",
        )
    if spec.threads is not None and spec.threads < 1:
        raise UsageError(f"`--threads {spec.threads}`", "give 1 or more")
    for calib in spec.calib:
        split_weight(calib)
    if spec.method != "gguf":
        from quantlab.quantize.torch_spec import check_torch_spec

        refuse_options(spec, ("type", "outtype", "imatrix", "converter"))
        return check_torch_spec(spec)
    refuse_options(spec, ("bits", "group_size", "sym", "desc_act", "scheme", "engine", "device", "dtype"))
    return _check_gguf(spec)


def refuse_options(spec: QuantizeSpec, names: tuple[str, ...], why: str = "") -> None:
    """Raise UsageError where one of these options is given: what does nothing is not accepted."""
    defaults = QuantizeSpec(spec.model, spec.out)
    for name in names:
        if getattr(spec, name) != getattr(defaults, name):
            raise UsageError(f"`--{name.replace('_', '-')}` does nothing for `{spec.method}`{why}", "leave it out")


def variant(spec: QuantizeSpec) -> str:
    """What tells the artifacts of one model apart, for names: Q4_K_M, AWQ-W4-g128, FP8-dynamic, INT8."""
    if spec.method == "gguf":
        return spec.type
    from quantlab.quantize.torch_spec import torch_variant

    return torch_variant(spec)


def _check_gguf(spec: QuantizeSpec) -> QuantizeSpec:
    if spec.out and not spec.out.endswith(".gguf"):
        raise UsageError(f"`--out {spec.out}` does not end in .gguf", f"call it `{spec.out}.gguf`")
    spec = msgspec.structs.replace(spec, type=file_type(spec.type or "Q4_K_M"), outtype=_wide_type(spec.outtype))
    _check_imatrix(spec)
    return spec


def file_type(name: str) -> str:
    """llama-quantize's name of a file type, whatever its case; aliases are resolved as llama-quantize does."""
    upper = _ALIASES.get(name.upper(), name.upper())
    if upper not in TYPES:
        raise unknown_name("type", name, (*TYPES, *_ALIASES))
    return upper


def split_weight(calib: str) -> tuple[str, float]:
    """Name or path, and weight (1 where none is given), of NAME|PATH[:WEIGHT]."""
    name, colon, text = calib.rpartition(":")
    try:
        weight = float(text) if colon else math.nan
    except ValueError:
        weight = math.nan
    # What follows a colon and is no number is a part of the path.
    if math.isnan(weight):
        return calib, 1.0
    if not name or not 0 < weight < math.inf:
        raise UsageError(f"`--calib {calib}` has no weight above 0", "write NAME or NAME:WEIGHT, for example c4:2")
    return name, weight


def _wide_type(name: str) -> str:
    if name.upper() not in WIDE_TYPES:
        raise unknown_name("outtype", name, WIDE_TYPES)
    return name.upper()


def _check_imatrix(spec: QuantizeSpec) -> None:
    if spec.type in NEED_IMATRIX and not spec.imatrix:
        raise UsageError(f"`{spec.type}` needs an importance matrix", "add `--imatrix`")
    if spec.type in WIDE_TYPES and (spec.imatrix or spec.skip):
        what = "`--imatrix`" if spec.imatrix else "`--skip`"
        raise UsageError(f"{what} does nothing for `{spec.type}`: no weight is quantized", "leave it out")
    if not spec.imatrix:
        refuse_options(spec, ("calib", "calib_samples", "calib_length"), " without `--imatrix`")
