"""Who is let in: everyone, or those whose deadlines can be met by what is predicted."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from quantlab.core.errors import UsageError
from quantlab.core.statistics import percentile
from quantlab.engine.costs import Costs
from quantlab.engine.request import Request
from quantlab.engine.scheduler import Scheduler
from quantlab.engine.sequence import Sequence
from quantlab.runtime.step_model import StepShape, StepTime, chunk_pairs


class Decision(NamedTuple):
    """What to do with an arrival, and the time to first token that was predicted (None: nothing known yet)."""

    verdict: Literal["accept", "reject", "degrade"]
    predicted_ttft_s: float | None = None
    reason: str = ""


class Admission(Protocol):
    """Decides once, when a request arrives."""

    def decide(self, request: Request, scheduler: Scheduler, now_s: float) -> Decision:
        """Accept it, reject it like a server's 429, or degrade it to a smaller model."""

    def observe(self, sequence: Sequence) -> None:
        """The first token of an accepted request has come."""


class AcceptAll:
    """Lets everyone in."""

    def decide(self, request: Request, scheduler: Scheduler, now_s: float) -> Decision:
        """Accept."""
        return Decision("accept")

    def observe(self, sequence: Sequence) -> None:
        """Learn nothing."""


# Errors of prediction that are remembered, and new ones before the margin is taken anew.
_WINDOW = 256
_RENEW_EVERY = 8


class PredictedDelay:
    """Turns away what would miss a deadline by the predicted delay (`predict_ttft`) and a margin.

    The margin is learnt: of what was accepted lately, `confidence` came later than predicted by no more than it. It
    covers what cannot be foreseen, such as later arrivals that share a step; it takes half of a deadline at most. A
    request without deadlines is always accepted, and everyone is until there are costs to predict with. With
    `degrade` a request goes to the engine's smaller model instead of being rejected.
    """

    def __init__(self, costs: Costs, *, confidence: float = 0.99, degrade: bool = False) -> None:
        if not 0 < confidence < 1:
            raise UsageError(f"a confidence of {confidence}", "give a share between 0 and 1, such as 0.99")
        self._costs, self._confidence, self._degrade = costs, confidence, degrade
        self._errors_s: deque[float] = deque(maxlen=_WINDOW)
        self._new = 0
        self._margin_s = 0.0

    def decide(self, request: Request, scheduler: Scheduler, now_s: float) -> Decision:
        """See `Admission`."""
        steps = self._costs.steps()
        if steps is None or (request.ttft_slo_s is None and request.e2e_slo_s is None):
            return Decision("accept")
        # It may have waited for the end of a step already.
        ttft = now_s - request.arrival_s + predict_ttft(request, scheduler, steps)
        e2el = ttft + (request.max_new_tokens - 1) * _step_s(scheduler, steps)
        for name, predicted, slo in (("TTFT", ttft, request.ttft_slo_s), ("E2EL", e2el, request.e2e_slo_s)):
            if slo is None:
                continue
            # Who rejects everything learns nothing more: half of the deadline is always left.
            margin = min(self._margin_s, slo / 2)
            if predicted + margin > slo:
                reason = f"predicted {name} {predicted:.3g} s and a margin of {margin:.3g} s: past {slo:.3g} s"
                return Decision("degrade" if self._degrade else "reject", ttft, reason)
        return Decision("accept", ttft)

    def observe(self, sequence: Sequence) -> None:
        """See `Admission`."""
        if sequence.predicted_ttft_s is None or sequence.first_token_s is None:
            return
        self._errors_s.append(sequence.first_token_s - sequence.arrival_s - sequence.predicted_ttft_s)
        self._new += 1
        if self._new >= _RENEW_EVERY:
            self._new = 0
            self._margin_s = max(0.0, percentile(self._errors_s, 100 * self._confidence))


def predict_ttft(request: Request, scheduler: Scheduler, steps: StepTime) -> float:
    """Seconds until the first token of a newcomer: the prefill of all prompts up to its own, and decode steps.

    Decode steps pass until the prompts have had their share of each step's token budget, and until a place and KV have
    come free: those that run end after their remaining tokens, and those ahead take the places one by one. Each is
    taken to generate the share of its limit that finished ones did on average; until one has, all of it.
    """
    key, own, limits = scheduler.order.key(request), len(request.prompt), scheduler.limits
    ahead, stay = sorted(_ahead(scheduler, key), key=_place), _not_displaced(scheduler, request)
    filling = [(s.filled, s.target - s.filled) for s in (*ahead, *scheduler.prefilling) if s.key <= key]
    tokens = sum(n for _, n in filling) + own
    pairs = sum(chunk_pairs(start, n) for start, n in filling) + chunk_pairs(0, own)
    # Each prompt is beside decoding sequences once, or more often where it is cut: a group of its own.
    groups = 1 + len(filling) + bool(stay)
    prefill_s = steps.seconds(StepShape(tokens, pairs, 0, 0, groups)) - steps.seconds(StepShape(0, 0, 0, 0))

    n_before = len(ahead) + len(stay)
    # Those that wait will hold their prompts and, on average, half of their answers.
    share = scheduler.finished_tokens / scheduler.finished_limits if scheduler.finished else 1.0
    lengths = [share * s.limit for s in ahead]
    held: float = sum(max(scheduler.kv_tokens(s), s.target) for s in stay) + sum(s.target for s in ahead) + own
    held += (sum(lengths) + share * request.max_new_tokens) / 2
    places = max(1, min(limits.max_num_seqs, int(limits.kv_budget_tokens * (n_before + 1) / held)))
    wait_steps = _until_free([max(1.0, share * s.limit - scheduler.generated(s)) for s in stay], lengths, places)
    room = max(1, limits.max_num_batched_tokens - len(scheduler.decoding))
    n_steps = max(math.ceil(tokens / room), wait_steps + math.ceil(own / room))
    seqs = min(n_before, places)
    return prefill_s + n_steps * steps.seconds(StepShape(0, 0, seqs, int(seqs * held / (n_before + 1))))


def _until_free(running: list[float], ahead: list[float], places: int) -> float:
    """Steps until a place is free for whoever comes after those ahead, each for so many steps."""
    ends = sorted(running)[max(0, len(running) - places) :]
    ends = [0.0] * (places - len(ends)) + ends
    for n in ahead:
        heapq.heapreplace(ends, ends[0] + n)
    return ends[0]


def _step_s(scheduler: Scheduler, steps: StepTime) -> float:
    """A decode step of the running sequences and one more."""
    seqs = scheduler.running + 1
    return steps.seconds(StepShape(0, 0, seqs, scheduler.kv_used + seqs))


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.key, sequence.request.id


def _ahead(scheduler: Scheduler, key: float) -> Iterator[Sequence]:
    """Those waiting that are served before a newcomer of this key."""
    heap, todo = scheduler.waiting, [0]
    while todo:
        i = todo.pop()
        if i < len(heap) and heap[i][0] <= key:
            yield heap[i][2]
            todo += (2 * i + 1, 2 * i + 2)


def _not_displaced(scheduler: Scheduler, request: Request) -> list[Sequence]:
    """Those running that a newcomer would not have preempted."""
    order = scheduler.order
    return [s for s in scheduler.sequences() if not (order.preemptive and order.displaces(request, s.request))]
