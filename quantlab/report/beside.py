"""Perplexities of parents, as they were measured beside their children (`quantlab ppl MODEL --against PARENT`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quantlab.core.errors import QuantlabError
from quantlab.core.lineage import made_from
from quantlab.core.result import Measurement, ModelInfo, Result, RuntimeInfo
from quantlab.report.artifacts import against_of, setting_of, torch_dtype


def parents_beside(results: Sequence[Result]) -> list[Result]:
    """A ppl Result for each parent that was measured beside a child.

    Only of those that have none of their own, and that stand in the results or have no other form measured there.
    """
    known = {result.model.sha256 for result in results}
    measured = [result for result in results if result.kind == "ppl"]
    own = {_measured(result) for result in measured}
    found = {}
    for child in measured:
        if "against_nll" not in child.measurements or "against_model" not in child.details:
            continue
        try:
            beside = _beside(child)
        except (KeyError, TypeError, ValueError) as error:
            message = f"the Result `{child.id}` tells nothing sound of its parent: {error}"
            raise QuantlabError(message, "remove it from the results") from error
        stands_in = any(made_from(child.model, r.model) for r in measured if setting_of(r) == setting_of(child))
        if _measured(beside) not in own and (beside.model.sha256 in known or not stands_in):
            found[_measured(beside)] = beside
    return list(found.values())


def _beside(child: Result) -> Result:
    """The Result that a run of the parent alone would have left."""
    details: dict[str, Any] = {k: v for k, v in child.details.items() if not k.startswith(("against", "top1_"))}
    nll = child.measurements["against_nll"]
    return msgspec.structs.replace(
        child,
        id=f"{child.id}-against",
        label=against_of(child).label,
        model=msgspec.convert(child.details["against_model"], ModelInfo),
        runtime=msgspec.convert(child.details["against_runtime"], RuntimeInfo),
        measurements={
            "ppl": Measurement("1", "lower", [float(child.details["against_ppl"])]),
            "nll": msgspec.structs.replace(nll, better="lower"),
        },
        warnings=[],
        details=details,
    )


def _measured(result: Result) -> tuple[object, ...]:
    return result.model.sha256, torch_dtype(result), setting_of(result)
