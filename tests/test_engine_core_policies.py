"""The policies: bounds on waiting, who goes and how, predicted delays; on simulated replicas under load."""

from __future__ import annotations

import math
import random
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.core.errors import UsageError
from quantlab.engine import (
    Admission,
    Cheaper,
    Decision,
    Engine,
    Fcfs,
    Fleet,
    KnownCosts,
    Limits,
    MeasuredCosts,
    PredictedDelay,
    PriorityOrder,
    Recompute,
    Replica,
    Request,
    RequestRecord,
    Swap,
)
from quantlab.engine.admission import predict_ttft
from quantlab.engine.costs import recompute_s
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.step_model import MeasuredStep, StepModel, StepShape
from tests.engine_cases import N_CTX, STEP_MODEL, simulated

# A small model on two cores: 20 ms a step and 4 ms a sequence, 3 ms a prompt token.
CPU = StepModel(0.02, 3e-3, 1e-6, 4e-3, 1e-6)


def serve(replica: Replica, requests: list[Request]) -> dict[int, RequestRecord]:
    records: list[RequestRecord] = []
    Fleet([replica]).run(sorted(requests, key=lambda r: r.arrival_s), records.append)
    return {record.id: record for record in records}


def stream(
    n: int, rate: float, *, seed: int = 1, first: int = 0, prompt: int = 100, new: int = 40, **options: Any
) -> Any:
    """Poisson arrivals, exponential lengths."""
    rng, at, requests = random.Random(seed), 0.0, []
    for i in range(first, first + n):
        at += rng.expovariate(rate)
        lengths = min(900, 1 + int(rng.expovariate(1 / prompt))), min(400, 1 + int(rng.expovariate(1 / new)))
        requests.append(Request(i, range(lengths[0]), lengths[1], at, **options))
    return requests


# ageing


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.integers(0, 1000), st.sampled_from([0.0, 0.3, 2.0]), st.integers(1, 4), st.floats(0.5, 3), st.booleans()
)
def test_a_batch_request_waits_no_longer_than_the_bound(
    seed: int, ageing_s: float, seqs: int, rho: float, preemptive: bool
) -> None:
    """Interactive traffic far beyond capacity: nobody who comes `ageing_s` after a batch request begins before it.

    Each request is one step of 0.1 s in one of `seqs` places: what is ahead at the end of the ageing time is counted.
    """
    rng = random.Random(seed)
    step_s, ats = 0.1, [0.0, 0.0]
    requests = []
    for i in range(150):
        batch = i % 15 == 7
        ats[batch] += rng.expovariate(rho * seqs / step_s / (15 if batch else 1))
        requests.append(Request(i, range(1), 1, ats[batch], priority="batch" if batch else "interactive"))
    order = PriorityOrder(ageing_s, preemptive=preemptive)
    records = serve(Replica(Limits(seqs, 64, 64, 64), StepModel(step_s), order=order), requests)
    for r in requests:
        if r.priority != "batch":
            continue
        wait = records[r.id].queue_delay_s
        ahead = [o for o in requests if order.key(o) < order.key(r) and records[o.id].finished_s > r.arrival_s]
        for other in requests:
            if other.arrival_s > r.arrival_s + ageing_s:
                assert records[other.id].admitted_s >= records[r.id].admitted_s
        # The step that runs at its arrival, and those ahead, `seqs` at a time.
        assert wait <= ageing_s + step_s * (1 + math.ceil(len(ahead) / seqs)) + 1e-9


def test_without_ageing_a_batch_request_starves() -> None:
    """What the bound is for: at twice the capacity it would wait for the end of the traffic."""
    requests = [*stream(400, 4.0, prompt=50), Request(1000, range(50), 20, 5.0, priority="batch")]
    waits = {}
    for ageing_s in (1e9, 5.0):
        order = PriorityOrder(ageing_s)
        waits[ageing_s] = serve(Replica(Limits(8, 256, 9000, 2048), CPU, order=order), requests)[1000].queue_delay_s
    assert waits[1e9] > 60
    assert waits[5.0] < waits[1e9] / 4


