"""The torch methods (awq, gptq, fp8, int8, rtn): a folder goes in, a checked one for transformers and vLLM comes out.

What can be known beforehand is checked beforehand (torch_plan.py). The engine works in a process of its own, in its
own interpreter where it needs one; a second process loads what it saved and compares it with the model that the
engine had in memory and with the parent. Only then the artifact gets its name; one that fails is kept as
NAME.rejected, and one whose check was interrupted is checked by the next run (torch_state.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

import msgspec

from quantlab.core import hardware
from quantlab.core.artifact import content_sha256, model_info, write_record
from quantlab.core.corpus import Corpus
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.files import flush_folder, write_text, written_folder
from quantlab.core.model import ModelFile, file_label
from quantlab.core.progress import Progress
from quantlab.core.result import Notice, Outcome
from quantlab.quantize import torch_facts as facts
from quantlab.quantize import torch_markers, torch_state
from quantlab.quantize.calibration import load_parts
from quantlab.quantize.chinese import language_notices, speaks_chinese
from quantlab.quantize.engines import ENGINES, Engine
from quantlab.quantize.engines.environment import interpreter
from quantlab.quantize.methods import check_place
from quantlab.quantize.spec import Prediction, QuantizeSpec
from quantlab.quantize.torch_leak import leak
from quantlab.quantize.torch_plan import Plan, plan
from quantlab.quantize.torch_source import TorchSource, prepare, read_source, vocabulary
from quantlab.quantize.torch_spec import calibrates, weights
from quantlab.quantize.torch_work import Checked, CheckJob, EngineDone, EngineJob, Samples
from quantlab.runtime.worker import run_in_child

_CHECK = "quantlab.quantize.torch_check:work"
# What tells in an artifact that failed its check why.
_REASON = "REASON.txt"
# The package that transformers loads an engine's format with: the classic formats with gptqmodel.
_LOADER = {"llmcompressor": "compressed_tensors"}
_CLASSIC_LOADER = "gptqmodel"


def run(spec: QuantizeSpec, progress: Progress) -> Outcome:
    """Write, check and record the artifact of `spec`, which check_spec has seen.

    Raises QuantlabError before any work where the output exists, memory or disk are too small, a layer does not fit
    the group, or the input is no plain causal language model.
    """
    started = time.perf_counter()
    engine, out = ENGINES[spec.engine or ""], Path(spec.out)
    _check_output(spec, out)
    python, checker = _python(engine), _checker(engine)
    with contextlib.ExitStack() as files:
        source = read_source(spec)
        planned = plan(source, spec)
        parts, notices = _calibration(spec, source) if calibrates(spec) else ([], [])
        wanted = _identity(spec, engine, planned, parts)
        state = files.enter_context(torch_state.kept(out, wanted, replace=spec.force))
        prepare(source, progress)
        # Straight from the state: at any moment what was made lies in it or under its name.
        folder = files.enter_context(written_folder(out, replace=spec.force, kept=torch_markers.artifact(state)))
        if (before := torch_markers.read_quantized(state)) is None:
            job = _job(spec, source, planned, parts, state, resumes=engine.resumes)
            said = run_in_child(engine.call, msgspec.to_builtins(job), progress, python=python)
            spent_s = time.perf_counter() - started
            quantized = torch_markers.write_quantized(state, msgspec.convert(said, EngineDone), spent_s)
        else:
            quantized = before
            # The duration is that of both runs.
            started -= before.duration_s
        try:
            checked = _check(spec, source, progress, state=state, python=checker)
            made = facts.Made(spec, engine, source, planned, quantized.done, checked)
            sha256 = "" if checked.fault else _record(folder, made)
        except QuantlabError as error:
            message = f"the artifact could not be checked and recorded: {error.message}"
            raise QuantlabError(message, error.hint) from error
        if checked.fault:
            torch_markers.forget(state)
            raise _reject(folder, out, checked.fault)
    model = ModelFile(str(out.resolve()), file_label(out), spec.out, sha256, spec.model.revision, source.note)
    info = model_info(model)
    return Outcome(
        label=model.label,
        model=info,
        runtime=facts.runtime(made),
        measurements=facts.measurements(made, info, time.perf_counter() - started),
        warnings=[
            *facts.resume_notices(made, only_checked=before is not None),
            *notices,
            *planned.warnings,
            *made.done.notices,
            *checked.notices,
            *facts.loss_notices(made),
        ],
        details=facts.details(made),
    )


def dry_run(spec: QuantizeSpec, progress: Progress) -> Prediction:
    """What `run` would write and need, from headers alone; raises what `run` raises of input, texts and room."""
    source = read_source(spec)
    if calibrates(spec):
        _calibration(spec, source)
    predicted = plan(source, spec).prediction
    try:
        interpreter(ENGINES[spec.engine or ""])
    except QuantlabError as error:
        # What is planned for another machine needs no engine here.
        missing = Notice("engine-missing", error.message, error.hint)
        return msgspec.structs.replace(predicted, warnings=[*predicted.warnings, missing])
    return predicted


def check(spec: QuantizeSpec) -> None:
    """Raise what `run` would raise of `spec` before any work: engine, input, shapes, memory, disk and texts."""
    engine = ENGINES[spec.engine or ""]
    interpreter(engine)
    _checker(engine)
    source = read_source(spec)
    planned = plan(source, spec)
    parts, _ = _calibration(spec, source) if calibrates(spec) else ([], [])
    if not spec.force:
        torch_state.check(Path(spec.out), _identity(spec, engine, planned, parts))


def _check_output(spec: QuantizeSpec, out: Path) -> None:
    model = Path(spec.model.path).resolve()
    if out.resolve() in (model, *model.parents):
        what = "is" if out.resolve() == model else "holds"
        raise UsageError(f"`{out}` {what} the input itself", "give the artifact another name with `--out`")
    check_place(spec)


def _python(engine: Engine) -> Path | None:
    """The interpreter of a child; None for this one, whose whole search path the child then has."""
    found = interpreter(engine)
    return None if found == Path(sys.executable) else found


def _checker(engine: Engine) -> Path | None:
    """The interpreter of the check: this one where it loads the format, as users will; else that of the engine.

    The transformers of an engine that lives alone is too old for the check: that of gptqmodel reads its format.
    """
    needed = ("torch", "transformers", _LOADER.get(engine.name, _CLASSIC_LOADER))
    if all(importlib.util.find_spec(name) for name in needed):
        return None
    return _python(ENGINES[_CLASSIC_LOADER] if engine.alone else engine)


def _calibration(spec: QuantizeSpec, source: TorchSource) -> tuple[list[tuple[Corpus, float]], list[Notice]]:
    """The weighted calibration texts, read before any work, and what must be said of them."""
    chinese = speaks_chinese(spec.model.label, vocabulary(source))
    parts = load_parts(spec, chinese=chinese)
    notices = language_notices(spec.model.label, parts, chinese=chinese)
    return parts, [*notices, *(note for corpus, _ in parts for note in corpus.notes)]


def _identity(
    spec: QuantizeSpec, engine: Engine, planned: Plan, parts: list[tuple[Corpus, float]]
) -> torch_state.Identity:
    """What the state of this quantization belongs to."""
    settings = {
        "method": spec.method,
        **(msgspec.to_builtins(weights(spec)) or {}),
        "scheme": spec.scheme,
        "layers_in_16_bits": planned.keep,
        "device": planned.device,
        "dtype": planned.dtype,
    }
    calibration = {
        "texts": [[corpus.sha256, weight] for corpus, weight in parts],
        "samples": spec.calib_samples,
        "length": spec.calib_length,
        "seed": spec.seed,
    }
    return torch_state.Identity(spec.model.sha256, calibration, settings, {"engine": engine.name, **engine.pins})


def _job(
    spec: QuantizeSpec,
    source: TorchSource,
    planned: Plan,
    parts: list[tuple[Corpus, float]],
    state: Path,
    *,
    resumes: bool,
) -> EngineJob:
    return EngineJob(
        method=spec.method,
        folder=str(source.folder),
        out=str(torch_markers.artifact(state)),
        probe=str(torch_markers.probe(state)),
        keep=planned.keep,
        device=planned.device,
        dtype=planned.dtype,
        threads=planned.threads,
        seed=spec.seed,
        weights=weights(spec),
        scheme=spec.scheme,
        calibration=Samples(parts, spec.calib_samples, spec.calib_length, spec.seed) if parts else None,
        state=str(state) if resumes else None,
    )


def _check(spec: QuantizeSpec, source: TorchSource, progress: Progress, *, state: Path, python: Path | None) -> Checked:
    """Load the artifact in a fresh process."""
    job = CheckJob(
        method=spec.method,
        folder=str(source.folder),
        artifact=str(torch_markers.artifact(state)),
        probe=str(torch_markers.probe(state)),
        device=spec.device,
        threads=spec.threads or hardware.usable_cores(),
        weights=weights(spec),
    )
    return msgspec.convert(run_in_child(_CHECK, msgspec.to_builtins(job), progress, python=python), Checked)


def _record(folder: Path, made: facts.Made) -> str:
    """Write card and record beside the weights; returns the sha256 of the artifact. A path in them is a fault."""
    sha256 = content_sha256(folder)
    facts.write_card(folder, made)
    write_record(folder, facts.record(made, sha256))
    made.checked.fault = leak(folder, made.source.folder)
    return sha256


def _reject(folder: Path, out: Path, fault: str) -> QuantlabError:
    """Keep an artifact that failed its check where nobody takes it for one, with the reason in it."""
    # Where the disk is full, the error alone tells the reason.
    with contextlib.suppress(OSError, QuantlabError):
        flush_folder(folder)
        write_text(folder / _REASON, fault + "\n")
    kept = out.with_name(f"{out.name}.rejected")
    if (kept / _REASON).is_file():
        shutil.rmtree(kept)
    elif kept.exists():
        # Somebody else's.
        kept = out.with_name(f"{out.name}.rejected.{os.getpid()}")
    folder.rename(kept)
    return QuantlabError(
        f"the artifact failed its check: {fault}",
        f"it is kept as `{kept}`; try another `--engine`, more calibration text, or check the model",
    )
