"""Simulation in virtual time: equal to the engine step by step and to queueing theory; routing, prefixes, columns."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.core.errors import UsageError
from quantlab.engine import (
    Columns,
    Engine,
    Event,
    Fleet,
    KnownCosts,
    LeastLoaded,
    Limits,
    PredictedDelay,
    PrefixAware,
    PrefixBlocks,
    Recompute,
    Replica,
    Request,
    RequestRecord,
    RoundRobin,
)
from quantlab.runtime.backend import Capacity
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import ExponentialSteps, Roofline, StepModel, StepShape
from tests import engine_cases
from tests.engine_cases import STEP_MODEL, SWAP_TOKEN_S, simulated
from tests.queue_theory import lindley, mean_wait, needed_customers

LIMITS = Limits(4, 32, 256, 64)


def serve(replicas: list[Replica], requests: Any, **options: Any) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    Fleet(replicas, **options).run(requests, records.append)
    return sorted(records, key=lambda record: record.id)


# the same as the engine


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data(), engine_cases.workloads(), engine_cases.orders, engine_cases.preemptions, st.booleans())
def test_a_replica_decides_and_times_as_the_engine_does(
    data: st.DataObject, requests: list[Request], order: Any, preemption: Any, guarded: bool
) -> None:
    """Leaps over many steps at once give the records and events of single steps, with swaps and rejections."""
    limits = data.draw(engine_cases.limits(requests))
    if guarded:
        requests = [msgspec.structs.replace(r, ttft_slo_s=0.1 + 0.05 * (r.id % 5)) for r in requests]
    costs = KnownCosts(STEP_MODEL, SWAP_TOKEN_S)
    guards = [PredictedDelay(costs) if guarded else None for _ in range(2)]
    clock, log = VirtualClock(), []
    engine = Engine(simulated(clock), limits, clock=clock, order=order, preemption=preemption, admission=guards[0])
    one = {"order": order, "preemption": preemption, "admission": guards[1], "swap_token_s": SWAP_TOKEN_S}
    replica = Replica(limits, STEP_MODEL, events=log, **one)
    expected = engine.run(requests)
    got = serve([replica], sorted(requests, key=lambda r: r.arrival_s))
    for a, b in zip(expected, got, strict=True):
        for field in ("admitted_s", "first_token_s", "finished_s", "predicted_ttft_s"):
            one, other = getattr(a, field), getattr(b, field)
            assert one == other or other == pytest.approx(one, rel=1e-9), field
        for field in ("id", "status", "new_tokens", "swapped", "recomputed", "finish_reason"):
            assert getattr(b, field) == getattr(a, field), field
    assert _story(log) == _story(engine.events)
    assert replica.n_steps == len(engine.steps)
    assert replica.load == 0


def _story(events: list[Event]) -> dict[int, list[tuple[str, str]]]:
    """What happened to each request, in order; a reason's digits apart."""
    story: dict[int, list[tuple[str, str]]] = {}
    for event in events:
        detail = event.detail if event.kind != "rejected" else ""
        story.setdefault(event.request_id, []).append((event.kind, detail))
    return story


def test_leaps_are_taken() -> None:
    """One request of 500 tokens, nobody else: three turns (arrival, prefill, decoding) for 500 steps."""
    turns = 0

    class Counting(Replica):
        def end(self) -> None:
            nonlocal turns
            turns += 1
            super().end()

    replica = Counting(Limits(4, 32, 1000, 1000), STEP_MODEL)
    (record,) = serve([replica], [Request(0, range(20), 500)])
    assert (turns, replica.n_steps) == (3, 500)
    expected = STEP_MODEL.seconds(StepShape(20, 210, 0, 0)) + sum(
        STEP_MODEL.seconds(StepShape(0, 0, 1, 21 + i)) for i in range(499)
    )
    assert record.finished_s == pytest.approx(expected)
    assert replica.busy_s == pytest.approx(expected)


# queueing theory


def one_by_one(rho: float, n: int, seed: int = 1) -> tuple[Replica, list[Request], np.ndarray, np.ndarray]:
    """An M/M/1 queue of mean service 1: one place, one step a request. With its interarrival and service times."""
    gaps = np.random.default_rng(seed).exponential(1 / rho, n)
    # The replica draws the same stream.
    stream = random.Random(seed)
    services = np.array([stream.expovariate(1.0) for _ in range(n)])
    requests = [Request(i, range(1), 1, at) for i, at in enumerate(np.cumsum(gaps).tolist())]
    return Replica(Limits(1, 1, 1, 2), ExponentialSteps(1.0, seed)), requests, gaps, services