def test_preemptive_priority_holds_the_delay_of_interactive_requests() -> None:
    """Long batch requests hold every place: interactive ones wait, go first, or take a place at once."""
    batch = stream(20, 50.0, seed=2, first=1000, new=400, priority="batch")
    live = stream(60, 0.5, prompt=30, new=10)
    p99, done = {}, {}
    for name, order in (
        ("fcfs", Fcfs()),
        ("priority", PriorityOrder(600, preemptive=False)),
        ("preemptive", PriorityOrder(600)),
    ):
        records = serve(Replica(Limits(4, 64, 9000, 2048), CPU, order=order), batch + live)
        p99[name] = np.percentile([records[r.id].ttft_s for r in live], 99)
        done[name] = all(record.status == "finished" for record in records.values())
    assert done == {"fcfs": True, "priority": True, "preemptive": True}
    assert p99["preemptive"] < 1.0 < p99["priority"] < p99["fcfs"]


def test_a_long_batch_prompt_does_not_hold_up_a_short_interactive_one() -> None:
    """Chunks go by key: the interactive prompt is in the next step, beside a prompt of 40 steps."""
    requests = [Request(0, range(1900), 5, priority="batch"), Request(1, range(20), 5, 0.5)]
    for order, most in ((PriorityOrder(60), 0.5), (Fcfs(), 1e9)):
        records = serve(Replica(Limits(4, 48, 9000, 2048), CPU, order=order), requests)
        assert records[1].ttft_s < most
    assert records[1].ttft_s > 4


# who goes, and how


def test_the_last_to_be_served_is_the_first_to_go() -> None:
    clock = VirtualClock()
    engine = Engine(simulated(clock), Limits(4, 32, 80, N_CTX), clock=clock, preemption=Recompute())
    engine.run([Request(i, list(range(10)), 40, 0.001 * i) for i in range(4)])
    preempted = [event.request_id for event in engine.events if event.kind == "preempted"]
    assert preempted
    assert 0 not in preempted
    finished = [event.request_id for event in engine.events if event.kind == "finished"]
    assert finished == [0, 1, 2, 3]


def test_cheaper_takes_what_is_predicted_to_take_less() -> None:
    """Recomputing n tokens: 1 ms each and 10 us for each pair; swapping: 2 x 2 ms each."""
    costs = KnownCosts(STEP_MODEL, 2e-3)
    assert recompute_s(costs, 100) == pytest.approx(0.1 + 5050e-5)
    assert costs.swap_s(100) == pytest.approx(0.4)
    policy = Cheaper(costs)
    assert [policy.swaps(n) for n in (10, 100, 500, 700, 2000)] == [False, False, False, True, True]
    assert Cheaper(KnownCosts(STEP_MODEL, 1e-5)).swaps(10)
    assert Cheaper(MeasuredCosts()).swaps(10), "nothing is known: swap"
    assert Swap().swaps(1)
    assert not Recompute().swaps(1)


def test_measured_costs_decide_by_what_ran() -> None:
    costs = MeasuredCosts()
    for i in range(1, 100):
        shape = StepShape(i if i % 2 else 0, 0, i % 5, 10 * i)
        costs.observe_step(MeasuredStep(shape, STEP_MODEL.seconds(shape)))
    costs.observe_swap(100, 0.5)
    costs.observe_swap(300, 1.5)
    assert costs.swap_s(10) == pytest.approx(2 * 10 * 5e-3)
    assert not Cheaper(costs).swaps(10)
    for _ in range(300):
        costs.observe_swap(100, 1e-4)
    assert Cheaper(costs).swaps(10), "old swaps are forgotten"


# admission


class Predicting:
    """Accepts everyone and notes what was predicted."""

    def decide(self, request: Request, scheduler: Any, now_s: float) -> Decision:
        return Decision("accept", now_s - request.arrival_s + predict_ttft(request, scheduler, CPU))

    def observe(self, sequence: Any) -> None:
        pass


@pytest.mark.parametrize("seqs", [1, 8, 32])
@pytest.mark.parametrize("kv", [1400, 100_000])
@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_predicted_delays_are_those_that_come(seqs: int, kv: int, rate: float) -> None:
    """Whether places, KV or prefill bind, below and above capacity: within a fifth in the median."""
    records = serve(Replica(Limits(seqs, 256, kv, 2048), CPU, admission=Predicting()), stream(1000, rate))
    predicted = np.array([record.predicted_ttft_s for record in records.values()])
    came = np.array([record.ttft_s for record in records.values()])
    assert np.median(came / predicted) == pytest.approx(1, abs=0.2)
    assert np.corrcoef(predicted, came)[0, 1] > 0.9
    assert came.mean() == pytest.approx(predicted.mean(), rel=0.25)


