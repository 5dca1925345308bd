"""What a stream of prompts allows: hits of a cache without limits, and the time that they save.

Nothing here asks the cache: it is what the measurement stands beside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from quantlab.engine import PrefixBlocks
from quantlab.runtime.backend import Tokens


def reusable_tokens(prompts: Sequence[Tokens], left: Sequence[Tokens], block_tokens: int) -> list[int]:
    """Tokens of each prompt that a cache of any size would hold when it comes, the prompts one after another.

    `left` is what each leaves behind: the prompt and its answer but for the last token. Whole blocks count, and one
    token of a prompt is always computed.
    """
    seen: set[bytes] = set()
    found = []
    for prompt, rest in zip(prompts, left, strict=True):
        known = 0
        for prefix in _prefixes(prompt, block_tokens):
            if prefix not in seen:
                break
            known += 1
        found.append(min(known * block_tokens, len(prompt) - 1))
        seen.update(_prefixes(rest, block_tokens))
    return found


def hit_rate(hits: Sequence[int], prompts: Sequence[Tokens]) -> float:
    """Tokens found as a share of tokens asked."""
    return sum(hits) / sum(map(len, prompts))


def budget_curve(
    prompts: Sequence[Tokens], left: Sequence[Tokens], block_tokens: int, *, prime: int
) -> list[tuple[int, float]]:
    """(tokens that the cache may hold, hit rate) from one block up to the budget beyond which nothing is gained.

    The stream is replayed on the cache of a simulated replica, whose evictions are those of the engine's.
    """
    names = [[int.from_bytes(p[:8], "little") for p in _prefixes(tokens, block_tokens)] for tokens in prompts]
    kept = [[int.from_bytes(p[:8], "little") for p in _prefixes(tokens, block_tokens)] for tokens in left]
    distinct = len({name for names_of_one in kept for name in names_of_one})
    curve, blocks = list[tuple[int, float]](), 1
    while True:
        cache, hits = PrefixBlocks(blocks * block_tokens, block_tokens), list[int]()
        for prompt, of_prompt, of_rest in zip(prompts, names, kept, strict=True):
            hits.append(min(cache.match(tuple(of_prompt)), len(prompt) - 1))
            cache.insert(tuple(of_rest))
        curve.append((blocks * block_tokens, hit_rate(hits[prime:], prompts[prime:])))
        if blocks >= distinct:
            return curve
        blocks *= 2


def saved_s(hits: Sequence[int], prompts: Sequence[Tokens], cold_s: Sequence[float]) -> list[float]:
    """TTFT that each hit should save: its tokens at the prefill rate of the same prompt when nothing is cached."""
    return [hit * cold / len(prompt) for hit, prompt, cold in zip(hits, prompts, cold_s, strict=True)]


def _prefixes(tokens: Tokens, block_tokens: int) -> list[bytes]:
    """A digest of the tokens up to the end of each whole block."""
    data, digest, found = np.asarray(tokens, "<i4").tobytes(), hashlib.sha256(), []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        digest.update(data[(end - block_tokens) * 4 : end * 4])
        found.append(digest.digest())
    return found
