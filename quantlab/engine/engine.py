"""The engine: the scheduler's plans, executed on one backend, with tokens chosen and stamped.

One step is one `Backend.forward`. Arrivals never wait for completions: they are taken in at the first step after
their time, and their time counts from then (no coordinated omission).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.engine.admission import AcceptAll, Admission
from quantlab.engine.costs import MeasuredCosts
from quantlab.engine.limits import Limits, check_request
from quantlab.engine.policies import Fcfs, Order, Preemption, Swap
from quantlab.engine.prefix_cache import PrefixCache, Prompt
from quantlab.engine.request import Event, EventKind, Request, RequestRecord
from quantlab.engine.sampling import choose
from quantlab.engine.scheduler import Scheduler
from quantlab.engine.sequence import Plan, Sequence
from quantlab.runtime.backend import Backend, Batch
from quantlab.runtime.clock import Clock, WallClock
from quantlab.runtime.step_model import MeasuredStep, StepShape


class StepRecord(NamedTuple):
    """One step. `overhead_s`: host time for arrivals, plan, arrays and sampling; real even on a virtual clock."""

    at_s: float
    shape: StepShape
    forward_s: float
    overhead_s: float
    running: int
    waiting: int
    kv_tokens: int

    @property
    def measured(self) -> MeasuredStep:
        """What a step model for simulation is fitted to: all that passes from this step to the next."""
        return MeasuredStep(self.shape, self.forward_s + self.overhead_s)


class Engine:
    """Continuous batching on one backend.

    `records` tell what became of each request; `events` and `steps` are the log, empty with `log=False`.
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        *,
        clock: Clock | None = None,
        order: Order | None = None,
        admission: Admission | None = None,
        preemption: Preemption | None = None,
        costs: MeasuredCosts | None = None,
        prefix: PrefixCache | None = None,
        log: bool = True,
    ) -> None:
        """`costs` learns from every step; give it to the policies too, so that they predict with it.

        `prefix` is a cache of the same backend: beginnings that were computed before are shared.
        """
        self.backend, self.limits = backend, limits
        self.clock = clock or WallClock()
        self.costs = costs or MeasuredCosts()
        self.events: list[Event] = []
        self.steps: list[StepRecord] = []
        self.records: list[RequestRecord] = []
        self._admission, self._log = admission or AcceptAll(), log
        self._scheduler = Scheduler(
            limits,
            order or Fcfs(),
            preemption or Swap(),
            events=self.events if log else None,
            cached_tokens=None if prefix is None else lambda s: prefix.peek(_prompt(prefix, s)),
            on_first_token=self._admission.observe,
        )
        loaded = backend.describe()
        self._eos, self._n_vocab = loaded.eos, loaded.n_vocab
        self._prefix = prefix
        if prefix is not None:
            prefix.check(limits)
        # Where there is a prefix cache, it has them.
        self._slots = list(range(loaded.capacity.n_seq))[::-1]
        # Host time of arrivals since the last step, and time of moving KV before this one.
        self._arrivals_s = self._moved_s = 0.0

    def run(self, requests: Iterable[Request], fallback: Engine | None = None) -> list[RequestRecord]:
        """Serve an open loop to its end; returns the records in the order of the requests.

        All requests are checked before the first is begun. `fallback` serves what admission degrades: an engine with
        a smaller model on the same clock, which takes turns with this one on the same device. A step that fails ends
        the requests in it; the others go on. Whatever ends the run early, `records` keeps what was finished.
        """
        ordered = list(requests)
        pending = deque(sorted(ordered, key=lambda request: request.arrival_s))
        self._check(ordered, fallback)
        engines = [self] if fallback is None else [self, fallback]
        began = len(self.records), len(fallback.records) if fallback else 0
        self.clock.restart()
        try:
            self._serve(pending, engines)
        except BaseException as error:
            for engine in engines:
                engine._abandon(error)
            raise
        records = self.records[began[0] :] + (fallback.records[began[1] :] if fallback else [])
        by_id = {record.id: record for record in records}
        return [by_id[request.id] for request in ordered]

    def _serve(self, pending: deque[Request], engines: list[Engine]) -> None:
        while True:
            now, began = self.clock.now(), time.perf_counter()
            while pending and pending[0].arrival_s <= now:
                self._arrive(pending.popleft(), now, engines[1:])
            self._arrivals_s += time.perf_counter() - began
            stepped = [engine.step() for engine in engines]
            if not any(stepped):
                if not pending:
                    return
                self.clock.wait_until(pending[0].arrival_s)

    def _check(self, requests: list[Request], fallback: Engine | None) -> None:
        if len({request.id for request in requests}) < len(requests):
            raise UsageError("two requests have the same id", "number them")
        for engine in (self, *([fallback] if fallback else [])):
            if engine.clock is not self.clock:
                raise UsageError("an engine and its fallback run on two clocks", "give both the same clock")
            for request in requests:
                check_request(request, engine.limits, engine._n_vocab)

    def _arrive(self, request: Request, now_s: float, fallback: list[Engine]) -> None:
        sequence = Sequence(request, self._scheduler.order.key(request))
        self._event(request.arrival_s, "arrived", sequence)
        decision = self._admission.decide(request, self._scheduler, now_s)
        sequence.predicted_ttft_s = decision.predicted_ttft_s
        if decision.verdict == "accept":
            self._scheduler.submit(sequence)
        elif decision.verdict == "degrade" and fallback:
            sequence.degraded = True
            self._event(now_s, "degraded", sequence, decision.reason)
            fallback[0]._scheduler.submit(sequence)
        else:
            self._event(now_s, "rejected", sequence, decision.reason)
            self.records.append(sequence.record("rejected", now_s, reason=decision.reason))

    def step(self) -> bool:
        """One step of what is waiting and running; False where there is nothing to do."""
        scheduler = self._scheduler
        if not scheduler.unfinished:
            return False
        began, at = time.perf_counter(), self.clock.now()
        plan = scheduler.plan(at, self._move)
        decoding = list(scheduler.decoding.sequences.values())
        if not decoding and not plan.chunks:
            return True
        batch = self._batch(decoding, plan)
        forward_at, host_at = self.clock.now(), time.perf_counter()
        try:
            rows = self.backend.forward(batch)
            now, host_s = self.clock.now(), time.perf_counter() - host_at
            ready = decoding + [s for s, n in plan.chunks if s.filled + n == s.target]
            tokens = choose(rows, [(s.request.sampling, s.request.id, len(s.tokens)) for s in ready])
        except Exception as error:  # a device's own errors are of any class
            self._fail([*decoding, *(sequence for sequence, _ in plan.chunks)], error)
            return True
        done = scheduler.advance(plan, 1, now)
        self._hand_out(ready, tokens, done, now)
        self._offer(plan)
        self.costs.observe_step(MeasuredStep(plan.shape, now - forward_at))
        if self._log:
            overhead_s = self._arrivals_s + time.perf_counter() - began - host_s - self._moved_s
            load = scheduler.running, len(scheduler.waiting), scheduler.kv_used
            self.steps.append(StepRecord(at, plan.shape, now - forward_at, overhead_s, *load))
        self._arrivals_s = 0.0
        return True

    def _batch(self, decoding: list[Sequence], plan: Plan) -> Batch:
        """One token of each decoding sequence, then the chunks."""
        tokens = [s.tokens[-1] for s in decoding]
        positions = [self._scheduler.decoding.held(s) for s in decoding]
        slots = [s.slot for s in decoding]
        wanted = [True] * len(decoding)
        for sequence, n in plan.chunks:
            start = sequence.filled
            tokens += sequence.ids(start, n)
            positions += range(start, start + n)
            slots += [sequence.slot] * n
            wanted += [False] * (n - 1) + [start + n == sequence.target]
        return Batch(
            np.array(tokens, np.int32), np.array(positions, np.int32), np.array(slots, np.int32), np.array(wanted)
        )

    def _hand_out(self, ready: list[Sequence], tokens: list[int], done: list[Sequence], now_s: float) -> None:
        """Stamp a token of each ready sequence; end those at their limit or at the end of text."""
        for sequence, token in zip(ready, tokens, strict=True):
            sequence.tokens.append(token)
            sequence.times_s.append(now_s)
            stops = token in self._eos and not sequence.request.ignore_eos
            if stops and sequence.state == "decode":
                self._scheduler.stop(sequence)
                done.append(sequence)
        for sequence in done:
            self._free(sequence)
            stopped = sequence.tokens[-1] in self._eos and not sequence.request.ignore_eos
            reason: Literal["stop", "length"] = "stop" if stopped else "length"
            self._event(now_s, "finished", sequence, reason)
            self.records.append(sequence.record("finished", now_s, finish_reason=reason))

    # KV moves and failures

    def _move(self, plan: Plan) -> None:
        """Carry out who leaves and who joins. A KV that cannot be saved or restored is computed again."""
        began = time.perf_counter()
        for sequence, swaps in plan.preempted:
            if swaps:
                self._save(sequence)
            self._free(sequence)
        for sequence in plan.admitted:
            self._join(sequence)
        for sequence in plan.resumed:
            prefix = self._prefix
            sequence.slot = self._slots.pop() if prefix is None else prefix.begin_empty(_prompt(prefix, sequence))
            self._restore(sequence)
        self._moved_s = time.perf_counter() - began

    def _join(self, sequence: Sequence) -> None:
        """Give it a slot, with what the prefix cache has of its prompt."""
        if self._prefix is None:
            sequence.slot = self._slots.pop()
            return
        sequence.slot, sequence.filled = self._prefix.begin(_prompt(self._prefix, sequence))
        sequence.cached = sequence.filled

    def _offer(self, plan: Plan) -> None:
        """Let others share the prompts that are complete now."""
        if self._prefix is None:
            return
        for sequence, _ in plan.chunks:
            if sequence.state == "decode":
                sequence.slot = self._prefix.filled(sequence.slot)

    def _save(self, sequence: Sequence) -> None:
        at = self.clock.now()
        try:
            sequence.blob = self.backend.save(sequence.slot)
        except QuantlabError:
            self._scheduler.recompute(sequence)
        else:
            self.costs.observe_swap(sequence.target, self.clock.now() - at)

    def _restore(self, sequence: Sequence) -> None:
        at, blob = self.clock.now(), sequence.blob
        sequence.blob = None
        assert blob is not None
        try:
            self.backend.restore(sequence.slot, blob)
        except QuantlabError as error:
            self._scheduler.recompute(sequence)
            self._event(at, "preempted", sequence, f"recompute: {error.message}")
            self._free(sequence)
        else:
            self.costs.observe_swap(sequence.target, self.clock.now() - at)

    def _free(self, sequence: Sequence, *, sound: bool = True) -> None:
        """Give its slot back. What it computed goes to the prefix cache where it is `sound`."""
        slot, sequence.slot = sequence.slot, -1
        if slot < 0:
            return
        if self._prefix is None:
            self.backend.release(slot)
            self._slots.append(slot)
        else:
            n_tokens = self.backend.length(slot) if sound else 0
            _prompt(self._prefix, sequence, n_tokens)
            self._prefix.end(slot, n_tokens)

    def _abandon(self, error: BaseException) -> None:
        """The run ends here: what waits and runs has failed, and the engine is empty again."""
        self._fail(self._scheduler.clear(), error)

    def _fail(self, sequences: list[Sequence], error: BaseException) -> None:
        """These sequences end, with the reason in their records."""
        now, reason = self.clock.now(), str(error) or type(error).__name__
        for sequence in sequences:
            if sequence.state != "done":
                self._scheduler.drop(sequence)
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self._free(sequence, sound=False)
            self._event(now, "failed", sequence, reason)
            self.records.append(sequence.record("failed", now, reason=reason))

    def _event(self, at_s: float, kind: EventKind, sequence: Sequence, detail: str = "") -> None:
        if self._log:
            self.events.append(Event(at_s, kind, sequence.request.id, detail))


def _prompt(prefix: PrefixCache, sequence: Sequence, n_tokens: int = 0) -> Prompt:
    """The tokens of a sequence for its prefix cache: what it must have to decode, and at least `n_tokens`."""
    if sequence.cache_prompt is None:
        sequence.cache_prompt = prefix.prompt((), sequence.request.cache_salt)
    known = len(sequence.cache_prompt)
    if (more := max(sequence.target, n_tokens) - known) > 0:
        sequence.cache_prompt.extend(sequence.ids(known, more))
    return sequence.cache_prompt
