"""How many tokens to draft: always the same number, or as many as are expected to pay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quantlab.core.errors import UsageError
from quantlab.engine.speculative.draft import Draft, Round
from quantlab.engine.speculative.theory import best_k

# Of earlier rounds counts what this to the power of their age says.
_FADES = 0.98
# The weight of what is known of all sequences beside what one of them shows, in tokens.
_PRIOR_TOKENS = 4.0
_FIRST_GUESS = 0.7
_BINS = 8
# A sequence that does not draft tries one token after so many rounds, since its text may change; then after twice as
# many, and so on: a draft model has all of them to catch up with.
_TRY_AFTER = 16


class DraftLength(Protocol):
    """Decides for each sequence; `most` is the largest number it may say."""

    most: int
    adapts: bool

    def limit(self, slot: int, *, chained: bool) -> int:
        """The most that the sequence's next draft may have."""

    def goes_on(self, slot: int, confidences: Sequence[float]) -> bool:
        """Whether a chained draft that has tokens of these confidences is to have one more."""

    def observe(self, slot: int, draft: Draft, round_: Round) -> None:
        """What became of a draft."""

    def release(self, slot: int) -> None:
        """The sequence is over."""


class FixedLength:
    """Always `most`; 0 drafts nothing."""

    adapts = False

    def __init__(self, most: int) -> None:
        if most < 0:
            raise UsageError(f"a draft of {most} tokens", "give 0 or more")
        self.most = most

    def limit(self, slot: int, *, chained: bool) -> int:
        """See `DraftLength`."""
        return self.most

    def goes_on(self, slot: int, confidences: Sequence[float]) -> bool:
        """Yes; see `DraftLength`."""
        return True

    def observe(self, slot: int, draft: Draft, round_: Round) -> None:
        """Learn nothing."""

    def release(self, slot: int) -> None:
        """Nothing is kept."""


class RoundCosts(NamedTuple):
    """Seconds of drafting 0, 1, 2... tokens, and of verifying as many.

    A draft of n tokens is not n times one of one: heads and lookups make them all at once.
    """

    draft_s: tuple[float, ...]
    verify_s: tuple[float, ...]

    def steps(self, k: int) -> float:
        """A round of `k` draft tokens in steps of plain decoding."""
        return (self.draft_s[k] + self.verify_s[k]) / self.verify_s[0]


class _Tally:
    """A share whose past fades."""

    __slots__ = ("accepted", "tested")

    def __init__(self) -> None:
        self.accepted = self.tested = 0.0

    def add(self, accepted: float, tested: float) -> None:
        self.accepted = _FADES * self.accepted + accepted
        self.tested = _FADES * self.tested + tested

    def share(self, prior: float) -> float:
        return (self.accepted + _PRIOR_TOKENS * prior) / (self.tested + _PRIOR_TOKENS)


class AdaptiveLength:
    """Drafts on while a further token is expected to gain more than it costs.

    The acceptance of a sequence is learnt from its rounds, and before they are many from all sequences; that of a
    token of which the draft model gives its probability, from what became of such tokens. The next token pays where
    its chance of being reached and accepted, over what it costs, is above the round's tokens over the round's cost:
    the speed-up has one maximum in the length. Nothing that is decided depends on a token that is left out, so that
    sampling stays exact.
    """

    adapts = True

    def __init__(self, most: int, costs: RoundCosts) -> None:
        known = min(len(costs.draft_s), len(costs.verify_s)) > most >= 1
        if not known or min(costs.verify_s) <= 0 or min(costs.draft_s) < 0:
            raise UsageError(
                f"drafts of up to {most} tokens at {costs}", "give at least 1, and times above 0 up to that length"
            )
        self.most, self._costs = most, costs
        # At these costs not even drafts without a fault would pay.
        self._never = best_k(1.0, costs.steps, most)[0] == 0
        self._all = _Tally()
        self._of: dict[int, _Tally] = {}
        self._idle: dict[int, int] = {}
        self._bins = [_Tally() for _ in range(_BINS)]

    def acceptance(self, slot: int) -> float:
        """What is expected of a draft token of this sequence."""
        return self._of[slot].share(self._everywhere) if slot in self._of else self._everywhere

    @property
    def _everywhere(self) -> float:
        return self._all.share(_FIRST_GUESS)

    def limit(self, slot: int, *, chained: bool) -> int:
        """See `DraftLength`: a chained draft is stopped on its way."""
        if self._never:
            return 0
        best, _ = best_k(self.acceptance(slot), self._costs.steps, self.most)
        if best == 0:
            idle = self._idle[slot] = self._idle.get(slot, 0) + 1
            return int(idle >= _TRY_AFTER and (idle // _TRY_AFTER).bit_count() == 1 and idle % _TRY_AFTER == 0)
        self._idle.pop(slot, None)
        return self.most if chained else best

    def goes_on(self, slot: int, confidences: Sequence[float]) -> bool:
        """See `DraftLength`."""
        reached = tokens = 1.0
        for confidence in confidences:
            reached *= self._expected(confidence)
            tokens += reached
        k, steps = len(confidences), self._costs.steps
        return reached * self.acceptance(slot) * steps(k) > (steps(k + 1) - steps(k)) * tokens

    def _expected(self, confidence: float) -> float:
        return self._bins[_bin(confidence)].share(self._everywhere)

    def observe(self, slot: int, draft: Draft, round_: Round) -> None:
        """See `DraftLength`."""
        if not round_.tested:
            return
        self._all.add(round_.accepted, round_.tested)
        self._of.setdefault(slot, _Tally()).add(round_.accepted, round_.tested)
        for i, confidence in enumerate(draft.confidences[: round_.tested]):
            self._bins[_bin(confidence)].add(float(i < round_.accepted), 1.0)

    def release(self, slot: int) -> None:
        """See `DraftLength`: what was learnt of all sequences stays."""
        self._of.pop(slot, None)
        self._idle.pop(slot, None)


def _bin(confidence: float) -> int:
    return min(_BINS - 1, int(confidence * _BINS))
