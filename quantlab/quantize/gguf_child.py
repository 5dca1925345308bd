"""The child's side of a gguf run: convert, importance matrix, quantize, check, each in this one process.

Its peak memory is what the run needs, and a crash of llama.cpp ends it and not the command.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from quantlab.core import hardware
from quantlab.core.corpus import WIKITEXT, load_text
from quantlab.core.errors import QuantlabError
from quantlab.core.files import sha256_file
from quantlab.core.gguf_file import GGUFHeader
from quantlab.core.result import Notice
from quantlab.quantize import calibration, imatrix
from quantlab.quantize.artifact_check import find_fault
from quantlab.quantize.conversations import Template
from quantlab.quantize.gguf_facts import label_notices
from quantlab.quantize.gguf_work import Conversion, Done, Importance, Job, Work
from quantlab.quantize.llama_model import LlamaModel
from quantlab.quantize.llama_quantize import Told, quantize, seconds_per_weight
from quantlab.quantize.spec import WIDE_TYPES
from quantlab.quantize.tensors import HEADS, head_is_copy, is_quantized, misfit, whole_header
from quantlab.runtime.worker import Channel

_TOLERATED_DIFFERENCE = 0.01


def work(spec: Any, channel: Channel) -> Done:
    """Do a `Work` (see quantlab.runtime.worker)."""
    todo, done = msgspec.convert(spec, Work), Done(floor_bytes=hardware.process_bytes())
    base = Path(todo.base)
    if todo.job is not None and todo.job.dry_run:
        _predict(todo, todo.job, base, done, channel)
        return done
    if todo.conversion is not None:
        with _Stage(done, "convert"):
            _convert(todo.conversion, base, channel)
        with _Stage(done, "tokenizer"):
            _check_tokens(Path(todo.conversion.folder), base, done, channel)
    if todo.job is not None:
        _quantize(todo, todo.job, base, done, channel)
    with _Stage(done, "check"):
        _check(todo, base, done, channel)
    done.peak_process_bytes = hardware.peak_process_bytes()
    return done


def _check(todo: Work, base: Path, done: Done, channel: Channel) -> None:
    """Look for faults of the artifact, and hash it meanwhile on another core."""
    channel.progress("check", 0, 1)
    artifact = Path(todo.job.out) if todo.job else base
    with ThreadPoolExecutor(1) as pool:
        sha256 = pool.submit(sha256_file, artifact)
        parent = whole_header(base)
        own = whole_header(artifact) if todo.job else parent
        if todo.job is not None:
            _require_quantized(todo.job, (tensor.type for tensor in own.tensors), done)
            done.notices += label_notices(todo.job.type, own.tensors, done.fallbacks)
        _check_head(todo, base, parent, done)
        done.fault = done.fault or find_fault(artifact, own, parent)
        done.sha256 = sha256.result()
    channel.progress("check", 1, 1)


def _require_quantized(job: Job, kinds: Iterable[str], done: Done) -> None:
    if job.type in WIDE_TYPES or any(map(is_quantized, kinds)):
        return
    why = misfit((fallback.columns for fallback in done.fallbacks), 32) if done.fallbacks else "all are skipped"
    raise QuantlabError(
        f"no matrix can be stored as {job.type}: {why}", "leave the model in 16 bits with `--type F16` or `--type BF16`"
    )


def _quantize(todo: Work, job: Job, base: Path, done: Done, channel: Channel) -> None:
    importance: dict[str, npt.NDArray[np.float32]] = {}
    if todo.importance is not None:
        with _Stage(done, "imatrix"):
            importance = _importance(todo.importance, base, todo.threads, done, channel)
        assert done.calibration is not None
        job = msgspec.structs.replace(job, metadata=job.metadata | _calibration_metadata(done.calibration))
    with _Stage(done, "quantize"):
        told = quantize(base, job, importance, threads=todo.threads, progress=channel.progress)
    done.fallbacks, done.types = told.fallbacks, told.types
    done.notices += _importance_notices(told, importance)


def _check_head(todo: Work, base: Path, parent: GGUFHeader, done: Done) -> None:
    """A tied head stored twice: the fault of a conversion, worth a word of a file that came so."""
    if any(tensor.name == HEADS[1] for tensor in parent.tensors) and head_is_copy(base):
        message = "the output matrix repeats the token embedding: a tied head is stored twice"
        if todo.conversion is not None:
            done.fault = message
        else:
            done.notices.append(Notice("tied-head-duplicated", message, "convert the original again"))


def _predict(todo: Work, job: Job, base: Path, done: Done, channel: Channel) -> None:
    """The types that the library would choose, and the seconds that it would take."""
    if todo.conversion is not None:
        _convert(todo.conversion, base, channel, header_only=True)
    told = quantize(base, job, {}, threads=todo.threads, progress=channel.progress)
    done.fallbacks, done.types = told.fallbacks, told.types
    _require_quantized(job, told.types.values(), done)
    kinds: dict[str, int] = {}
    for tensor in whole_header(base).tensors:
        if (kind := told.types[tensor.name]) != tensor.type:
            kinds[kind] = kinds.get(kind, 0) + tensor.params
    speeds = {kind: seconds_per_weight(kind, weigh=job.weigh) for kind in kinds}
    done.quantize_s = sum(n * speeds[kind] for kind, n in kinds.items()) / todo.threads


class _Stage:
    """Adds the seconds of a block to the stages."""

    def __init__(self, done: Done, name: str) -> None:
        self._done, self._name = done, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._done.stages_s[self._name] = time.perf_counter() - self._start


def _convert(conversion: Conversion, base: Path, channel: Channel, *, header_only: bool = False) -> None:
    from quantlab.quantize.convert import convert
    from quantlab.quantize.convert.external import convert_with

    folder = Path(conversion.folder)
    if conversion.converter is not None:
        script = Path(conversion.converter)
        convert_with(script, folder, base, outtype=conversion.outtype, progress=channel.progress)
        return
    convert(
        folder,
        base,
        outtype=conversion.outtype,
        extra_metadata=conversion.metadata,
        header_only=header_only,
        progress=channel.progress,
    )


def _check_tokens(folder: Path, base: Path, done: Done, channel: Channel) -> None:
    """Compare with the folder's tokenizer on a probe and on WikiText, or the built-in text where there is none.

    Of the text only telling lines: all of WikiText takes longer than a conversion. Raises QuantlabError where more
    than 1% of the ids differ.
    """
    from quantlab.quantize.convert.token_check import PROBE, check_tokens, telling_lines

    channel.progress("compare tokenizers", 0, 1)
    text = load_text(WIKITEXT, "evaluation", offline=True)
    lines = telling_lines(text.raw)
    check = check_tokens(folder, base, [PROBE, lines])
    channel.progress("compare tokenizers", 1, 1)
    part = f"{text.name}: every line with a new character, {len(lines)} of {len(text.raw)} characters"
    done.tokens = {"texts": ["probe", part], **msgspec.to_builtins(check)}
    places = ", ".join(f"`{difference.around}`" for difference in check.differences[:3])
    differs = (
        f"llama.cpp's tokens differ from the folder's tokenizer at {check.n_different} of {check.n_ids} ids: "
        f"around {places}"
    )
    if check.n_different > _TOLERATED_DIFFERENCE * check.n_ids:
        raise QuantlabError(differs, "tokenizer.json belongs to another model, or llama.cpp has no such tokenizer")
    if not check.n_ids:
        done.notices.append(
            Notice("tokenizer-unchecked", "the folder has no tokenizer.json to compare the converted one with")
        )
    elif check.n_different:
        done.notices.append(Notice("tokenizer-differs", differs, "compare models on token ids of one tokenizer"))
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
        template = Template(source, model.special_text("bos"), model.special_text("eos")) if source else None
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
    sets = [corpus.name for corpus, _ in todo.parts]
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
