"""A recipe: models, methods and benches in a YAML file, run step by step, resumed where it stopped.

Keys of an entry are the options of the command of that name (`quantize`, `bench`, `ppl`, `batching`, `speculative`),
written with underscores.
`against` of ppl and `fallback` of batching may name an artifact of the recipe, by its variant (F16, AWQ-W4-g128) or its
`out`, any model, or `parent`: the model that the artifacts were made from.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.errors import QuantlabError, UsageError, missing_extra
from quantlab.core.files import os_error
from quantlab.core.model import ModelFile
from quantlab.core.result import Result
from quantlab.lab.execute import Lab, Step, fingerprint
from quantlab.lab.prefix_cache import prefix_cache_step
from quantlab.lab.runtimes import asked
from quantlab.lab.speculative import found, speculative_step, stand_in_step
from quantlab.lab.steps import artifact_file, batching_step, bench_steps, ppl_step, quantize_step
from quantlab.quantize.methods import check, check_place
from quantlab.quantize.spec import variant

Options = dict[str, Any]

PARENT = "parent"


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to run. Benches run on the artifacts of each model; with `parent`, or where nothing is quantized, on the
    model itself too.
    """

    name: str
    models: list[str]
    parent: bool = False
    quantize: list[Options] = []
    bench: list[Options] = []
    ppl: list[Options] = []
    batching: list[Options] = []
    speculative: list[Options] = []
    prefix_cache: list[Options] = []

    @property
    def measures(self) -> list[Options]:
        """The entries of every command that measures."""
        return [*self.bench, *self.ppl, *self.batching, *self.speculative, *self.prefix_cache]


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe; errors name the place in the file."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise os_error(error, path) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"`{path}` is not YAML: {' '.join(str(error).split())}", "see recipes/cpu-lab.yaml") from error
    try:
        recipe = msgspec.convert(content, Recipe)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"`{path}` is not a recipe: {error}", f"its keys: {', '.join(Recipe.__struct_fields__)}"
        ) from error
    # The copies of the table are called so.
    if not re.fullmatch(r"\w[\w.-]{0,99}", recipe.name):
        raise UsageError(f"`{path}`: the name {recipe.name!r} is no file name", "use letters, digits, `-`, `_` and `.`")
    if not recipe.models:
        raise UsageError(f"`{path}` lists no models", "for example `models: [demo]`")
    if not (recipe.quantize or recipe.measures):
        raise UsageError(f"`{path}` does nothing", "add `quantize` or `bench`, say")
    return recipe


def run_recipe(recipe: Recipe, lab: Lab, *, force: bool = False) -> list[Result]:
    """Run every step that has no finished Result yet; returns the Results of all steps, in order.

    Options, models, outputs, parents, runtimes, texts and engines are checked before the first step runs, and the
    shapes that a torch method asks for.
    """
    _check_options(recipe)
    models = {text: lab.model(text) for text in recipe.models}
    steps = {
        text: [quantize_step(model, {"force": force, **_as_offline(options, lab)}) for options in recipe.quantize]
        for text, model in models.items()
    }
    every = [step for of_model in steps.values() for step in of_model]
    _check_outputs(every, lab)
    _check_named(recipe, lab, next(iter(steps.values())))
    _check_runtimes(recipe, every)
    _check_inputs(recipe, every, lab)
    results: list[Result] = []
    for text, quantize in steps.items():
        variants, outs = {}, {}
        for step in quantize:
            results += _quantized(step, lab) or lab.execute(step)
            variants[variant(step.spec).upper()] = outs[step.spec.out] = artifact_file(step.spec)
        subjects = [*([models[text]] if recipe.parent or not outs else []), *outs.values()]
        for step, measured in _measuring_steps(recipe, lab, subjects, variants | outs | {PARENT: models[text]}):
            results += lab.finished(step, measured) or lab.execute(step)
    return results


def _as_offline(options: Options, lab: Lab) -> Options:
    return {**options, "offline": lab.offline or options.get("offline", False)}


def _check_options(recipe: Recipe) -> None:
    """Build every step on a stand-in, so that a misspelled option in the last one stops the first."""
    model = ModelFile(path="", label="model", source="", sha256="")
    for options in recipe.quantize:
        quantize_step(model, options)
    for options in recipe.bench:
        list(bench_steps([model], options))
    for options in recipe.ppl:
        ppl_step(model, {**options, "against": None})
    for options in recipe.batching:
        batching_step(model, {**options, "fallback": model if options.get("fallback") else None})
    for options in recipe.speculative:
        stand_in_step(options)
    for options in recipe.prefix_cache:
        prefix_cache_step(model, options)


