"""What one engine may hold and compute, and the requests that it could never serve."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from quantlab.core.errors import UsageError
from quantlab.engine.request import PRIORITIES, Request
from quantlab.runtime.backend import Backend


class Limits(msgspec.Struct, frozen=True):
    """What one engine may hold and compute: sequences at once, tokens a step, tokens of KV in all.

    The first two are named as vLLM names them. A sequence that is admitted reserves its whole prompt in the KV
    budget, and one token more with each decode step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_budget_tokens: int
    n_ctx: int

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)) < 1:
            raise UsageError(f"{self} has a size below 1", "give sizes from 1 on")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}",
                "each sequence decodes one token a step: raise the one or lower the other",
            )


def limits_of(
    backend: Backend,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    kv_budget_tokens: int | None = None,
    prefix_tokens: int = 0,
) -> Limits:
    """The limits of an engine on this backend: what it was opened for, or less.

    `prefix_tokens` of the KV are left to a prefix cache, with the one sequence that it needs at least.
    """
    capacity = backend.describe().capacity
    most_seqs = min(capacity.n_seq - (prefix_tokens > 0), capacity.n_outputs or capacity.n_batch, capacity.n_batch)
    most_kv = capacity.n_seq * capacity.n_ctx - prefix_tokens
    limits = Limits(
        max_num_seqs=most_seqs if max_num_seqs is None else max_num_seqs,
        max_num_batched_tokens=capacity.n_batch if max_num_batched_tokens is None else max_num_batched_tokens,
        kv_budget_tokens=most_kv if kv_budget_tokens is None else kv_budget_tokens,
        n_ctx=capacity.n_ctx,
    )
    for name, asked, most in (
        ("max_num_seqs", limits.max_num_seqs, most_seqs),
        ("max_num_batched_tokens", limits.max_num_batched_tokens, capacity.n_batch),
        ("kv_budget_tokens", limits.kv_budget_tokens, most_kv),
    ):
        if asked > most:
            raise UsageError(f"{name} {asked}: the backend was opened for {most}", "open it larger, or ask less")
    return limits


def check_request(request: Request, limits: Limits, n_vocab: int | None = None) -> None:
    """Refuse a request that can never be served: UsageError, and nothing has begun."""
    what, n = f"request {request.id}", len(request.prompt)
    if not n or request.max_new_tokens < 1:
        raise UsageError(f"{what}: {n} prompt tokens and {request.max_new_tokens} new ones", "each takes at least 1")
    if not 0 <= request.arrival_s < math.inf:
        raise UsageError(f"{what} arrives at {request.arrival_s} s", "arrivals are seconds from 0 on")
    if request.priority not in PRIORITIES:
        raise UsageError(f"{what}: unknown priority `{request.priority}`", f"known: {', '.join(PRIORITIES)}")
    for name, slo in (("ttft_slo_s", request.ttft_slo_s), ("e2e_slo_s", request.e2e_slo_s)):
        if slo is not None and not slo > 0:
            raise UsageError(f"{what}: {name} of {slo} s", "a deadline is above 0")
    if n + request.max_new_tokens > limits.n_ctx:
        raise UsageError(
            f"{what}: {n} prompt tokens and {request.max_new_tokens} new ones, the context holds {limits.n_ctx}",
            "raise `n_ctx`, or shorten the request",
        )
    # The last token is handed out, not fed back.
    if n + request.max_new_tokens - 1 > limits.kv_budget_tokens:
        raise UsageError(
            f"{what}: {n} prompt tokens and {request.max_new_tokens} new ones, the KV budget is "
            f"{limits.kv_budget_tokens} tokens in all",
            "raise `kv_budget_tokens`, or shorten the request",
        )
    if n_vocab is None:
        return
    ids = np.asarray(request.prompt)
    if not 0 <= ids.min() <= ids.max() < n_vocab:
        raise UsageError(f"{what}: a prompt has token ids outside the vocabulary of {n_vocab}")
