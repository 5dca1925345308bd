"""The engine on llama.cpp and torch, stories260K: the greedy tokens of `generate` for every request, whatever runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.engine import (
    Cheaper,
    Engine,
    Limits,
    MeasuredCosts,
    PriorityOrder,
    Recompute,
    Request,
    Sampling,
    Swap,
    limits_of,
)
from quantlab.runtime import backend as runtime
from quantlab.runtime.backend import Backend, Capacity
from quantlab.runtime.clock import VirtualClock
from tests.engine_cases import Watched, is_empty

N_CTX, N_SEQ, N_BATCH, NEW = 96, 4, 32, 20
TEXTS = [
    "Once upon a time, there was a little",
    "The dog",
    "Lily and Tom went to the park. They saw a big",
    "One day",
    "It was a sunny day and the boy wanted to play with his red ball, but his mom said that",
    '"Look, mom!" said Sam. "A',
    "The cat was very",
    "Timmy loved",
]


def _llamacpp(stories: Path, folder: Path) -> Backend:
    pytest.importorskip("llama_cpp")
    from quantlab.quantize.convert import convert
    from quantlab.runtime.llamacpp import LlamaCppBackend

    convert(stories, folder / "stories.gguf", outtype="F32")
    return LlamaCppBackend(folder / "stories.gguf", Capacity(N_CTX, N_SEQ, N_BATCH), device="cpu", threads=1)


def _torch(stories: Path, folder: Path) -> Backend:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from quantlab.runtime.torch.backend import TorchBackend

    return TorchBackend(stories, Capacity(N_CTX, N_SEQ, N_BATCH), device="cpu", dtype="float32", threads=1)


@pytest.fixture(scope="module", params=[_llamacpp, _torch], ids=["llamacpp", "torch"])
def backend(request: pytest.FixtureRequest, stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    opened = request.param(stories, tmp_path_factory.mktemp("model"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pool(backend: Backend) -> list[tuple[np.ndarray, list[int]]]:
    """Prompts and the greedy tokens of each alone; those without a tie that rounding could turn."""
    found = []
    for text in TEXTS:
        prompt = backend.encode(text, bos=True)
        backend.reset()
        (generation,) = backend.generate([runtime.Request(prompt, NEW)])
        backend.reset()
        whole = np.concatenate([prompt, generation.tokens]).astype(np.int32)
        rows = np.concatenate(
            [
                backend.forward(runtime.Batch.of(0, whole[at : at + N_BATCH], at, logits="all")).copy()
                for at in range(0, len(whole), N_BATCH)
            ]
        )[len(prompt) - 1 : -1]
        top = np.sort(rows, axis=1)[:, -2:]
        if (top[:, 1] - top[:, 0]).min() > 0.005:
            found.append((prompt, generation.tokens))
    backend.reset()
    assert len(found) >= 5
    assert len({tuple(tokens) for _, tokens in found}) == len(found)
    return found


@hypothesis.settings(
    max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], database=None
)
@hypothesis.given(
    data=st.data(),
    picks=st.lists(
        st.tuples(st.integers(0, 99), st.integers(1, NEW), st.integers(0, 25), st.booleans()), min_size=1, max_size=8
    ),
    seqs=st.integers(1, N_SEQ),
    preemption=st.sampled_from([Swap(), Recompute(), Cheaper(MeasuredCosts())]),
    ageing_s=st.sampled_from([0.0, 5.0, 100.0]),
)
def test_whatever_the_batch_the_greedy_tokens_are_those_of_generate(
    backend: Backend, pool: Any, data: Any, picks: Any, seqs: int, preemption: Any, ageing_s: float
) -> None:
    requests, expected = [], []
    for i, (pick, new_tokens, arrival, batch) in enumerate(picks):
        prompt, tokens = pool[pick % len(pool)]
        kind = "batch" if batch else "interactive"
        requests.append(Request(i, prompt, new_tokens, float(arrival), priority=kind))
        expected.append(tokens[:new_tokens])
    need = max(len(r.prompt) + r.max_new_tokens - 1 for r in requests)
    chunk, spare = data.draw(st.integers(seqs, N_BATCH)), data.draw(st.integers(0, N_CTX))
    limits = Limits(seqs, chunk, need + spare, N_CTX)
    clock = VirtualClock()
    engine = Engine(
        Watched(backend, limits, clock), limits, clock=clock, order=PriorityOrder(ageing_s), preemption=preemption
    )
    records = engine.run(requests)
    assert [record.tokens for record in records] == expected
    assert is_empty(engine)


@pytest.mark.parametrize("preemption", [Swap(), Recompute()], ids=["swap", "recompute"])
def test_preempted_requests_finish_with_the_same_text(backend: Backend, pool: Any, preemption: Any) -> None:
    requests = [Request(i, prompt, NEW, 0.0) for i, (prompt, _) in enumerate(pool)]
    need = max(len(prompt) for prompt, _ in pool) + NEW - 1
    engine = Engine(backend, limits_of(backend, kv_budget_tokens=need + 20), preemption=preemption)
    records = engine.run(requests)
    assert sum(record.swapped + record.recomputed for record in records) > 1
    assert [backend.decode(record.tokens) for record in records] == [backend.decode(tokens) for _, tokens in pool]
    assert is_empty(engine)


def test_samples_do_not_depend_on_the_batch(backend: Backend, pool: Any) -> None:
    """Rounding may turn a sample that lies on a border; twenty tokens of five prompts hold none."""
    requests = [
        Request(i, prompt, NEW, sampling=Sampling(0.8, top_k=40, top_p=0.95, seed=4))
        for i, (prompt, _) in enumerate(pool)
    ]
    together = Engine(backend, limits_of(backend, max_num_batched_tokens=12)).run(requests)
    alone = [Engine(backend, limits_of(backend)).run([request])[0] for request in requests]
    assert [record.tokens for record in together] == [record.tokens for record in alone]
    assert [record.tokens for record in together] != [tokens for _, tokens in pool]


def test_real_time_is_stamped_and_learnt(backend: Backend, pool: Any) -> None:
    """Wall clock, a stream of arrivals: times rise, the step model fits what ran, the overhead is noted."""
    costs = MeasuredCosts()
    engine = Engine(backend, limits_of(backend), costs=costs, preemption=Cheaper(costs))
    requests = [Request(i, pool[i % len(pool)][0], NEW, 0.005 * i, ignore_eos=False) for i in range(24)]
    records = engine.run(requests)
    assert all(record.status == "finished" for record in records)
    for record in records:
        assert record.arrival_s <= record.admitted_s < record.first_token_s
        assert all(np.diff(record.times_s) > 0)
        assert record.tokens == pool[record.id % len(pool)][1][: len(record.tokens)]
    found = costs.fit()
    assert found is not None
    assert found.n_steps > 20
    # The model is of the last steps of each kind; a loaded machine is no fault of it.
    total = sum(step.forward_s for step in engine.steps)
    assert sum(found.model.seconds(step.shape) for step in engine.steps) == pytest.approx(total, rel=0.8)
    assert sum(step.overhead_s for step in engine.steps) > 0


def test_the_benchmarks_can_be_imported() -> None:
    """They run by hand: a name that moved would be seen late."""
    for name in ("benchmarks", "engine_benchmarks", "engine_benchmarks_model"):
        importlib.import_module(f"tests.{name}")
