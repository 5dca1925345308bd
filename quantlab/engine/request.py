"""What goes into the engine and what comes out: requests, records, events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from quantlab.core.errors import UsageError
from quantlab.runtime.backend import Tokens

Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen; temperature 0 is greedy. `top_k` 0 and `top_p` 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise UsageError(f"{self}", "temperature and top_k are from 0 on, top_p above 0 and at most 1")


GREEDY = Sampling()


class Request(msgspec.Struct, frozen=True, eq=False):
    """One request of an open loop: it arrives at `arrival_s` after the start, whatever the engine does.

    `prompt`: token ids. A simulated fleet takes their number alone, so `range(n)` is enough. `ttft_slo_s` and
    `e2e_slo_s` are deadlines counted from the arrival; None: none. `prefix`: one hash for each block of the prompt
    that the request could share with others, first block first (simulated fleets only). `cache_salt`: requests of
    different salts share nothing, so that no tenant learns from its TTFT what another has asked.
    """

    id: int
    prompt: Tokens | Sequence[int]
    max_new_tokens: int
    arrival_s: float = 0.0
    ignore_eos: bool = True
    priority: Priority = "interactive"
    ttft_slo_s: float | None = None
    e2e_slo_s: float | None = None
    sampling: Sampling = GREEDY
    prefix: tuple[int, ...] = ()
    cache_salt: str = ""


class RequestRecord(msgspec.Struct):
    """What became of one request. Times are seconds on the run's clock; None where it did not come so far.

    `tokens` and `times_s` (when each token was on the host) stay empty in a simulated fleet, which counts only.
    """

    id: int
    priority: Priority
    status: Literal["finished", "rejected", "failed"]
    prompt_tokens: int
    arrival_s: float
    new_tokens: int = 0
    # When its first prefill chunk was put into a step; the end of queueing.
    admitted_s: float | None = None
    first_token_s: float | None = None
    # The last token; or when it was rejected or failed.
    finished_s: float | None = None
    finish_reason: Literal["length", "stop"] | None = None
    # Why it was rejected or failed.
    reason: str = ""
    predicted_ttft_s: float | None = None
    # Handed to the smaller model, because the deadline could not be met.
    degraded: bool = False
    swapped: int = 0
    recomputed: int = 0
    cached_tokens: int = 0
    ttft_slo_s: float | None = None
    e2e_slo_s: float | None = None
    tokens: list[int] = []
    times_s: list[float] = []

    @property
    def queue_delay_s(self) -> float | None:
        """Arrival to the first step."""
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first token, queueing included."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for fewer than two tokens."""
        if self.status != "finished" or self.new_tokens < 2 or self.first_token_s is None or self.finished_s is None:
            return None
        return (self.finished_s - self.first_token_s) / (self.new_tokens - 1)

    @property
    def e2el_s(self) -> float | None:
        """Arrival to the last token; None unless it finished."""
        return None if self.status != "finished" or self.finished_s is None else self.finished_s - self.arrival_s

    @property
    def met_deadlines(self) -> bool:
        """Whether it finished within the deadlines that it had."""
        return (
            self.status == "finished"
            and (self.ttft_slo_s is None or (self.ttft_s or 0.0) <= self.ttft_slo_s)
            and (self.e2e_slo_s is None or (self.e2el_s or 0.0) <= self.e2e_slo_s)
        )


EventKind = Literal[
    "arrived", "admitted", "rejected", "degraded", "preempted", "resumed", "first_token", "finished", "failed"
]  # fmt: skip


class Event(NamedTuple):
    """One decision or turn of one request. `detail`: swap or recompute, the reason, the finish reason."""

    at_s: float
    kind: EventKind
    request_id: int
    detail: str = ""
