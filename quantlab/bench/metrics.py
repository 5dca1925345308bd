"""Every speed of a bench, computed here and nowhere else from the time stamps of generations.

A time stamp is taken when a token id has reached the host (runtime/backend.py). For one request with tokens at
t_1..t_n, sent at t_0:

    ttft = t_1 - t_0
    tpot = (t_n - t_1) / (n - 1)
    itl  = t_2 - t_1, ..., t_n - t_(n-1)
    e2el = t_n - t_0

For the requests of one batch, T_0 the start, T_first the moment when the last of them has its first token, T_last
the last token of all:

    prefill_throughput = prompt tokens / (T_first - T_0)
    output_throughput  = new tokens / (T_last - T_0), the prefill included, as vLLM's bench reports it
    decode_throughput  = tokens after T_first / (T_last - T_first); 1 / tpot for one request

Tokens are those that were generated, not those that were asked for. Not measured: tokenization, sampling, transport.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from quantlab.core.result import Measurement
from quantlab.runtime.backend import Generation, Loaded

# The requests of one batch, submitted together.
Repetition = Sequence[Generation]


def ttft(generation: Generation) -> float:
    """Seconds from the start to the first token."""
    return generation.times_s[0] - generation.start_s


def tpot(generation: Generation) -> float:
    """Mean seconds between tokens after the first; raises ValueError for fewer than two tokens."""
    n = len(generation.times_s)
    if n < 2:
        raise ValueError(f"TPOT needs two tokens, there are {n}")
    return (generation.times_s[-1] - generation.times_s[0]) / (n - 1)


def itl(generation: Generation) -> list[float]:
    """Seconds between neighbouring tokens."""
    return [later - earlier for earlier, later in itertools.pairwise(generation.times_s)]


def e2el(generation: Generation) -> float:
    """Seconds from the start to the last token."""
    return generation.times_s[-1] - generation.start_s


def prefill_throughput(batch: Repetition, prompt_tokens: int) -> float:
    """Prompt tokens per second; `prompt_tokens` counts those of the whole batch."""
    return prompt_tokens / (_last_first(batch) - batch[0].start_s)


def output_throughput(batch: Repetition) -> float:
    """New tokens per second of the whole run, prefill included."""
    return sum(len(g.times_s) for g in batch) / (_last(batch) - batch[0].start_s)


def decode_throughput(batch: Repetition) -> float:
    """New tokens per second while every prompt is done; raises ValueError where no token follows the first ones."""
    begin = _last_first(batch)
    tokens = sum(time > begin for g in batch for time in g.times_s)
    if not tokens:
        raise ValueError("no token was decoded after the prefill")
    return tokens / (_last(batch) - begin)


def decodes(repetitions: Sequence[Repetition]) -> bool:
    """Whether every request of every repetition has the two tokens that TPOT needs."""
    return all(len(g.times_s) >= 2 for batch in repetitions for g in batch)


def measurements(repetitions: Sequence[Repetition], prompt_tokens: int) -> dict[str, Measurement]:
    """All speeds of a cell by name; `prompt_tokens` is the length of each prompt.

    One sample a request (ttft, tpot, e2el), a gap (itl) or a batch (throughputs). `tpot`, `itl` and
    `decode_throughput` are left out where a request has fewer than two tokens.
    """
    flat = [g for batch in repetitions for g in batch]
    size = len(repetitions[0])
    found = {
        "ttft": Measurement("s", "lower", [ttft(g) for g in flat], size),
        "e2el": Measurement("s", "lower", [e2el(g) for g in flat], size),
        "prefill_throughput": _rate([prefill_throughput(b, prompt_tokens * len(b)) for b in repetitions]),
        "output_throughput": _rate([output_throughput(b) for b in repetitions]),
    }
    if decodes(repetitions):
        gaps = [[gap for g in batch for gap in itl(g)] for batch in repetitions]
        even = len({len(of_batch) for of_batch in gaps}) == 1
        samples = [gap for of_batch in gaps for gap in of_batch]
        found["tpot"] = Measurement("s", "lower", [tpot(g) for g in flat], size)
        found["itl"] = Measurement("s", "lower", samples, len(gaps[0]) if even else 1)
        found["decode_throughput"] = _rate([decode_throughput(b) for b in repetitions])
    return found


def plain_measurements(repetitions: Sequence[Repetition]) -> dict[str, Measurement]:
    """`tpot_generate`: TPOT of the same requests in the library's own decoding loop; empty where there is none."""
    if not repetitions or not decodes(repetitions):
        return {}
    samples = [tpot(generation) for batch in repetitions for generation in batch]
    return {"tpot_generate": Measurement("s", "lower", samples, len(repetitions[0]))}


def _rate(samples: list[float]) -> Measurement:
    return Measurement("tokens/s", "higher", samples)


def _last_first(batch: Repetition) -> float:
    return max(g.times_s[0] for g in batch)


def _last(batch: Repetition) -> float:
    return max(g.times_s[-1] for g in batch)


def mean_depth(repetitions: Sequence[Repetition], prompt_tokens: int) -> float:
    """Mean number of tokens that a decode step attends to, its own included."""
    counts = [len(g.times_s) for batch in repetitions for g in batch]
    return prompt_tokens + sum(counts) / len(counts) / 2


def tpot_floor(loaded: Loaded, batch: int, depth: float, bytes_per_s: float) -> float:
    """Seconds that a decode step needs to read its bytes once: weights for all, KV of `depth` tokens for each sequence.

    A layer with a sliding window reads no more than the window; `depth` is a mean, so that the floor is a little high
    where it lies near one. Not in it: computing, writing, and what a step of several sequences reads beyond one
    token's experts or rows.
    """
    return (loaded.bytes_read_per_token + batch * loaded.kv_bytes_read(depth)) / bytes_per_s
