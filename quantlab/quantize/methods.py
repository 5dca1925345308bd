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
    return cast(Outcome, _module(check_spec(spec)).run(check_spec(spec), progress))


def dry_run(spec: QuantizeSpec, progress: Progress) -> Prediction:
    """Predict size, memory and time of `run`; writes nothing."""
    return cast(Prediction, _module(check_spec(spec)).dry_run(check_spec(spec), progress))


def _module(spec: QuantizeSpec) -> ModuleType:
    name = METHODS[spec.method]
    assert name is not None
    return importlib.import_module(name)
