"""Admission where step times are learnt while they change: other processes slow the machine, or steps scatter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quantlab.engine import Engine, Fcfs, MeasuredCosts, Order, PredictedDelay, PriorityOrder, Request, RequestRecord
from quantlab.engine.admission import predict_ttft
from quantlab.engine.limits import limits_of
from quantlab.runtime.backend import Capacity
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import MeasuredStep, StepModel, StepShape

# Like a small model on two cores; it serves 7.8 requests of `mixed` per second.
STEPS = StepModel(0.008, 1.2e-3, 1e-7, 1.2e-3, 1e-6)
MU, SEQS, SLO_S = 7.8, 8, 0.5
Slow = Callable[[float], float]


class Changing:
    """Steps of STEPS times `slow(now)`, scattered lognormally with this coefficient of variation."""

    leaps = False

    def __init__(self, clock: VirtualClock, slow: Slow, variation: float) -> None:
        self._clock, self._slow = clock, slow
        self._sigma = math.sqrt(math.log(1 + variation**2))
        self._random = random.Random(5)

    def seconds(self, shape: StepShape) -> float:
        noise = math.exp(self._random.gauss(-(self._sigma**2) / 2, self._sigma))
        return STEPS.seconds(shape) * self._slow(self._clock.now()) * noise

    def decode_s(self, seqs: int, context: int, steps: int) -> float:
        raise NotImplementedError

    def decode_steps(self, seqs: int, context: int, within_s: float, most: int) -> int:
        return 1


def mixed(rate: float, n: int, seed: int) -> list[Request]:
    rng, at, found = random.Random(seed), 0.0, []
    for i in range(n):
        at += rng.expovariate(rate)
        batch = i % 2 == 1
        new = rng.randint(8, 24) * (4 if batch else 1)
        prompt = np.zeros(rng.randint(16, 48), np.int32)
        kind: Any = "batch" if batch else "interactive"
        found.append(Request(i, prompt, new, at, priority=kind, ttft_slo_s=None if batch else SLO_S))
    return found


def served(order: Order, rate: float, n: int, seed: int, *, slow: Slow, variation: float) -> list[RequestRecord]:
    """The interactive requests of a run under the guard, which learnt from a run before it."""
    clock = VirtualClock()
    capacity = Capacity(512, SEQS, 4096, n_outputs=SEQS)
    costs, limits = MeasuredCosts(), None
    for number in range(2):
        now: Slow = slow if number else lambda _: 1.0
        backend = SimulatedBackend(capacity, Changing(clock, now, variation), clock)
        limits = limits or limits_of(backend, max_num_batched_tokens=128)
        guard = PredictedDelay(costs)
        engine = Engine(backend, limits, clock=clock, order=order, admission=guard, costs=costs)
        records = engine.run(mixed(rate, n if number else 100, seed if number else 99))
    return [record for record in records if record.priority == "interactive"]


@pytest.mark.parametrize(
    ("what", "share", "slow", "variation", "most_late"),
    [
        ("nothing changes", 0.95, lambda t: 1.0, 0.0, 0.005),
        ("steps scatter", 0.95, lambda t: 1.0, 0.5, 0.01),
        ("they double midway", 0.8, lambda t: 1.0 if t < 8 else 2.0, 0.0, 0.015),
        ("they double and scatter", 0.8, lambda t: 1.0 if t < 8 else 2.0, 0.5, 0.02),
        ("every fifth second is three times slower", 0.6, lambda t: 3.0 if t % 5 < 1 else 1.0, 0.0, 0.02),
    ],
)
@pytest.mark.parametrize("order", [Fcfs(), PriorityOrder(5.0)], ids=["fcfs", "priority"])
def test_the_guard_holds_the_deadline_in_a_short_run(
    order: Order, what: str, share: float, slow: Slow, variation: float, most_late: float
) -> None:
    """Of a hundred requests each, six seeds: nearly nobody who was let in is late, and somebody is let in."""
    everyone = [r for seed in range(1, 7) for r in served(order, share * MU, 100, seed, slow=slow, variation=variation)]
    finished = [record for record in everyone if record.status == "finished"]
    late = sum(not record.met_deadlines for record in finished)
    assert late / len(finished) <= most_late, what
    assert len(finished) > 0.55 * len(everyone)


def test_predicted_step_times_follow_the_machine_within_some_steps() -> None:
    """What prefill costs is known from long ago; that everything takes twice as long is known from now."""
    costs, rng = MeasuredCosts(), random.Random(0)

    def step(prefill: int, seqs: int, factor: float) -> None:
        shape = StepShape(prefill, prefill * prefill // 2, seqs, 40 * seqs)
        costs.observe_step(MeasuredStep(shape, factor * STEPS.seconds(shape)))

    for _ in range(400):
        step(rng.choice([0, 0, 0, 32, 64]), rng.randint(1, 8), 1.0)
    asked = StepShape(64, 2048, 4, 160)
    known = costs.steps()
    assert known is not None
    assert known.seconds(asked) == pytest.approx(STEPS.seconds(asked), rel=0.02)
    for _ in range(16):
        step(0, rng.randint(1, 8), 2.0)
    slower = costs.steps()
    assert slower is not None
    assert slower.seconds(asked) == pytest.approx(2 * STEPS.seconds(asked), rel=0.05)


def test_a_place_is_free_when_those_ahead_have_had_theirs() -> None:
    """Two places that are free in 3 and 9 steps; one waits for 4 steps: the newcomer has its place in 7."""
    from quantlab.engine import Limits, Swap
    from quantlab.engine.scheduler import Scheduler
    from quantlab.engine.sequence import Sequence

    scheduler = Scheduler(Limits(2, 64, 640, 64), Fcfs(), Swap())
    for i, new in enumerate((4, 10, 4)):
        request = Request(i, range(1), new, 0.1 * i)
        scheduler.submit(Sequence(request, scheduler.order.key(request)))
    plan = scheduler.plan(1.0)
    scheduler.advance(plan, 1, 2.0)
    assert (scheduler.running, len(scheduler.waiting)) == (2, 1)
    # 3 and 4 steps of those before it, and its own prefill.
    ttft = predict_ttft(Request(9, range(1), 5, 1.0), scheduler, StepModel(1.0))
    assert ttft == pytest.approx(3 + 4 + 1)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_slower_model_is_slower_in_every_term(factor: float) -> None:
    model = StepModel(0.01, 1e-3, 1e-6, 2e-3, 1e-5, (0.01, 0.013, 0.015))
    for shape in (StepShape(0, 0, 1, 40), StepShape(64, 2080, 2, 90), StepShape(1, 1, 7, 500)):
        assert model.slower(factor).seconds(shape) == pytest.approx(factor * model.seconds(shape))
