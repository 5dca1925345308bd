"""The batching bench: one Outcome for each point of its curves, as soon as it is measured.

All parts run on one loaded model: (a) batch_sizes.py, (b) open_loop.py, (c) sla.py, (d) mixed.py; what their words mean
is in theory.py, which requests count in window.py. Not measured: tokenization and transport; of a server they are in
every time.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from quantlab.bench.batching import batch_sizes, mixed, notices, open_loop, sla
from quantlab.bench.batching.load import Lengths, lengths
from quantlab.bench.batching.opening import opened
from quantlab.bench.batching.serve import Cell, Run
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.target import Target, lost, lost_error
from quantlab.bench.batching.theory import Server
from quantlab.bench.batching.window import Window
from quantlab.core.artifact import model_info
from quantlab.core.progress import Progress, silent
from quantlab.core.result import Measurement, ModelInfo, Notice, Outcome

_ALONE_REQUESTS = 20
Row = tuple[dict[str, Measurement], dict[str, Any]]


def run(spec: BatchingSpec, progress: Progress = silent) -> Iterator[Outcome]:
    """The Outcomes of every chosen part, in order.

    Requests that are lost on the way are counted in the Outcome of their load and raise QuantlabError at the end; a
    server that is gone ends the bench at once.
    """
    info = _endpoint_info(spec) if spec.endpoint else model_info(spec.model)
    drawn = lengths(spec)
    with contextlib.ExitStack() as stack:
        target, said = opened(spec, drawn, info, stack, progress)
        bench = _Bench(spec, target, drawn, info=info, said=said, progress=progress)
        yield from bench.outcomes()
    if bench.lost:
        raise lost_error(bench.lost, bench.sent)


def _endpoint_info(spec: BatchingSpec) -> ModelInfo:
    return ModelInfo(spec.model.source, "endpoint", "none", 0, 0.0, {})


class _Bench:
    """The parts on one target; `sent` and `lost` count requests."""

    def __init__(
        self,
        spec: BatchingSpec,
        target: Target,
        drawn: Lengths,
        *,
        info: ModelInfo,
        said: list[Notice],
        progress: Progress,
    ) -> None:
        self.spec, self.target, self.drawn, self.info = spec, target, drawn, info
        self.sent, self.lost = 0, dict[str, int]()
        self._silent = False
        self._said, self._progress = said, progress
        self._session, self._rows, self._done = uuid.uuid4().hex[:16], 0, 0
        self._points: list[batch_sizes.BatchPoint] = []
        self._steps = self._expected_steps()

    def outcomes(self) -> Iterator[Outcome]:
        """Part after part; the details of the last one say that the bench is complete."""
        parts = self.spec.chosen()
        if "batch" in parts:
            yield from self._batch_sizes()
        if {"load", "sla"} & set(parts):
            yield from self._loads(parts)
        if "mixed" in parts and not self._gone:
            yield from self._mixed()

    def _batch_sizes(self) -> Iterator[Outcome]:
        self._points = batch_sizes.measure(self.spec, self.target, self._advance)
        said = list(notices.of_batches(self.spec, self._points))
        for index in range(len(self._points)):
            ends = index == len(self._points) - 1
            yield self._outcome("batch", batch_sizes.row(self.spec, self._points, index), said, ends=ends)

    def _loads(self, parts: tuple[str, ...]) -> Iterator[Outcome]:
        spec = self.spec
        whole = open_loop.saturate(spec, self.drawn)
        if not self._points:
            self._run(msgspec.structs.replace(whole, requests=whole.requests[: spec.max_num_seqs]), "warm-up")
        run = self._run(whole, "capacity")
        server = open_loop.capacity(spec, run)
        yield self._outcome("capacity", open_loop.capacity_row(server, run, spec), notices.of_trace(spec, self.drawn))
        known: list[sla.Judged] = []
        if "load" in parts:
            rates = spec.rate or [share * server.mu for share in spec.utilization]
            for i, rate in enumerate(rates):
                judged, outcome = self._load("load", server, rate, ends=i == len(rates) - 1)
                known.append(judged)
                yield outcome
                if self._gone:
                    return
        if "sla" in parts and not self._gone:
            yield from self._search(server, known)

    def _load(self, part: str, server: Server, rate: float, *, ends: bool = False) -> tuple[sla.Judged, Outcome]:
        """One rate, and whether it meets the limits."""
        spec = self.spec
        if rate == sla.ALONE:
            run = self._one_by_one()
            found, details = open_loop.alone_row(spec, run)
        else:
            run = self._run(open_loop.cell(spec, self.drawn, rate), f"load {rate / server.mu:.2f}")
            found, details = open_loop.row(spec, self.drawn, server, rate, run)
        together = sla.judged_together(spec)
        judged = sla.judge(spec, rate, Window(run), together=together)
        said = [*notices.of_requests(spec, details["requests_measured"], together)]
        # The search itself goes beyond capacity.
        said += notices.of_load(details) if part == "load" else []
        return judged, self._outcome(part, (found, details | sla.details(judged)), said, ends=ends)

    def _search(self, server: Server, known: list[sla.Judged]) -> Iterator[Outcome]:
        """Every rate that is tried is a row; then comes the answer."""
        search = sla.Search(server.mu, known)
        for rate in search.rates():
            judged, outcome = self._load("sla", server, rate)
            search.tell(judged)
            yield outcome
            if self._gone:
                return
        answer = search.answer()
        highest = answer.highest
        found = {} if highest is None or highest.rate == sla.ALONE else {
            "sla_capacity": Measurement("requests/s", "higher", [highest.rate]),
            "goodput": Measurement("requests/s", "higher", [highest.goodput.estimate]),
        }  # fmt: skip
        said = notices.of_answer(self.spec, answer, search.judged)
        yield self._outcome("answer", (found, sla.summary(self.spec, answer, search.judged)), said, ends=True)

    def _mixed(self) -> Iterator[Outcome]:
        spec = self.spec
        whole = open_loop.alone(mixed.cell(spec, self.drawn, math.inf, "fcfs"))
        run = self._run(whole, "capacity for mixed traffic")
        mu = open_loop.capacity(spec, run).mu
        rows = mixed.policies(spec)
        for policy in rows:
            run = self._run(mixed.cell(spec, self.drawn, spec.mixed_utilization * mu, policy), f"mixed, {policy}")
            found, details = mixed.row(spec, spec.mixed_utilization * mu, mu, policy, run)
            said = [
                *notices.of_load(details),
                *notices.of_requests(spec, len(found["ttft"].samples) if "ttft" in found else 0),
                *(notices.of_mixed(spec, details, self._points) if policy == "guarded" else ()),
            ]
            yield self._outcome("mixed", (found, details), said, ends=policy == rows[-1])

    def _one_by_one(self) -> Run:
        """Some of the requests, each alone: on one time axis, as if each had come when the one before had gone."""
        whole = open_loop.saturate(self.spec, self.drawn)
        alone = [msgspec.structs.replace(whole, requests=[asked]) for asked in whole.requests[:_ALONE_REQUESTS]]
        runs = [self._run(cell, "requests alone", counts=i == 0) for i, cell in enumerate(alone)]
        return open_loop.in_turn(runs)

    @property
    def _gone(self) -> bool:
        """Whether a server does not answer any more: it cannot be reached, or nothing that was sent came back."""
        return "connection error" in self.lost or self._silent

    def _run(self, cell: Cell, stage: str, *, counts: bool = True) -> Run:
        self._progress(stage, self._done, self._steps)
        run = self.target.run(cell)
        self.sent += len(run.records)
        self._silent = all(record.status == "failed" for record in run.records)
        for what, n in lost([run]).items():
            self.lost[what] = self.lost.get(what, 0) + n
        if counts:
            self._advance(stage)
        return run

    def _advance(self, stage: str) -> None:
        self._done += 1
        self._progress(stage, min(self._done, self._steps), self._steps)

    def _expected_steps(self) -> int:
        spec, parts = self.spec, self.spec.chosen()
        return sum(
            (
                len(set(spec.batch)) * (spec.warmup + spec.repeats) + batch_sizes.compares(self.target)
                if "batch" in parts
                else 0,
                1 + ("batch" not in parts) if {"load", "sla"} & set(parts) else 0,
                len(spec.rate or spec.utilization) if "load" in parts else 0,
                sla.steps_at_most() if "sla" in parts else 0,
                1 + len(mixed.policies(spec)) if "mixed" in parts else 0,
            )
        )

    def _outcome(self, part: str, row: Row, said: Iterable[Notice], *, ends: bool = False) -> Outcome:
        """A row as an Outcome; `session` and `row` tell what belongs together, and in which order.

        `ends`: it is the last of its part.
        """
        found, details = row
        self._rows += 1
        if details.get("requests_lost"):
            said = [*said, _lost_notice(details)]
        return Outcome(
            label=self.spec.model.label,
            model=self.info,
            runtime=self.target.runtime,
            measurements=found,
            warnings=[*self._said, *said, *self.target.notices()],
            details={
                "part": part,
                "session": self._session,
                "row": self._rows,
                "complete": ends and {"answer": "sla"}.get(part, part) == self.spec.chosen()[-1] and not self.lost,
                **details,
            },
        )


def _lost_notice(details: dict[str, Any]) -> Notice:
    return Notice(
        "lost-requests",
        f"{details['requests_lost']} of {details['requests']} requests were lost; latencies are of those that finished",
        "see the log of what served them",
    )
