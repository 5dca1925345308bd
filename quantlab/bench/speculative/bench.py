"""The speculative bench: one Outcome for each draft, batch size and length, and an answer for each draft.

What the words mean is in points.py, why something does not pay in diagnosis.py. Not measured: tokenization.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from quantlab.bench.speculative import notices, server
from quantlab.bench.speculative.diagnosis import Point, best_of, diagnose, switch_off_batch
from quantlab.bench.speculative.heads import HeadsSpec, train
from quantlab.bench.speculative.points import costs_of_groups
from quantlab.bench.speculative.rows import Row, best_in_theory, row
from quantlab.bench.speculative.session import Divergence, Session, groups_of, opened_session
from quantlab.bench.speculative.spec import SpeculativeSpec
from quantlab.core.artifact import model_info
from quantlab.core.progress import Progress, silent
from quantlab.core.result import Measurement, Notice, Outcome

Details = dict[str, Any]
Found = tuple[dict[str, Measurement], Details]


def run(spec: SpeculativeSpec | HeadsSpec, progress: Progress = silent) -> Iterator[Outcome]:
    """The Outcomes of every draft, in order; for heads to train the one of the training."""
    if isinstance(spec, HeadsSpec):
        yield train(spec, progress)
        return
    if spec.endpoint:
        yield from server.run(spec, progress)
        return
    told = _Told(spec)
    for number, source in enumerate(spec.draft):
        progress(f"{source.label}: loading", 0, 1)
        with opened_session(spec, number) as session:
            draft = _Draft(session, number, told, progress)
            yield from draft.outcomes()


class _Told:
    """Makes Outcomes; `session` and `row` of their details tell what belongs together, and in which order."""

    def __init__(self, spec: SpeculativeSpec) -> None:
        self._spec, self._info = spec, model_info(spec.model)
        self._session, self._rows = uuid.uuid4().hex[:16], 0

    def outcome(
        self,
        session: Session,
        number: int,
        part: str,
        found: tuple[dict[str, Measurement], Details],
        said: list[Notice],
    ) -> Outcome:
        """One row of the draft `number`; its answer ends it, and the last one's ends the bench."""
        measurements, details = found
        source, ready = self._spec.draft[number], session.ready
        self._rows += 1
        return Outcome(
            label=self._spec.model.label,
            model=self._info,
            runtime=ready.target.runtime,
            measurements=measurements,
            warnings=said,
            details={
                "part": part,
                "session": self._session,
                "row": self._rows,
                "complete": part == "answer" and number == len(self._spec.draft) - 1,
                "draft": source.label,
                "draft_kind": source.kind,
                "prompts": len(ready.categories),
                "prompt_sha256": ready.prompt_sha256,
                "draft_bytes": ready.draft_bytes,
                "target_weight_bytes": ready.target.weight_bytes,
                **details,
            },
        )


class _Draft:
    """One draft: the lengths of each batch size, then the answer."""

    def __init__(self, session: Session, number: int, told: _Told, progress: Progress) -> None:
        self._session, self._number, self._told, self._progress = session, number, told, progress
        self._spec = session.spec
        self._said = list(notices.of_loading(self._spec, session.ready))
        self._points: list[Point] = []
        self._batches: list[Details] = []

    def outcomes(self) -> Iterator[Outcome]:
        for batch in self._spec.batches():
            yield from self._batch(batch)
        yield self._outcome("answer", ({}, self._answer()), [])

    def _batch(self, batch: int) -> Iterator[Outcome]:
        spec, session = self._spec, self._session
        groups, stage = [], f"{spec.draft[self._number].label}, batch {batch}"
        total = len(groups_of(session.ready.categories, batch))
        self._progress(f"{stage}, warming up", 0, 1)
        session.warm_up(batch)
        self._progress(stage, 0, total)
        for group in session.measure(batch):
            groups.append(group)
            self._progress(stage, len(groups), total)
        costs = costs_of_groups(groups, batch, chained=session.ready.chained)
        in_theory = best_in_theory(spec, session.ready, groups, costs)
        rows = {k: row(spec, session.ready, groups, costs, k) for k in session.lengths()[1:]}
        here = [found.point for found in rows.values() if found.point is not None]
        self._points += here
        self._batches.append({"batch": batch, **in_theory, **self._best(here)})
        for i, (k, found) in enumerate(rows.items()):
            divergence = None
            if spec.temperature == 0:
                advance = partial(self._advance, f"{stage}, answers that differ", i, len(rows))
                divergence = session.divergence(groups, k, advance)
            said = [*notices.of_groups(groups), *notices.of_divergence(divergence, k)]
            yield self._outcome("k", (found.measurements, self._details(found, divergence) | in_theory), said)

    def _advance(self, stage: str, done: int, total: int, more: float) -> None:
        self._progress(stage, done + more, total)

    def _details(self, found: Row, divergence: Divergence | None) -> Details:
        reason = None if found.point is None else diagnose(found.point, self._points)
        return {
            **found.details,
            "pays": None if found.point is None else found.point.pays,
            "reason": msgspec.to_builtins(reason),
            "divergence": msgspec.to_builtins(divergence),
        }

    def _best(self, here: list[Point]) -> Details:
        """The fastest of one batch size; where none pays, why the fastest fixed length does not."""
        if not here:
            return {"best_k": None, "speedup_interval": [None, None, None], "pays": None, "reason": None}
        best = best_of(here)
        reason = None if best.pays else diagnose(best_of([p for p in here if p.k is not None]), self._points)
        return {
            "best_k": best.k,
            "speedup_interval": [best.speedup, best.low, best.high],
            "pays": best.pays,
            "reason": msgspec.to_builtins(reason),
        }

    def _answer(self) -> Details:
        """What to do, of each batch size and in all."""
        return {"batches": self._batches, "switch_off_batch": switch_off_batch(self._points)}

    def _outcome(self, part: str, found: Found, said: Iterable[Notice]) -> Outcome:
        session, runtime = self._session, self._session.ready.target.runtime
        busy = session.contention.notices(runtime.threads) if runtime.device == "cpu" else []
        return self._told.outcome(session, self._number, part, found, [*self._said, *said, *busy])