@pytest.mark.parametrize("rho", [0.5, 0.7, 0.8, 0.9, 0.95, 1.2])
def test_every_wait_is_that_of_the_queue(rho: float) -> None:
    """Lindley's recursion on the same random numbers, request by request."""
    replica, requests, gaps, services = one_by_one(rho, 20_000)
    waits = [record.queue_delay_s for record in serve([replica], requests)]
    assert waits == pytest.approx(lindley(gaps, services), abs=1e-6)


@pytest.mark.parametrize(("rho", "table"), [(0.5, 1), (0.7, 2.33), (0.8, 4), (0.9, 9), (0.95, 19)])
def test_waits_in_the_long_run_are_those_of_theory(rho: float, table: float) -> None:
    """W_q = rho / (mu (1 - rho)) within 3%, by so many customers that three standard errors are 3%.

    The customers are those of `test_every_wait_is_that_of_the_queue`, by its recursion; the same random numbers at
    every load. The table is the seed's, in service times.
    """
    n = needed_customers(rho, relative_error=0.03, standard_errors=3)
    rng = np.random.default_rng(7)
    measured = mean_wait(rng, rho, n)
    assert measured == pytest.approx(rho / (1 - rho), rel=0.03)
    assert measured == pytest.approx(table, rel=0.035)


def test_the_simulated_queue_itself_in_the_long_run() -> None:
    """The same at rho 0.5 with every customer served by the scheduler; higher loads: tests/engine_benchmarks.py."""
    n = needed_customers(0.5, relative_error=0.03, standard_errors=3)
    replica, requests, _, _ = one_by_one(0.5, n, seed=3)
    columns = Columns()
    run = Fleet([replica]).run(requests, columns.append)
    assert columns.queue_delay_s.mean() == pytest.approx(1.0, rel=0.03)
    assert run.utilization[0] == pytest.approx(0.5, rel=0.01)


def test_the_engine_itself_is_the_same_queue() -> None:
    _, requests, gaps, services = one_by_one(0.8, 2000)
    clock = VirtualClock()
    backend = SimulatedBackend(Capacity(n_ctx=2, n_seq=1, n_batch=1), ExponentialSteps(1.0, 1), clock)
    records = Engine(backend, Limits(1, 1, 1, 2), clock=clock).run(requests)
    assert [record.queue_delay_s for record in records] == pytest.approx(lindley(gaps, services), abs=1e-6)


def test_two_servers_with_one_queue_would_wait_less_than_two_queues() -> None:
    """Round robin splits a Poisson stream into two Erlang-2 streams; least loaded joins the shorter queue."""
    waits = {}
    for router in (RoundRobin(), LeastLoaded()):
        columns = Columns()
        rng = np.random.default_rng(5)
        arrivals = np.cumsum(rng.exponential(1 / 1.6, 40_000)).tolist()
        replicas = [Replica(Limits(1, 1, 1, 2), ExponentialSteps(1.0, seed)) for seed in (1, 2)]
        Fleet(replicas, router).run((Request(i, range(1), 1, at) for i, at in enumerate(arrivals)), columns.append)
        waits[type(router).__name__] = columns.queue_delay_s.mean()
    # M/M/2 at rho 0.8 waits 1.78, M/M/1 4: the shortest queue lies close to the one, round robin in between.
    assert 1.6 < waits["LeastLoaded"] < 2.5 < waits["RoundRobin"] < 3.6


def test_a_roofline_fleet_serves_at_the_rate_of_its_numbers() -> None:
    """Memory bound: 64 sequences at 7 ms a step and their KV; the throughput follows."""
    roofline = Roofline(14e9, 131072, 7e9, 2e12, 3e14)
    replica = Replica(Limits(64, 8192, 64 * 1200, 4096), roofline)
    records = serve([replica], [Request(i, range(100), 1000) for i in range(64)])
    step_s = (14e9 + 131072 * 64 * (100 + 500)) / 2e12
    assert records[0].tpot_s == pytest.approx(step_s, rel=0.01)
    assert len({record.finished_s for record in records}) == 1


# routing


