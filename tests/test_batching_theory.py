"""The queue's definitions: by hand, against Lindley's recursion, and against theory in the long run."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import numpy as np
import pytest

from quantlab.bench.batching.load import Asked
from quantlab.bench.batching.serve import Cell, Run
from quantlab.bench.batching.target import SimulatedTarget
from quantlab.bench.batching.theory import (
    Facts,
    Server,
    agrees,
    broken_assumptions,
    busy_s,
    in_service,
    mg1_wait_s,
    mm1_wait_s,
    relaxation_s,
    saturated,
    service_times,
    shares_s,
)
from quantlab.bench.batching.window import Window
from quantlab.core.errors import QuantlabError
from quantlab.core.statistics import Interval, batch_means_interval, bootstrap_interval, share_interval
from quantlab.engine import RequestRecord
from quantlab.runtime.step_model import ExponentialSteps, StepModel, StepTime
from tests.queue_theory import lindley


def record(i: int, arrival: float, admitted: float | None, finished: float | None, **more: object) -> RequestRecord:
    fields = {"id": i, "priority": "interactive", "status": "finished", "prompt_tokens": 4, "new_tokens": 2, **more}
    return RequestRecord(**fields, arrival_s=arrival, admitted_s=admitted, first_token_s=admitted, finished_s=finished)  # type: ignore[arg-type]


def alone(steps: StepTime, requests: list[Asked], seqs: int = 1) -> Run:
    """One server in virtual time."""
    return SimulatedTarget(steps, 4096, seqs).run(Cell(requests, seqs, 4096))


def test_a_load_in_virtual_time_computes_no_tokens() -> None:
    """Only where tokens are kept: an engine's step costs many times what a replica's does."""
    target = SimulatedTarget(StepModel(0.1), 64, 2)
    cell = Cell([Asked(4, 5, 0.1 * i) for i in range(20)], 2, 64)
    records = target.run(cell).records
    assert target._backend.counters()["steps"] == 0
    kept = target.run(msgspec.structs.replace(cell, keep_tokens=True)).records
    assert target._backend.counters()["steps"] > 0
    for a, b in zip(records, kept, strict=True):
        assert (a.admitted_s, a.first_token_s, a.finished_s) == pytest.approx(
            (b.admitted_s, b.first_token_s, b.finished_s)
        )
        assert len(a.times_s) == len(b.times_s) == 5


def poisson(rate: float, new_tokens: list[int], seed: int = 1) -> list[Asked]:
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(new_tokens)))
    return [Asked(1, new, at) for new, at in zip(new_tokens, arrivals.tolist(), strict=True)]


# definitions by hand


def test_service_times_are_shares_of_the_busy_time() -> None:
    """One alone for 2 s, then two for 2 s, then the other alone for 1 s: 3 and 2 of 5."""
    records = [record(0, 0.0, 0.0, 4.0), record(1, 1.0, 2.0, 5.0), record(2, 1.5, None, 1.5, status="rejected")]
    assert service_times(records) == [pytest.approx(3.0), pytest.approx(2.0), None]
    assert busy_s(records, 0.0, 10.0) == pytest.approx(5.0)
    assert busy_s(records, 4.5, 10.0) == pytest.approx(0.5)


def test_a_request_that_failed_takes_its_share_and_has_no_service_time() -> None:
    records = [
        record(0, 0.0, 0.0, 2.0, status="failed"),
        record(1, 0.0, 0.0, 2.0),
        record(2, 0.0, None, None, status="failed"),
    ]
    assert service_times(records) == [None, pytest.approx(1.0), None]
    assert shares_s(records) == [pytest.approx(1.0), pytest.approx(1.0), None]
    # Two were in service all the time, one of which failed.
    assert in_service(records) == pytest.approx(2.0)


def test_requests_that_are_not_served_are_counted_beside_the_mean_service() -> None:
    """Every second one fails after a tenth of its service, or is rejected: the others' mean is their own."""
    whole = [record(i, 2.0 * i, 2.0 * i, 2.0 * i + 1) for i in range(40)]
    failed = [record(40 + i, 2.0 * i + 1, 2.0 * i + 1, 2.0 * i + 1.1, status="failed") for i in range(40)]
    rejected = [record(40 + i, 2.0 * i + 1, None, 2.0 * i + 1, status="rejected") for i in range(40)]
    for others in (failed, rejected):
        window = Window(Run(whole + others))
        assert window.services_s == pytest.approx([1.0] * len(window.services_s))
        assert window.in_service == pytest.approx(1.0)
        assert window.unserved == pytest.approx(0.5)
    told = list(broken_assumptions(facts(unserved=0.5), exponential=False))
    assert told == ["every request is served: 50.0% are rejected or fail"]


