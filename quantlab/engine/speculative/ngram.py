"""Prompt lookup: what followed the last few tokens when they stood earlier in the text.

Saxena, A. (2023), Prompt Lookup Decoding, github.com/apoorvumang/prompt-lookup-decoding. Costs next to nothing, and
hits where an answer repeats its prompt or itself: summaries, retrieval, edits of code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantlab.core.errors import UsageError
from quantlab.engine.speculative.draft import NO_DRAFT, Ask, Draft
from quantlab.runtime.backend import Batch


class NgramProposer:
    """Looks up the longest of the last `most` to `least` tokens; the latest place wins."""

    name = "ngram"
    chained = False

    def __init__(self, *, most: int = 3, least: int = 1) -> None:
        if not 1 <= least <= most:
            raise UsageError(f"n-grams of {least} to {most} tokens", "give at least 1, and the larger one as the most")
        self._sizes = range(most, least - 1, -1)
        # For each slot: how many ends are indexed, and where the text went on after an n-gram.
        self._ends: dict[int, int] = {}
        self._after: dict[int, dict[tuple[int, ...], int]] = {}

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """See `Proposer`."""
        for slot in prompts:
            self._ends[slot], self._after[slot] = 0, {}

    def watch(self, batch: Batch) -> None:
        """Nothing is learnt from the target."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Proposer`."""
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft:
        context, after = ask.context, self._after[ask.slot]
        # The n-grams that end at the end of the text are not yet indexed: nothing follows them.
        for end in range(self._ends[ask.slot], len(context)):
            for size in self._sizes:
                if size <= end:
                    after[tuple(context[end - size : end])] = end
        self._ends[ask.slot] = len(context)
        for size in self._sizes:
            if size < len(context) and (start := after.get(tuple(context[-size:]))) is not None:
                return Draft(_continued(context, start, ask.limit))
        return NO_DRAFT

    def settle(self, slot: int, length: int) -> None:
        """A text only grows."""

    def release(self, slot: int) -> None:
        """See `Proposer`."""
        self._ends.pop(slot, None)
        self._after.pop(slot, None)


def _continued(context: Sequence[int], start: int, n: int) -> list[int]:
    """`n` tokens from `start` on; past the end of the text what was just drafted goes on repeating."""
    period = len(context) - start
    return [context[start + i % period] for i in range(n)]
