"""The engine on simulated backends: the same tokens whatever the batch, limits kept, everything released, failures."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.engine import (
    AcceptAll,
    Decision,
    Engine,
    Fcfs,
    Limits,
    MeasuredCosts,
    PriorityOrder,
    Recompute,
    Request,
    Sampling,
    Swap,
    limits_of,
)
from quantlab.engine.sampling import choose, sample, uniform
from quantlab.runtime.backend import Batch, Capacity, Logits
from quantlab.runtime.clock import VirtualClock, WallClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import StepShape
from tests import engine_cases
from tests.engine_cases import N_BATCH, N_CTX, N_SEQ, STEP_MODEL, SWAP_TOKEN_S, Watched, alone, is_empty, simulated

ROOMY = Limits(N_SEQ, N_BATCH, N_SEQ * N_CTX, N_CTX)


def request(i: int, prompt_tokens: int = 5, new_tokens: int = 4, arrival_s: float = 0.0, **options: Any) -> Request:
    prompt = np.random.default_rng(i).integers(0, 512, prompt_tokens, dtype=np.int32)
    return Request(i, prompt, new_tokens, arrival_s, **options)


# identity


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data(), engine_cases.workloads(), engine_cases.orders, engine_cases.preemptions)
def test_every_request_gets_its_own_tokens_within_every_limit(
    data: st.DataObject, requests: list[Request], order: Any, preemption: Any
) -> None:
    """Chunks, batches, order, swapping and recomputing change nothing of what is said; greedy and sampled."""
    limits = data.draw(engine_cases.limits(requests))
    clock = VirtualClock()
    backend = Watched(simulated(clock), limits)
    engine = Engine(backend, limits, clock=clock, order=order, preemption=preemption)
    records = engine.run(requests)
    assert [record.id for record in records] == [r.id for r in requests]
    for r, record in zip(requests, records, strict=True):
        assert record.status == "finished"
        assert record.tokens == alone(r).tokens
        assert len(record.tokens) == len(record.times_s) == record.new_tokens == r.max_new_tokens
        assert r.arrival_s <= record.admitted_s < record.first_token_s == record.times_s[0]
        assert record.times_s[-1] == record.finished_s
        assert all(np.diff(record.times_s) > 0)
    assert is_empty(engine)
    preempted = sum(record.swapped + record.recomputed for record in records)
    assert preempted == sum(event.kind == "preempted" for event in engine.events)
    assert preempted == sum(event.kind == "resumed" for event in engine.events)
    assert sum(len(step.tokens) for step in backend.steps) == sum(
        step.shape.prefill_tokens + step.shape.decode_seqs for step in engine.steps
    )


def test_the_budgets_of_the_property_do_preempt() -> None:
    """The property above would hold of an engine that never preempts."""
    requests = [request(i, 10, 30) for i in range(6)]
    for preemption, counter in ((Swap(), "swapped"), (Recompute(), "recomputed")):
        clock = VirtualClock()
        engine = Engine(simulated(clock), Limits(4, 32, 60, N_CTX), clock=clock, preemption=preemption)
        records = engine.run(requests)
        assert sum(getattr(record, counter) for record in records) > 4
        assert [record.tokens for record in records] == [alone(r).tokens for r in requests]


def test_a_request_stops_at_eos_and_frees_its_place() -> None:
    """Every token of the vocabulary but a few ends the text: each must end where it would alone."""
    eos = frozenset(range(0, 512, 7))
    requests = [request(i, 3, 20, ignore_eos=i % 2 == 0) for i in range(10)]
    clock = VirtualClock()
    engine = Engine(simulated(clock, eos=eos), Limits(3, 8, 70, N_CTX), clock=clock)
    records = engine.run(requests)
    assert is_empty(engine)
    for r, record in zip(requests, records, strict=True):
        assert record.tokens == alone(r, eos=eos).tokens
        full = alone(request(r.id, 3, 20)).tokens
        ends = [i for i, token in enumerate(full) if token in eos]
        if r.ignore_eos or not ends:
            assert (record.tokens, record.finish_reason) == (full, "length")
        else:
            assert (record.tokens, record.finish_reason) == (full[: ends[0] + 1], "stop")
    assert {record.finish_reason for record in records} == {"length", "stop"}


# the shape of steps


def test_prompts_are_cut_to_the_budget_and_decoding_goes_on() -> None:
    """A prompt of 40 in chunks beside two decoding sequences: 6 tokens a step are left of 8."""
    clock = VirtualClock()
    limits = Limits(3, 8, 200, N_CTX)
    backend = Watched(simulated(clock), limits)
    engine = Engine(backend, limits, clock=clock)
    records = engine.run([request(0, 2, 24), request(1, 2, 24), request(2, 40, 2, arrival_s=0.03)])
    shapes = [(step.shape.prefill_tokens, step.shape.decode_seqs) for step in engine.steps]
    assert shapes[0] == (4, 0)
    chunked = [shape for shape in shapes if shape[0] and shape[1]]
    assert chunked == [(6, 2)] * 6 + [(4, 2)]
    for record in records[:2]:
        gaps = np.diff(record.times_s)
        assert gaps.max() < STEP_MODEL.seconds(StepShape(6, 300, 3, 200)), "the long prompt stalled decoding"


def test_time_stamps_are_those_of_the_steps_in_virtual_time() -> None:
    clock = VirtualClock()
    engine = Engine(simulated(clock), ROOMY, clock=clock)
    (record,) = engine.run([request(0, 3, 3, arrival_s=2.0)])
    first = 2.0 + STEP_MODEL.seconds(StepShape(3, 6, 0, 0))
    second = first + STEP_MODEL.seconds(StepShape(0, 0, 1, 4))
    assert record.times_s == pytest.approx([first, second, second + STEP_MODEL.seconds(StepShape(0, 0, 1, 5))])
    assert (record.queue_delay_s, record.ttft_s) == pytest.approx((0, first - 2))
    assert record.tpot_s == pytest.approx((record.times_s[2] - first) / 2)
    assert record.e2el_s == pytest.approx(record.times_s[2] - 2)
    assert [event.kind for event in engine.events] == ["arrived", "admitted", "first_token", "finished"]


def test_arrivals_do_not_wait_for_completions() -> None:
    """One place, long service: the second counts its wait from its own arrival."""
    clock = VirtualClock()
    engine = Engine(simulated(clock), Limits(1, 32, 64, N_CTX), clock=clock)
    first, second = engine.run([request(0, 5, 20), request(1, 5, 1, arrival_s=0.001)])
    assert second.arrival_s == 0.001
    assert second.queue_delay_s == pytest.approx(first.finished_s - 0.001)


def test_a_wall_clock_waits_for_arrivals() -> None:
    """Nothing else is real here: the simulated steps take no time of the wall."""
    engine = Engine(simulated(VirtualClock()), ROOMY, clock=WallClock())
    records = engine.run([request(1, arrival_s=0.06), request(0, arrival_s=0.02)])
    assert [record.id for record in records] == [1, 0]
    assert 0.02 <= records[1].admitted_s < records[0].admitted_s
    assert records[0].admitted_s >= 0.06
    assert 0 < min(step.overhead_s for step in engine.steps) < 0.01


def test_a_second_run_starts_at_zero_again() -> None:
    clock = VirtualClock()
    engine = Engine(simulated(clock), ROOMY, clock=clock)
    one, two = engine.run([request(0)]), engine.run([request(0)])
    assert one == two
    assert len(engine.records) == 2


def test_without_a_log_only_records_are_kept() -> None:
    clock = VirtualClock()
    engine = Engine(simulated(clock), Limits(4, 32, 60, N_CTX), clock=clock, log=False)
    records = engine.run([request(i, 10, 30) for i in range(6)])
    assert engine.events == engine.steps == []
    assert engine.records
    assert [record.tokens for record in records] == [alone(request(i, 10, 30)).tokens for i in range(6)]


# sampling


def test_the_random_stream_is_uniform_and_of_its_request() -> None:
    draws = np.array([uniform(3, i, j) for i in range(200) for j in range(100)])
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    # Chi-square with 19 degrees of freedom: 43.8 is its 99.9th percentile.
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    assert len({uniform(s, i, j) for s in (0, 1, -1) for i in range(9) for j in range(9)}) == 3 * 81
    assert 0 <= draws.min() < draws.max() < 1


def test_every_token_of_a_request_has_a_draw_of_its_own() -> None:
    rows = np.tile(np.random.default_rng(3).standard_normal(400).astype(np.float32), (300, 1))
    sampling = Sampling(1.0, seed=9)
    for wanted in ([(sampling, 5, i) for i in range(300)], [(sampling, i, 5) for i in range(300)]):
        tokens = choose(rows, wanted)
        assert tokens == [sample(rows[0], sampling, uniform(9, request_id, i)) for _, request_id, i in wanted]
        assert len(set(tokens)) > 100
    assert len(set(choose(rows, [(sampling, 5, 5)] * 300))) == 1


def _kept(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution by its definition, token by token."""
    p = np.exp((row - row.max()).astype(np.float64) / sampling.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept, total = [], 0.0
    pool = order[: sampling.top_k] if sampling.top_k else order
    whole = sum(p[i] for i in pool)
    for i in pool:
        if sampling.top_p < 1 and total >= sampling.top_p * whole:
            break
        kept.append(i)
        total += p[i]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.0, top_k=5),
        Sampling(1.5, top_p=0.6),
        Sampling(0.8, top_k=8, top_p=0.9),
        Sampling(1.0, top_p=1e-9),
        Sampling(1.0, top_k=1),
        Sampling(1e-4),
    ],
    ids=str,
)
def test_samples_have_the_distribution_that_was_asked_for(sampling: Sampling) -> None:
    """The share of [0, 1) that gives each token is its probability."""
    row = np.random.default_rng(5).standard_normal(40).astype(np.float32) * 2
    n = 4000
    got = np.bincount([sample(row, sampling, (i + 0.5) / n) for i in range(n)], minlength=40) / n
    assert np.abs(got - _kept(row, sampling)).max() < 1.5 / n
    likely = np.flatnonzero(_kept(row, sampling))
    assert sample(row, sampling, 0.0) == likely[0]
    assert sample(row, sampling, 1 - 2**-53) in likely


