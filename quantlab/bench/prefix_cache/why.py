"""Why a prompt missed: the first token that differs from an earlier prompt, and what stands behind it for nothing.

Tokens behind the difference are lost where the earlier prompt has them too, somewhere: if what differs stood after
them, they would have been found.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

# How many earlier prompts a prompt is compared with, the newest first; the first of the stream always.
_LOOKS_BACK = 16


class Miss(msgspec.Struct, frozen=True):
    """Request `request` against the earlier `against`: equal up to token `at`, which lies in block `block`.

    So many tokens more would be found if those that stand in the earlier prompt too followed on what is equal: `lost`.
    What another earlier prompt gives is not lost.
    """

    request: int
    against: int
    at: int
    block: int
    lost: int


def misses(prompts: Sequence[Sequence[Hashable]], block_tokens: int) -> list[Miss]:
    """A Miss for each prompt but the first: against the earlier one that shares most with it, found or lost."""
    windows = [_windows(prompt, block_tokens) for prompt in prompts]
    known = [set(of_one) for of_one in windows]
    found = []
    for i in range(1, len(prompts)):
        earlier = {0, *range(max(0, i - _LOOKS_BACK), i)}
        places = {j: common_prefix(prompts[i], prompts[j]) for j in sorted(earlier, reverse=True)}
        best = max(places.values())
        candidates = []
        for j, at in places.items():
            lost = at + _lost(windows[i], known[j], at, block_tokens) - best
            candidates.append(Miss(i, j, at, at // block_tokens, max(0, lost)))
        found.append(max(candidates, key=lambda miss: (miss.lost, miss.at)))
    return found


def common_prefix(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """How many first elements are equal."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _lost(windows: list[int], earlier: set[int], at: int, block_tokens: int) -> int:
    """Tokens from `at` on that stand in a row of `block_tokens` which the earlier prompt has too."""
    lost, until = 0, at
    for start in range(at, len(windows)):
        if windows[start] in earlier:
            lost += start + block_tokens - max(start, until)
            until = start + block_tokens
    return lost


def _windows(prompt: Sequence[Hashable], block_tokens: int) -> list[int]:
    """Hashes of every `block_tokens` tokens in a row, by their start."""
    return [hash(tuple(prompt[i : i + block_tokens])) for i in range(len(prompt) - block_tokens + 1)]
