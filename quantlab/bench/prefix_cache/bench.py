"""The prefix-cache bench: one Outcome for each scenario or trace, and one for each length of the tiers.

Not measured: tokenization. What the words mean is in measure.py and theory.py.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from quantlab.bench.prefix_cache import server
from quantlab.bench.prefix_cache.lint.run import LintSpec
from quantlab.bench.prefix_cache.lint.run import run as lint
from quantlab.bench.prefix_cache.notices import of_row
from quantlab.bench.prefix_cache.rows import Row
from quantlab.bench.prefix_cache.spec import PrefixCacheSpec
from quantlab.bench.prefix_cache.targets import Target, opened_model, simulated
from quantlab.core.artifact import model_info
from quantlab.core.progress import Progress, silent
from quantlab.core.result import ModelInfo, Outcome


def run(spec: PrefixCacheSpec | LintSpec, progress: Progress = silent) -> Iterator[Outcome]:
    """The Outcomes of every chosen stream, in order; the details of the last one say that the bench is complete.

    Of a log the one that tells what it has too early.
    """
    if isinstance(spec, LintSpec):
        yield lint(spec, progress)
        return
    if spec.endpoint:
        yield from server.run(spec, progress)
        return
    info = model_info(spec.model)
    with contextlib.ExitStack() as stack:
        progress("loading", 0, 1)
        target = simulated(spec, info, progress) if spec.simulate else stack.enter_context(opened_model(spec, progress))
        told = _Told(spec, info, target)
        for row in target.rows():
            # At once: the target tells of this row and not of the next, and a run that ends early has what it measured.
            yield told.outcome(row)


class _Told:
    """Makes Outcomes; `session` and `row` of their details tell what belongs together, and in which order."""

    def __init__(self, spec: PrefixCacheSpec, info: ModelInfo, target: Target) -> None:
        self._spec, self._info, self._target = spec, info, target
        self._session, self._rows = uuid.uuid4().hex[:16], 0

    def outcome(self, row: Row) -> Outcome:
        """One row; with the last one the bench is complete."""
        self._rows += 1
        return Outcome(
            label=self._spec.model.label,
            model=self._info,
            runtime=self._target.runtime,
            measurements=row.measurements,
            warnings=[*row.warnings, *of_row(self._spec, row), *self._target.notices()],
            details={
                "part": row.part,
                "session": self._session,
                "row": self._rows,
                "complete": row.last,
                **row.details,
            },
        )