def test_the_first_prediction_is_exact_where_nothing_is_random() -> None:
    """One place, constant service of 0.1 s: the n-th in the queue waits n - 1 services."""
    replica = Replica(Limits(1, 8, 64, 64), StepModel(0.1), admission=PredictedDelay(KnownCosts(StepModel(0.1))))
    records = serve(replica, [Request(i, range(1), 1, ttft_slo_s=0.55) for i in range(10)])
    statuses = [records[i].status for i in range(10)]
    assert statuses == ["finished"] * 5 + ["rejected"] * 5
    assert [records[i].predicted_ttft_s for i in range(6)] == pytest.approx([0.1 * (i + 1) for i in range(6)])
    assert [records[i].ttft_s for i in range(5)] == pytest.approx([0.1 * (i + 1) for i in range(5)])
    assert "predicted TTFT 0.6 s" in records[5].reason


@pytest.mark.parametrize("rate", [2.0, 4.0, 8.0])
def test_the_guard_keeps_the_deadline_of_what_it_lets_in(rate: float) -> None:
    """To three times the capacity: without it everyone is late; with it nearly nobody, and the machine stays busy."""
    requests = stream(3000, rate, ttft_slo_s=1.0)
    late, served = {}, {}
    for name, guard in (("off", None), ("on", PredictedDelay(KnownCosts(CPU)))):
        replica = Replica(Limits(8, 256, 100_000, 2048), CPU, admission=guard)
        records = [r for r in serve(replica, requests).values() if r.status == "finished"]
        late[name] = np.mean([not record.met_deadlines for record in records])
        served[name] = sum(record.met_deadlines for record in records) / 3000
    assert late["off"] > 0.9
    assert late["on"] < 0.03
    assert served["on"] > 10 * served["off"]
    assert served["on"] * rate > 1.2


def test_deadlines_of_the_whole_answer_are_guarded_too() -> None:
    guard = PredictedDelay(KnownCosts(StepModel(0.1)))
    replica = Replica(Limits(4, 8, 640, 200), StepModel(0.1), admission=guard)
    records = serve(replica, [Request(0, range(1), 100, e2e_slo_s=10.1), Request(1, range(1), 100, e2e_slo_s=9.9)])
    assert (records[0].status, records[1].status) == ("finished", "rejected")
    assert records[0].met_deadlines
    assert "E2EL" in records[1].reason


def test_who_has_no_deadline_is_let_in_and_a_guard_without_costs_lets_everyone_in() -> None:
    for guard, options in (
        (PredictedDelay(KnownCosts(CPU)), {}),
        (PredictedDelay(MeasuredCosts()), {"ttft_slo_s": 1e-6}),
    ):
        records = serve(Replica(Limits(8, 256, 9000, 2048), CPU, admission=guard), stream(50, 100.0, **options))
        assert {record.status for record in records.values()} == {"finished"}


def test_mixed_load_with_every_guard_keeps_interactive_deadlines_and_starves_nobody() -> None:
    """Interactive beside batch work beyond capacity: the guards hold one class and finish the other."""
    live = stream(400, 1.0, seed=3, prompt=60, new=20, ttft_slo_s=1.0)
    batch = stream(150, 1.5, seed=4, first=1000, prompt=200, new=80, priority="batch")
    results = {}
    for name, order, guard in (
        ("off", Fcfs(), None),
        ("on", PriorityOrder(600.0), PredictedDelay(KnownCosts(CPU))),
    ):
        guarded: Admission | None = guard
        records = serve(Replica(Limits(8, 128, 4000, 2048), CPU, order=order, admission=guarded), live + batch)
        ttft = [records[r.id].ttft_s for r in live if records[r.id].status == "finished"]
        results[name] = np.percentile(ttft, 99), len(ttft), records
    assert results["off"][0] > 10
    assert results["on"][0] < 1.0
    assert results["on"][1] > 300
    assert all(results["on"][2][r.id].status == "finished" for r in batch)


def test_impossible_policies_are_refused() -> None:
    for wrong in (-1.0, math.nan):
        with pytest.raises(UsageError, match="ageing"):
            PriorityOrder(wrong)
