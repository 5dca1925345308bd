"""A request on its way through one engine, and the plan of one step."""

from __future__ import annotations

from typing import Literal

import numpy as np

from quantlab.engine.prefix_cache.keys import Prompt
from quantlab.engine.request import Request, RequestRecord
from quantlab.runtime.step_model import StepShape

State = Literal["waiting", "prefill", "decode", "swapped", "done"]


class Sequence:
    """The scheduler's view of a request.

    `target` tokens must be in the KV before it decodes (the prompt; after a recompute also what was generated), of
    which `filled` are. While it decodes nothing here moves: see decoding.py.
    """

    __slots__ = (
        "admitted_s", "arrival_s", "blob", "cache_prompt", "cached", "degraded", "ends_at", "filled", "first_token_s",
        "generated", "joined", "key", "limit", "predicted_ttft_s", "recomputed", "request", "slot", "state", "swapped",
        "target", "times_s", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, key: float) -> None:
        self.request, self.key = request, key
        self.arrival_s, self.limit = request.arrival_s, request.max_new_tokens
        self.state: State = "waiting"
        self.target, self.filled = len(request.prompt), 0
        # Tokens that a prefix cache held when it was admitted.
        self.cached = 0
        # Its tokens as a prefix cache names them, where there is one.
        self.cache_prompt: Prompt | None = None
        # As of the moment it began to decode, or was preempted.
        self.generated = 0
        self.joined = self.ends_at = 0
        self.slot = -1
        self.blob: bytes | None = None
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.predicted_ttft_s: float | None = None
        self.degraded = False
        self.swapped = self.recomputed = 0
        self.tokens: list[int] = []
        self.times_s: list[float] = []

    def ids(self, start: int, n: int) -> list[int]:
        """Token ids from `start` on: of the prompt, then of what was generated."""
        prompt = self.request.prompt
        part = prompt[start : start + n]
        ids: list[int] = part.tolist() if isinstance(part, np.ndarray) else list(part)
        if start + n > len(prompt):
            ids += self.tokens[max(0, start - len(prompt)) : start + n - len(prompt)]
        return ids

    def record(
        self,
        status: Literal["finished", "rejected", "failed"],
        now_s: float,
        *,
        finish_reason: Literal["length", "stop"] | None = None,
        reason: str = "",
    ) -> RequestRecord:
        """What became of it, as of now."""
        request = self.request
        return RequestRecord(
            id=request.id,
            priority=request.priority,
            status=status,
            prompt_tokens=len(request.prompt),
            arrival_s=self.arrival_s,
            new_tokens=self.generated,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            finished_s=now_s,
            finish_reason=finish_reason,
            reason=reason,
            predicted_ttft_s=self.predicted_ttft_s,
            degraded=self.degraded,
            swapped=self.swapped,
            recomputed=self.recomputed,
            cached_tokens=self.cached,
            ttft_slo_s=request.ttft_slo_s,
            e2e_slo_s=request.e2e_slo_s,
            tokens=self.tokens,
            times_s=self.times_s,
        )


class Plan:
    """One step: who leaves and joins before it, and what it computes besides one token of each decoding sequence."""

    __slots__ = ("admitted", "chunks", "preempted", "resumed", "shape")

    def __init__(self) -> None:
        # With whether it is swapped; otherwise it is computed again.
        self.preempted: list[tuple[Sequence, bool]] = []
        self.admitted: list[Sequence] = []
        self.resumed: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int]] = []
        self.shape = StepShape(0, 0, 0, 0)
