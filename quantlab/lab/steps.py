"""From options, as flags or recipe keys give them, to steps: defaults that depend on the model are set here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from quantlab.bench.batching.heeded import check_heeded
from quantlab.bench.batching.spec import BatchingSpec, parse_numbers, parse_seconds
from quantlab.bench.spec import BenchSpec, parse_sizes, prompt_text
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import unknown_name
from quantlab.core.files import sha256_text
from quantlab.core.model import ModelFile, ModelRef, file_label
from quantlab.evaluate.spec import PplSpec, Protocol
from quantlab.lab.execute import Lab, Step, make_spec
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


def batching_step(model: ModelFile, options: Options) -> Step:
    """A batching step. Rates and shares may be comma lists, times texts such as `500ms`."""
    # An option that was not given has the default of the spec.
    options = {name: value for name, value in options.items() if value is not None}
    # That an endpoint is a server may be said.
    given = [name for name, value in options.items() if value not in ("auto", "server")]
    for name, parse in (("rate", parse_numbers), ("utilization", parse_numbers), ("batch", parse_sizes)):
        # A recipe may have a single number.
        if isinstance(options.get(name), str | int | float):
            options[name] = parse(str(options[name]), f"--{name}")
    for name in ("ttft_slo", "tpot_slo", "ageing"):
        if name in options:
            options[f"{name}_s"] = parse_seconds(options.pop(name), f"--{name.replace('_', '-')}")
    for name, of_spec in (("bandwidth", "bandwidth_bytes_per_s"), ("flops", "flops_per_s")):
        if name in options:
            # YAML takes 1e12 for a text.
            (options[of_spec],) = parse_numbers(str(options.pop(name)), f"--{name}")
    if isinstance(options.get("parts"), str):
        options["parts"] = [part.strip() for part in options["parts"].split(",")]
    spec = make_spec(BatchingSpec, {"model": model, **_for_spec(options, [model])})
    check_heeded(spec, given)
    return Step("batching", spec)


def batching_models(lab: Lab, text: str, options: Options) -> tuple[ModelFile, Options]:
    """MODEL of the command, and its options with what `fallback` names as files, for the same runtime."""
    named = options.get("fallback")
    if named is None:
        return loadable(lab, text, options), options
    if ModelRef.parse(text).kind == "endpoint":
        # It is refused with the other options that an endpoint does not heed.
        return loadable(lab, text, options), {**options, "fallback": ModelFile(named, named, named, sha256="")}
    model, small = lab.runnables([text, named], options)
    return model, {**options, "fallback": small}


def loadable(lab: Lab, text: str, options: Options) -> ModelFile:
    """MODEL of a command that loads files and endpoints alike."""
    ref = ModelRef.parse(text)
    if ref.kind != "endpoint":
        return lab.runnables([text], options)[0]
    # What an endpoint serves is known by its address alone.
    named = options.get("served_model")
    return ModelFile(path=ref.where, label=named or ref.where, source=ref.where, sha256=sha256_text(ref.where))


def inspect_step(model: ModelFile) -> Step:
    """A step that looks at what is stored."""
    return Step("inspect", InspectSpec(model))


def _for_spec(options: Options, models: list[ModelFile]) -> Options:
    """The options without `runtime`, which Lab.runnables has obeyed, and without a `dtype` that no model heeds."""
    asked(options)
    dropped = {"runtime"} if any(Path(model.path).is_dir() for model in models) else {"runtime", "dtype"}
    return {name: value for name, value in options.items() if name not in dropped}
