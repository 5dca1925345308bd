"""Restore or recompute: what bringing a block back takes, as it was measured, against what computing it would."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from quantlab.core.statistics import median
from quantlab.engine.costs import Costs, recompute_s

Tier = Literal["device", "ram", "disk"]
# The first blocks come through cold caches and tell nothing yet; then the median of the last ones counts.
_LEAST, _WINDOW = 3, 64


class RestoreCosts:
    """Seconds a token that blocks of RAM and disk took to come back: reading, checking, copying."""

    def __init__(self) -> None:
        self._seen: dict[Tier, deque[float]] = {}

    def observe(self, tier: Tier, n_tokens: int, seconds: float) -> None:
        """A block came back."""
        self._seen.setdefault(tier, deque(maxlen=_WINDOW)).append(seconds / n_tokens)

    def token_s(self, tier: Tier) -> float | None:
        """Seconds a token; None where too little was measured."""
        seen = self._seen.get(tier, ())
        return median(list(seen)) if len(seen) >= _LEAST else None


def worth_restoring(
    tiers: Sequence[Tier], restoring: RestoreCosts, costs: Costs | None, *, start: int, block_tokens: int
) -> int:
    """How many of the blocks from token `start` on, which lie in `tiers`, to restore so that a prompt is ready soonest.

    All of them as long as nothing is known. The tokens after them are computed.
    """
    best, best_gain, spent = 0, 0.0, 0.0
    for n, tier in enumerate(tiers, 1):
        token_s = restoring.token_s(tier)
        recompute = None if costs is None else recompute_s(costs, n * block_tokens, start)
        if token_s is None or recompute is None:
            return len(tiers)
        spent += token_s * block_tokens
        if recompute - spent > best_gain:
            best, best_gain = n, recompute - spent
    return best