def test_a_server_that_tells_no_steps_serves_from_the_arrival() -> None:
    records = [record(0, 0.0, None, 2.0), record(1, 1.0, None, 2.0)]
    assert service_times(records) == [pytest.approx(1.5), pytest.approx(0.5)]


@pytest.mark.parametrize("seed", range(5))
def test_shares_add_up_to_the_busy_time(seed: int) -> None:
    rng = random.Random(seed)
    requests = sorted(
        (Asked(rng.randint(1, 30), rng.randint(1, 20), rng.uniform(0, 2)) for _ in range(60)), key=lambda a: a.arrival_s
    )
    run = alone(StepModel(0.01, 1e-3, 0, 2e-3), requests, seqs=4)
    shares = [s for s in service_times(run.records) if s is not None]
    assert len(shares) == 60
    assert sum(shares) == pytest.approx(busy_s(run.records, 0.0, math.inf))


# one at a time it is M/G/1


@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_one_sequence_at_a_time_is_lindleys_queue_and_its_service_times(rho: float) -> None:
    rng = random.Random(3)
    new = [rng.randint(1, 12) for _ in range(400)]
    service = [0.1 * n for n in new]
    mean = sum(service) / len(service)
    run = alone(StepModel(0.1), poisson(rho / mean, new))
    assert service_times(run.records) == pytest.approx(service)
    arrivals = [r.arrival_s for r in run.records]
    gaps = np.array([arrivals[0], *(b - a for a, b in itertools.pairwise(arrivals))])
    waits = [r.queue_delay_s for r in run.records]
    assert waits == pytest.approx(lindley(gaps, np.array(service)).tolist(), abs=1e-9)
    busy = busy_s(run.records, 0.0, run.records[-1].finished_s or 0.0)
    assert busy == pytest.approx(sum(service))


def test_the_saturated_server_has_the_mean_and_the_variation_of_its_services() -> None:
    rng = random.Random(4)
    new = [rng.randint(1, 12) for _ in range(300)]
    run = alone(StepModel(0.1), [Asked(1, n, 0.0) for n in new])
    # The last one has nobody behind it.
    service = np.array([0.1 * n for n in new[:-1]])
    server = saturated(run.records, 1)
    assert server.mu == pytest.approx(1 / service.mean())
    assert server.squared_variation == pytest.approx(service.var() / service.mean() ** 2)


@pytest.mark.parametrize("rho", [0.5, 0.7])
def test_exponential_service_waits_as_m_m_1_says(rho: float) -> None:
    steps = ExponentialSteps(0.1, seed=2)
    run = alone(steps, poisson(rho / 0.1, [1] * 20_000))
    measured = batch_means_interval(Window(run).samples(lambda r: r.queue_delay_s))
    predicted = mm1_wait_s(rho, 10.0)
    assert predicted is not None
    assert measured.estimate == pytest.approx(predicted, rel=0.12)
    assert Window(run).utilization == pytest.approx(rho, rel=0.03)


def test_constant_service_waits_half_as_long() -> None:
    """M/D/1, where M/M/1 is twice too long."""
    run = alone(StepModel(0.1), poisson(7.0, [1] * 20_000))
    measured = batch_means_interval(Window(run).samples(lambda r: r.queue_delay_s))
    mg1, mm1 = mg1_wait_s(0.7, 10.0, 0.0), mm1_wait_s(0.7, 10.0)
    assert mg1 is not None
    assert mm1 == pytest.approx(2 * mg1)
    assert measured.estimate == pytest.approx(mg1, rel=0.08)
    assert agrees(measured, mg1)
    assert not agrees(measured, mm1)


def test_the_table_of_the_seed() -> None:
    """Waits in service times at 70, 80, 90, 95 percent."""
    assert [mm1_wait_s(rho, 1.0) for rho in (0.7, 0.8, 0.9, 0.95)] == pytest.approx([7 / 3, 4, 9, 19])
    assert mm1_wait_s(1.0, 1.0) is None
    assert mg1_wait_s(1.2, 1.0, 1.0) is None


# a batching server


