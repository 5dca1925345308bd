"""From options, as flags or recipe keys give them, to steps: defaults that depend on the model are set here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantlab.bench.spec import BenchSpec
from quantlab.core.artifact import content_sha256
from quantlab.core.model import ModelFile
from quantlab.evaluate.spec import PplSpec
from quantlab.lab.execute import Step, make_spec
from quantlab.quantize.spec import QuantizeSpec, check_spec

ARTIFACTS = Path("artifacts")

Options = dict[str, Any]


def quantize_step(model: ModelFile, options: Options) -> Step:
    """A quantize step; without `out` the artifact goes to artifacts/MODEL-TYPE.gguf."""
    spec = make_spec(QuantizeSpec, {"model": model, "out": "", **options})
    spec = check_spec(spec)
    if not spec.out:
        spec = make_spec(QuantizeSpec, {**_fields(spec), "out": str(ARTIFACTS / f"{model.label}-{spec.type}.gguf")})
    return Step("quantize", spec)


def artifact_file(spec: QuantizeSpec) -> ModelFile:
    """The artifact that a finished quantize step wrote."""
    path = Path(spec.out)
    return ModelFile(
        path=str(path.resolve()),
        label=path.stem,
        source=spec.out,
        sha256=content_sha256(path),
        revision=spec.model.revision,
        note=spec.model.note,
    )


def bench_steps(models: list[ModelFile], options: Options) -> Iterator[Step]:
    """One bench step for each cell: the models of a cell run interleaved."""
    spec = make_spec(BenchSpec, {"models": models, **options})
    for prompt_tokens in spec.prompt_tokens:
        for batch in spec.batch:
            cell = {**_fields(spec), "prompt_tokens": [prompt_tokens], "batch": [batch]}
            yield Step("bench", make_spec(BenchSpec, cell))


def ppl_step(model: ModelFile, options: Options) -> Step:
    """A perplexity step for one model."""
    return Step("ppl", make_spec(PplSpec, {"model": model, **options}))


def _fields(spec: Any) -> Options:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def inspect_step(model: ModelFile) -> Step:
    """A step that looks at what is stored."""
    return Step("inspect", InspectSpec(model))