def test_rounding_seldom_turns_a_sample() -> None:
    """Two logits that are nearly alike must not change places: of 4000 draws hardly one differs."""
    row = np.repeat(np.random.default_rng(8).standard_normal(20), 2).astype(np.float32)
    noisy = row + np.random.default_rng(9).standard_normal(40).astype(np.float32) * 1e-5
    for sampling in (Sampling(1.0), Sampling(0.8, top_k=30, top_p=0.999)):
        differ = sum(
            sample(row, sampling, (i + 0.5) / 4000) != sample(noisy, sampling, (i + 0.5) / 4000) for i in range(4000)
        )
        assert differ < 8


def test_transformers_keeps_the_same_tokens() -> None:
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    row = np.random.default_rng(6).standard_normal(60).astype(np.float32) * 2
    for temperature, top_k, top_p in ((0.7, 10, 0.8), (1.3, 0, 0.5), (1.0, 7, 1.0)):
        scores = torch.tensor(row)[None] / temperature
        if top_k:
            scores = warpers.TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = warpers.TopPLogitsWarper(top_p)(None, scores)
        expected = scores.softmax(-1)[0].numpy()
        assert _kept(row, Sampling(temperature, top_k, top_p)) == pytest.approx(expected, abs=1e-6)


def test_logits_that_are_not_finite_end_with_a_clear_error() -> None:
    rows = np.zeros((2, 8), np.float32)
    rows[1, 3] = np.nan
    with pytest.raises(QuantlabError, match="not finite"):
        choose(rows, [(Sampling(), 0, 0), (Sampling(), 1, 0)])