def test_round_robin_and_least_loaded() -> None:
    replicas = [Replica(LIMITS, StepModel(1.0)) for _ in range(3)]
    router = RoundRobin()
    assert [router.choose(Request(i, range(1), 1), replicas) for i in range(5)] == [0, 1, 2, 0, 1]
    replicas[0].put(Request(0, range(1), 5), 0.0)
    replicas[1].put(Request(1, range(1), 5), 0.0)
    replicas[1].put(Request(2, range(1), 5), 0.0)
    assert [replica.load for replica in replicas] == [1, 2, 0]
    assert LeastLoaded().choose(Request(3, range(1), 1), replicas) == 2


def test_prefix_aware_routing_hits_unless_the_holder_is_busy() -> None:
    """Ten conversations on two replicas, each turn repeating its history."""
    requests = [
        Request(
            i, range(96 * turn + 1), 1, 10.0 * turn + 0.5 * talk, prefix=tuple(range(100 * talk, 100 * talk + turn))
        )
        for i, (turn, talk) in enumerate(itertools.product(range(1, 8), range(10)))
    ]
    cached = {}
    for router in (RoundRobin(), PrefixAware(slack=4)):
        limits = Limits(8, 1024, 8000, 1000)
        replicas = [Replica(limits, StepModel(0.001, 1e-4), prefix=PrefixBlocks(100_000, 96)) for _ in range(3)]
        records = serve(replicas, requests, router=router)
        cached[type(router).__name__] = sum(record.cached_tokens for record in records)
        assert all(record.cached_tokens < record.prompt_tokens for record in records)
    everything = sum(96 * (turn - 1) for turn in range(1, 8)) * 10
    assert cached["PrefixAware"] == everything
    assert cached["RoundRobin"] < 0.8 * everything
    # A hot prefix: the holder is busy, so another one serves.
    hot = [Request(i, range(97), 50, 0.01 * i, prefix=(1,)) for i in range(40)]
    limits = Limits(2, 1024, 8000, 1000)
    replicas = [Replica(limits, StepModel(0.1), prefix=PrefixBlocks(1000, 96)) for _ in range(2)]
    serve(replicas, hot, router=PrefixAware(slack=2))
    assert min(replica.n_steps for replica in replicas) > 0.4 * max(replica.n_steps for replica in replicas)


def test_cached_tokens_are_not_computed() -> None:
    model = StepModel(0.0, 1e-3)
    replica = Replica(Limits(1, 512, 1000, 1000), model, prefix=PrefixBlocks(1000, 100))
    first, second, third = serve(
        [replica],
        [
            Request(0, range(250), 1, 0.0, prefix=(1, 2)),
            Request(1, range(250), 1, 10.0, prefix=(1, 2)),
            Request(2, range(200), 1, 20.0, prefix=(1, 2)),
        ],
    )
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 200, 199)
    assert (first.ttft_s, second.ttft_s) == pytest.approx((0.25, 0.05))


def test_the_prefix_cache_forgets_the_least_recently_used_tail_first() -> None:
    cache = PrefixBlocks(capacity_tokens=40, block_tokens=10)
    cache.insert((1, 2, 3))
    cache.insert((1, 2, 4))
    assert [cache.match(p) for p in ((1, 2, 3), (1, 2, 4), (1, 9), (5,), ())] == [30, 30, 10, 0, 0]
    cache.insert((7,))
    assert [cache.match(p) for p in ((1, 2, 3), (1, 2, 4), (7,))] == [20, 30, 10]
    cache.insert((8,))
    assert [cache.match(p) for p in ((1, 2, 4), (7,), (8,))] == [20, 10, 10], "the head outlives the tail"
    assert PrefixBlocks(0, 10).match((1,)) == 0
    for sizes in ((-1, 10), (10, 0)):
        with pytest.raises(UsageError):
            PrefixBlocks(*sizes)


# the smaller model, columns, streams


def test_a_fleet_degrades_to_its_small_replicas_or_rejects() -> None:
    model, small = StepModel(0.1, 1e-3), StepModel(0.01, 1e-4)
    requests = [Request(i, range(50), 10, 0.2 * i, ttft_slo_s=0.5) for i in range(100)]
    for fallback in ([Replica(LIMITS, small)], []):
        costs = KnownCosts(model)
        guard = PredictedDelay(costs, degrade=True)
        limits = Limits(2, 64, 256, 64)
        records = serve([Replica(limits, model, admission=guard)], requests, fallback=fallback)
        assert [record.id for record in records] == list(range(100))
        turned = [record for record in records if record.degraded or record.status == "rejected"]
        assert 20 < len(turned) < 80
        assert {record.degraded for record in turned} == {bool(fallback)}
        assert all("predicted TTFT" in record.reason for record in turned if record.status == "rejected")
        assert np.mean([record.met_deadlines for record in records if record.status == "finished"]) > 0.95


