"""One stream on one backend: flush, prime, measure, validate.

A cold pass forgets everything before each request; a warm pass forgets, sends the first requests, and then measures
the others one after another. Requests never overlap, so that TTFT has no queue in it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from quantlab.bench.prefix_cache.scenarios import Stream
from quantlab.core.errors import UsageError
from quantlab.engine import Engine, MeasuredCosts, Request, limits_of
from quantlab.engine.prefix_cache import PrefixCache
from quantlab.runtime.backend import Backend, Batch, Logits, Tokens
from quantlab.runtime.clock import Clock


class Served(NamedTuple):
    """What became of one request."""

    ttft_s: float
    cached_tokens: int
    tokens: list[int]


class Sharing(msgspec.Struct, frozen=True):
    """So many prompts held at once, and the tokens that they would hold more without sharing."""

    prompts: int
    saved_tokens: int


class Agreement(msgspec.Struct, frozen=True):
    """The largest difference of the first token's logits, in standard deviations, for a prompt of which
    `cached_tokens` are found: between the cache and the same steps without it, and between those and one step.

    `kv_bytes` are those tokens' own, `added_bytes` what sharing them with another sequence added.
    """

    cached_tokens: int
    same_steps: float
    one_step: float
    kv_bytes: int
    added_bytes: int


class Bed:
    """A backend and its prefix cache, one request at a time."""

    def __init__(
        self, backend: Backend, clock: Clock, *, budget_tokens: int, block_tokens: int, new_tokens: int
    ) -> None:
        self.backend, self._clock, self._new_tokens = backend, clock, new_tokens
        self._budget, self._block = budget_tokens, block_tokens
        self.costs = MeasuredCosts()
        self.forget()

    def forget(self) -> None:
        """Begin with an empty cache."""
        self.backend.reset()
        self.cache = PrefixCache(
            self.backend, budget_tokens=self._budget, block_tokens=self._block, clock=self._clock, costs=self.costs
        )
        limits = limits_of(self.backend, max_num_seqs=1, kv_budget_tokens=self.backend.describe().capacity.n_ctx)
        self._engine = Engine(self.backend, limits, clock=self._clock, costs=self.costs, prefix=self.cache, log=False)

    def ask(self, prompt: Tokens) -> Served:
        """Serve one request to its end."""
        (record,) = self._engine.run([Request(0, prompt, self._new_tokens)])
        if record.ttft_s is None or record.status != "finished":
            raise UsageError(f"a request of {len(prompt)} tokens failed: {record.reason}")
        self._engine.records.clear()
        return Served(record.ttft_s, record.cached_tokens, record.tokens)

    def cold(self, stream: Stream) -> list[Served]:
        """The measured requests, each with an empty cache."""
        found = []
        for prompt in stream.prompts[stream.prime :]:
            self.cache.clear()
            found.append(self.ask(prompt))
        return found

    def warm(self, stream: Stream) -> list[Served]:
        """All requests, one after another; the first `prime` of them are not measured."""
        self.cache.clear()
        return [self.ask(prompt) for prompt in stream.prompts]

    def sharing(self, stream: Stream) -> Sharing:
        """Hold as many measured prompts at once as there are sequences; the cache has what `warm` left."""
        self.warm(stream)
        # The others hold what is cached.
        most = self.backend.describe().capacity.n_seq // 2
        slots = [self.cache.begin(self.cache.prompt(prompt))[0] for prompt in stream.prompts[stream.prime :][:most]]
        saved = self.cache.held()["shared_tokens"]
        for slot in slots:
            self.cache.end(slot)
        return Sharing(len(slots), saved)

    def agreement(self, prompt: Tokens, cached_tokens: int) -> Agreement:
        """Compare the logits behind a prompt whose first `cached_tokens`, whole blocks, are in the cache."""
        self.forget()
        for part in (prompt[:cached_tokens], prompt) if cached_tokens else (prompt,):
            slot, held = self.cache.begin(self.cache.prompt(part))
            cached = self._logits(slot, part, held)
            self.cache.end(slot, len(part))
        self.backend.reset()
        if cached_tokens:
            self._logits(0, prompt[:cached_tokens], 0)
        kv_bytes = self.backend.kv_bytes()
        self.backend.share(0, 1, cached_tokens)
        added_bytes = self.backend.kv_bytes() - kv_bytes
        same = self._logits(0, prompt, cached_tokens)
        self.backend.reset()
        whole = self._logits(0, prompt, 0)
        self.forget()
        spread = float(whole.std())
        same_steps, one_step = (float(np.abs(a - same).max()) / spread for a in (cached, whole))
        return Agreement(held, same_steps, one_step, kv_bytes, added_bytes)

    def _logits(self, slot: int, tokens: Tokens, start: int) -> Logits:
        """Compute the tokens from `start` on; returns the logits behind the last one."""
        size = self.backend.describe().capacity.n_batch
        rows: Logits = np.zeros((1, 1), np.float32)
        for at in range(start, len(tokens), size):
            rows = self.backend.forward(Batch.of(slot, tokens[at : at + size], at, logits="last")).copy()
        return rows
