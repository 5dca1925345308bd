"""From options, as flags or recipe keys give them, to steps: defaults that depend on the model are set here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from quantlab.bench.spec import BenchSpec, prompt_text
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import unknown_name
from quantlab.core.model import ModelFile, file_label
from quantlab.evaluate.spec import PplSpec, Protocol
from quantlab.lab.execute import Step, make_spec
from quantlab.lab.runtimes import asked
from quantlab.quantize.spec import InspectSpec, QuantizeSpec, check_spec, variant

ARTIFACTS = Path("artifacts")

Options = dict[str, Any]


def quantize_step(model: ModelFile, options: Options) -> Step:
    """A quantize step; without `out` the artifact goes to artifacts/MODEL-VARIANT, with .gguf for gguf."""
    spec = check_spec(make_spec(QuantizeSpec, {"model": model, "out": "", **options}))
    suffix = ".gguf" if spec.method == "gguf" else ""
    out = spec.out or str(ARTIFACTS / f"{model.label}-{variant(spec)}{suffix}")
    return Step("quantize", msgspec.structs.replace(spec, out=out))


def artifact_file(spec: QuantizeSpec) -> ModelFile:
    """The artifact that a finished quantize step wrote."""
    path = Path(spec.out)
    return ModelFile(
        path=str(path.resolve()),
        label=file_label(path),
        source=spec.out,
        sha256=content_sha256(path),
        revision=spec.model.revision,
        note=spec.model.note,
    )


def bench_steps(models: list[ModelFile], options: Options) -> Iterator[Step]:
    """One bench step for each cell: the models of a cell run interleaved. `prompt` is TEXT or @FILE."""
    if isinstance(options.get("prompt"), str):
        options = {**options, "prompt": prompt_text(options["prompt"])}
    spec = make_spec(BenchSpec, {"models": models, **_for_spec(options, models)})
    for cell in spec.cells():
        yield Step("bench", cell)


def ppl_step(model: ModelFile, options: Options) -> Step:
    """A perplexity step for one model, whose parent `against` is a ModelFile (Lab.parent)."""
    if "protocol" in options and options["protocol"] not in get_args(Protocol):
        raise unknown_name("protocol", str(options["protocol"]), get_args(Protocol))
    models = [model, *([options["against"]] if options.get("against") else [])]
    return Step("ppl", make_spec(PplSpec, {"model": model, **_for_spec(options, models)}))


def inspect_step(model: ModelFile) -> Step:
    """A step that looks at what is stored."""
    return Step("inspect", InspectSpec(model))


def _for_spec(options: Options, models: list[ModelFile]) -> Options:
    """The options without `runtime`, which Lab.runnables has obeyed, and without a `dtype` that no model heeds."""
    asked(options)
    dropped = {"runtime"} if any(Path(model.path).is_dir() for model in models) else {"runtime", "dtype"}
    return {name: value for name, value in options.items() if name not in dropped}