def test_columns_are_the_records() -> None:
    records = [
        RequestRecord(3, "batch", "finished", 7, 1.0, 5, 1.5, 2.0, 4.0, "length", swapped=1, recomputed=2),
        RequestRecord(4, "interactive", "rejected", 8, 2.0, finished_s=2.0, reason="late"),
        RequestRecord(5, "interactive", "finished", 9, 3.0, 1, 3.0, 3.5, 3.5, degraded=True, ttft_slo_s=0.1),
        RequestRecord(6, "interactive", "failed", 9, 3.0, 2, 3.0, 3.5, 3.6),
    ]
    columns = Columns()
    for record in records:
        columns.append(record)
    assert len(columns) == 4
    assert columns.ids.tolist() == [3, 4, 5, 6]
    for name in ("queue_delay_s", "ttft_s", "tpot_s", "e2el_s"):
        expected = [getattr(record, name) for record in records]
        got = [None if math.isnan(value) else value for value in getattr(columns, name).tolist()]
        assert got == expected, name
    assert columns.finished.tolist() == [True, False, True, False]
    assert columns.rejected.tolist() == [False, True, False, False]
    assert columns.batch.tolist() == [True, False, False, False]
    assert columns.degraded.tolist() == [False, False, True, False]
    assert columns.met_deadlines.tolist() == [record.met_deadlines for record in records] == [True, False, False, False]
    assert columns.preempted.tolist() == [3, 0, 0, 0]
    assert columns.prompt_tokens.tolist() == [7, 8, 9, 9]
    assert columns.new_tokens.tolist() == [5, 0, 1, 2]
    assert columns.arrival_s.tolist() == [1, 2, 3, 3]


def test_requests_are_taken_from_a_stream_as_time_goes_on() -> None:
    """Never more of a generator than has arrived; a wrong request ends the run, with what was finished kept."""
    records: list[RequestRecord] = []

    def stream() -> Any:
        for i in range(50):
            assert len(records) >= i - 2
            yield Request(i, range(5), 2, float(i))
        yield Request(50, range(5), 2, 3.0)

    with pytest.raises(UsageError, match="after one at 49"):
        Fleet([Replica(LIMITS, STEP_MODEL)]).run(stream(), records.append)
    assert len(records) >= 49


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Fleet([]), "no replicas"),
        (lambda: Replica(LIMITS, STEP_MODEL, swap_token_s=-1), "swapping"),
        (lambda: PrefixAware(-1), "slack"),
        (lambda: KnownCosts(STEP_MODEL, -1), "swapping"),
        (lambda: PredictedDelay(KnownCosts(STEP_MODEL), confidence=1.0), "confidence"),
        (lambda: serve([Replica(LIMITS, STEP_MODEL)], [Request(0, range(60), 10)]), "context"),
        (lambda: serve([Replica(Limits(1, 8, 20, 64), STEP_MODEL)], [Request(0, range(20), 2)]), "KV budget"),
        (lambda: serve([Replica(LIMITS, STEP_MODEL)], [Request(0, range(5), 1, -1.0)]), "arrives"),
        (lambda: Limits(0, 1, 1, 1), "size"),
        (lambda: Limits(4, 3, 1, 1), "max_num_batched_tokens"),
    ],
)
def test_impossible_fleets_are_refused(wrong: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        wrong()
    assert caught.value.hint


def test_a_fleet_may_run_again() -> None:
    fleet, requests = Fleet([Replica(LIMITS, STEP_MODEL)]), [Request(i, range(5), 5, 0.1 * i) for i in range(20)]
    columns = [Columns(), Columns()]
    one, two = fleet.run(requests, columns[0].append), fleet.run(requests, columns[1].append)
    assert (one.duration_s, one.n_steps) == (two.duration_s, two.n_steps)
    assert one.utilization == pytest.approx(two.utilization)
    assert columns[0].e2el_s.tolist() == columns[1].e2el_s.tolist()


def test_preemption_by_recompute_in_leaps_keeps_the_budget() -> None:
    """Long answers on a small budget: everything is preempted often, and ends."""
    replica = Replica(Limits(8, 64, 300, 256), STEP_MODEL, preemption=Recompute())
    records = serve([replica], [Request(i, range(20), 150, 0.01 * i) for i in range(20)])
    assert all(record.status == "finished" for record in records)
    assert sum(record.recomputed for record in records) > 20
