"""Method gguf: a folder or a GGUF goes in, a checked GGUF of any type that llama.cpp writes comes out.

The work is done in a child process (gguf_child.py). The artifact appears under its name only when it has passed its
check; its record stands in its metadata (quantlab.*) and beside it in NAME.gguf.json.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quantlab import __version__
from quantlab.core import hardware
from quantlab.core.artifact import (
    Record,
    gguf_shards,
    model_info,
    read_record,
    record_path,
    safetensors_files,
    safetensors_header,
    write_record,
)
from quantlab.core.errors import QuantlabError, UsageError, missing_extra
from quantlab.core.files import PARTIAL_SUFFIX, check_output, check_space, sha256_file, write_text, written
from quantlab.core.gguf_file import TensorInfo, read_header
from quantlab.core.model import ModelFile
from quantlab.core.progress import Progress
from quantlab.core.result import Measurement, ModelInfo, Notice, Outcome, RuntimeInfo
from quantlab.quantize.calibration import Part, language_notices, load_parts, speaks_chinese
from quantlab.quantize.spec import WIDE_TYPES, QuantizeSpec
from quantlab.runtime.worker import run_in_child

SMALL_PARAMS = 1_000_000_000
_CHILD = "quantlab.quantize.gguf_child:work"


class Source(msgspec.Struct, frozen=True):
    """What is quantized: a folder to convert, or a GGUF. `params` counts weights, `size_bytes` its weight files."""

    path: Path
    is_folder: bool
    params: int
    size_bytes: int
    # Names of the matrices, as GGUF calls them; empty where only a foreign converter knows them.
    matrices: list[str]
    quantized_types: list[str]
    vocabulary: list[str]


def run(spec: QuantizeSpec, progress: Progress) -> Outcome:
    """Write, check and record the artifact of `spec` (already checked by check_spec).

    Raises QuantlabError before any work where the output exists, the disk is too small or the input is already
    quantized; an artifact that fails its check is kept as NAME.gguf.rejected.
    """
    started = time.perf_counter()
    out = Path(spec.out)
    source = read_source(spec)
    imatrix_path = out.with_suffix(".imatrix.gguf")
    for path in (out, imatrix_path) if spec.imatrix else (out,):
        check_output(path, force=spec.force)
    check_space(out.parent, _least_bytes(spec, source))
    parts, notices = _calibration_parts(spec, source)
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(written(out))
        imatrix = stack.enter_context(written(imatrix_path)) if spec.imatrix else None
        base, how = _base(spec, source, temporary, stack)
        done = run_child(_work(spec, source, base, how, temporary, parts, imatrix), progress)
        if done.fault:
            raise _reject(temporary, out, done.fault)
        sha256 = sha256_file(temporary)
        # A record that outlives its artifact would speak of another.
        record_path(out).unlink(missing_ok=True)
    write_record(out, _record(spec, sha256, done))
    info = model_info(ModelFile(str(out.resolve()), out.stem, spec.out, sha256, spec.model.revision, spec.model.note))
    content = content_notices(spec, source, info, done, out)
    return Outcome(
        label=out.stem,
        model=info,
        runtime=_runtime(spec),
        measurements=_measurements(info, time.perf_counter() - started, done),
        warnings=[*notices, *done.notices, *content],
        details=_details(spec, info, done, out, how),
    )


def run_child(work: Work, progress: Progress) -> Done:
    """Do the work in a child process."""
    return msgspec.convert(run_in_child(_CHILD, msgspec.to_builtins(work), progress), Done)
