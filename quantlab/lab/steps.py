"""From options, as flags or recipe keys give them, to steps: defaults that depend on the model are set here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from quantlab.bench.spec import BenchSpec, prompt_text
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import unknown_name
from quantlab.core.model import ModelFile
from quantlab.evaluate.spec import PplSpec, Protocol
from quantlab.lab.execute import Step, make_spec
from quantlab.quantize.spec import InspectSpec, QuantizeSpec, check_spec

ARTIFACTS = Path("artifacts")

Options = dict[str, Any]


def quantize_step(model: ModelFile, options: Options) -> Step:
    """A quantize step; without `out` the artifact goes to artifacts/MODEL-TYPE.gguf."""
    spec = check_spec(make_spec(QuantizeSpec, {"model": model, "out": "", **options}))
    out = spec.out or str(ARTIFACTS / f"{model.label}-{spec.type}.gguf")
    return Step("quantize", msgspec.structs.replace(spec, out=out))


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
    """One bench step for each cell: the models of a cell run interleaved. `prompt` is TEXT or @FILE."""
    if isinstance(options.get("prompt"), str):
        options = {**options, "prompt": prompt_text(options["prompt"])}
    spec = make_spec(BenchSpec, {"models": models, **options})
    for cell in spec.cells():
        yield Step("bench", cell)


def ppl_step(model: ModelFile, options: Options) -> Step:
    """A perplexity step for one model."""
    if "protocol" in options and options["protocol"] not in get_args(Protocol):
        raise unknown_name("protocol", str(options["protocol"]), get_args(Protocol))
    return Step("ppl", make_spec(PplSpec, {"model": model, **options}))


def inspect_step(model: ModelFile) -> Step:
    """A step that looks at what is stored."""
    return Step("inspect", InspectSpec(model))