# failures


class Failing(SimulatedBackend):
    """Steps, saves or restores fail where `fails(what, count)` says so."""

    def __init__(self, clock: VirtualClock, fails: Any) -> None:
        capacity = Capacity(n_ctx=N_CTX, n_seq=N_SEQ, n_batch=N_BATCH)
        super().__init__(capacity, STEP_MODEL, clock, swap_token_s=SWAP_TOKEN_S)
        self._fails, self._counts = fails, {"forward": 0, "save": 0, "restore": 0}

    def _count(self, what: str) -> None:
        self._counts[what] += 1
        self._fails(what, self._counts[what])

    def forward(self, batch: Batch) -> Logits:
        self._count("forward")
        return super().forward(batch)

    def save(self, seq: int) -> bytes:
        self._count("save")
        return super().save(seq)

    def restore(self, seq: int, blob: bytes) -> None:
        self._count("restore")
        super().restore(seq, blob)


def _failing_at(what: str, *counts: int, error: type[BaseException] = QuantlabError) -> Any:
    def fails(kind: str, count: int) -> None:
        if kind == what and (count in counts or not counts):
            raise error("the device is lost")

    return fails


@pytest.mark.parametrize("error", [QuantlabError, RuntimeError])
def test_a_failed_step_ends_its_requests_and_the_others_go_on(error: type[Exception]) -> None:
    requests = [request(i, 5, 3 + 3 * i) for i in range(4)] + [request(9, arrival_s=5.0)]
    clock = VirtualClock()
    engine = Engine(Failing(clock, _failing_at("forward", 5, error=error)), ROOMY, clock=clock)
    records = engine.run(requests)
    assert [record.status for record in records] == ["finished", "failed", "failed", "failed", "finished"]
    for r, record in zip(requests, records, strict=True):
        if record.status == "finished":
            assert record.tokens == alone(r).tokens
        else:
            assert record.reason == "the device is lost"
            assert record.tokens == alone(r).tokens[:4]
            assert record.e2el_s is record.tpot_s is None
    assert is_empty(engine)
    assert [event.request_id for event in engine.events if event.kind == "failed"] == [1, 2, 3]


