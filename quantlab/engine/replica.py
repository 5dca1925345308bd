"""One engine in virtual time: the scheduler and its policies decide, a step model says how long it takes.

No token is computed. As long as nothing arrives and no sequence ends, decode steps are taken as one. Arrivals are
taken in at the first step boundary after them, as `Engine` does: both give the same records.
"""

from __future__ import annotations

from collections.abc import Callable

from quantlab.core.errors import UsageError
from quantlab.engine.admission import AcceptAll, Admission, Decision
from quantlab.engine.limits import Limits
from quantlab.engine.policies import Fcfs, Order, Preemption, Recompute
from quantlab.engine.prefix import PrefixBlocks
from quantlab.engine.request import Event, EventKind, Request, RequestRecord
from quantlab.engine.scheduler import Scheduler
from quantlab.engine.sequence import Plan, Sequence
from quantlab.runtime.step_model import StepTime


class Replica:
    """One server of a fleet.

    `events` may collect its event log. `busy_s` and `n_steps` count the steps that have ended.
    """

    def __init__(
        self,
        limits: Limits,
        step_time: StepTime,
        *,
        order: Order | None = None,
        admission: Admission | None = None,
        preemption: Preemption | None = None,
        swap_token_s: float = 0.0,
        prefix: PrefixBlocks | None = None,
        events: list[Event] | None = None,
    ) -> None:
        if not swap_token_s >= 0:
            raise UsageError(f"swapping a token in {swap_token_s} s", "give seconds from 0 on")
        self.limits, self.events = limits, events
        self.busy_s, self.n_steps = 0.0, 0
        # When the steps that run will have ended; None while it is idle.
        self.ends_s: float | None = None
        # Set by the fleet: where records go, and where requests that are degraded go.
        self.sink: Callable[[RequestRecord], None] = lambda record: None
        self.degrade: Callable[[Request, float], None] | None = None
        self._admission = None if isinstance(admission, AcceptAll) else admission
        self._scheduler = Scheduler(
            limits,
            order or Fcfs(),
            preemption or Recompute(),
            events=events,
            cached_tokens=None if prefix is None else lambda sequence: self.cached_tokens(sequence.request),
            on_first_token=None if self._admission is None else self._admission.observe,
        )
        self._time, self._swap_token_s, self._prefix = step_time, swap_token_s, prefix
        self._inbox: list[tuple[Request, bool]] = []
        # What runs: for how many steps (0: a plan is yet to be made), planned and begun (KV is moved in between) when.
        self._plan = Plan()
        self._steps, self._planned_s, self._began_s = 0, 0.0, 0.0

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return self._scheduler.unfinished + len(self._inbox)

    def cached_tokens(self, request: Request) -> int:
        """How much of the prompt the prefix cache holds; one token is always computed, for its logits."""
        if self._prefix is None or not request.prefix:
            return 0
        return min(self._prefix.match(request.prefix), len(request.prompt) - 1)

    def put(self, request: Request, now_s: float, *, degraded: bool = False) -> None:
        """A request arrives; `ends_s` may become another."""
        self._inbox.append((request, degraded))
        if self.ends_s is None:
            # Others may arrive at the same moment: the first plan is made when time goes on.
            self.ends_s, self._steps = now_s, 0
        elif self._steps > 1 and self._concerns(request):
            self._cut(now_s)

    def end(self) -> None:
        """`ends_s` has come: hand out what is finished and begin the next plan."""
        assert self.ends_s is not None
        if self._steps:
            self._finish(self.ends_s)
        self._begin(self.ends_s)

    def _finish(self, now_s: float) -> None:
        plan = self._plan
        self.busy_s += now_s - self._planned_s
        self.n_steps += self._steps
        for sequence in self._scheduler.advance(plan, self._steps, now_s):
            self._event(now_s, "finished", sequence.request, "length")
            self.sink(sequence.record("finished", now_s, finish_reason="length"))
        if self._prefix is not None:
            for sequence, _ in plan.chunks:
                if sequence.filled == sequence.target:
                    self._prefix.insert(sequence.request.prefix)

    def _begin(self, now_s: float) -> None:
        if self._inbox:
            self._take_in(now_s)
        scheduler = self._scheduler
        if not scheduler.unfinished:
            self.ends_s = None
            return
        plan = self._plan = scheduler.plan(now_s)
        self._planned_s = self._began_s = now_s
        if self._swap_token_s:
            moved = sum(s.target for s, swaps in plan.preempted if swaps) + sum(s.target for s in plan.resumed)
            self._began_s += moved * self._swap_token_s
        self._steps = scheduler.horizon(plan) if self._time.leaps else 1
        if self._steps > 1:
            self.ends_s = self._began_s + self._time.decode_s(
                plan.shape.decode_seqs, plan.shape.context_tokens, self._steps
            )
        else:
            self.ends_s = self._began_s + self._time.seconds(plan.shape)

    def _concerns(self, request: Request) -> bool:
        """Whether an arrival could change what runs: not where it can only wait, unseen by anyone."""
        scheduler = self._scheduler
        if self._admission is not None or scheduler.order.preemptive:
            return True
        if scheduler.running >= self.limits.max_num_seqs:
            return False
        # Whoever heads the queue does not fit until a sequence ends.
        return not scheduler.waiting or scheduler.order.key(request) < scheduler.waiting[0][0]

    def _cut(self, now_s: float) -> None:
        """End the decode steps that run at their first boundary from now on."""
        seqs, context = self._plan.shape.decode_seqs, self._plan.shape.context_tokens
        steps = self._time.decode_steps(seqs, context, now_s - self._began_s, self._steps)
        if steps < self._steps:
            self._steps = steps
            self.ends_s = self._began_s + self._time.decode_s(seqs, context, steps)

    def _take_in(self, now_s: float) -> None:
        scheduler = self._scheduler
        for request, degraded in self._inbox:
            sequence = Sequence(request, scheduler.order.key(request))
            sequence.degraded = degraded
            self._event(request.arrival_s, "arrived", request)
            if self._admission is not None and not degraded:
                decision = self._admission.decide(request, scheduler, now_s)
                sequence.predicted_ttft_s = decision.predicted_ttft_s
                if decision.verdict != "accept":
                    self._turn_away(sequence, decision, now_s)
                    continue
            scheduler.submit(sequence)
        self._inbox.clear()

    def _turn_away(self, sequence: Sequence, decision: Decision, now_s: float) -> None:
        if decision.verdict == "degrade" and self.degrade is not None:
            self._event(now_s, "degraded", sequence.request, decision.reason)
            self.degrade(sequence.request, now_s)
        else:
            self._event(now_s, "rejected", sequence.request, decision.reason)
            self.sink(sequence.record("rejected", now_s, reason=decision.reason))

    def _event(self, at_s: float, kind: EventKind, request: Request, detail: str = "") -> None:
        if self.events is not None:
            self.events.append(Event(at_s, kind, request.id, detail))