def test_capacity_of_a_batching_server_by_hand() -> None:
    """Steps of 0.1 s whatever is in them: eight requests of ten tokens at a time, 8 a second."""
    run = alone(StepModel(0.1), [Asked(1, 10, 0.0)] * 64, seqs=8)
    server = saturated(run.records, 8)
    assert server.mu == pytest.approx(8.0)
    assert server.squared_variation == pytest.approx(0.0, abs=1e-9)


def test_lengths_that_differ_do_not_bias_the_capacity() -> None:
    """Lengths from 5 to 15 tokens, eight at a time: 8 tokens a step of 0.1 s, so 80 tokens a second."""
    rng = random.Random(5)
    new = [rng.randint(5, 15) for _ in range(200)]
    run = alone(StepModel(0.1), [Asked(1, n, 0.0) for n in new], seqs=8)
    assert saturated(run.records, 8).mu == pytest.approx(80 / (sum(new) / len(new)), rel=0.03)


def test_too_few_finished_requests_tell_no_capacity() -> None:
    with pytest.raises(QuantlabError, match="1 of 3 requests finished"):
        saturated([record(0, 0, 0, 1), *(record(i, 0, None, None, status="failed") for i in (1, 2))], 1)


def test_at_low_load_a_batching_server_is_busier_than_its_load() -> None:
    rng = random.Random(6)
    new = [rng.randint(5, 15) for _ in range(400)]
    server = saturated(alone(StepModel(0.1), [Asked(1, n, 0.0) for n in new], seqs=8).records, 8)
    window = Window(alone(StepModel(0.1), poisson(0.5 * server.mu, new), seqs=8))
    assert window.utilization > 0.9
    assert 2 < window.in_service < 8


# broken assumptions


def facts(**changes: object) -> Facts:
    """M/M/1 as it should be."""
    base = Facts(0.5, Server(1.0, 1.0, 100), 1.0, 1.0, 1.0, poisson=True, duration_s=1e6)
    return base._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "exponential", "named"),
    [
        ({}, True, []),
        ({"in_service": 3.2}, False, ["one request at a time: 3.2"]),
        ({"server": Server(1.0, 0.2, 100)}, True, ["exponential service"]),
        ({"server": Server(1.0, 0.2, 100)}, False, []),
        ({"mean_service_s": 1.5}, False, ["service does not depend on load: a request takes 1.50 times"]),
        ({"poisson": False, "gaps_squared_variation": 4.0}, False, ["Poisson arrivals"]),
        ({"rho": 1.1}, False, ["load below 1: rho is 1.10"]),
        ({"rho": 0.9, "duration_s": 500.0}, False, ["steady state: the run has 1.3 relaxation times"]),
    ],
)
def test_broken_assumptions_are_named(changes: dict[str, object], exponential: bool, named: list[str]) -> None:
    got = list(broken_assumptions(facts(**changes), exponential=exponential))
    assert len(got) == len(named)
    assert all(name in one for name, one in zip(named, got, strict=True))


def test_relaxation_grows_with_load() -> None:
    assert relaxation_s(0.25, 2.0, 1.0) == pytest.approx(2.0)
    assert relaxation_s(0.9, 1.0, 1.0) > 10 * relaxation_s(0.5, 1.0, 1.0)
    assert relaxation_s(1.0, 1.0, 1.0) == math.inf


# what is measured, and its uncertainty


def test_the_first_and_the_last_tenth_are_load_only() -> None:
    records = [record(i, float(i), i + 0.5, i + 0.75, times_s=[i + 0.5, i + 0.75]) for i in range(20)]
    window = Window(Run(records))
    assert [r.id for r in window.records] == list(range(2, 18))
    assert (window.begin_s, window.end_s) == (2.0, 17.0)
    assert window.utilization == pytest.approx(0.75)
    assert window.met(0.5, 0.25) == [1.0] * 16
    assert window.met(0.4, 0.25) == window.met(0.5, 0.2) == [0.0] * 16
    assert window.goodput(0.5, 0.25) == pytest.approx(20 / 19)
    found = window.measurements(0.5, 0.25)
    assert found["ttft"].samples == [0.5] * 16
    assert found["tpot"].samples == [0.25] * 16
    assert found["queue_delay"].samples == [0.5] * 16
    assert found["rejected"].samples == found["preempted"].samples == [0.0] * 16
    assert "queue_delay" not in Window(Run(records, knows_queue=False)).measurements(0.5, 0.25)


