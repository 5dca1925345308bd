"""The policies of `--policy` and of the part mixed by name, as the engine's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quantlab.engine import (
    AcceptAll,
    Admission,
    Cheaper,
    Costs,
    Fcfs,
    Order,
    PredictedDelay,
    Preemption,
    PriorityOrder,
)


class Policy(NamedTuple):
    """Who is next, who is let in, and how a victim leaves."""

    order: Order
    admission: Admission
    preemption: Preemption


_POLICIES: dict[str, Callable[[Costs, float], tuple[Order, Admission]]] = {
    "fcfs": lambda costs, ageing_s: (Fcfs(), AcceptAll()),
    "admission": lambda costs, ageing_s: (Fcfs(), PredictedDelay(costs)),
    "priority": lambda costs, ageing_s: (PriorityOrder(ageing_s, preemptive=False), AcceptAll()),
    "preemption": lambda costs, ageing_s: (PriorityOrder(ageing_s), AcceptAll()),
    "guarded": lambda costs, ageing_s: (PriorityOrder(ageing_s), PredictedDelay(costs)),
    "fallback": lambda costs, ageing_s: (PriorityOrder(ageing_s), PredictedDelay(costs, degrade=True)),
}


def policy(name: str, costs: Costs, ageing_s: float) -> Policy:
    """A new policy of a name of spec.POLICIES or of mixed.policies: what it learns is of one run."""
    return Policy(*_POLICIES[name](costs, ageing_s), Cheaper(costs))
