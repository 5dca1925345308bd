"""llama_model_quantize in process: its arguments, its log read back as progress and as facts.

It validates every tensor that it reads, so weights that are not finite are found here, by name, without a scan.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantlab.core import units
from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import TYPES
from quantlab.core.progress import Progress
from quantlab.quantize.gguf_work import Fallback, Job
from quantlab.quantize.llama_model import Log, lib
from quantlab.quantize.spec import TYPES as FILE_TYPES
from quantlab.quantize.tensors import matching, matrices, whole_header

_TYPE_IDS = {name: number for number, (name, _, _) in TYPES.items()}
# The longest string that an override of metadata holds, without its closing zero.
_LONGEST_VALUE_BYTES = 127

_RATE_ROWS, _RATE_COLUMNS, _RATE_SECONDS = 16, 1024, 0.05

_STEP = re.compile(r"\[\s*(\d+)/\s*(\d+)\] (.*?)\s+- \[.* type =\s+(\S+), ")
_TARGET = re.compile(r"-> .*\((\S+)\)$")
_MISFIT = re.compile(r"warning: (.*?)\s+- ncols\s+(\d+) not divisible by\s+(\d+) \(required for type\s+(\S+)\) ")
_FALLBACK = re.compile(_MISFIT.pattern + r".*falling back to\s+(\S+)")
_MISSING = re.compile(r"did not find weights for (.+)")
_NOT_FINITE = re.compile(r"tensor '(\S+)' has invalid data")


class Told(msgspec.Struct):
    """What the library said: fallbacks, tensors without importance, each tensor's type (of a dry run its new one)."""

    fallbacks: list[Fallback] = []
    without_importance: list[str] = []
    types: dict[str, str] = {}


def quantize(
    base: Path, job: Job, importance: Mapping[str, npt.NDArray[np.float32]], *, threads: int, progress: Progress
) -> Told:
    """Quantize `base` to `job.out`; with `dry_run` only the types are decided and nothing is written.

    Raises QuantlabError with the library's reason.
    """
    told = Told()
    params = lib.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = FILE_TYPES[job.type]
    params.allow_requantize = job.allow_requantize
    params.dry_run = job.dry_run
    # The arrays live until the call returns.
    imatrix = _imatrix(importance)
    overrides = _metadata(job.metadata)
    names = matching(job.skip, matrices(whole_header(base).tensors)) if job.skip else []
    keep = _keep(names, job.keep_type)
    params.imatrix = imatrix if importance else None
    params.kv_overrides = overrides
    params.tt_overrides = keep if names else None

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
        code = lib.llama_model_quantize(str(base).encode(), job.out.encode(), ctypes.byref(params))
    if code != 0:
        raise _failed(log, base, job, last=next(reversed(told.types), ""))
    return told


def seconds_per_weight(kind: str, *, weigh: bool) -> float:
    """The seconds that the library needs on one thread for one weight of `kind`, measured on a few rows.

    `weigh` gives it importances, without which it refuses the lowest types.
    """
    chunk = lib._lib.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    values = np.random.default_rng(0).standard_normal((_RATE_ROWS, _RATE_COLUMNS), np.float32)
    importance = np.ones(_RATE_COLUMNS, np.float32)
    out = np.empty(values.nbytes, np.uint8)
    arguments = (_TYPE_IDS[kind], values.ctypes.data, out.ctypes.data, 0, _RATE_ROWS, _RATE_COLUMNS)
    # The first call builds tables.
    chunk(*arguments, importance.ctypes.data if weigh else None)
    start, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < _RATE_SECONDS:
        chunk(*arguments, importance.ctypes.data if weigh else None)
        calls += 1
    return spent / (calls * values.size)


def _failed(log: Log, base: Path, job: Job, *, last: str) -> QuantlabError:
    """The library's reason; `last` is the tensor that it had in hand."""
    said, _, reason = log.last("failed to quantize").partition("failed to quantize:")
    reason = reason.strip() or log.last("error")
    if (misfit := _MISFIT.search(said)) and "fallback" in reason:
        return QuantlabError(
            f"{job.type} needs columns in multiples of {misfit[3]}: `{misfit[1]}` has {misfit[2]}",
            "take a type with blocks of 32, such as Q4_0",
        )
    if broken := _NOT_FINITE.search(reason):
        return QuantlabError(
            f"tensor `{broken[1]}` holds weights that are not finite (NaN or infinite) or is damaged",
            "get the model again; a model trained in BF16 may overflow in F16: convert it with `--outtype BF16`",
        )
    if "validation failed" in reason:
        return QuantlabError(
            f"tensor `{last}` holds weights too large for {job.type}",
            "get the model again; one trained in BF16 may need `--type BF16`",
        )
    if "iostream" in reason:
        free = shutil.disk_usage(Path(job.out).parent).free
        return QuantlabError(
            f"llama.cpp could not write `{Path(job.out).parent}` ({units.size(free)} free there)",
            "free some room, or choose another place with `--out`",
        )
    missing = "importance matrix" in reason or "imatrix" in reason
    hint = "use `--imatrix` with more text" if missing else "try another type, and look at it with `quantlab inspect`"
    return QuantlabError(f"llama.cpp does not quantize `{base.name}` to {job.type}: {reason}", hint)


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