def test_a_device_that_stays_lost_ends_every_request() -> None:
    clock = VirtualClock()
    engine = Engine(Failing(clock, _failing_at("forward")), Limits(2, 8, 70, N_CTX), clock=clock)
    records = engine.run([request(i, arrival_s=float(i)) for i in range(5)])
    assert {(record.status, record.reason) for record in records} == {("failed", "the device is lost")}
    assert is_empty(engine)


@pytest.mark.parametrize("what", ["save", "restore"])
@pytest.mark.parametrize("counts", [(1,), ()], ids=["once", "always"])
def test_a_kv_that_is_not_saved_or_restored_is_computed_again(what: str, counts: tuple[int, ...]) -> None:
    requests = [request(i, 20, 20) for i in range(4)]
    clock = VirtualClock()
    backend = Failing(clock, _failing_at(what, *counts))
    engine = Engine(backend, Limits(4, 32, 60, N_CTX), clock=clock, preemption=Swap())
    records = engine.run(requests)
    assert [record.tokens for record in records] == [alone(r).tokens for r in requests]
    assert sum(record.recomputed for record in records) > 0
    assert is_empty(engine)


def test_an_interrupted_run_keeps_what_was_finished_and_the_engine_is_empty() -> None:
    requests = [request(i, 5, 3 + 3 * i) for i in range(4)]
    clock = VirtualClock()
    backend = Failing(clock, _failing_at("forward", 5, error=KeyboardInterrupt))
    engine = Engine(backend, Limits(3, 32, 256, N_CTX), clock=clock)
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests)
    assert {record.id: record.status for record in engine.records} == {
        0: "finished", 1: "failed", 2: "failed", 3: "failed",
    }  # fmt: skip
    assert is_empty(engine)
    assert engine.run([request(7)])[0].tokens == alone(request(7)).tokens


# bad input


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Request(0, [], 1), "prompt tokens"),
        (Request(0, [1], 0), "new ones"),
        (Request(0, [1], -3), "new ones"),
        (Request(0, [1], 1, -0.5), "arrives"),
        (Request(0, [1], 1, float("nan")), "arrives"),
        (Request(0, [1], 1, float("inf")), "arrives"),
        (Request(0, [1] * 60, 5), "context"),
        (Request(0, [1] * 30, 30), "KV budget"),
        (Request(0, [512], 1), "vocabulary"),
        (Request(0, [-1], 1), "vocabulary"),
        (Request(0, [1], 1, ttft_slo_s=0.0), "ttft_slo_s"),
        (Request(0, [1], 1, e2e_slo_s=-1.0), "e2e_slo_s"),
        (Request(0, [1], 1, priority="urgent"), "priority"),
        (Request(1, [1], 1), "same id"),
    ],
)  # fmt: skip
def test_impossible_requests_are_refused_before_any_is_begun(wrong: Request, says: str) -> None:
    clock = VirtualClock()
    engine = Engine(simulated(clock), Limits(2, 8, 50, N_CTX), clock=clock)
    with pytest.raises(UsageError, match=says):
        engine.run([request(1), wrong])
    assert engine.events == engine.records == []
    assert engine.run([request(1, 30, 21)])[0].status == "finished", "exactly the budget"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": 5},
        {"max_num_batched_tokens": 33},
        {"max_num_batched_tokens": 3},
        {"kv_budget_tokens": 0},
        {"kv_budget_tokens": 257},
    ],
    ids=str,
)
def test_limits_that_the_backend_does_not_have(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError) as caught:
        limits_of(simulated(VirtualClock()), **wrong)
    assert caught.value.hint
    assert limits_of(simulated(VirtualClock())) == ROOMY


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
    ],
    ids=str,
)
def test_impossible_samplings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**wrong)


