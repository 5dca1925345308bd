"""llama_model_quantize in process: its arguments, its log read back as progress and as facts.

It validates every tensor that it reads, so weights that are not finite are found here, by name, without a scan.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import TYPES, TensorInfo
from quantlab.core.progress import Progress
from quantlab.quantize.llama_model import Log, lib
from quantlab.quantize.spec import WIDE_TYPES

_TYPE_IDS = {name: number for number, (name, _, _) in TYPES.items()}
_BLOCKS = {name: (weights, size_bytes) for name, weights, size_bytes in TYPES.values()}
# The longest string that an override of metadata holds, without its closing zero.
_LONGEST_VALUE_BYTES = 127

_STEP = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+(\S+)\s+-.* type =\s+(\S+), ")
_TARGET = re.compile(r"-> .*\((\S+)\)$")
_FALLBACK = re.compile(
    r"warning: (\S+)\s+- ncols\s+(\d+) not divisible by\s+(\d+) \(required for type\s+(\S+)\) .*falling back to\s+(\S+)"
)
_MISSING = re.compile(r"did not find weights for (\S+)")
_NOT_FINITE = re.compile(r"tensor '(\S+)' has invalid data")


class Fallback(msgspec.Struct, frozen=True):
    """A tensor whose columns are no multiple of the block of the type that the label stands for."""

    tensor: str
    columns: int
    block: int
    wanted: str
    stored: str


class Told(msgspec.Struct):
    """What the library said: fallbacks, tensors without importance, and in a dry run each tensor's type."""

    fallbacks: list[Fallback] = []
    without_importance: list[str] = []
    types: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True):
    """One call. `keep` are names of tensors that stay in 16 bits (`keep_type`)."""

    base: str
    out: str
    type: str
    threads: int
    keep: list[str] = []
    keep_type: str = "F16"
    allow_requantize: bool = False
    metadata: dict[str, str | int] = {}
    dry_run: bool = False


def quantize(job: Job, importance: Mapping[str, npt.NDArray[np.float32]], progress: Progress) -> Told:
    """Quantize `job.base` to `job.out`; with `dry_run` only the types are decided and nothing is written.

    Raises QuantlabError with the library's reason.
    """
    told = Told()
    params = lib.llama_model_quantize_default_params()
    params.nthread = job.threads
    params.ftype = ftype_id(job.type)
    params.allow_requantize = job.allow_requantize
    params.dry_run = job.dry_run
    # The arrays live until the call returns.
    imatrix = _imatrix(importance)
    overrides = _metadata(job.metadata)
    keep = _keep(job.keep, job.keep_type)
    params.imatrix = imatrix if importance else None
    params.kv_overrides = overrides
    params.tt_overrides = keep if job.keep else None

    def on_line(line: str) -> None:
        if step := _STEP.search(line):
            target = _TARGET.search(line)
            told.types[step[3]] = (target[1] if target else step[4]).upper()
            progress("quantize", int(step[1]), int(step[2]))
        elif fallback := _FALLBACK.search(line):
            name, columns, block, wanted, stored = fallback.groups()
            told.fallbacks.append(Fallback(name, int(columns), int(block), wanted.upper(), stored.upper()))
        elif missing := _MISSING.search(line):
            told.without_importance.append(missing[1])

    with Log(on_line).listening() as log:
        code = lib.llama_model_quantize(job.base.encode(), job.out.encode(), ctypes.byref(params))
    if code != 0:
        raise _failed(log, job)
    return told


def ftype_id(name: str) -> int:
    """The number of a file type, as llama_cpp defines it."""
    prefix = "ALL" if name == "F32" else "MOSTLY"
    return int(getattr(lib, f"LLAMA_FTYPE_{prefix}_{name}"))


def _failed(log: Log, job: Job) -> QuantlabError:
    reason = log.last("failed to quantize").partition("failed to quantize:")[2].strip() or log.last("error")
    if broken := _NOT_FINITE.search(reason):
        return QuantlabError(
            f"tensor `{broken[1]}` holds weights that are not finite (NaN or infinite) or is damaged",
            "get the model again; a model trained in BF16 may overflow in F16: convert it with `--outtype BF16`",
        )
    if "iostream" in reason:
        free = shutil.disk_usage(Path(job.out).parent).free
        return QuantlabError(
            f"llama.cpp could not write `{Path(job.out).parent}` ({free / 1e9:.2f} GB free there)",
            "free some room, or choose another place with `--out`",
        )
    hint = "use `--imatrix` with more text" if "importance matrix" in reason or "imatrix" in reason else ""
    return QuantlabError(f"llama.cpp does not quantize `{Path(job.base).name}` to {job.type}: {reason}", hint)


def _imatrix(importance: Mapping[str, npt.NDArray[np.float32]]) -> Any:
    array = (lib.llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(array, importance.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return array


def _metadata(metadata: Mapping[str, str | int]) -> Any:
    array = (lib.llama_model_kv_override * (len(metadata) + 1))()
    for entry, (key, value) in zip(array, metadata.items(), strict=False):
        entry.key = key.encode()
        if isinstance(value, int):
            entry.tag, entry.value.val_i64 = lib.LLAMA_KV_OVERRIDE_TYPE_INT, value
        else:
            entry.tag = lib.LLAMA_KV_OVERRIDE_TYPE_STR
            # A value that is cut off is cut between characters.
            entry.value.val_str = value.encode()[:_LONGEST_VALUE_BYTES].decode("utf-8", "ignore").encode()
    return array


def _keep(names: Sequence[str], kind: str) -> Any:
    array = (lib.llama_model_tensor_override * (len(names) + 1))()
    for entry, name in zip(array, names, strict=False):
        entry.pattern, entry.type = f"^{re.escape(name)}$".encode(), _TYPE_IDS[kind]
    return array


def stored_bytes(params: int, kind: str) -> int:
    """The bytes of `params` weights stored as `kind`."""
    weights, size_bytes = _BLOCKS[kind]
    return params // weights * size_bytes


def nominal_bits(tensors: Sequence[TensorInfo], fallbacks: Sequence[Fallback]) -> float:
    """Bits per weight that the label would stand for, were every column count a multiple of the block.

    The library's own rule for an embedding or output matrix whose columns do not fit is Q8_0 instead of Q6_K, and it
    logs nothing.
    """
    wanted = {fallback.tensor: fallback.wanted for fallback in fallbacks}
    heads = ("token_embd.weight", "output.weight")
    bits = 0.0
    for tensor in tensors:
        kind = wanted.get(tensor.name, tensor.type)
        if tensor.name in heads and kind == "Q8_0" and fallbacks:
            kind = "Q6_K"
        weights, size_bytes = _BLOCKS[kind]
        bits += 8 * size_bytes / weights * tensor.params
    return bits / sum(tensor.params for tensor in tensors)


def is_quantized(kind: str) -> bool:
    """Whether a stored type is a quantized one."""
    return kind not in (*WIDE_TYPES, "F64", "I8", "I16", "I32", "I64")
