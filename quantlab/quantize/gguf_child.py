"""The child's side of a gguf run: convert, importance matrix, quantize, check, each in this one process.

Its peak memory is what the run needs, and a crash of llama.cpp ends it and not the command.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from quantlab.core import hardware
from quantlab.core.corpus import load_text
from quantlab.core.result import Notice
from quantlab.quantize import calibration, imatrix
from quantlab.quantize.artifact_check import find_fault
from quantlab.quantize.llama_model import LlamaModel
from quantlab.quantize.llama_quantize import Fallback, Job, Told, quantize
from quantlab.runtime.worker import Channel

_TOLERATED_DIFFERENCE = 0.01


class Conversion(msgspec.Struct, frozen=True):
    """A folder to convert to `Work.base` first."""

    folder: str
    outtype: Literal["F16", "BF16", "F32"]
    converter: str | None
    metadata: dict[str, str]


class Importance(msgspec.Struct, frozen=True):
    """An importance matrix to compute from `parts` and to write to `out`."""

    parts: list[calibration.Part]
    samples: int | None
    length: int
    seed: int
    out: str


class Work(msgspec.Struct, frozen=True):
    """All that the child does. `job` None: the converted base is the artifact."""

    base: str
    threads: int
    conversion: Conversion | None = None
    importance: Importance | None = None
    job: Job | None = None


class Done(msgspec.Struct):
    """What the child did. `fault`: why the artifact must not be used."""

    peak_process_bytes: int = 0
    fault: str | None = None
    fallbacks: list[Fallback] = []
    types: dict[str, str] = {}
    stages_s: dict[str, float] = {}
    calibration: dict[str, Any] | None = None
    tokens: dict[str, Any] | None = None
    notices: list[Notice] = []


def work(spec: Any, channel: Channel) -> Done:
    """Do a `Work` (see quantlab.runtime.worker)."""
    todo, done = msgspec.convert(spec, Work), Done()
    base = Path(todo.base)
    if todo.conversion is not None:
        with _Stage(done, "convert"):
            _convert(todo.conversion, base, done, channel)
    if todo.job is not None:
        importance: dict[str, npt.NDArray[np.float32]] = {}
        job = todo.job
        if todo.importance is not None:
            with _Stage(done, "imatrix"):
                importance = _importance(todo.importance, base, todo.threads, done, channel)
            assert done.calibration is not None
            job = msgspec.structs.replace(job, metadata=job.metadata | _calibration_metadata(done.calibration))
        with _Stage(done, "quantize"):
            told = quantize(job, importance, channel.progress)
        done.fallbacks, done.types = told.fallbacks, told.types
        done.notices += _importance_notices(told, importance)
    if todo.job is None or not todo.job.dry_run:
        channel.progress("check", 0, 1)
        artifact = Path(todo.job.out) if todo.job else base
        with _Stage(done, "check"):
            done.fault = done.fault or find_fault(artifact, base, threads=todo.threads)
        channel.progress("check", 1, 1)
    done.peak_process_bytes = hardware.peak_process_bytes()
    return done


class _Stage:
    """Adds the seconds of a block to the stages."""

    def __init__(self, done: Done, name: str) -> None:
        self._done, self._name = done, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._done.stages_s[self._name] = time.perf_counter() - self._start


def _convert(conversion: Conversion, base: Path, done: Done, channel: Channel) -> None:
    from quantlab.quantize.convert import convert
    from quantlab.quantize.convert.external import convert_with

    folder = Path(conversion.folder)
    if conversion.converter is not None:
        script = Path(conversion.converter)
        convert_with(script, folder, base, outtype=conversion.outtype, progress=channel.progress)
    else:
        convert(
            folder,
            base,
            outtype=conversion.outtype,
            extra_metadata=conversion.metadata,
            progress=channel.progress,
        )
    _check_tokens(folder, base, done, channel)


def _check_tokens(folder: Path, base: Path, done: Done, channel: Channel) -> None:
    """Compare with the folder's tokenizer on a probe and on WikiText, or the built-in text where there is none."""
    from quantlab.quantize.convert.token_check import PROBE, check_tokens

    channel.progress("compare tokenizers", 0, 1)
    text = load_text("wikitext2", "evaluation", offline=True)
    check = check_tokens(folder, base, [PROBE, text.raw])
    channel.progress("compare tokenizers", 1, 1)
    done.tokens = {"texts": ["probe", text.name], **msgspec.to_builtins(check)}
    if check.n_different > _TOLERATED_DIFFERENCE * check.n_ids:
        done.fault = f"its tokenizer differs from the folder's at {check.n_different} of {check.n_ids} ids"
    if not check.n_ids:
        done.notices.append(
            Notice("tokenizer-unchecked", f"`{folder.name}` has no tokenizer.json to compare the converted one with")
        )
    elif check.n_different:
        places = ", ".join(f"`{difference.around}`" for difference in check.differences[:3])
        done.notices.append(
            Notice(
                "tokenizer-differs",
                f"llama.cpp's tokens differ from the folder's tokenizer at {check.n_different} of {check.n_ids} ids: "
                f"around {places}",
                "compare models on token ids of one tokenizer",
            )
        )
    if check.bos != check.expected_bos:
        done.notices.append(
            Notice(
                "bos-differs",
                f"llama.cpp puts {check.bos} BOS before a text, the folder's tokenizer {check.expected_bos}",
            )
        )


def _importance(
    todo: Importance, base: Path, threads: int, done: Done, channel: Channel
) -> dict[str, npt.NDArray[np.float32]]:
    with LlamaModel(base) as model:
        source = model.chat_template
        template = (
            calibration.Template(source, model.special_text("bos"), model.special_text("eos")) if source else None
        )
        built = calibration.build(
            todo.parts,
            lambda text, special: model.encode(text, special=special),
            samples=todo.samples,
            length=todo.length,
            seed=todo.seed,
            bos=model.bos,
            template=template,
        )
    entries = imatrix.collect(base, built.windows, threads=threads, progress=channel.progress)
    sets = [part.corpus.name for part in todo.parts]
    imatrix.write(Path(todo.out), entries, datasets=sets, windows=len(built.windows), n_ctx=todo.length)
    done.calibration = built.record | {"entries": len(entries)}
    done.notices += built.notices
    if partial := [name for name, entry in entries.items() if not entry.counts.all()]:
        done.notices.append(
            Notice(
                "imatrix-partial",
                f"some experts of {len(partial)} tensors met no calibration token (first: `{partial[0]}`)",
                "calibrate on more, and more varied, text",
            )
        )
    return {name: entry.mean() for name, entry in entries.items()}


def _calibration_metadata(record: dict[str, Any]) -> dict[str, str | int]:
    names = ", ".join(entry["name"] for entry in record["sets"])
    return {
        "quantize.imatrix.dataset": names,
        "quantize.imatrix.entries_count": cast(int, record["entries"]),
        "quantize.imatrix.chunks_count": cast(int, record["samples"]),
        "quantlab.calibration_sha256": cast(str, record["sha256"]),
    }


def _importance_notices(told: Told, importance: dict[str, npt.NDArray[np.float32]]) -> list[Notice]:
    # The embedding is looked up, not multiplied, and a tied head shares it: no matrix has entries for them.
    missing = [name for name in told.without_importance if name not in ("token_embd.weight", "output.weight")]
    if not importance or not missing:
        return []
    return [
        Notice(
            "imatrix-missing",
            f"{len(missing)} tensors were quantized without importance (first: `{missing[0]}`)",
            "the calibration text never reached them",
        )
    ]