# costs


def test_costs_are_learnt_from_the_steps() -> None:
    costs, clock = MeasuredCosts(), VirtualClock()
    assert costs.steps() is None
    assert costs.swap_s(10) is None
    engine = Engine(simulated(clock), Limits(4, 32, 90, N_CTX), clock=clock, costs=costs, preemption=Swap())
    engine.run([request(i, 5 + i, 20, arrival_s=0.01 * i) for i in range(20)])
    found = costs.fit()
    assert found is not None
    assert found.mean_relative_error < 0.01
    shape = StepShape(12, 78, 2, 40)
    assert costs.steps().seconds(shape) == pytest.approx(STEP_MODEL.seconds(shape), rel=0.1)
    assert costs.swap_s(10) == pytest.approx(2 * 10 * SWAP_TOKEN_S)


# the smaller model


class DegradeOdd(AcceptAll):
    """Degrades odd requests, rejects those that 4 divides."""

    def decide(self, request: Request, scheduler: Any, now_s: float) -> Decision:
        verdict = "degrade" if request.id % 2 else "accept" if request.id % 4 else "reject"
        return Decision(verdict, 1.0, "by number")


def test_what_is_degraded_is_served_by_the_smaller_engine() -> None:
    clock = VirtualClock()
    small = Engine(simulated(clock, seed=5), ROOMY, clock=clock)
    engine = Engine(simulated(clock), ROOMY, clock=clock, admission=DegradeOdd())
    requests = [request(i, arrival_s=0.01 * i) for i in range(9)]
    records = engine.run(requests, fallback=small)
    for r, record in zip(requests, records, strict=True):
        if r.id % 4 == 0:
            assert (record.status, record.reason, record.tokens) == ("rejected", "by number", [])
        else:
            assert (record.status, record.degraded) == ("finished", bool(r.id % 2))
            assert record.tokens == alone(r, seed=5 if r.id % 2 else 0).tokens
    assert is_empty(engine)
    assert is_empty(small)
    with pytest.raises(UsageError, match="two clocks"):
        engine.run(requests, fallback=Engine(simulated(VirtualClock()), ROOMY, clock=VirtualClock()))
    assert [r.status for r in engine.run([requests[1]])] == ["rejected"], "nothing smaller is there"


def test_order_and_priority_are_kept_by_the_waiting_queue() -> None:
    """One place: FCFS serves by arrival; interactive first unless a batch request has aged."""
    kinds = ["batch", "batch", "interactive", "batch", "interactive"]
    requests = [request(i, 5, 3, arrival_s=0.02 * i, priority=kind) for i, kind in enumerate(kinds)]
    for order, expected in (
        (Fcfs(), [0, 1, 2, 3, 4]),
        (PriorityOrder(1.0, preemptive=False), [0, 2, 4, 1, 3]),
        (PriorityOrder(0.03, preemptive=False), [0, 2, 1, 4, 3]),
        (PriorityOrder(0.0, preemptive=False), [0, 1, 2, 3, 4]),
    ):
        clock = VirtualClock()
        engine = Engine(simulated(clock), Limits(1, 32, 64, N_CTX), clock=clock, order=order)
        engine.run(requests)
        assert [event.request_id for event in engine.events if event.kind == "admitted"] == expected


def test_learning_costs_imports_nothing_in_the_middle_of_a_run() -> None:
    """The first fit came with an import of 0.2 s, which whoever waited then was charged with."""
    script = (
        "import sys; from quantlab.engine import MeasuredCosts; costs = MeasuredCosts(); before = set(sys.modules)\n"
        "from quantlab.runtime.step_model import MeasuredStep, StepShape\n"
        "for i in range(1, 20): costs.observe_step(MeasuredStep(StepShape(0, 0, i, i), 0.01 * i))\n"
        "assert costs.fit(); print([name for name in set(sys.modules) - before if name.startswith('scipy')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
