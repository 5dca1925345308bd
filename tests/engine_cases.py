"""Engines and requests for the engine's tests: small budgets, a clock that ticks with each step, a watching backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from quantlab.engine import (
    Cheaper,
    Engine,
    Fcfs,
    KnownCosts,
    Limits,
    Order,
    Preemption,
    PriorityOrder,
    Recompute,
    Request,
    RequestRecord,
    Sampling,
    Swap,
)
from quantlab.runtime.backend import Backend, Batch, Capacity, Logits
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import StepModel

STEP_MODEL = StepModel(0.01, 1e-3, 1e-5, 2e-3, 1e-4)
SWAP_TOKEN_S = 3e-4
N_CTX, N_SEQ, N_BATCH = 64, 4, 32


class Watched:
    """A backend that notes its steps, checks the limits of each and lets a clock tick; everything else is passed on."""

    def __init__(self, backend: Backend, limits: Limits, tick: VirtualClock | None = None) -> None:
        self._backend, self._limits, self._tick = backend, limits, tick
        self.steps: list[Batch] = []
        self.most_kv = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: Batch) -> Logits:
        rows = self._backend.forward(batch)
        if self._tick:
            self._tick.advance(1)
        self.steps.append(batch)
        assert len(batch.tokens) <= self._limits.max_num_batched_tokens
        lengths = [self._backend.length(seq) for seq in range(self._backend.describe().capacity.n_seq)]
        assert sum(length > 0 for length in lengths) <= self._limits.max_num_seqs
        assert sum(lengths) <= self._limits.kv_budget_tokens
        self.most_kv = max(self.most_kv, sum(lengths))
        return rows


def simulated(clock: VirtualClock, **options: Any) -> SimulatedBackend:
    capacity = Capacity(n_ctx=N_CTX, n_seq=N_SEQ, n_batch=N_BATCH)
    return SimulatedBackend(capacity, STEP_MODEL, clock, swap_token_s=SWAP_TOKEN_S, **options)


def alone(request: Request, **options: Any) -> RequestRecord:
    """What the request gives with nothing beside it."""
    clock = VirtualClock()
    limits = Limits(1, N_BATCH, N_CTX, N_CTX)
    return Engine(simulated(clock, **options), limits, clock=clock).run([request])[0]


def is_empty(engine: Engine) -> bool:
    """Whether nothing is left: no KV, no place taken, no one waiting."""
    scheduler, n_seq = engine._scheduler, engine.backend.describe().capacity.n_seq
    counts = (scheduler.unfinished, scheduler.kv_used, scheduler.decoding.context, scheduler.waiting_tokens)
    slots = sorted(engine._slots) == list(range(n_seq))
    return counts == (0, 0, 0, 0) and slots and all(engine.backend.length(seq) == 0 for seq in range(n_seq))


orders: st.SearchStrategy[Order] = st.one_of(
    st.builds(Fcfs), st.builds(PriorityOrder, st.sampled_from([0.0, 0.1, 5.0]), preemptive=st.booleans())
)
preemptions: st.SearchStrategy[Preemption] = st.one_of(
    st.builds(Swap), st.builds(Recompute), st.just(Cheaper(KnownCosts(STEP_MODEL, SWAP_TOKEN_S)))
)
samplings = st.sampled_from([Sampling(), Sampling(1.0, seed=1), Sampling(0.7, 20, 0.9, seed=2), Sampling(2.0, 0, 0.5)])


@st.composite
def limits(draw: st.DrawFn, requests: Sequence[Request]) -> Limits:
    """From the smallest that can serve the requests at all to roomy."""
    seqs = draw(st.integers(1, N_SEQ))
    need = max((len(r.prompt) + r.max_new_tokens - 1 for r in requests), default=1)
    return Limits(seqs, draw(st.integers(seqs, N_BATCH)), draw(st.integers(need, need + 2 * N_CTX)), N_CTX)


@st.composite
def workloads(draw: st.DrawFn, most: int = 12) -> list[Request]:
    """Requests with distinct prompts; arrivals are irrational enough never to meet the end of a step."""
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    span = draw(st.sampled_from([0.0, 0.05, 1.0]))
    return [
        Request(
            i,
            rng.integers(0, 512, draw(st.integers(1, 40)), dtype=np.int32),
            draw(st.integers(1, 24)),
            float(rng.uniform(0, span)) if span else 0.0,
            priority=draw(st.sampled_from(["interactive", "batch"])),
            sampling=draw(samplings),
        )
        for i in range(draw(st.integers(1, most)))
    ]
