"""What speculation gains in theory, from acceptance and costs.

Leviathan, Y., Kalman, M., Matias, Y. (2023), Fast Inference from Transformers via Speculative Decoding, ICML; their
formula takes a verify for as long as a step of one token. `v`, its cost in such steps, is ours: where compute binds it
is well above 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BISECTIONS = 60


def expected_tokens(a: float, k: int) -> float:
    """Tokens that a verify of `k` draft tokens hands out, each accepted with probability `a` if those before it were.

    (1 - a^(k+1)) / (1 - a): the accepted ones, and one of the target's own.
    """
    return expected_tokens_by_position([a] * k)


def expected_tokens_by_position(acceptance: Sequence[float]) -> float:
    """The same where the acceptance of each position is its own."""
    tokens = reached = 1.0
    for a in acceptance:
        reached *= a
        tokens += reached
    return tokens


def speedup(a: float, k: int, c: float, v: float = 1.0) -> float:
    """Of plain decoding: a draft token takes `c` steps of the target, the verify `v`."""
    return expected_tokens(a, k) / (k * c + v)


def break_even_acceptance(k: int, c: float, v: float = 1.0) -> float | None:
    """The acceptance from which on speculation pays; None where it does not even if every token is accepted."""
    if speedup(1.0, k, c, v) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, k, c, v) >= 1 else (middle, high)
    return high


def break_even_draft_cost(a: float, k: int, v: float = 1.0) -> float | None:
    """The cost of a draft token, in steps, up to which speculation pays; None where even a free draft does not."""
    cost = (expected_tokens(a, k) - v) / k
    return cost if cost >= 0 else None


def break_even_verify_cost(a: float, k: int, c: float) -> float:
    """The cost of a verify, in steps, up to which speculation pays; below 1 it cannot be had."""
    return expected_tokens(a, k) - k * c


def best_k(a: float, steps: Callable[[int], float], most: int, coverage: float = 1.0) -> tuple[int, float]:
    """The number of draft tokens, up to `most`, with the largest speed-up, and that; 0 where none has one above 1.

    A round of k draft tokens takes `steps(k)` of plain decoding; `coverage` is the share of rounds that have a draft.
    """

    def gain(k: int) -> float:
        """The rounds without a draft take one step and hand out one token."""
        return (coverage * expected_tokens(a, k) + 1 - coverage) / (coverage * steps(k) + 1 - coverage) if k else 1.0

    best = max(range(most + 1), key=lambda k: (gain(k), -k))
    return best, gain(best)
