"""The simulated backend passes the contract; step models add up, look ahead and are fitted; clocks."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.runtime.backend import Backend, Batch, Capacity, Request
from quantlab.runtime.clock import VirtualClock, WallClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import (
    ExponentialSteps,
    MeasuredStep,
    Roofline,
    StepModel,
    StepShape,
    StepTime,
    chunk_pairs,
    fit,
)
from tests.backend_contract import MULTILINGUAL, BackendContract, Open, batch

MODEL = StepModel(0.01, 1e-3, 1e-5, 2e-3, 1e-4)
ROOFLINE = Roofline(
    weight_bytes=14e9, kv_bytes_per_token=131072, params=7e9, bandwidth_bytes_per_s=2e12, flops_per_s=3e14
)


def simulated(*, seed: int = 0, swap_token_s: float = 0.0, **capacity: Any) -> SimulatedBackend:
    return SimulatedBackend(Capacity(**capacity), MODEL, VirtualClock(), seed=seed, swap_token_s=swap_token_s)


class TestSimulated(BackendContract):
    @pytest.fixture
    def open_backend(self) -> Open:
        return simulated

    @pytest.fixture
    def open_other(self) -> Open:
        def other(**capacity: int) -> Backend:
            return simulated(seed=1, **capacity)

        return other

    # No token of it is written out, and no weight is read.
    test_control_tokens_are_parsed_only_when_asked = None

    def test_describe_is_consistent(self, backend: Backend) -> None:
        loaded = backend.describe()
        assert loaded.runtime.name == "simulated"
        assert loaded.n_vocab == backend.forward(Batch.of(0, [5], 0, logits="last")).shape[1]
        assert (loaded.weight_bytes, loaded.bytes_read_per_token) == (0, 0)


def test_a_step_takes_the_time_of_its_work() -> None:
    """Two tokens onto nothing, one token onto three (decode), one token onto nothing (prefill)."""
    backend = simulated(n_ctx=16, n_seq=3)
    backend.forward(Batch.of(1, [1, 2, 3], 0, logits="none"))
    assert backend.clock.now() == pytest.approx(MODEL.seconds(StepShape(3, 1 + 2 + 3, 0, 0)))
    before = backend.clock.now()
    backend.forward(batch([5, 6, 7, 8], [0, 1, 3, 0], [0, 0, 1, 2], [True] * 4))
    expected = 0.01 + 3 * 1e-3 + (1 + 2 + 1) * 1e-5 + 1 * 2e-3 + 4 * 1e-4
    assert backend.clock.now() - before == pytest.approx(expected)


def test_swapping_takes_time_and_generate_is_stamped_in_virtual_time() -> None:
    backend = simulated(n_ctx=16, n_seq=2, swap_token_s=0.5)
    (generation,) = backend.generate([Request(np.arange(4, dtype=np.int32), 3)])
    steps = [StepShape(4, 10, 0, 0), StepShape(0, 0, 1, 5), StepShape(0, 0, 1, 6)]
    assert generation.start_s == 0
    assert generation.times_s == pytest.approx(list(itertools.accumulate(map(MODEL.seconds, steps))))
    before = backend.clock.now()
    blob = backend.save(0)
    assert backend.clock.now() - before == pytest.approx(3.0)
    backend.restore(1, blob)
    assert backend.clock.now() - before == pytest.approx(6.0)
    assert backend.memory().device_allocated == 12


def test_tokens_are_bytes_and_a_closed_backend_refuses() -> None:
    backend = simulated(n_ctx=16)
    assert backend.decode(backend.encode(MULTILINGUAL)) == MULTILINGUAL
    assert backend.piece_bytes(65) == b"A"
    assert backend.piece_bytes(300) == b""
    with pytest.raises(UsageError, match="vocabulary"):
        backend.piece_bytes(512)
    backend.close()
    with pytest.raises(UsageError, match="closed"):
        backend.length(0)


def test_greedy_tokens_differ_between_histories() -> None:
    """A constant answer would make every test of identity pass."""
    backend = simulated(n_ctx=64, n_seq=8)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 512, 5, dtype=np.int32) for _ in range(8)]
    generations = backend.generate([Request(prompt, 40) for prompt in prompts])
    assert len({tuple(g.tokens) for g in generations}) == 8
    assert all(len(set(g.tokens)) > 30 for g in generations)


# step models

models = st.one_of(
    st.builds(
        StepModel,
        st.floats(1e-6, 1),
        st.just(1e-4),
        st.just(1e-7),
        st.floats(0, 0.1),
        st.one_of(st.just(0.0), st.floats(1e-9, 1e-3)),
        st.one_of(st.just(()), st.lists(st.floats(1e-4, 1), min_size=1, max_size=40).map(tuple)),
    ),
    st.builds(
        Roofline,
        st.floats(1e6, 1e11),
        st.one_of(st.just(0.0), st.floats(1, 1e6)),
        st.floats(1e6, 1e11),
        st.floats(1e9, 1e13),
        st.floats(1e9, 1e15),
        st.floats(0, 0.01),
    ),
)


@hypothesis.given(models, st.integers(1, 300), st.integers(1, 20_000), st.integers(1, 200), st.floats(0, 1.2))
def test_many_decode_steps_add_up_and_are_looked_ahead(
    model: StepTime, seqs: int, context: int, steps: int, share: float
) -> None:
    ends = list(itertools.accumulate(model.seconds(StepShape(0, 0, seqs, context + i * seqs)) for i in range(steps)))
    assert model.decode_s(seqs, context, steps) == pytest.approx(ends[-1], rel=1e-9)
    within = share * ends[-1]
    got = model.decode_steps(seqs, context, within, steps)
    expected = next((i + 1 for i, end in enumerate(ends) if end >= within), steps)
    # At a boundary the last digit decides.
    assert got == expected or abs(ends[min(got, expected) - 1] - within) < 1e-9 * ends[-1]


def test_the_roofline_by_hand() -> None:
    """7e9 16-bit weights on 2 TB/s: 7 ms a step, until compute takes longer at 7e-3 x 3e14 / 14e9 = 150 sequences."""
    assert ROOFLINE.seconds(StepShape(0, 0, 1, 0)) == pytest.approx(7e-3)
    assert ROOFLINE.seconds(StepShape(0, 0, 150, 0)) == pytest.approx(7e-3)
    assert ROOFLINE.seconds(StepShape(0, 0, 300, 0)) == pytest.approx(14e-3)
    assert ROOFLINE.seconds(StepShape(0, 0, 1, 100_000)) == pytest.approx((14e9 + 131072e5) / 2e12)
    assert ROOFLINE.seconds(StepShape(3000, 4_501_500, 0, 0)) == pytest.approx(2 * 7e9 * 3000 / 3e14)


def _steps(model: StepModel, n: int, noise: float, seed: int = 0) -> list[MeasuredStep]:
    """A mixture as an engine runs it: decode steps of every batch, some with a chunk."""
    rng = random.Random(seed)
    steps = []
    for i in range(n):
        seqs = rng.randint(0, 16)
        tokens = rng.randint(1, 256) if i % 5 == 0 or not seqs else 0
        pairs, context = chunk_pairs(rng.randint(0, 500), tokens), seqs * rng.randint(10, 800)
        shape = StepShape(tokens, pairs, seqs, context, 2 if seqs and tokens > 1 else 1)
        steps.append(MeasuredStep(shape, model.seconds(shape) * rng.lognormvariate(0, noise)))
    return steps


def test_a_linear_model_is_found_again() -> None:
    found = fit(_steps(MODEL, 200, 0.0))
    assert found.mean_relative_error < 1e-6
    assert found.r_squared > 1 - 1e-9
    assert found.model.prefill_token_s == pytest.approx(MODEL.prefill_token_s, rel=1e-4)
    assert found.model.prefill_pair_s == pytest.approx(MODEL.prefill_pair_s, rel=1e-4)
    assert found.model.context_token_s == pytest.approx(MODEL.context_token_s, rel=1e-4)
    for seqs in (0, 1, 3, 16, 40):
        assert found.model.batch(seqs) == pytest.approx(MODEL.base_s + MODEL.decode_seq_s * seqs, rel=1e-4)


def test_a_bent_batch_and_noise() -> None:
    """The decode times of llama.cpp on two cores at 1, 2, 4, 8, 16 sequences: no line fits them."""
    corners, seconds = [0, 1, 2, 4, 8, 16], [0.015, 0.027, 0.0435, 0.049, 0.0606, 0.0958]
    truth = StepModel(0, 3e-3, 1e-6, 0.006, 1e-6, tuple(np.interp(range(17), corners, seconds).tolist()))
    found = fit(_steps(truth, 2000, 0.05))
    for seqs, expected in zip(corners, seconds, strict=True):
        assert found.model.batch(seqs) == pytest.approx(expected, rel=0.04)
    # The mean of |exp(N(0, s)) - 1| is about s * sqrt(2 / pi), its 95th percentile about 1.96 s.
    assert found.mean_relative_error == pytest.approx(0.05 * math.sqrt(2 / math.pi), rel=0.1)
    assert found.p95_relative_error == pytest.approx(0.05 * 1.96, rel=0.1)
    line = np.polynomial.polynomial.polyfit(corners[1:], seconds[1:], 1)
    assert abs(line[0] + line[1] - 0.027) / 0.027 > 0.2, "a line would have done"


def test_a_batch_that_was_measured_often_has_a_cost_of_its_own() -> None:
    """Kernels that take rows by fours: five to seven sequences cost more than eight."""
    truth = {4: 0.0144, 5: 0.0190, 6: 0.0205, 7: 0.0221, 8: 0.0197}
    found = fit([MeasuredStep(StepShape(0, 0, n, 40 * n), s) for n, s in truth.items() for _ in range(64)]).model
    for seqs, expected in truth.items():
        assert found.seconds(StepShape(0, 0, seqs, 40 * seqs)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_beyond_the_largest_batch_the_line_is_that_of_a_doubling(seed: int) -> None:
    """Batches of 1 to 8, each measured often, kernels by fours: 7 and 8 alone would say that more cost nothing."""
    rng = random.Random(seed)
    truth = {1: 6.0, 2: 10.5, 3: 13.0, 4: 14.4, 5: 19.0, 6: 20.5, 7: 21.5, 8: 19.8}
    steps = [
        MeasuredStep(StepShape(0, 0, n, n * rng.randint(10, 90)), 1e-3 * ms * rng.lognormvariate(0, 0.02))
        for n, ms in truth.items()
        for _ in range(90)
    ]
    # From 4 to 8 it is 1.35 ms a sequence.
    assert fit(steps).model.batch(16) == pytest.approx(1e-3 * (19.8 + 8 * 1.35), rel=0.08)


def test_groups_cost_what_their_passes_cost() -> None:
    truth = StepModel(0.01, 1e-3, 1e-5, 2e-3, 1e-4, group_s=0.009)
    steps = _steps(truth, 400, 0.0)
    assert len({step.shape.groups for step in steps}) > 1
    assert fit(steps).model.group_s == pytest.approx(0.009, rel=1e-3)
    assert truth.slower(2).group_s == pytest.approx(0.018)


def test_noise_with_a_long_tail_does_not_pull_the_model_to_the_fastest_steps() -> None:
    """A machine with other work: half of the steps take five times as long. The model predicts the total."""
    rng = random.Random(4)
    steps = [MeasuredStep(s.shape, s.duration_s * rng.choice([1, 5])) for s in _steps(MODEL, 2000, 0.1)]
    found = fit(steps)
    total = sum(step.duration_s for step in steps)
    assert sum(found.model.seconds(step.shape) for step in steps) == pytest.approx(total, rel=0.02)
    # Of some 90 steps each: three standard errors are 20%; the fastest would be 67% too low.
    assert found.model.batch(8) == pytest.approx(3 * (MODEL.base_s + 8 * MODEL.decode_seq_s), rel=0.3)


def test_decode_alone_and_one_batch_alone_are_fitted_too() -> None:
    decode = [step for step in _steps(MODEL, 300, 0.0) if not step.shape.prefill_tokens]
    assert fit(decode).mean_relative_error < 1e-6
    alone = [MeasuredStep(StepShape(0, 0, 4, 40 + i), 0.02) for i in range(5)]
    found = fit(alone)
    assert found.model.seconds(StepShape(0, 0, 4, 42)) == pytest.approx(0.02, rel=1e-3)
    assert found.mean_relative_error < 1e-3


@pytest.mark.parametrize(
    "steps", [[], [MeasuredStep(StepShape(1, 1, 0, 0), 0.1)], [MeasuredStep(StepShape(1, 1, 0, 0), 0.0)] * 5]
)
def test_what_cannot_be_fitted_is_refused(steps: list[MeasuredStep]) -> None:
    with pytest.raises(QuantlabError, match="do not fit"):
        fit(steps)


def test_exponential_steps_have_their_mean_and_their_stream() -> None:
    model, again = ExponentialSteps(0.5, 3), ExponentialSteps(0.5, 3)
    shape = StepShape(1, 1, 0, 0)
    draws = [model.seconds(shape) for _ in range(20_000)]
    assert draws[:9] == [again.seconds(shape) for _ in range(9)]
    # Mean and standard deviation are equal; the standard error is 0.7%.
    assert np.mean(draws) == pytest.approx(0.5, rel=0.03)
    assert np.std(draws) == pytest.approx(0.5, rel=0.04)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: StepModel(-1),
        lambda: StepModel(0),
        lambda: StepModel(1, math.nan),
        lambda: StepModel(1, batch_s=(0.1, -0.1)),
        lambda: Roofline(1, 1, 1, 0, 1),
        lambda: Roofline(1, 1, 1, 1, math.inf),
        lambda: Roofline(1, -1, 1, 1, 1),
        lambda: ExponentialSteps(0, 0),
        lambda: ExponentialSteps(-1, 0),
        lambda: SimulatedBackend(Capacity(), MODEL, VirtualClock(), n_vocab=10),
        lambda: SimulatedBackend(Capacity(), MODEL, VirtualClock(), swap_token_s=-1),
    ],
)
def test_impossible_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError) as caught:
        wrong()
    assert caught.value.hint


def test_clocks() -> None:
    virtual, wall = VirtualClock(), WallClock()
    virtual.advance(2)
    virtual.wait_until(1)
    assert virtual.now() == 2
    virtual.wait_until(5)
    assert virtual.now() == 5
    before = wall.now()
    wall.wait_until(before + 0.02)
    assert wall.now() >= before + 0.02
    wall.wait_until(0)
    wall.restart()
    virtual.restart()
    assert 0 <= wall.now() < before + 0.02
    assert virtual.now() == 0
