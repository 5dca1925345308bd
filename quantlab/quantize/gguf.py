"""Method gguf: a folder or a GGUF goes in, a checked GGUF of any type that llama.cpp writes comes out.

The work is done in a child process (gguf_child.py). The artifact appears under its name only when it has passed its
check; its record stands in its metadata (quantlab.*) and beside it in NAME.gguf.json.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import cast

import msgspec

from quantlab import __version__
from quantlab.core import hardware
from quantlab.core.artifact import is_shard, model_info, read_record, record_path, write_record
from quantlab.core.corpus import Corpus
from quantlab.core.errors import QuantlabError, UsageError, missing_extra
from quantlab.core.files import check_output, check_space, partial_of, sha256_file, write_text, written
from quantlab.core.model import ModelFile
from quantlab.core.progress import Progress
from quantlab.core.result import Notice, Outcome
from quantlab.quantize.gguf_facts import (
    details,
    loss_notices,
    measurements,
    metadata,
    prediction,
    record,
    runtime,
)
from quantlab.quantize.gguf_source import Source, least_bytes, read_source, vocabulary
from quantlab.quantize.gguf_work import Conversion, Done, Importance, Job, Work
from quantlab.quantize.spec import WIDE_TYPES, OutType, Prediction, QuantizeSpec
from quantlab.quantize.tensors import whole_header
from quantlab.runtime.worker import run_in_child

_CHILD = "quantlab.quantize.gguf_child:work"


def run(spec: QuantizeSpec, progress: Progress) -> Outcome:
    """Write, check and record the artifact of `spec`, which check_spec has seen.

    Raises QuantlabError before any work where the output exists, the disk is too small or the input is already
    quantized; an artifact that fails its check is kept as NAME.gguf.rejected.
    """
    started = time.perf_counter()
    _require_library()
    out = Path(spec.out)
    source = read_source(spec)
    imatrix_path = out.with_suffix(".imatrix.gguf")
    _check_outputs(spec, source, [out, imatrix_path] if spec.imatrix else [out])
    converted = _converted_before(spec, source)
    check_space(out.parent, least_bytes(spec, source, converts=_converts(spec, source, converted)))
    parts, notices = _calibration(spec, source) if spec.imatrix else ([], [])
    threads = spec.threads or hardware.usable_cores()
    with contextlib.ExitStack() as files:
        temporary = files.enter_context(written(out))
        base, how = _base(spec, source, temporary, converted, files)
        work = Work(
            base=str(base),
            threads=threads,
            conversion=_conversion(spec, source) if how == "converted" else None,
            importance=_importance(spec, parts, files.enter_context(written(imatrix_path))) if spec.imatrix else None,
            job=_job(spec, source, temporary) if base != temporary else None,
        )
        done = _in_child(work, progress)
        if done.fault:
            raise _reject(temporary, out, done.fault)
        # A record that outlives its artifact would speak of another.
        record_path(out).unlink(missing_ok=True)
    write_record(out, record(spec, done))
    model = ModelFile(str(out.resolve()), out.stem, spec.out, done.sha256, spec.model.revision, spec.model.note)
    info = model_info(model)
    return Outcome(
        label=out.stem,
        model=info,
        runtime=runtime(spec, threads),
        measurements=measurements(info, time.perf_counter() - started, done),
        warnings=[*notices, *done.notices, *loss_notices(spec, source, done)],
        details=details(spec, info, done, out, how),
    )


def dry_run(spec: QuantizeSpec, progress: Progress) -> Prediction:
    """What `run` would write and need. llama.cpp itself chooses the types, on a header without weights for a folder.

    Raises what `run` raises for the input, and where the disk cannot hold it; writes nothing.
    """
    _require_library()
    source = read_source(spec)
    threads = spec.threads or hardware.usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "header.gguf" if source.is_folder else source.path
        conversion = _conversion(spec, source) if source.is_folder else None
        if spec.converter is not None:
            raise UsageError("`--dry-run` cannot plan for `--converter`", "leave out one of them")
        done = _in_child(Work(str(base), threads, conversion, job=_job(spec, source, base, dry_run=True)), progress)
        header = whole_header(base)
    converts = _converts(spec, source, _converted_before(spec, source))
    predicted = prediction(spec, source, header, done, converts=converts)
    check_space(Path(spec.out).parent, predicted.disk_bytes)
    return predicted


def _check_outputs(spec: QuantizeSpec, source: Source, outputs: list[Path]) -> None:
    out = outputs[0]
    if out.resolve() in [file.resolve() for file in source.files]:
        raise UsageError(f"`{out}` is the input itself", "give the artifact another name with `--out`")
    if is_shard(out):
        raise UsageError(f"`{out.name}` is the name of one file of several", "give a name without `-0000N-of-0000M`")
    for path in outputs:
        check_output(path, force=spec.force)
    if not spec.force:
        # A record that lost its artifact may go; another's file may not.
        read_record(out)


def _require_library() -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        raise missing_extra("llama-cpp-python", "gguf")


def _in_child(work: Work, progress: Progress) -> Done:
    return msgspec.convert(run_in_child(_CHILD, msgspec.to_builtins(work), progress), Done)


def _calibration(spec: QuantizeSpec, source: Source) -> tuple[list[tuple[Corpus, float]], list[Notice]]:
    """The weighted calibration texts, read before any work, and what must be said of them."""
    from quantlab.quantize.calibration import load_parts
    from quantlab.quantize.chinese import language_notices, speaks_chinese

    chinese = speaks_chinese(spec.model.label, vocabulary(source))
    parts = load_parts(spec, chinese=chinese)
    notices = language_notices(spec.model.label, parts, chinese=chinese)
    return parts, [*notices, *(note for corpus, _ in parts for note in corpus.notes)]


def _base(
    spec: QuantizeSpec, source: Source, temporary: Path, converted: Path | None, files: contextlib.ExitStack
) -> tuple[Path, str]:
    """The GGUF that is quantized: the input itself, one converted before, or a temporary file to convert to."""
    if not source.is_folder:
        return source.path, "given"
    if spec.type in WIDE_TYPES:
        return temporary, "converted"
    if converted is not None:
        return converted, "reused"
    # Named so that the next run removes it where this one is killed.
    base = partial_of(Path(spec.out), "base")
    files.callback(base.unlink, missing_ok=True)
    return base, "converted"


def _converted_before(spec: QuantizeSpec, source: Source) -> Path | None:
    """The conversion of a folder that an earlier run left beside the output, where it can be used again."""
    if not source.is_folder or spec.type in WIDE_TYPES:
        return None
    kept = Path(spec.out).parent / f"{spec.model.label}-{spec.outtype}.gguf"
    return kept if _is_conversion(kept, spec) else None


def _converts(spec: QuantizeSpec, source: Source, converted: Path | None) -> bool:
    """Whether the run needs room for a conversion beside its output."""
    return source.is_folder and spec.type not in WIDE_TYPES and converted is None


def _is_conversion(path: Path, spec: QuantizeSpec) -> bool:
    """Whether `path` is an intact conversion of this very model, made in the way that is asked now."""
    if not path.is_file():
        return False
    try:
        found = read_record(path)
    except QuantlabError:
        return False
    # A converter of the user may have changed, ours changes with the version.
    return (
        found is not None
        and spec.converter is None
        and found.parent_sha256 == spec.model.sha256
        and (found.quantlab, found.asked.get("converter")) == (__version__, None)
        and found.asked.get("type") == spec.outtype
        and found.sha256 == sha256_file(path)
    )


def _conversion(spec: QuantizeSpec, source: Source) -> Conversion:
    kind = spec.type if spec.type in WIDE_TYPES else spec.outtype
    # The folder of a Hub model is named by a commit.
    facts = {"general.name": spec.model.label, **metadata(spec, kind=kind)}
    return Conversion(str(source.path), cast(OutType, kind), spec.converter, facts)


def _importance(spec: QuantizeSpec, parts: list[tuple[Corpus, float]], out: Path) -> Importance:
    return Importance(parts, spec.calib_samples, spec.calib_length, spec.seed, str(out))


def _job(spec: QuantizeSpec, source: Source, out: Path, *, dry_run: bool = False) -> Job:
    facts = source.history | metadata(spec, kind=spec.type)
    if spec.imatrix:
        facts["quantize.imatrix.file"] = Path(spec.out).with_suffix(".imatrix.gguf").name
    return Job(str(out), spec.type, spec.skip, source.wide_type, spec.allow_requantize, facts, spec.imatrix, dry_run)


def _reject(temporary: Path, out: Path, fault: str) -> QuantlabError:
    """Keep an artifact that failed its check where nobody takes it for one, with the reason beside it."""
    rejected = out.with_name(out.name + ".rejected")
    fault = fault.replace(temporary.name, out.name)
    temporary.replace(rejected)
    # Where the disk is full, the error alone tells the reason.
    with contextlib.suppress(QuantlabError):
        write_text(rejected.with_name(rejected.name + ".txt"), fault + "\n")
    return QuantlabError(
        f"the artifact failed its check: {fault}", f"it is kept as `{rejected}`; try another type, or check the model"
    )