def _check_outputs(steps: list[Step], lab: Lab) -> None:
    """Refuse what would stop the run half way: two artifacts of one name, and a file that may not be replaced."""
    paths = [Path(step.spec.out).resolve() for step in steps]
    for step, path in zip(steps, paths, strict=True):
        if paths.count(path) > 1:
            raise UsageError(f"two steps of the recipe write `{step.spec.out}`", "give each its own `out`")
        if not _quantized(step, lab):
            check_place(step.spec)


def _check_named(recipe: Recipe, lab: Lab, quantize: list[Step]) -> None:
    """Whether each `against` and `fallback` is one artifact, or a model; `quantize` are the steps of one model."""
    variants = [variant(step.spec).upper() for step in quantize]
    outs = [step.spec.out for step in quantize]
    keys = [("against", options) for options in recipe.ppl] + [("fallback", options) for options in recipe.batching]
    for key, named in ((key, str(options[key])) for key, options in keys if options.get(key) is not None):
        if variants.count(named.upper()) > 1:
            raise UsageError(f"`{key}: {named}` names several artifacts", "name one of them by its `out`")
        if named.upper() in variants or named in outs or named == PARENT:
            continue
        try:
            lab.model(named)
        except QuantlabError as error:
            raise UsageError(
                f"`{key}: {named}` is neither an artifact of the recipe ({', '.join(variants)}) nor a model: "
                f"{error.message}",
                error.hint,
            ) from error


def _check_runtimes(recipe: Recipe, steps: list[Step]) -> None:
    """Whether what measures can read the artifacts that the recipe will write."""
    entries = recipe.measures
    files = [step.spec.out for step in steps if step.spec.method == "gguf"]
    folders = [step.spec.out for step in steps if step.spec.method != "gguf"]
    for options in entries:
        unread = {"torch": files, "llamacpp": folders}.get(asked(options))
        if unread:
            raise UsageError(f"`runtime: {options['runtime']}` does not read `{unread[0]}`", "leave `runtime` out")
    if folders and entries and importlib.util.find_spec("torch") is None:
        raise missing_extra("torch", "torch")


def _check_inputs(recipe: Recipe, steps: list[Step], lab: Lab) -> None:
    """Raise now what a step would raise before its work: of texts, and of torch methods engines and shapes too."""
    stand_in = ModelFile(path="", label="model", source="", sha256="")
    for options in recipe.ppl:
        # Reads the text, as quantize steps do theirs.
        fingerprint(ppl_step(stand_in, {**_as_offline(options, lab), "against": None}))
    for options in recipe.batching:
        fingerprint(batching_step(stand_in, {**options, "fallback": None}))
    for options in recipe.speculative:
        fingerprint(stand_in_step(options))
    for step in steps:
        if not _quantized(step, lab):
            fingerprint(step)
            check(step.spec)


def _quantized(step: Step, lab: Lab) -> list[Result]:
    """The Result of a quantize step that is finished, its artifact still there and unchanged; else none."""
    return lab.finished(step, [artifact_file(step.spec)]) if Path(step.spec.out).exists() else []


def _named(name: str, artifacts: dict[str, ModelFile], lab: Lab) -> ModelFile:
    """An artifact of the recipe by its variant or its `out`, `parent`, or any model."""
    return artifacts.get(name) or artifacts.get(name.upper()) or lab.model(name)


def _measuring_steps(
    recipe: Recipe, lab: Lab, subjects: list[ModelFile], artifacts: dict[str, ModelFile]
) -> Iterator[tuple[Step, list[ModelFile]]]:
    """The steps that measure, small enough that a killed run loses little, with the models that each measures."""
    for options in recipe.bench:
        models = lab.runnables(subjects, options)
        for step in bench_steps(models, options):
            yield step, models
    for options in recipe.ppl:
        against = _named(str(options["against"]), artifacts, lab) if options.get("against") is not None else None
        everything = [*subjects, *([against] if against else [])]
        for subject in lab.runnables(everything, options)[: len(subjects)]:
            parent = lab.parent(against, subject, options) if against else None
            # The parent's divergence from itself is zero by definition.
            other = parent if parent is not None and parent.sha256 != subject.sha256 else None
            yield ppl_step(subject, {**_as_offline(options, lab), "against": other}), [subject]
    for options in recipe.batching:
        fallback = [_named(str(options["fallback"]), artifacts, lab)] if options.get("fallback") else []
        models = lab.runnables([*subjects, *fallback], options)
        for subject in models[: len(subjects)]:
            # One that is the fallback itself has none.
            small = [model for model in models[len(subjects) :] if model.sha256 != subject.sha256]
            yield batching_step(subject, {**options, "fallback": small[0] if small else None}), [subject]
    for options in recipe.prefix_cache:
        for subject in lab.runnables(subjects, options):
            yield prefix_cache_step(subject, options), [subject]
    for options in recipe.speculative:
        for subject in subjects:
            target, drafts = found(lab, subject, options)
            yield speculative_step(target, drafts, options), [target]
