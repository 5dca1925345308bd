"""A recipe: models, methods and benches in a YAML file, run step by step, resumed where it stopped.

Keys of an entry are the options of the command of that name (`quantize`, `bench`, `ppl`), written with underscores.
`against` of ppl may name the type of an artifact of the recipe (F16) or any model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.artifact import content_sha256
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.files import os_error
from quantlab.core.model import ModelFile
from quantlab.core.result import Result
from quantlab.lab.execute import Lab, Step
from quantlab.lab.steps import artifact_file, bench_steps, ppl_step, quantize_step

Options = dict[str, Any]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to run. Benches run on the artifacts of each model, or on the model itself where nothing is quantized."""

    name: str
    models: list[str]
    quantize: list[Options] = []
    bench: list[Options] = []
    ppl: list[Options] = []
    baseline: str | None = None


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe; errors name the place in the file."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise os_error(error, path) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"`{path}` is not YAML: {' '.join(str(error).split())}") from error
    try:
        recipe = msgspec.convert(content, Recipe)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"`{path}` is not a recipe: {error}", f"its keys: {', '.join(Recipe.__struct_fields__)}"
        ) from error
    if not recipe.models:
        raise UsageError(f"`{path}` lists no models", "for example `models: [demo]`")
    return recipe


def run_recipe(recipe: Recipe, lab: Lab, *, force: bool = False) -> list[Result]:
    """Run every step that has no finished Result yet; returns the Results of all steps, in order.

    Every option of every step is checked before the first step runs.
    """
    for text in recipe.models:
        if not recipe.quantize and not recipe.bench and not recipe.ppl:
            raise UsageError(f"recipe `{recipe.name}` does nothing with `{text}`", "add `quantize`, `bench` or `ppl`")
    results: list[Result] = []
    for text in recipe.models:
        model = lab.model(text)
        artifacts: dict[str, ModelFile] = {}
        quantize = [quantize_step(model, {"force": force, **options}) for options in recipe.quantize]
        _check_options(recipe, model)
        for step in quantize:
            results += _quantized(step, Path(step.spec.out), lab)
            artifacts[step.spec.type] = artifact_file(step.spec)
        subjects = list(artifacts.values()) or [lab.runnable(text)]
        for step, expected in _measuring_steps(recipe, lab, subjects, artifacts):
            results += lab.finished(step, expected) or lab.execute(step)
    return results


def _check_options(recipe: Recipe, model: ModelFile) -> None:
    """Build every step on a stand-in, so that a misspelled option in the last one stops the first."""
    for options in recipe.bench:
        list(bench_steps([model], options))
    for options in recipe.ppl:
        ppl_step(model, {**options, "against": None})


def _quantized(step: Step, path: Path, lab: Lab) -> list[Result]:
    """The Result of a quantize step: a finished one if its artifact is still there, unchanged."""
    for result in lab.finished(step, 1):
        if path.is_file() and content_sha256(path) == result.model.sha256:
            return [result]
    return lab.execute(step)


def _measuring_steps(
    recipe: Recipe, lab: Lab, subjects: list[ModelFile], artifacts: dict[str, ModelFile]
) -> Iterator[tuple[Step, int]]:
    """The bench and ppl steps, small enough that a killed run loses little, with the Results each will have."""
    for options in recipe.bench:
        for step in bench_steps(subjects, options):
            yield step, len(subjects)
    for options in recipe.ppl:
        named = options.get("against")
        parent = None if named is None else artifacts.get(str(named)) or _named_model(lab, str(named), artifacts)
        for subject in subjects:
            # The parent's divergence from itself is zero by definition.
            against = parent if parent is not None and parent.sha256 != subject.sha256 else None
            yield ppl_step(subject, {**options, "against": against}), 1


def _named_model(lab: Lab, named: str, artifacts: dict[str, ModelFile]) -> ModelFile:
    try:
        return lab.runnable(named)
    except QuantlabError as error:
        known = ", ".join(artifacts)
        raise UsageError(
            f"`against: {named}` is neither an artifact of the recipe ({known}) nor a model: {error.message}",
            error.hint,
        ) from error
