"""The requests of one load: lengths and arrivals, drawn or recorded before the run begins.

Arrivals are Poisson, bursty (`--burstiness`, gamma gaps) or a trace's. Whatever they are, they are stretched so that n
requests take n / rate seconds: the rate is the one that was asked for, also in a short run. For Poisson arrivals this
is the process given that the n-th arrival comes when it should. One `seed` gives one pattern at every rate, so that
loads differ in the rate alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from quantlab.bench.arrivals import arrival_times
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceRow, TraceShape, read_trace, summarize
from quantlab.core.errors import UsageError
from quantlab.engine import Priority

# A recorded length beyond this many means is cut, where the scale is ours.
_CUT = 8
# The answer of a batch request of mixed traffic is longer.
BATCH_LENGTH = 4


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """One request without its prompt: the process that has the tokenizer takes that from text."""

    prompt_tokens: int
    new_tokens: int
    arrival_s: float
    priority: Priority = "interactive"
    ttft_slo_s: float | None = None
    prefix: tuple[int, ...] = ()


class Lengths(NamedTuple):
    """Tokens of each request, the gaps before each (mean 1), and how many recorded lengths were cut.

    With a prefix cache, of each request one hash for every `block_tokens` of its prompt.
    """

    prompt: list[int]
    new: list[int]
    gaps: list[float]
    cut: int = 0
    prefixes: list[tuple[int, ...]] = []  # noqa: RUF012
    block_tokens: float = 0.0


def lengths(spec: BatchingSpec) -> Lengths:
    """The requests of every load of this spec; raises UsageError for a trace that has no gaps or too few rows."""
    count = spec.n_requests()
    if spec.trace is not None:
        return _recorded(spec, Path(spec.trace), count)
    rng = np.random.default_rng([spec.seed, 1])
    prompt, new = (
        rng.integers(math.ceil(mean * (1 - ratio)), math.floor(mean * (1 + ratio)) + 1, count).clip(least)
        for mean, ratio, least in (
            # BOS may be one of a prompt's tokens; TPOT needs two new ones.
            (spec.prompt_tokens, spec.random_range_ratio, min(2, spec.prompt_tokens)),
            (spec.new_tokens, spec.random_range_ratio, min(2, spec.new_tokens)),
        )
    )
    gaps = np.diff(arrival_times(1.0, count, burstiness=spec.burstiness, seed=spec.seed), prepend=0.0)
    if not gaps.sum() > 0:
        raise UsageError(f"`--burstiness` {spec.burstiness:g}: all requests arrive at one time", "give a larger one")
    return Lengths(prompt.tolist(), new.tolist(), gaps.tolist())


def _recorded(spec: BatchingSpec, path: Path, count: int) -> Lengths:
    plain = list(read_trace(path, TraceShape(limit=count)))
    summary = summarize(plain)
    if summary.rate_per_s is None:
        raise UsageError(f"all rows of `{path}` arrive at one time: there is no rate to scale", "give another trace")
    scale = spec.length_scale or spec.prompt_tokens * summary.rows / summary.prompt_tokens
    own = spec.length_scale is None
    shape = TraceShape(
        length_scale=scale,
        max_prompt_tokens=_CUT * spec.prompt_tokens if own else None,
        max_new_tokens=_CUT * spec.new_tokens if own else None,
        limit=count,
    )
    rows = list(read_trace(path, shape))
    gaps = np.diff([row.arrival_s for row in rows])
    # A recording does not tell the gap before its first row.
    mean = float(gaps.mean())
    cut = sum(_is_cut(row, shape, scale) for row in plain)
    prefixes = [row.hash_ids or () for row in rows] if spec.prefix_cache_tokens is not None else []
    if prefixes and not any(prefixes):
        raise UsageError(f"`{path}` tells no shared prefixes", "give a trace with hash_ids, or no prefix cache")
    return Lengths(
        [max(2, row.prompt_tokens) for row in rows],
        [row.new_tokens for row in rows],
        [1.0, *(gaps / mean).tolist()],
        cut,
        prefixes,
        MOONCAKE_BLOCK_TOKENS * scale,
    )


def _is_cut(row: TraceRow, shape: TraceShape, scale: float) -> bool:
    return any(
        most is not None and tokens * scale > most
        for tokens, most in ((row.prompt_tokens, shape.max_prompt_tokens), (row.new_tokens, shape.max_new_tokens))
    )


def at_rate(drawn: Lengths, rate_per_s: float, *, ttft_slo_s: float | None = None) -> list[Asked]:
    """The requests, arriving at `rate_per_s` on average; an infinite rate is all at once."""
    ends = np.cumsum(drawn.gaps)
    arrivals = np.zeros(len(ends)) if math.isinf(rate_per_s) else ends * (len(ends) / ends[-1] / rate_per_s)
    prefixes = drawn.prefixes or [()] * len(drawn.prompt)
    return [
        Asked(prompt, new, at, ttft_slo_s=ttft_slo_s, prefix=prefix)
        for prompt, new, at, prefix in zip(drawn.prompt, drawn.new, arrivals.tolist(), prefixes, strict=True)
    ]


def mixed(requests: list[Asked], *, ttft_slo_s: float, seed: int) -> list[Asked]:
    """The same arrivals, one of two neighbours a batch request of BATCH_LENGTH times the answer, without a deadline.

    Which of them is drawn, the same for every rate: in turn, a router that takes replicas in turn would sort them.
    """
    second = np.random.default_rng([seed, 2]).integers(0, 2, len(requests) // 2 + 1)
    return [
        msgspec.structs.replace(asked, new_tokens=BATCH_LENGTH * asked.new_tokens, priority="batch", ttft_slo_s=None)
        if i % 2 == second[i // 2]
        else msgspec.structs.replace(asked, ttft_slo_s=ttft_slo_s)
        for i, asked in enumerate(requests)
    ]


def squared_variation_of_gaps(drawn: Lengths) -> float:
    """Variance over squared mean of the gaps between arrivals: 1 for a Poisson process."""
    gaps = np.array(drawn.gaps[1:])
    return float(gaps.var() / gaps.mean() ** 2) if len(gaps) else 1.0
