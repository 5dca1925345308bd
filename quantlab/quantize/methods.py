"""From a method's name to the module that does it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import cast

from quantlab.core.artifact import RECORD_NAME
from quantlab.core.files import check_output, check_output_folder
from quantlab.core.progress import Progress
from quantlab.core.result import Outcome
from quantlab.quantize.spec import METHODS, Prediction, QuantizeSpec, check_spec


def run(spec: QuantizeSpec, progress: Progress) -> Outcome:
    """Write and check the artifact that `spec` asks for."""
    spec = check_spec(spec)
    return cast(Outcome, _module(spec).run(spec, progress))


def check_place(spec: QuantizeSpec) -> None:
    """Refuse an output that exists, before any work; `force` replaces a file, and a folder that is an artifact."""
    out = Path(spec.out)
    if spec.method == "gguf":
        check_output(out, force=spec.force)
    else:
        check_output_folder(out, RECORD_NAME, force=spec.force)


def check(spec: QuantizeSpec) -> None:
    """Raise what `run` would raise of engine, input, shapes, memory, disk or texts; looks at headers alone.

    Of gguf the run itself finds all that within a second.
    """
    spec = check_spec(spec)
    if spec.method != "gguf":
        _module(spec).check(spec)


def dry_run(spec: QuantizeSpec, progress: Progress) -> Prediction:
    """Predict size, memory, disk and time of `run`; writes nothing. Raises where memory or the disk is too small."""
    spec = check_spec(spec)
    return cast(Prediction, _module(spec).dry_run(spec, progress))


def _module(spec: QuantizeSpec) -> ModuleType:
    return importlib.import_module(METHODS[spec.method])
