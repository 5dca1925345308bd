"""From a method's name to the module that does it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import cast

from quantlab.core.progress import Progress
from quantlab.core.result import Outcome
from quantlab.quantize.spec import METHODS, Prediction, QuantizeSpec, check_spec


def run(spec: QuantizeSpec, progress: Progress) -> Outcome:
    """Write and check the artifact that `spec` asks for."""
    spec = check_spec(spec)
    return cast(Outcome, _module(spec).run(spec, progress))


def dry_run(spec: QuantizeSpec, progress: Progress) -> Prediction:
    """Predict size, memory and time of `run`; writes nothing."""
    spec = check_spec(spec)
    return cast(Prediction, _module(spec).dry_run(spec, progress))


def _module(spec: QuantizeSpec) -> ModuleType:
    name = METHODS[spec.method]
    assert name is not None
    return importlib.import_module(name)
