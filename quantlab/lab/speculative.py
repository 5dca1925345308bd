"""From the options of `quantlab speculative` to its step: what drafts is found, or made, here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from quantlab.bench.spec import parse_sizes
from quantlab.bench.speculative.heads import HeadsSpec
from quantlab.bench.speculative.spec import DraftKind, DraftSource, SpeculativeSpec
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.files import sha256_file, user_path
from quantlab.core.model import ModelFile, ModelRef
from quantlab.lab.execute import Lab, Step, make_spec
from quantlab.lab.runtimes import as_gguf, asked
from quantlab.lab.steps import ARTIFACTS, loadable
from quantlab.quantize.spec import file_type
from quantlab.runtime.torch.heads_file import checked_record

Options = dict[str, Any]
_HEADS = ("medusa", "eagle")
_OF_NGRAM = ("prompt_lookup_max", "prompt_lookup_min")
_OF_FILES = ("k", "adaptive", "n_ctx", "temperature", *_OF_NGRAM)


class Asked(NamedTuple):
    """One `--draft`, as it was written: `copy` is of the target itself, `value` a model, a type or a file."""

    kind: DraftKind
    value: str
    text: str
    copy: bool = False


def parse_draft(text: str) -> Asked:
    """MODEL, `self:TYPE`, `ngram`, `medusa:PATH` or `eagle:PATH`."""
    kind, colon, value = text.partition(":")
    if text == "ngram":
        return Asked("ngram", "", text)
    if kind == "self" and colon:
        return Asked("draft", file_type(value), text, copy=True)
    if kind in _HEADS and colon:
        if not value:
            raise UsageError(f"`--draft {text}` names no file", f"give the file that was trained: `{kind}:PATH`")
        return Asked(cast(DraftKind, kind), value, text)
    if not text.strip():
        raise UsageError("`--draft` is empty", "give a model, `self:Q4_0`, `ngram`, `medusa:PATH` or `eagle:PATH`")
    return Asked("draft", text, text)


def drafts_of(options: Options) -> list[Asked]:
    """What `draft` of the options names: one text or several."""
    given = options.get("draft") or []
    return [parse_draft(str(text)) for text in ([given] if isinstance(given, str) else given)]


def speculative_step(model: ModelFile, drafts: list[DraftSource], options: Options) -> Step:
    """The step of a target and its drafts as files; numbers may be comma lists."""
    options = {name: value for name, value in options.items() if value is not None and name != "draft"}
    _check_heeded(model, drafts, options)
    for name, flag in (("k", "-k"), ("batch", "--batch")):
        # A recipe may have a single number.
        if isinstance(options.get(name), str | int):
            options[name] = parse_sizes(str(options[name]), flag)
    if isinstance(options.get("categories"), str):
        options["categories"] = [name.strip() for name in options["categories"].split(",")]
    asked(options)
    paths = [file.path for file in (model, *(d.model for d in drafts)) if file is not None]
    dropped = {"runtime"} if any(Path(path).is_dir() for path in paths) else {"runtime", "dtype"}
    kept = {name: value for name, value in options.items() if name not in dropped}
    return Step("speculative", make_spec(SpeculativeSpec, {"model": model, "draft": drafts, **kept}))


def _check_heeded(model: ModelFile, drafts: list[DraftSource], options: Options) -> None:
    """Refuse options that would do nothing."""
    refused: tuple[str, ...] = ()
    why = ""
    if model.path.startswith(("http://", "https://")):
        refused, why = _OF_FILES, "for an endpoint: it drafts by itself, and is asked greedily"
    elif all(draft.kind != "ngram" for draft in drafts):
        refused, why = _OF_NGRAM, "without `--draft ngram`"
    for name in refused:
        if name in options:
            flag = "-k" if name == "k" else f"--{name.replace('_', '-')}"
            raise UsageError(f"`{flag}` does nothing {why}", "leave it out")


def stand_in_step(options: Options) -> Step:
    """The step on a target that is nowhere, to check options by."""
    model = ModelFile(path="", label="model", source="", sha256="")
    drafts = [DraftSource(asked.kind, asked.text) for asked in drafts_of(options)]
    return speculative_step(model, drafts, options)


def heads_step(lab: Lab, target: str, options: Options) -> Step:
    """The step that trains heads for a target, a folder that torch runs."""
    options = {name: value for name, value in options.items() if value is not None}
    method = str(options.get("method", "medusa"))
    (model,) = lab.runnables([target], _in_torch(method, options))
    out = options.pop("out", None) or str(ARTIFACTS / f"{model.label}-{method}.safetensors")
    options.pop("runtime", None)
    return Step("speculative", make_spec(HeadsSpec, {"model": model, "out": out, "offline": lab.offline, **options}))


def found(lab: Lab, target: str | ModelFile, options: Options) -> tuple[ModelFile, list[DraftSource]]:
    """Target and drafts as files of one runtime; a low-bit copy is made once and kept in the cache.

    Heads read the target's hidden states, which torch gives: with them the target must be a folder.
    """
    wanted = drafts_of(options)
    if heads := [draft for draft in wanted if draft.kind in _HEADS]:
        options = _in_torch(heads[0].kind, options)
    if isinstance(target, str) and ModelRef.parse(target).kind == "endpoint":
        # What is wrong with drafts for a server, the spec says.
        return loadable(lab, target, options), [DraftSource(d.kind, d.text) for d in wanted]
    models = [target, *(draft.value for draft in wanted if draft.kind == "draft" and not draft.copy)]
    model, *others = lab.runnables(models, options)
    files = iter(others)
    sources = [_source(lab, model, draft, files) for draft in wanted]
    labels = [source.label for source in sources]
    # Files of one name in several folders are told apart as they were written.
    return model, [
        msgspec.structs.replace(source, label=draft.text) if labels.count(source.label) > 1 else source
        for source, draft in zip(sources, wanted, strict=True)
    ]


def _source(lab: Lab, target: ModelFile, draft: Asked, models: Iterator[ModelFile]) -> DraftSource:
    """One draft as files; `models` has those that were named, in order."""
    if draft.kind in _HEADS:
        return _heads(target, draft)
    if draft.kind == "ngram":
        return DraftSource("ngram", "ngram")
    if draft.copy:
        return _copy(lab, target, draft.value)
    model = next(models)
    return DraftSource("draft", model.label, model)


def _in_torch(method: str, options: Options) -> Options:
    if asked(options) == "llamacpp":
        raise UsageError(
            f"`{method}` reads the target's hidden states, and llama.cpp gives none",
            "leave `--runtime llamacpp` out, and give the target as a folder",
        )
    return {**options, "runtime": "torch"}


def _copy(lab: Lab, model: ModelFile, kind: str) -> DraftSource:
    """The target's own copy in fewer bits."""
    if Path(model.path).is_dir():
        raise UsageError(
            f"`self:{kind}` is a GGUF, and the target runs in torch",
            "use `--runtime llamacpp`, or give a GGUF file as the target",
        )
    copy, _ = as_gguf(model, offline=lab.offline, progress=lab.progress, kind=kind)
    return DraftSource("draft", f"self:{kind}", copy)


def _heads(target: ModelFile, draft: Asked) -> DraftSource:
    """Trained heads, checked now: what was measured before is not lost to a wrong file."""
    path = user_path(draft.value)
    if not path.is_file():
        raise QuantlabError(f"`{draft.value}` is no file", "train it: `quantlab speculative train TARGET`")
    checked_record(path, draft.kind, target.sha256)
    file = ModelFile(str(path.resolve()), path.stem, draft.value, sha256_file(path))
    return DraftSource(draft.kind, f"{draft.kind}:{path.stem}", file)
