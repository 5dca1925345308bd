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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from quantlab.core import hardware
from quantlab.core.artifact import content_sha256
from quantlab.core.corpus import Purpose, load_text
from quantlab.core.errors import UsageError, unknown_name
from quantlab.core.files import cache_folder, sha256_text
from quantlab.core.model import ModelFile, ModelRef
from quantlab.core.progress import Progress, silent
from quantlab.core.result import SCHEMA, Environment, Kind, Outcome, Result
from quantlab.lab.store import Store
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
}


class Lab:
    """Executes steps; keeps Results in `store` (None keeps nothing)."""

    def __init__(self, store: Store | None, *, offline: bool = False, progress: Progress = silent) -> None:
        self.store = store
        self.offline = offline
        self.progress = progress
        self._models: dict[str, ModelFile] = {}

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

    def runnable(self, text: str) -> ModelFile:
        """The model as a file that llama.cpp loads: a folder is converted to an F16 GGUF in the cache, once."""
        model = self.model(text)
        if not Path(model.path).is_dir():
            return model
        from quantlab.quantize.methods import run
        from quantlab.quantize.spec import QuantizeSpec

        path = cache_folder() / "gguf" / model.sha256[:16] / f"{model.label}-F16.gguf"
        if not path.is_file():
            run(QuantizeSpec(model, str(path), type="F16", offline=self.offline), self.progress)
        return msgspec.structs.replace(model, path=str(path), label=path.stem, sha256=content_sha256(path))

    def execute(self, step: Step) -> list[Result]:
        """Run one step; each Result is stored as soon as it is there, so a later failure loses none."""
        module, function = _ROOMS[step.kind]
        run: Callable[[Spec, Progress], Outcome | Iterable[Outcome]] = getattr(
            importlib.import_module(module), function
        )
        env = hardware.environment()
        results = []
        for outcome, started, seconds in _timed(run, step.spec, self.progress):
            result = _result(step, outcome, env, started, seconds)
            if self.store is not None:
                self.store.save(result)
            results.append(result)
        return results

    def finished(self, step: Step, expected: int) -> list[Result]:
        """The newest stored Results of this very step on this machine and software; empty if not all are there."""
        if self.store is None:
            return []
        wanted = fingerprint(step)
        here = hardware.environment()
        found = {
            result.label: result
            for result in self.store.load()
            if result.fingerprint == wanted
            and result.status == "ok"
            and (result.env.cpu, result.env.gpu, result.env.packages) == (here.cpu, here.gpu, here.packages)
        }
        return list(found.values()) if len(found) == expected else []


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
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"wrong option: {error}") from error


def _timed(
    run: Callable[[Spec, Progress], Outcome | Iterable[Outcome]], spec: Spec, progress: Progress
) -> Iterator[tuple[Outcome, str, float]]:
    """Each outcome with the time it began and the seconds it took."""
    each: Iterator[Outcome] | None = None
    while True:
        started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
        if each is None:
            outcomes = run(spec, progress)
            each = iter([outcomes] if isinstance(outcomes, Outcome) else outcomes)
        outcome = next(each, None)
        if outcome is None:
            return
        yield outcome, started.isoformat(timespec="milliseconds"), time.perf_counter() - clock


def _result(step: Step, outcome: Outcome, env: Environment, started: str, seconds: float) -> Result:
    return Result(
        schema=SCHEMA,
        id=uuid.uuid4().hex,
        kind=step.kind,
        status="ok",
        label=outcome.label,
        spec=msgspec.to_builtins(step.spec),
        fingerprint=fingerprint(step),
        model=outcome.model,
        runtime=outcome.runtime,
        env=env,
        measurements=outcome.measurements,
        warnings=outcome.warnings,
        started_at=started,
        duration_s=seconds,
        details=outcome.details,
    )
