"""The decisions of the scheduler, one class each: who is next, who must go, and how.

Admission is in admission.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quantlab.core.errors import UsageError
from quantlab.engine.costs import Costs, recompute_s
from quantlab.engine.request import Request
from quantlab.engine.sequence import Sequence


class Order(Protocol):
    """Who is next. A request keeps its key: the smallest waiting key is served first, the largest goes first.

    `preemptive`: whether `displaces` is ever true.
    """

    preemptive: bool

    def key(self, request: Request) -> float:
        """Its place: smaller is earlier."""

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting`, that finds no room, may have `running` preempted."""


class Fcfs:
    """First come, first served."""

    preemptive = False

    def key(self, request: Request) -> float:
        """The arrival."""
        return request.arrival_s

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Never."""
        return False


class PriorityOrder:
    """Interactive requests before batch requests, with ageing.

    A batch request counts as if it had arrived `ageing_s` later. So it is overtaken by the interactive requests that
    arrive within `ageing_s` of it and by no later one, however many arrive: its wait is at most `ageing_s` plus the
    time to serve what was ahead of it by then. With `preemptive`, an interactive request that finds no room has
    running batch requests of a larger key preempted; a request that has the smallest key of all is never preempted,
    so every request finishes.
    """

    def __init__(self, ageing_s: float, *, preemptive: bool = True) -> None:
        if not ageing_s >= 0:
            raise UsageError(f"an ageing time of {ageing_s} s", "give seconds from 0 on")
        self.ageing_s, self.preemptive = ageing_s, preemptive

    def key(self, request: Request) -> float:
        """The arrival, later by the ageing time for a batch request."""
        return request.arrival_s + (self.ageing_s if request.priority == "batch" else 0.0)

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Interactive displaces batch, unless the batch request has aged."""
        urgent = waiting.priority == "interactive" and running.priority == "batch"
        return urgent and self.key(waiting) < self.key(running)


class Preemption(Protocol):
    """How a victim leaves: its KV is moved to host memory, or forgotten and computed again."""

    def swaps(self, n_tokens: int) -> bool:
        """Whether to swap a sequence with `n_tokens` in the KV; otherwise it is recomputed."""


class Swap:
    """Always swap."""

    def swaps(self, n_tokens: int) -> bool:
        """Yes."""
        return True


class Recompute:
    """Always recompute."""

    def swaps(self, n_tokens: int) -> bool:
        """No."""
        return False


class Cheaper:
    """Swap or recompute, whichever is predicted to take less time; swap where nothing was measured yet."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def swaps(self, n_tokens: int) -> bool:
        """Whether moving the KV out and back takes less time than computing it again."""
        swap, recompute = self._costs.swap_s(n_tokens), recompute_s(self._costs, n_tokens)
        return swap is None or recompute is None or swap <= recompute


def victim(running: Iterable[Sequence]) -> Sequence:
    """Who goes when the KV is full: the one of the largest key, as it would have been served last."""
    return max(running, key=lambda sequence: (sequence.key, sequence.request.id))
