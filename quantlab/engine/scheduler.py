"""Continuous batching: which sequences the next step computes. Nothing is executed here.

A request joins and leaves between steps. Decoding sequences come first, one token each; what is left of the step's
token budget goes to prefill chunks (Agrawal, A., et al. (2023), SARATHI, arXiv:2308.16369). The engine executes a
plan on a backend, a simulated replica only adds up its time; both then call `advance`. As long as nobody arrives, the
same plan holds for `horizon` steps, and a replica takes them as one.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator

from quantlab.engine.decoding import Decoding
from quantlab.engine.limits import Limits
from quantlab.engine.policies import Order, Preemption, victim
from quantlab.engine.request import Event, EventKind
from quantlab.engine.sequence import Plan, Sequence
from quantlab.runtime.step_model import shape_of

# A share of the KV budget stays free when one is admitted beside others, so that it is not preempted at once.
_WATERMARK = 0.01


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.key, sequence.request.id


class Scheduler:
    """The queue, the running sequences and the KV budget of one engine or replica."""

    def __init__(
        self,
        limits: Limits,
        order: Order,
        preemption: Preemption,
        *,
        events: list[Event] | None = None,
        cached_tokens: Callable[[Sequence], int] | None = None,
        on_first_token: Callable[[Sequence], None] | None = None,
    ) -> None:
        """`cached_tokens`: how much of a prompt need not be computed, asked when it is admitted."""
        self._cached_tokens, self._on_first_token = cached_tokens, on_first_token
        self.limits, self.order, self.preemption, self.events = limits, order, preemption, events
        self.waiting: list[tuple[float, int, Sequence]] = []
        self.waiting_tokens = 0
        # In the order of their keys.
        self.prefilling: list[Sequence] = []
        self.decoding = Decoding()
        self.kv_used = 0
        self._watermark = int(_WATERMARK * limits.kv_budget_tokens)
        # Of those that finished: how many, what they generated, and what they might have.
        self.finished = self.finished_tokens = self.finished_limits = 0

    @property
    def running(self) -> int:
        """Sequences that hold KV."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def unfinished(self) -> int:
        """Sequences that wait or run."""
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    def submit(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        heapq.heappush(self.waiting, (sequence.key, sequence.request.id, sequence))
        self.waiting_tokens += sequence.target - sequence.filled

    def plan(self, now_s: float, move: Callable[[Plan], None] = lambda plan: None) -> Plan:
        """The next step of what waits and runs, of which there is some: preempts, admits and cuts chunks.

        `move` carries out who leaves and joins; it may find that less of a prompt is held than was told, or that a
        sequence must be recomputed.
        """
        plan = Plan()
        while len(self.decoding) > self.limits.kv_budget_tokens - self.kv_used:
            self._preempt(plan, victim(self.sequences()), now_s)
        if self.waiting and self.order.preemptive:
            self._displace(plan, now_s)
        room = self.limits.max_num_batched_tokens - len(self.decoding)
        if self.waiting:
            self._admit(plan, room, now_s)
        move(plan)
        self._cut_chunks(plan, self.limits.max_num_batched_tokens - len(self.decoding))
        assert plan.shape.prefill_tokens or plan.shape.decode_seqs or self.waiting, "whoever waits alone fits"
        return plan

    def horizon(self, plan: Plan) -> int:
        """How many steps in a row the plan holds if nobody arrives: until one ends, or the KV is full."""
        if plan.chunks or not self.decoding:
            return 1
        free = self.limits.kv_budget_tokens - self.kv_used
        return min(self.decoding.until_next_end(), free // len(self.decoding))

    def advance(self, plan: Plan, steps: int, now_s: float) -> list[Sequence]:
        """The plan ran `steps` times and ended now; returns those that reached their limit of new tokens."""
        done: list[Sequence] = []
        if self.decoding:
            self.kv_used += len(self.decoding) * steps
            for sequence in self.decoding.advance(steps):
                self._leave(sequence)
                done.append(sequence)
        completed = 0
        for sequence, n in plan.chunks:
            sequence.filled += n
            if sequence.filled == sequence.target:
                completed += 1
                self._filled(sequence, now_s, done)
        # Chunks are cut in the order of `prefilling`, and only the last may leave something to fill.
        del self.prefilling[:completed]
        for sequence in done:
            self._done(sequence)
        return done

    def stop(self, sequence: Sequence) -> None:
        """A decoding sequence ended before its limit."""
        self._leave(sequence)
        self._done(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A running sequence failed."""
        if sequence.state == "decode":
            self._leave(sequence)
        else:
            self.prefilling.remove(sequence)
            self.kv_used -= sequence.target
        sequence.state = "done"

    def clear(self) -> list[Sequence]:
        """Drop everything; returns what waited and ran."""
        left = [*self.sequences(), *(sequence for _, _, sequence in self.waiting)]
        for sequence in list(self.sequences()):
            self.drop(sequence)
        for _, _, sequence in self.waiting:
            sequence.state = "done"
        self.waiting.clear()
        self.waiting_tokens = 0
        return left

    def recompute(self, sequence: Sequence) -> None:
        """The saved KV of a sequence is lost: it is computed again."""
        resumed = sequence.state == "decode"
        if resumed:
            self._leave(sequence)
        self._begin_again(sequence)
        if resumed:
            self.submit(sequence)
        else:
            self.waiting_tokens += sequence.target

    def kv_tokens(self, sequence: Sequence) -> int:
        """Tokens of a running sequence in the KV."""
        if sequence.state == "decode":
            return self.decoding.held(sequence)
        return sequence.filled

    def generated(self, sequence: Sequence) -> int:
        """Tokens that a running sequence has generated."""
        decoded = self.decoding.held(sequence) - sequence.target if sequence.state == "decode" else 0
        return sequence.generated + decoded

    # who leaves

    def sequences(self) -> Iterator[Sequence]:
        """Those that hold KV."""
        yield from self.decoding.sequences.values()
        yield from self.prefilling

    def _preempt(self, plan: Plan, sequence: Sequence, now_s: float) -> None:
        held = self.kv_tokens(sequence)
        if sequence.state == "decode":
            self._leave(sequence)
        else:
            self.prefilling.remove(sequence)
            self.kv_used -= sequence.target
        # A prompt that is not complete is begun again.
        swaps = sequence.generated > 0 and sequence.state == "decode" and self.preemption.swaps(held)
        if swaps:
            sequence.state, sequence.target, sequence.filled = "swapped", held, held
            sequence.swapped += 1
        else:
            self._begin_again(sequence)
        plan.preempted.append((sequence, swaps))
        self.submit(sequence)
        self._event(now_s, "preempted", sequence, "swap" if swaps else "recompute")

    def _begin_again(self, sequence: Sequence) -> None:
        """All that was prompt or generated is what must be filled."""
        sequence.state = "waiting"
        sequence.target, sequence.filled = len(sequence.request.prompt) + sequence.generated, 0
        sequence.recomputed += 1

    def _displace(self, plan: Plan, now_s: float) -> None:
        """Make room for the head of the queue where the order lets it displace others, and that is enough."""
        head = self.waiting[0][2]
        if self._fits(head):
            return
        others = [s for s in self.sequences() if self.order.displaces(head.request, s.request)]
        missing = self._missing(head)
        if sum(max(self.kv_tokens(s), s.target) + 1 for s in others) < missing or not others:
            return
        others.sort(key=_place)
        while others and not self._fits(head):
            self._preempt(plan, others.pop(), now_s)

    # who joins

    def _missing(self, sequence: Sequence) -> int:
        """KV tokens that must come free before it can be admitted; 0 or less: none.

        It takes its target, and one token more where it decodes at once (it was swapped); the others grow by one.
        """
        taken = self.kv_used + len(self.decoding) + (self._watermark if self.running else 0)
        return taken + sequence.target + (sequence.state == "swapped") - self.limits.kv_budget_tokens

    def _fits(self, sequence: Sequence) -> bool:
        return self.running < self.limits.max_num_seqs and self._missing(sequence) <= 0

    def _admit(self, plan: Plan, room: int, now_s: float) -> None:
        """Take from the queue while there is room: what the decoding ones leave of the token budget."""
        while self.waiting and self._fits(self.waiting[0][2]) and self._left(self.waiting[0][0], room) > 0:
            sequence = heapq.heappop(self.waiting)[2]
            self.waiting_tokens -= sequence.target - sequence.filled
            self.kv_used += sequence.target
            if sequence.admitted_s is None:
                sequence.admitted_s = now_s
                self._event(now_s, "admitted", sequence)
            else:
                self._event(now_s, "resumed", sequence, "swap" if sequence.state == "swapped" else "recompute")
            if sequence.state == "swapped":
                plan.resumed.append(sequence)
                self.decoding.join(sequence)
                room -= 1
            else:
                sequence.state = "prefill"
                if self._cached_tokens is not None:
                    sequence.filled = sequence.cached = self._cached_tokens(sequence)
                plan.admitted.append(sequence)
                insort(self.prefilling, sequence, key=_place)

    def _left(self, key: float, room: int) -> int:
        """What the prompts of smaller keys leave of the token budget: a long batch prompt holds nobody up."""
        for sequence in self.prefilling:
            if sequence.key > key:
                break
            room -= sequence.target - sequence.filled
        return room

    def _cut_chunks(self, plan: Plan, room: int) -> None:
        for sequence in self.prefilling:
            if room <= 0:
                break
            n = min(sequence.target - sequence.filled, room)
            plan.chunks.append((sequence, n))
            room -= n
        seqs = len(self.decoding)
        plan.shape = shape_of(((s.filled, n) for s, n in plan.chunks), seqs, self.decoding.context + seqs)

    # bookkeeping

    def _filled(self, sequence: Sequence, now_s: float, done: list[Sequence]) -> None:
        """The last chunk of a prompt gave a token."""
        sequence.generated += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            self._event(now_s, "first_token", sequence)
            if self._on_first_token is not None:
                self._on_first_token(sequence)
        if sequence.generated == sequence.limit:
            self.kv_used -= sequence.target
            done.append(sequence)
        else:
            self.decoding.join(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.kv_used -= self.decoding.leave(sequence)

    def _done(self, sequence: Sequence) -> None:
        sequence.state = "done"
        self.finished += 1
        self.finished_tokens += sequence.generated
        self.finished_limits += sequence.limit

    def _event(self, now_s: float, kind: EventKind, sequence: Sequence, detail: str = "") -> None:
        if self.events is not None:
            self.events.append(Event(now_s, kind, sequence.request.id, detail))
