"""`execute(step)`: run what a spec asks for, record where it ran, keep the Results.

A step is a spec of one of the rooms. Its fingerprint is the sha256 of the spec with every input (models, texts) named
by content, so that a step already done is recognized wherever its files lie, and never after one of them changed.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from quantlab.core import hardware
from quantlab.core.artifact import content_sha256
from quantlab.core.corpus import Purpose, load_text
from quantlab.core.errors import UsageError, unknown_name
from quantlab.core.files import sha256_file, sha256_text
from quantlab.core.model import ModelFile, ModelRef, file_label
from quantlab.core.progress import Progress, silent
from quantlab.core.result import SCHEMA, Environment, Kind, Notice, Outcome, Result
from quantlab.lab import runtimes
from quantlab.lab.runtimes import Options
from quantlab.lab.store import Store
from quantlab.quantize.engines import ENGINES
from quantlab.quantize.spec import split_weight

Spec = Any  # the frozen struct of one of the rooms
S = TypeVar("S", bound=msgspec.Struct)

# Where a spec lies or writes does not change what it measures.
_NOT_IDENTITY = ("path", "source", "out", "force", "offline")


class Step(NamedTuple):
    """One thing to do: a kind and the spec of its room."""

    kind: Kind
    spec: Spec


# The module and function of each kind: (spec, progress) -> Outcome or an iterator of them.
_ROOMS: dict[str, tuple[str, str]] = {
    "quantize": ("quantlab.quantize.methods", "run"),
    "inspect": ("quantlab.quantize.inspection", "run"),
    "bench": ("quantlab.bench.latency", "run"),
    "ppl": ("quantlab.evaluate.perplexity", "run"),
    "batching": ("quantlab.bench.batching.bench", "run"),
    "speculative": ("quantlab.bench.speculative.bench", "run"),
    "prefix-cache": ("quantlab.bench.prefix_cache.bench", "run"),
}
# Their Results are the points of curves, and belong together.
_OF_CURVES = ("batching", "speculative", "prefix-cache")


class Lab:
    """Executes steps; keeps Results in `store` (None keeps nothing)."""

    def __init__(self, store: Store | None, *, offline: bool = False, progress: Progress = silent) -> None:
        self.store = store
        self.offline = offline
        self.progress = progress
        self._models: dict[str, ModelFile] = {}
        # What was said when a model was converted, by the sha256 of what came out.
        self._notices: dict[str, list[Notice]] = {}

    def model(self, text: str) -> ModelFile:
        """The model that the user named, fetched if it must be, with its content's sha256."""
        if text not in self._models:
            from quantlab.lab.models import resolve

            source = resolve(ModelRef.parse(text), offline=self.offline, progress=self.progress)
            self._models[text] = ModelFile(
                path=str(source.path),
                label=source.name,
                source=text,
                sha256=content_sha256(source.path),
                revision=source.revision,
                note=source.note,
            )
        return self._models[text]

    def runnables(self, texts: Sequence[str | ModelFile], options: Options) -> list[ModelFile]:
        """The models of one command as files that their runtimes load (lab/runtimes.py).

        A folder for llama.cpp is converted to an F16 GGUF in the cache, once. `options` may name `runtime`, `device`
        and `dtype`.
        """
        models = [text if isinstance(text, ModelFile) else self.model(text) for text in texts]
        chosen = runtimes.in_torch(models, options)
        return [model if torch else self._for_llamacpp(model) for model, torch in zip(models, chosen, strict=True)]

    def parent(self, text: str | ModelFile, model: ModelFile, options: Options) -> ModelFile:
        """The parent that `model` (of `runnables`) is measured against: in the same runtime where both can be."""
        parent = text if isinstance(text, ModelFile) else self.model(text)
        torch_alone = runtimes.check_runtime(parent, runtimes.asked(options))
        return parent if torch_alone or Path(model.path).is_dir() else self._for_llamacpp(parent)

    def _for_llamacpp(self, model: ModelFile) -> ModelFile:
        if not Path(model.path).is_dir():
            return model
        file, notices = runtimes.as_gguf(model, offline=self.offline, progress=self.progress)
        self._notices[file.sha256] = notices
        return file

    def execute(self, step: Step) -> list[Result]:
        """Run one step; its Results in the order in which they came."""
        return list(self.results(step))

    def results(self, step: Step) -> Iterator[Result]:
        """Run one step; each Result is stored as soon as it is there, so a later failure loses none."""
        if self.store is not None:
            self.store.check_writable()
        module, function = _ROOMS[step.kind]
        run: Callable[[Spec, Progress], Outcome | Iterable[Outcome]] = getattr(
            importlib.import_module(module), function
        )
        env, identity = hardware.environment(), fingerprint(step)
        started, clock = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"), time.perf_counter()
        outcomes = run(step.spec, self._progress_of(step))
        for outcome in [outcomes] if isinstance(outcomes, Outcome) else outcomes:
            seconds = time.perf_counter() - clock
            said = [*self._notices.get(outcome.model.sha256 or "", []), *outcome.warnings]
            whole = msgspec.structs.replace(outcome, warnings=said)
            result = _result(step, whole, env, identity, started=started, seconds=seconds)
            if self.store is not None:
                self.store.save(result)
            yield result

    def _progress_of(self, step: Step) -> Progress:
        """Progress whose stages name what they work on; those of a bench name the cell, as it has several models."""
        if step.kind == "bench":
            return self.progress
        name = file_label(Path(step.spec.out)) if step.kind == "quantize" else step.spec.model.label
        return lambda stage, done, total: self.progress(f"{name}: {stage}", done, total)

    def finished(self, step: Step, models: list[ModelFile]) -> list[Result]:
        """The newest stored Results of this very step, for `models` in order, under the conditions of now.

        Empty if one of them is missing.
        """
        if self.store is None:
            return []
        wanted = fingerprint(step)
        now = _conditions(step.kind, hardware.environment())
        stored = [
            result
            for result in self.store.load()
            if result.fingerprint == wanted and result.status == "ok" and _conditions(step.kind, result.env) == now
        ]
        if step.kind in _OF_CURVES:
            return _last_complete(stored)
        found = {(result.label, result.model.sha256): result for result in stored}
        asked = [(model.label, model.sha256) for model in models]
        return [found[model] for model in asked] if found.keys() >= set(asked) else []