def test_rejected_and_lost_requests_count_in_goodput_and_have_no_latency() -> None:
    records = [record(i, float(i), i + 0.5, i + 1.0, times_s=[i + 0.5, i + 1.0]) for i in range(10)]
    records[3] = record(3, 3.0, None, 3.0, status="rejected")
    records[4] = record(4, 4.0, 4.5, 4.6, status="failed")
    window = Window(Run(records))
    assert len(window.measurements(1, 1)["ttft"].samples) == 6
    assert sum(window.met(1, 1)) == 6
    assert window.goodput(1, 1) == pytest.approx(10 / 9 * 6 / 8)


def test_batch_means_are_wider_than_neighbours_that_are_alike_would_say() -> None:
    rng = np.random.default_rng(0)
    held, inside = 0, 0
    for _ in range(200):
        noise = rng.standard_normal(1000)
        walk = np.empty(1000)
        walk[0] = noise[0]
        for i in range(1, 1000):
            walk[i] = 0.9 * walk[i - 1] + noise[i]
        interval = batch_means_interval(walk.tolist())
        held += not interval.excludes(0.0)
        half = 1.96 * walk.std() / math.sqrt(1000)
        inside += abs(walk.mean()) <= half
    assert held / 200 > 0.85
    assert inside / 200 < 0.6


def test_bootstrap_of_mean_and_percentile_cover_the_truth() -> None:
    rng = np.random.default_rng(1)
    mean = p90 = 0
    for seed in range(100):
        samples = rng.exponential(1.0, 300).tolist()
        mean += not bootstrap_interval(samples, seed=seed).excludes(1.0)
        p90 += not bootstrap_interval(samples, 90, seed=seed).excludes(math.log(10))
    assert 86 <= mean <= 100
    assert 84 <= p90 <= 100


@pytest.mark.parametrize("n", [2, 3, 7, 10, 101, 375])
def test_bootstrap_of_a_mean_draws_blocks_around_the_end(n: int) -> None:
    """Sums of blocks are those of the samples themselves, drawn one resample after the other."""
    samples = np.random.default_rng(n).exponential(1.0, n)
    length, rng = max(1, round(n ** (1 / 3))), np.random.default_rng(0)
    means = []
    for _ in range(500):
        starts = rng.integers(0, n, -(-n // length))
        means.append(samples[((starts[:, None] + np.arange(length)) % n).ravel()[:n]].mean())
    found = bootstrap_interval(samples.tolist())
    assert found[1:] == pytest.approx(np.percentile(means, [2.5, 97.5]).tolist())
    surer = bootstrap_interval(samples.tolist(), confidence=0.999)
    assert None not in (surer.low, surer.high, found.low, found.high)
    assert surer.low < found.low < found.high < surer.high or n < 10  # type: ignore[operator]


def test_intervals_of_few_samples_have_no_ends() -> None:
    assert batch_means_interval([1.0] * 5) == bootstrap_interval([1.0]) == Interval(1.0, None, None)
    assert batch_means_interval([float(i) for i in range(25)]).estimate == 12.0
    few = bootstrap_interval([1.0, 2.0, 3.0], 99)
    assert few.high is not None
    assert few.high <= 3.0


@pytest.mark.parametrize(("hits", "n"), [(0, 20), (1, 20), (7, 300), (300, 300)])
def test_limits_of_a_share_are_the_exact_ones(hits: int, n: int) -> None:
    from scipy.stats import binomtest

    oracle = binomtest(hits, n).proportion_ci(confidence_level=0.9, method="exact")
    assert share_interval(hits, n) == pytest.approx((hits / n, oracle.low, oracle.high))


# a fleet


def test_the_utilization_of_a_fleet_is_the_mean_of_its_replicas() -> None:
    """One is busy all the time, one half of it, one never."""
    records = [record(i, float(i), float(i), i + (1.0 if i % 2 else 0.5)) for i in range(21)]
    whole = Window(Run(records)).utilization
    assert whole == pytest.approx(0.75, abs=0.02)
    busy = [record(i, i / 2, i / 2, i / 2 + (0.5 if i % 2 else 1.0)) for i in range(42)]
    fleet = Run(busy, replicas=3, served_by=[i % 2 for i in range(42)])
    assert [[r.id for r in part[:2]] for part in fleet.of_replicas()] == [[0, 2], [1, 3], []]
    assert Window(fleet).utilization == pytest.approx((1 + 0.5 + 0) / 3, abs=0.03)
    assert Window(Run(busy)).utilization == pytest.approx(1.0)