def _last_complete(results: list[Result]) -> list[Result]:
    """The points of the newest session that came to its end, in order; empty where none did."""
    complete = [result.details["session"] for result in results if result.details.get("complete")]
    rows = [result for result in results if complete and result.details["session"] == complete[-1]]
    return sorted(rows, key=lambda result: int(result.details["row"]))


def _conditions(kind: Kind, env: Environment) -> tuple[Any, ...]:
    """Machine and software that a Result depends on; speed on more, as the comparison has it."""
    software = (env.cpu, env.gpu, env.packages)
    return (*software, env.driver, env.os) if kind in ("bench", *_OF_CURVES) else software


def fingerprint(step: Step) -> str:
    """The sha256 of kind and spec, inputs by content and not by place."""
    identity = {"kind": step.kind, "spec": _identity(msgspec.to_builtins(step.spec))}
    return sha256_text(msgspec.json.encode(identity, order="sorted").decode())


def _identity(value: Any) -> Any:
    """A spec without places, its texts replaced by their sha256."""
    if isinstance(value, list):
        return [_identity(item) for item in value]
    if not isinstance(value, dict):
        return value
    identity = {key: _identity(item) for key, item in value.items() if key not in _NOT_IDENTITY}
    offline = value.get("offline", False)
    if "data" in value:
        identity["data"] = _text_sha256(value["data"], "evaluation", offline)
    if "calib" in value:
        parts = [split_weight(calib) for calib in value["calib"]]
        identity["calib"] = [(_text_sha256(name, "calibration", offline), weight) for name, weight in parts]
    if value.get("engine"):
        # It may run in another environment, whose packages are not those of the Result.
        identity["engine"] = ENGINES[value["engine"]].pins | {"engine": value["engine"]}
    for file in ("trace", "prompts"):
        if value.get(file):
            identity[file] = sha256_file(Path(value[file]))
    if value.get("converter"):
        identity["converter"] = sha256_file(Path(value["converter"]))
    return identity


@functools.cache
def _text_sha256(name: str, purpose: Purpose, offline: bool) -> str:
    """The content of a text by name or path, so that a file that changed is measured again."""
    return load_text(name, purpose, offline=offline).sha256


def make_spec(kind: type[S], options: dict[str, Any]) -> S:
    """A spec from options by name; an unknown option or a wrong type is wrong use."""
    known = kind.__struct_fields__
    if unknown := [name for name in options if name not in known]:
        raise unknown_name("option", unknown[0], known)
    try:
        spec = msgspec.convert(options, kind)
        msgspec.json.encode(spec)
    except UnicodeEncodeError as error:
        raise UsageError(f"the option `{error.object}` is not UTF-8", "use another name or text") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"wrong option: {error}", "in a recipe lists have brackets, `[128, 512]`") from error
    return spec


def _result(step: Step, outcome: Outcome, env: Environment, identity: str, *, started: str, seconds: float) -> Result:
    """`seconds` from the start of the step until the outcome was there."""
    return Result(
        schema=SCHEMA,
        id=uuid.uuid4().hex,
        kind=step.kind,
        status="ok",
        label=outcome.label,
        spec=msgspec.to_builtins(step.spec),
        fingerprint=identity,
        model=outcome.model,
        runtime=outcome.runtime,
        env=env,
        measurements=outcome.measurements,
        warnings=outcome.warnings,
        started_at=started,
        duration_s=seconds,
        details=outcome.details,
    )
